// The graph of the selection: rows as nodes, the values between them as edges; rows expand in place.

import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { canExpand, graphOf, MOST_NODES, type GraphNode } from "../data/graph";
import { curve, layoutOf, type Layout, type Placed } from "../data/layout";
import { CALL, GROUP, LINE, OP, type Recording } from "../data/recording";
import { ALL } from "../data/stretch";
import type { State } from "../state";
import { timeText } from "../text";

interface Camera {
  x: number;
  y: number;
  scale: number;
}

interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

const LARGEST = 1.15; // a small graph is not blown up to fill the screen
const MAP = 116; // pixels of the longer side of the map
const MAP_MARGIN = 10; // pixels between the map and the corner
const ROOM_FOR_MAP = 300; // pixels of height, below which the map would cover the graph
const SMALLEST_FIT = 0.8; // smaller text is hard to read: the top is shown instead of everything
const SMALLEST_IN_NOTEBOOK = 0.72; // a notebook has no room for a map either

export function GraphView({ state }: { state: State }): JSX.Element {
  const { recording } = state;
  const scope = state.scope.value;
  const expanded = state.expanded.value;
  const graph = useMemo(() => graphOf(recording, scope, expanded), [recording, scope, expanded]);
  const layout = useMemo(
    () => (graph.nodes.length ? layoutOf(graph, (node) => title(recording, node), (node) => note(recording, node)) : undefined),
    [graph],
  );
  return (
    <div class="graph">
      <Crumbs state={state} />
      {layout ? (
        <Drawing key={scope} state={state} layout={layout} />
      ) : (
        <p class="empty">
          {graph.size > MOST_NODES
            ? `${graph.size.toLocaleString("en")} nodes are more than can be read: select a module in the tree.`
            : "Nothing runs in here."}
        </p>
      )}
    </div>
  );
}

function Crumbs({ state }: { state: State }): JSX.Element {
  const { recording } = state;
  const scope = state.scope.value;
  const around = scope < 0 ? [] : [...recording.around(scope), scope];
  return (
    <nav class="crumbs" aria-label="What the graph shows">
      <button class="link" type="button" onClick={() => state.enter(-1)}>
        run
      </button>
      {around.map((row) => (
        <span key={row}>
          {" › "}
          <button class="link" type="button" aria-current={row === scope ? "true" : undefined} onClick={() => state.enter(row)}>
            {recording.rowLabel(row)}
            {recording.count[row] > 1 && ` ×${recording.count[row]}`}
          </button>
        </span>
      ))}
    </nav>
  );
}

function title(recording: Recording, node: GraphNode): string {
  if (node.role === "row") {
    const times = recording.count[node.row] > 1 ? ` ×${recording.count[node.row]}` : "";
    return recording.rowLabel(node.row) + times;
  }
  return recording.valueLabel(node.value) || node.role;
}

function note(recording: Recording, node: GraphNode): string {
  if (node.role !== "row") return recording.shape(node.value);
  const text = recording.rowNote(node.row);
  return text.length > 34 ? `${text.slice(0, 33)}…` : text;
}

function Drawing({ state, layout }: { state: State; layout: Layout }): JSX.Element {
  const svg = useRef<SVGSVGElement>(null);
  const [camera, setCamera] = useState<Camera>({ x: 0, y: 0, scale: 1 });
  const [hovered, setHovered] = useState("");
  const drag = useRef<{ x: number; y: number; camera: Camera } | undefined>(undefined);
  const [size, setSize] = useState({ width: 0, height: 0 });
  const before = useRef<{ layout: Layout; camera: Camera } | undefined>(undefined);
  const fit = (): void => {
    const box = svg.current?.getBoundingClientRect();
    if (box) setCamera(fitted(layout, box.width, box.height));
  };
  useLayoutEffect(() => {
    const box = svg.current?.getBoundingClientRect();
    if (!box || !svg.current) return;
    setSize({ width: box.width, height: box.height });
    const old = before.current;
    const next = old ? inPlace(old.layout, layout, camera, box.width, box.height) : fitted(layout, box.width, box.height);
    setCamera(next);
    if (old) follow(svg.current, old.layout, layout, camera, next);
    before.current = { layout, camera: next };
  }, [layout]);
  const zoom = (factor: number, at?: { x: number; y: number }): void => {
    const box = svg.current?.getBoundingClientRect();
    if (!box) return;
    const x = (at?.x ?? box.left + box.width / 2) - box.left;
    const y = (at?.y ?? box.top + box.height / 2) - box.top;
    setCamera((now) => {
      const scale = Math.max(0.05, Math.min(3, now.scale * factor));
      const k = scale / now.scale;
      return { scale, x: x - (x - now.x) * k, y: y - (y - now.y) * k };
    });
  };
  useEffect(() => {
    const element = svg.current;
    if (!element) return undefined;
    const onWheel = (event: WheelEvent): void => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey || !event.shiftKey) zoom(Math.exp(-event.deltaY / 400), { x: event.clientX, y: event.clientY });
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, []);
  /** Moves a node that is not visible to the middle when the keyboard reaches it. */
  const reveal = ({ x, y, width, height }: Placed): void => {
    const seen = seenPart(layout, camera, size);
    const isSeen = x - width / 2 >= seen.x && x + width / 2 <= seen.x + seen.width && y - height / 2 >= seen.y && y + height / 2 <= seen.y + seen.height;
    if (!isSeen) setCamera({ ...camera, x: size.width / 2 - x * camera.scale, y: size.height / 2 - y * camera.scale });
  };
  const near = useMemo(() => followed(layout, hovered), [layout, hovered]);
  const most = useMemo(() => Math.max(1, ...layout.nodes.map(({ node }) => (node.row < 0 ? 0 : state.recording.time[node.row]))), [layout]);
  return (
    <div class="canvas">
      <svg
        ref={svg}
        role="group"
        aria-label="Data flow"
        class={hovered ? "following" : ""}
        onPointerDown={(event) => {
          drag.current = { x: event.clientX, y: event.clientY, camera };
        }}
        onPointerMove={(event) => {
          const from = drag.current;
          if (!from || !(event.buttons & 1)) return;
          setCamera({ ...from.camera, x: from.camera.x + event.clientX - from.x, y: from.camera.y + event.clientY - from.y });
        }}
        onPointerUp={() => (drag.current = undefined)}
      >
        <defs>
          <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
            <path d="M0,0.8 L7,4 L0,7.2 z" />
          </marker>
        </defs>
        <g style={{ transform: `translate(${camera.x}px, ${camera.y}px) scale(${camera.scale})` }} class="camera">
          {layout.boxes.map((box) => (
            <Box key={box.node.id} state={state} box={box} />
          ))}
          {layout.routes.map(({ edge, points, label }) => (
            <g key={`${edge.from}>${edge.to}`} data-edge={`${edge.from}>${edge.to}`} class={near.has(`${edge.from}>${edge.to}`) ? "edge near" : "edge"}>
              <path d={curve(points)} marker-end="url(#arrow)" />
              <text x={label.x} y={label.y + 3}>
                {edge.shape}
                {edge.count > 1 ? ` +${edge.count - 1}` : ""}
              </text>
            </g>
          ))}
          {layout.nodes.map((placed) => (
            <NodeView key={placed.node.id} state={state} placed={placed} most={most} isNear={near.has(placed.node.id)} onHover={setHovered} onFocus={reveal} />
          ))}
        </g>
      </svg>
      <Minimap layout={layout} camera={camera} size={size} onMove={setCamera} />
      <div class="zoom">
        <button type="button" aria-label="Zoom in" onClick={() => zoom(1.3)}>+</button>
        <button type="button" aria-label="Zoom out" onClick={() => zoom(1 / 1.3)}>−</button>
        <button type="button" onClick={fit}>fit</button>
      </div>
    </div>
  );
}

/** Everything on the screen; of a graph too large for that, its top. */
function fitted(layout: Layout, width: number, height: number): Camera {
  const wide = width / Math.max(1, layout.width);
  const smallest = height < ROOM_FOR_MAP ? SMALLEST_IN_NOTEBOOK : SMALLEST_FIT;
  const scale = Math.min(LARGEST, Math.max(Math.min(wide, height / Math.max(1, layout.height)), Math.min(wide, smallest)));
  const room = height - layout.height * scale;
  return { scale, x: (width - layout.width * scale) / 2, y: room > 0 ? room / 2 : 0 };
}

/** The camera after rows were expanded or closed: all of the graph if it fits, else the row stays in place. */
function inPlace(old: Layout, now: Layout, camera: Camera, width: number, height: number): Camera {
  const whole = fitted(now, width, height);
  if (now.width * whole.scale <= width + 1 && now.height * whole.scale <= height + 1) return whole;
  const places = placesOf(old);
  const isBox = new Set(old.boxes.map((box) => box.node.id));
  const wasNode = now.boxes.find((box) => places.has(box.node.id) && !isBox.has(box.node.id));
  const wasBox = now.nodes.find((node) => isBox.has(node.node.id));
  const changed = wasNode ?? wasBox;
  const from = changed && places.get(changed.node.id);
  if (!changed || !from) return whole;
  const seen = camera.y + (from.y - from.height / 2) * camera.scale;
  const y = seen - (changed.y - changed.height / 2) * whole.scale;
  return { ...whole, y: Math.max(height - now.height * whole.scale, Math.min(0, y)) };
}

function placesOf(layout: Layout): Map<string, Placed> {
  return new Map([...layout.nodes, ...layout.boxes].map((placed) => [placed.node.id, placed]));
}

/** Moves all nodes from their old places; new ones come out of the row that was expanded, or closed. */
function follow(svg: SVGSVGElement, old: Layout, now: Layout, from: Camera, to: Camera): void {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const options = { duration: 320, easing: "cubic-bezier(0.3, 0, 0.2, 1)" };
  const places = placesOf(old);
  const cameraText = ({ x, y, scale }: Camera): string => `translate(${x}px, ${y}px) scale(${scale})`;
  svg.querySelector(".camera")?.animate([{ transform: cameraText(from) }, { transform: cameraText(to) }], options);
  const corner = (placed: Placed, width = placed.width, height = placed.height): string =>
    `translate(${placed.x - width / 2}px, ${placed.y - height / 2}px)`;
  const elements = new Map([...svg.querySelectorAll("[data-node]")].map((each) => [each.getAttribute("data-node"), each]));
  for (const placed of [...now.nodes, ...now.boxes]) {
    const was = places.get(placed.node.id);
    const start = was ?? places.get(placed.node.box);
    const element = elements.get(placed.node.id);
    if (!element || !start) continue;
    element.animate(
      [
        { transform: corner(start, was && was.width !== placed.width ? placed.width : start.width), opacity: was ? 1 : 0 },
        { transform: corner(placed), opacity: 1 },
      ],
      options,
    );
  }
  for (const edge of svg.querySelectorAll("[data-edge]")) edge.animate([{ opacity: 0 }, { opacity: 0, offset: 0.5 }, { opacity: 1 }], options);
}

interface MinimapProps {
  layout: Layout;
  camera: Camera;
  size: { width: number; height: number };
  onMove: (camera: Camera) => void;
}

/** The whole graph in a corner, with the visible part marked; only if not all of it is visible. */
function Minimap({ layout, camera, size, onMove }: MinimapProps): JSX.Element | null {
  const isWhole = layout.width * camera.scale <= size.width + 4 && layout.height * camera.scale <= size.height + 4;
  if (isWhole || size.height < ROOM_FOR_MAP) return null;
  const shrunk = Math.min(MAP / layout.width, MAP / layout.height);
  const seen = seenPart(layout, camera, size);
  const [width, height] = [layout.width * shrunk, layout.height * shrunk];
  const hides = (x: number): number => hiddenBy(layout, camera, { x, y: size.height - height - MAP_MARGIN, width, height });
  const isLeft = hides(size.width - width - MAP_MARGIN) > hides(MAP_MARGIN);
  const move = (event: JSX.TargetedPointerEvent<SVGSVGElement>): void => {
    const box = event.currentTarget.getBoundingClientRect();
    const x = (event.clientX - box.left) / shrunk;
    const y = (event.clientY - box.top) / shrunk;
    onMove({ ...camera, x: size.width / 2 - x * camera.scale, y: size.height / 2 - y * camera.scale });
  };
  return (
    <svg
      class={isLeft ? "minimap left" : "minimap"}
      aria-hidden="true"
      width={width}
      height={height}
      viewBox={`0 0 ${layout.width} ${layout.height}`}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        move(event);
      }}
      onPointerMove={(event) => event.buttons & 1 && move(event)}
    >
      {layout.boxes.map((box) => (
        <rect key={box.node.id} class="group" x={box.x - box.width / 2} y={box.y - box.height / 2} width={box.width} height={box.height} />
      ))}
      {layout.nodes.map(({ node, x, y, width, height }) => (
        <rect key={node.id} x={x - width / 2} y={y - height / 2} width={width} height={height} />
      ))}
      <rect class="seen" {...seen} />
    </svg>
  );
}

/** The part of a graph that is on the screen. */
function seenPart(layout: Layout, { x, y, scale }: Camera, size: { width: number; height: number }): Area {
  const [left, top] = [Math.max(0, -x / scale), Math.max(0, -y / scale)];
  const right = Math.min(layout.width, (size.width - x) / scale);
  const bottom = Math.min(layout.height, (size.height - y) / scale);
  return { x: left, y: top, width: Math.max(0, right - left), height: Math.max(0, bottom - top) };
}

/** How many nodes are at least in part below an area of the screen. */
function hiddenBy(layout: Layout, camera: Camera, area: Area): number {
  return layout.nodes.filter(({ x, y, width, height }) => {
    const [left, top] = [camera.x + (x - width / 2) * camera.scale, camera.y + (y - height / 2) * camera.scale];
    const [right, bottom] = [left + width * camera.scale, top + height * camera.scale];
    return left < area.x + area.width && right > area.x && top < area.y + area.height && bottom > area.y;
  }).length;
}

/** The ancestors and descendants of a node: the ids of nodes and edges. */
function followed(layout: Layout, id: string): Set<string> {
  const found = new Set<string>();
  if (!id) return found;
  const walk = (start: "from" | "to", end: "from" | "to"): void => {
    const pending = [id];
    const seen = new Set(pending);
    while (pending.length) {
      const at = pending.pop();
      for (const { edge } of layout.routes) {
        if (edge[start] !== at) continue;
        found.add(`${edge.from}>${edge.to}`);
        found.add(edge[end]);
        if (!seen.has(edge[end])) pending.push(edge[end]);
        seen.add(edge[end]);
      }
    }
  };
  walk("from", "to");
  walk("to", "from");
  found.add(id);
  return found;
}

function Box({ state, box }: { state: State; box: Placed }): JSX.Element {
  const { row } = box.node;
  return (
    <g class="box" data-node={box.node.id} style={{ transform: `translate(${box.x - box.width / 2}px, ${box.y - box.height / 2}px)` }}>
      <rect width={box.width} height={box.height} rx="8" />
      <text
        x="10"
        y="16"
        role="button"
        tabindex={0}
        aria-expanded="true"
        onClick={() => state.expand(row)}
        onKeyDown={(event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          state.expand(row);
          event.preventDefault();
        }}
      >
        ▾ {title(state.recording, box.node)}
      </text>
    </g>
  );
}

interface NodeProps {
  state: State;
  placed: Placed;
  /** The time of the node that took longest. */
  most: number;
  isNear: boolean;
  onHover: (id: string) => void;
  onFocus: (placed: Placed) => void;
}

function NodeView({ state, placed, most, isNear, onHover, onFocus }: NodeProps): JSX.Element {
  const { recording } = state;
  const { node, width, height } = placed;
  const isRow = node.role === "row";
  const selected = state.row.value;
  const isBrushed = isRow && state.stretch.value?.rows[node.row] === ALL;
  const isSelected = isBrushed || (isRow ? selected >= node.row && selected < recording.end[node.row] : state.value.value === node.value);
  const expands = isRow && canExpand(recording, node.row);
  const choose = (): void => (isRow ? state.select(node.row) : state.selectValue(node.value));
  const name = title(recording, node);
  const isWrong = isRow && (recording.gaveNan(node.row) || recording.raised(node.row));
  const room = Math.floor((width - (expands ? 30 : 18)) / 6.6);
  return (
    <g
      class={`node ${isRow ? nodeClass(recording, node.row) : node.role}${isSelected ? " selected" : ""}${isWrong ? " faulty" : ""}${isNear ? " near" : ""}`}
      style={{ transform: `translate(${placed.x - width / 2}px, ${placed.y - height / 2}px)` }}
      data-node={node.id}
      role="button"
      tabindex={0} // in SVG attributes have their own case
      aria-label={`${name} ${isRow ? note(recording, node) : recording.shape(node.value)}`}
      aria-pressed={isSelected}
      onClick={choose}
      onDblClick={() => expands && state.expand(node.row)}
      onKeyDown={(event) => {
        if (event.key === "Enter") choose();
        else if (event.key === " " && expands) state.expand(node.row);
        else return;
        event.preventDefault();
      }}
      onFocus={() => onFocus(placed)}
      onPointerEnter={() => onHover(node.id)}
      onPointerLeave={() => onHover("")}
    >
      <title>{isRow ? `${name}, ${timeText(recording.time[node.row])}` : name}</title>
      {isRow && recording.count[node.row] > 1 && <rect class="behind" x="4" y="4" width={width} height={height} rx="6" />}
      <rect width={width} height={height} rx={isRow ? 6 : 13} />
      {isRow ? (
        <>
          <rect class="share" x="5" y={height - 4} width={(width - 10) * Math.min(1, recording.time[node.row] / most)} height="2" rx="1" />
          <text class="title" x="10" y={note(recording, node) ? 17 : height / 2 + 4} aria-hidden="true">{cut(name, room)}</text>
          <text class="note" x="10" y="32" aria-hidden="true">{cut(note(recording, node), Math.floor((width - 16) / 6.3))}</text>
        </>
      ) : (
        <text class="note" x={width / 2} y="17" text-anchor="middle" aria-hidden="true">{cut(`${name} ${recording.shape(node.value)}`, Math.floor((width - 10) / 6.3))}</text>
      )}
      {expands && (
        <text
          class="expand"
          aria-hidden="true"
          x={width - 16}
          y="17"
          onClick={(event) => {
            event.stopPropagation();
            state.expand(node.row);
          }}
        >
          ▸
        </text>
      )}
    </g>
  );
}

function cut(text: string, room: number): string {
  return text.length <= room ? text : `${text.slice(0, Math.max(1, room - 1))}…`;
}

function nodeClass(recording: Recording, row: number): string {
  switch (recording.kind[row]) {
    case OP:
      return `op ${recording.run.phases[recording.opPhase[recording.ref[row]]]}`;
    case CALL:
      return "call";
    case LINE:
      return "line";
    case GROUP:
      return "group";
    default:
      return "phase";
  }
}
