// Where the nodes of a graph are drawn: layers from top to bottom, expanded rows as boxes around their nodes.

import dagre from "@dagrejs/dagre";
import type { Graph, GraphEdge, GraphNode } from "./graph";

export interface Placed {
  node: GraphNode;
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Route {
  edge: GraphEdge;
  points: { x: number; y: number }[];
  label: { x: number; y: number };
}

export interface Layout {
  nodes: Placed[];
  boxes: Placed[];
  routes: Route[];
  width: number;
  height: number;
}

const LETTER = 7.2; // pixels of a letter in a label, about
const GAP = 20; // pixels between two layers
const BOXED_GAP = 9; // the same where boxes add layers of their own
const NODE_HEIGHT = 40;
const INPUT_HEIGHT = 26;
const TITLE = 18; // pixels of the title of a box

export function layoutOf(graph: Graph, title: (node: GraphNode) => string, note: (node: GraphNode) => string): Layout {
  const made = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  const ranksep = graph.boxes.length ? BOXED_GAP : GAP;
  made.setGraph({ rankdir: "TB", nodesep: 26, ranksep, edgesep: 14, marginx: 16, marginy: graph.boxes.length ? 16 + TITLE : 16 });
  made.setDefaultEdgeLabel(() => ({}));
  for (const box of graph.boxes) made.setNode(box.id, { label: title(box) });
  for (const node of graph.nodes) {
    const isRow = node.role === "row";
    const letters = isRow ? Math.max(title(node).length + 3, note(node).length * 0.9) : (title(node).length + note(node).length) * 0.9;
    const width = Math.min(260, Math.max(72, letters * LETTER + 24));
    made.setNode(node.id, { width, height: isRow ? NODE_HEIGHT : INPUT_HEIGHT });
  }
  for (const node of [...graph.boxes, ...graph.nodes]) if (node.box) made.setParent(node.id, node.box);
  for (const edge of graph.edges) {
    made.setEdge(edge.from, edge.to, { width: edge.shape.length * 6 + 10, height: 14, labelpos: "c" });
  }
  dagre.layout(made);
  const placed = (node: GraphNode): Placed => {
    const at = made.node(node.id);
    return { node, x: at.x, y: at.y, width: at.width, height: at.height };
  };
  const { width = 0, height = 0 } = made.graph();
  return {
    nodes: graph.nodes.map(placed),
    boxes: withTitles(graph.boxes.map(placed)),
    routes: graph.edges.map((edge) => {
      const at = made.edge(edge.from, edge.to);
      return { edge, points: at.points, label: { x: at.x ?? 0, y: at.y ?? 0 } };
    }),
    width,
    height,
  };
}

/** Boxes with room for their titles above their nodes; an outer box is above the title of an inner one. */
function withTitles(boxes: Placed[]): Placed[] {
  const made = new Map<string, Placed>();
  for (const box of [...boxes].reverse()) {
    const inner = [...made.values()].filter((each) => each.node.box === box.node.id);
    const bottom = box.y + box.height / 2;
    const top = Math.min(box.y - box.height / 2, ...inner.map((each) => each.y - each.height / 2 - 4)) - TITLE;
    made.set(box.node.id, { ...box, y: (top + bottom) / 2, height: bottom - top });
  }
  return boxes.map((box) => made.get(box.node.id) ?? box);
}

/** A smooth line through points. */
export function curve(points: { x: number; y: number }[]): string {
  const [first, ...rest] = points;
  let path = `M${first.x},${first.y}`;
  for (let i = 0; i < rest.length; i++) {
    const point = rest[i];
    const next = rest[i + 1];
    if (!next) path += `L${point.x},${point.y}`;
    else path += `Q${point.x},${point.y} ${(point.x + next.x) / 2},${(point.y + next.y) / 2}`;
  }
  return path;
}
