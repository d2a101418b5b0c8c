// The timeline at the bottom: steps, phases, module calls and ops over time, and the memory that was held.

import type { JSX } from "preact";
import { effect } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import type { State } from "../state";
import { timeText } from "../text";
import { FIRST_ONLY } from "./detail";
import { Drawing, LEFT } from "./timeline_drawing";

const NUDGE = 1 / 50; // of the visible time: how far a key moves the end of a stretch
const CLOSER = 1.4; // how much closer a key or a turn of the wheel goes
const SHORTEST_BRUSH = 4; // pixels; a shorter one is a click
const KEYS =
  "Arrows go from op to op; with shift they select a stretch of time. z shows what is selected, 0 the whole run, w and s zoom, a and d move.";

interface Hover {
  x: number;
  y: number;
  text: string;
}

export function TimelineView({ state }: { state: State }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [hover, setHover] = useState<Hover | undefined>(undefined);
  const [brush, setBrush] = useState<[number, number] | undefined>(undefined);
  const drawing = useRef<Drawing | undefined>(undefined);

  useEffect(() => {
    const element = canvas.current;
    if (!element) return undefined;
    const made = (drawing.current = new Drawing(element, state));
    const stop = effect(() => {
      void state.span.value;
      void state.selectedSpan;
      made.draw();
    });
    const redraw = (): void => made.draw();
    const onWheel = (event: WheelEvent): void => {
      event.preventDefault();
      const sideways = event.shiftKey ? event.deltaY : event.deltaX;
      if (sideways) move(state, sideways / 800);
      else zoomAt(state, Math.exp(-event.deltaY / 400), made.moment(event.clientX - element.getBoundingClientRect().left));
    };
    const observer = new ResizeObserver(redraw);
    observer.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    addEventListener("themechange", redraw);
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => {
      stop();
      observer.disconnect();
      dark.removeEventListener("change", redraw);
      removeEventListener("themechange", redraw);
      element.removeEventListener("wheel", onWheel);
    };
  }, [state]);

  const placeOf = (event: { clientX: number; clientY: number }): { x: number; y: number } => {
    const box = canvas.current?.getBoundingClientRect();
    return { x: Math.max(LEFT, event.clientX - (box?.left ?? 0)), y: event.clientY - (box?.top ?? 0) };
  };
  const isBrushing = brush && Math.abs(brush[1] - brush[0]) > SHORTEST_BRUSH;
  const release = (event: PointerEvent): void => {
    const made = drawing.current;
    if (!brush || !made) return;
    const { x, y } = placeOf(event);
    setBrush(undefined);
    if (isBrushing) state.selectStretch(made.moment(brush[0]), made.moment(brush[1]));
    else {
      const row = made.rowAt(x, y);
      if (row >= 0) state.select(row);
    }
  };
  return (
    <section class="timeline" aria-label="Timeline">
      <canvas
        ref={canvas}
        id="timeline"
        role="application"
        tabIndex={0}
        aria-label={`Steps, phases, module calls, ops, devices and memory over time. ${KEYS}`}
        onPointerDown={(event) => {
          const { x } = placeOf(event);
          event.currentTarget.setPointerCapture(event.pointerId);
          setHover(undefined);
          setBrush([x, x]);
        }}
        onPointerMove={(event) => {
          const { x, y } = placeOf(event);
          if (brush) setBrush([brush[0], x]);
          else {
            const text = drawing.current?.textAt(x, y) ?? "";
            setHover(text ? { x: event.clientX, y: event.clientY, text } : undefined);
          }
        }}
        onPointerUp={release}
        onPointerCancel={() => setBrush(undefined)}
        onPointerLeave={() => setHover(undefined)}
        onDblClick={(event) => {
          const { x, y } = placeOf(event);
          state.zoom(state.recording.spanOf(drawing.current?.rowAt(x, y) ?? -1));
        }}
        onKeyDown={(event) => drawing.current && onKey(state, drawing.current, event)}
      />
      {isBrushing && (
        <div class="brush" style={{ left: Math.min(...brush), width: Math.abs(brush[1] - brush[0]) }}>
          {timeText(Math.abs((drawing.current?.moment(brush[1]) ?? 0) - (drawing.current?.moment(brush[0]) ?? 0)))}
        </div>
      )}
      <Buttons state={state} />
      {hover && (
        <div class="tip" style={{ left: Math.min(hover.x + 12, innerWidth - 320), bottom: innerHeight - hover.y + 10 }}>
          {hover.text}
        </div>
      )}
    </section>
  );
}

function Buttons({ state }: { state: State }): JSX.Element {
  const [from, to] = state.span.value;
  const selected = state.selectedSpan;
  const isZoomed = from > 0 || to < state.recording.run.duration;
  const stretch = state.stretch.value;
  return (
    <div class="time-buttons">
      {state.recording.isFolded && (
        <span class="only" title={FIRST_ONLY}>
          modules and ops: of equal steps the first only
        </span>
      )}
      <output class="dim">
        {stretch && `${stretch.ops.length.toLocaleString("en")} ops in ${timeText(stretch.to - stretch.from)}`}
      </output>
      {selected && (selected[0] !== from || selected[1] !== to) && (
        <button type="button" title="Show what is selected (z)" onClick={() => state.zoom(selected)}>
          zoom in
        </button>
      )}
      {isZoomed && (
        <button type="button" title="Show the whole run (0)" onClick={() => state.zoom()}>
          whole run
        </button>
      )}
    </div>
  );
}

/** Shows less or more around a moment, which stays where it is. */
function zoomAt(state: State, factor: number, moment: number): void {
  const [from, to] = state.span.value;
  const around = Math.max(from, Math.min(to, moment));
  const { duration } = state.recording.run;
  state.zoom([Math.max(0, around - (around - from) / factor), Math.min(duration, around + (to - around) / factor)]);
}

/** Moves to earlier or later times, by a share of the visible time. */
function move(state: State, share: number): void {
  const [from, to] = state.span.value;
  const { duration } = state.recording.run;
  const by = Math.max(-from, Math.min(Math.max(0, duration - to), share * (to - from)));
  state.zoom([from + by, to + by]);
}

function onKey(state: State, drawing: Drawing, event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const [from, to] = state.span.value;
  const forward = event.key === "ArrowRight" ? 1 : -1;
  switch (event.key) {
    case "ArrowLeft":
    case "ArrowRight":
      if (event.shiftKey) extend(state, forward * NUDGE * (to - from));
      else state.selectOp(drawing.nextOp(forward));
      break;
    case "w":
    case "+":
      zoomAt(state, CLOSER, (from + to) / 2);
      break;
    case "s":
    case "-":
      zoomAt(state, 1 / CLOSER, (from + to) / 2);
      break;
    case "a":
      move(state, -0.2);
      break;
    case "d":
      move(state, 0.2);
      break;
    default:
      return;
  }
  event.preventDefault();
}

/** Moves the end of the selected stretch; without one, a stretch begins at the selected row. */
function extend(state: State, by: number): void {
  const [from, to] = state.brushed.value ?? state.selectedSpan ?? [state.span.value[0], state.span.value[0]];
  state.selectStretch(from, Math.max(from, to + by));
}
