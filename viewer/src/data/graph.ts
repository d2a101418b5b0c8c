// The data flow between rows of the tree: edges from the producers of values to their consumers.

import { CALL, GROUP, LINE, OP, PHASE, STEP, type Recording } from "./recording";

/** A node: a row of the tree, a value that comes from outside, or one that leaves the graph. */
export interface GraphNode {
  id: string;
  row: number;
  /** Of a value that comes from outside or leaves the graph. */
  value: number;
  role: "row" | "input" | "output";
  /** The id of the box it is drawn in; empty for the outermost. */
  box: string;
  parameters: number;
}

export interface GraphEdge {
  from: string;
  to: string;
  shape: string;
  /** How many values go this way. */
  count: number;
}

export interface Graph {
  nodes: GraphNode[];
  /** Rows that were expanded in place; each holds nodes. */
  boxes: GraphNode[];
  edges: GraphEdge[];
  /** How many nodes there would be; more than can be drawn leaves `nodes` empty. */
  size: number;
}

export const MOST_NODES = 400;
const MOST_INPUTS = 8;
const FEW_NODES = 5; // a graph with fewer leaves most of the screen empty
const MOST_EXPANDED = 16; // nodes that are still read at a glance
const PLAIN_LINE = 12; // a line with more ops than that stays one node

/** The row whose inside is drawn when a row is selected: itself if it holds others, else the row around it. */
export function graphScope(recording: Recording, row: number): number {
  let at = row;
  while (at >= 0 && (recording.kind[at] === OP || recording.kind[at] === LINE)) at = recording.parent[at];
  return at;
}

/** The graph inside a row, -1 for the whole run, with some of its rows expanded. */
export function graphOf(recording: Recording, scope: number, expanded: ReadonlySet<number>): Graph {
  const made: Graph = { nodes: [], boxes: [], edges: [], size: 0 };
  place(recording, scope, "", expanded, made);
  made.size = made.nodes.length;
  if (made.size > MOST_NODES) return { ...made, nodes: [], boxes: [] };
  connect(recording, scope, made);
  return made;
}

function place(recording: Recording, row: number, box: string, expanded: ReadonlySet<number>, made: Graph): void {
  for (const child of recording.children(row)) {
    const node: GraphNode = { id: `row-${child}`, row: child, value: -1, role: "row", box, parameters: 0 };
    const kind = recording.kind[child];
    if (kind === LINE && recording.children(child).length <= PLAIN_LINE) {
      place(recording, child, box, expanded, made);
    } else if (expanded.has(child) && canExpand(recording, child)) {
      made.boxes.push(node);
      place(recording, child, node.id, expanded, made);
    } else made.nodes.push(node);
    if (made.nodes.length > MOST_NODES * 4) return;
  }
}

/** Whether a node can be expanded: an op is one node, whatever ran inside it. */
export function canExpand(recording: Recording, row: number): boolean {
  return recording.kind[row] !== OP && !recording.isLeaf(row);
}

function connect(recording: Recording, scope: number, made: Graph): void {
  const first = scope + 1;
  const end = scope < 0 ? recording.rows : recording.end[scope];
  const unitOf = new Int32Array(end - first).fill(-1);
  made.nodes.forEach((node, unit) => unitOf.fill(unit, node.row - first, recording.end[node.row] - first));
  const unitOfOp = (op: number): number => {
    const row = op < 0 ? -1 : recording.opRow[op];
    return row >= first && row < end ? unitOf[row - first] : -1;
  };
  const edges = new Map<string, GraphEdge>();
  const inputs = new Map<number, GraphNode>();
  const seen = new Set<string>();
  const add = (from: GraphNode, to: GraphNode, value: number): void => {
    const key = `${from.id}>${to.id}`;
    if (seen.has(`${key}:${value}`)) return;
    seen.add(`${key}:${value}`);
    const edge = edges.get(key);
    if (edge) edge.count++;
    else edges.set(key, { from: from.id, to: to.id, shape: recording.shape(value), count: 1 });
  };
  const read = (unit: number, value: number): void => {
    const to = made.nodes[unit];
    const from = unitOfOp(recording.valueProducer[value]);
    if (from === unit) return;
    if (from >= 0) add(made.nodes[from], to, value);
    else if (isWeight(recording, value)) to.parameters++;
    else if (recording.run.kinds[recording.valueKind[value]] === "constant") return;
    else if (isOuterInput(recording, value, first, end)) {
      const source = inputs.get(value) ?? outside(inputs, value);
      if (source) add(source, to, value);
    }
  };
  for (let row = first; row < end; row++) {
    const unit = unitOf[row - first];
    if (unit < 0) continue;
    if (recording.kind[row] === OP) for (const value of recording.opInputs.of(recording.ref[row])) read(unit, value);
    else if (recording.kind[row] === CALL && recording.isLeaf(row)) {
      for (const value of recording.callInputs.of(recording.ref[row])) read(unit, value);
    }
  }
  made.nodes.push(...inputs.values());
  if (scope >= 0 && recording.kind[scope] === CALL && recording.callRow[recording.ref[scope]] === scope) {
    for (const value of recording.callOutputs.of(recording.ref[scope]).slice(0, MOST_INPUTS)) {
      const from = unitOfOp(recording.valueProducer[value]);
      if (from < 0) continue;
      const node: GraphNode = { id: `output-${value}`, row: -1, value, role: "output", box: "", parameters: 0 };
      made.nodes.push(node);
      add(made.nodes[from], node, value);
    }
  }
  made.edges.push(...edges.values());
}

function outside(inputs: Map<number, GraphNode>, value: number): GraphNode | undefined {
  if (inputs.size >= MOST_INPUTS) return undefined;
  const node: GraphNode = { id: `input-${value}`, row: -1, value, role: "input", box: "", parameters: 0 };
  inputs.set(value, node);
  return node;
}

function isWeight(recording: Recording, value: number): boolean {
  const kind = recording.run.kinds[recording.valueKind[value]];
  if (kind === "parameter" || kind === "buffer" || kind === "state") return true;
  const base = recording.valueBase[value];
  return recording.valueProducer[value] < 0 && base >= 0 && isWeight(recording, base);
}

/** Whether a value comes from outside the rows: it was produced before them, or by no recorded op. */
function isOuterInput(recording: Recording, value: number, first: number, end: number): boolean {
  const producer = recording.valueProducer[value];
  if (producer < 0) return true;
  const row = recording.opRow[producer];
  return row < first || row >= end;
}

/** The row that a graph opens with: the first module with more than one row in it. */
export function firstScope(recording: Recording): number {
  let at = -1;
  for (;;) {
    const inside = recording.children(at);
    const holders = inside.filter((row) => [STEP, PHASE, CALL, GROUP].includes(recording.kind[row]) && !recording.isLeaf(row));
    const isCall = at >= 0 && recording.kind[at] === CALL && inside.length > 1;
    if (!holders.length || isCall) return at;
    at = holders[0];
  }
}

/** The rows that a graph opens expanded: of a graph with few nodes, the module call that takes most of the time. */
export function firstExpanded(recording: Recording, scope: number): Set<number> {
  const rows = recording.children(scope);
  const total = rows.reduce((sum, row) => sum + recording.time[row], 0);
  const largest = rows.find((row) => recording.kind[row] === CALL && recording.time[row] > total / 2);
  const inside = largest === undefined ? 0 : recording.children(largest).length;
  const isClear = largest !== undefined && rows.length <= FEW_NODES && inside >= rows.length && inside <= MOST_EXPANDED;
  return new Set(isClear ? [largest] : []);
}
