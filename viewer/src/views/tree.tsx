// The tree at the left: only the rows that are on the screen are in the document, however many there are.

import type { JSX } from "preact";
import { useEffect, useMemo } from "preact/hooks";
import { ASIDE, CALL, GROUP, LINE, OP, PHASE, ROUND, STEP, type Recording } from "../data/recording";
import { NO_FILTER } from "../data/search";
import { ALL } from "../data/stretch";
import type { State } from "../state";
import { bytesText, timeText } from "../text";
import { focusTree } from "./keys";
import { useVirtualRows } from "./virtual_rows";

const HEIGHT = 24; // pixels of a row

export function Tree({ state }: { state: State }): JSX.Element {
  return (
    <nav class="side" aria-label="The run as a tree">
      <Search state={state} />
      <p class="legend" aria-hidden="true">
        <span>
          <i class="bar time" /> time
        </span>
        <span>
          <i class="bar memory" /> memory made
        </span>
      </p>
      <Rows state={state} />
    </nav>
  );
}

function Search({ state }: { state: State }): JSX.Element {
  const { phases, levels } = state.recording.run;
  const filter = state.filter.value;
  const ran = [...new Set(state.recording.opPhase)].sort();
  const seen = [...new Set(state.recording.opLevel)].sort();
  const steps = stepRows(state.recording);
  return (
    <div class="search">
      <input
        id="search"
        type="search"
        placeholder="Search modules, ops, shapes, file:line"
        aria-label="Search modules, ops, shapes, variables and lines"
        value={filter.query}
        onInput={(event) => (state.filter.value = { ...filter, query: event.currentTarget.value })}
        onKeyDown={(event) => {
          if (event.key !== "Enter" && event.key !== "ArrowDown") return;
          event.preventDefault();
          const [first] = state.matches.value;
          if (first !== undefined) state.selectAndEnter(first);
          focusTree();
        }}
      />
      {steps.length > 1 && (
        <select
          aria-label="Step"
          value={filter.step}
          onChange={(event) => (state.filter.value = { ...filter, step: Number(event.currentTarget.value) })}
        >
          <option value={-1}>all steps</option>
          {steps.map((row) => (
            <option key={row} value={row}>
              {state.recording.rowLabel(row)}
            </option>
          ))}
        </select>
      )}
      {ran.length > 1 && (
        <select
          aria-label="Phase"
          value={filter.phase}
          onChange={(event) => (state.filter.value = { ...filter, phase: Number(event.currentTarget.value) })}
        >
          <option value={-1}>all phases</option>
          {ran.map((phase) => (
            <option key={phase} value={phase}>
              {phases[phase]}
            </option>
          ))}
        </select>
      )}
      {seen.length > 1 && (
        <select
          aria-label="Level of ops"
          value={filter.level}
          onChange={(event) => (state.filter.value = { ...filter, level: Number(event.currentTarget.value) })}
        >
          <option value={-1}>all ops</option>
          {seen.map((level) => (
            <option key={level} value={level}>
              {levels[level]}
            </option>
          ))}
        </select>
      )}
      {state.isFiltering.value && (
        <output class="found">
          {state.matches.value.size.toLocaleString("en")} found
          <button class="plain" type="button" onClick={() => (state.filter.value = NO_FILTER)}>
            clear
          </button>
        </output>
      )}
    </div>
  );
}

/** The rows of steps, also of those in a group. */
function stepRows(recording: Recording): number[] {
  const found: number[] = [];
  for (let row = 0; row < recording.rows; ) {
    const kind = recording.kind[row];
    if (kind === STEP) found.push(row);
    row = kind === GROUP || kind === ROUND || (kind === STEP && recording.kind[row + 1] === STEP) ? row + 1 : recording.end[row];
  }
  return found;
}

function Rows({ state }: { state: State }): JSX.Element {
  const { recording } = state;
  const rows = state.rows.value;
  const selected = state.row.value;
  const { box, first, last, onScroll, spacer, reveal } = useVirtualRows(rows.length, HEIGHT);
  const stretch = state.stretch.value;
  useEffect(() => {
    const at = indexOf(rows, selected >= 0 || !stretch?.ops.length ? selected : recording.opRow[stretch.ops[0]]);
    if (at >= 0) reveal(at);
  }, [selected, stretch, rows]);
  const whole = useMemo(() => wholes(recording), [recording]);
  const most = Math.max(1, ...whole.map((row) => recording.time[row]));
  const mostMemory = Math.max(1, ...whole.map((row) => recording.memory[row]));
  return (
    <div
      ref={box}
      id="tree"
      class="rows"
      role={rows.length ? "tree" : "group"} // a tree has to have rows
      tabIndex={0}
      aria-label="Steps, modules, lines and ops"
      aria-multiselectable={rows.length ? true : undefined} // a stretch of time has many
      aria-activedescendant={selected >= 0 ? `row-${selected}` : undefined}
      onScroll={onScroll}
      onKeyDown={(event) => move(state, event)}
    >
      {rows.length === 0 && (
        <p class="empty">{state.isFiltering.value ? "Nothing matches." : "Nothing was recorded in this run."}</p>
      )}
      <div class="spacer" style={spacer}>
        {Array.from(rows.subarray(first, last), (row, at) => (
          <Row key={row} state={state} row={row} top={(first + at) * HEIGHT} most={most} mostMemory={mostMemory} />
        ))}
      </div>
    </div>
  );
}

/** The rows that the bars are shares of: the outermost, of a group its members, or a step would be a dot. */
function wholes(recording: Recording): number[] {
  return recording.children(-1).flatMap((row) => (recording.kind[row] === GROUP ? recording.children(row) : [row]));
}

interface RowProps {
  state: State;
  row: number;
  top: number;
  most: number;
  mostMemory: number;
}

function Row({ state, row, top, most, mostMemory }: RowProps): JSX.Element {
  const { recording } = state;
  const isLeaf = recording.isLeaf(row);
  const isOpen = !isLeaf && (state.isFiltering.value || state.open.value.has(row));
  const time = recording.time[row];
  const memory = recording.memory[row];
  const depth = recording.depth[row];
  const brushed = state.stretch.value?.rows[row] ?? 0;
  return (
    <div
      id={`row-${row}`}
      class={`row ${rowClass(recording, row)}${brushed ? " brushed" : ""}`}
      role="treeitem"
      aria-level={depth + 1}
      aria-selected={state.row.value === row || brushed === ALL}
      {...(isLeaf ? {} : { "aria-expanded": isOpen })}
      data-match={state.matches.value.has(row) ? "true" : undefined}
      style={{ transform: `translateY(${top}px)`, paddingLeft: 6 + depth * 13 }}
      title={`${recording.rowLabel(row)}  ${recording.rowNote(row)}`}
      onClick={() => state.selectAndEnter(row)}
      onDblClick={() => !isLeaf && state.toggle(row)}
    >
      <span
        class="twist"
        aria-hidden="true"
        onClick={(event) => {
          event.stopPropagation();
          if (!isLeaf) state.toggle(row);
        }}
      >
        {isLeaf ? "" : isOpen ? "▾" : "▸"}
      </span>
      <span class="name">{recording.rowLabel(row)}</span>
      {recording.count[row] > 1 && <span class="times">×{recording.count[row]}</span>}
      {recording.gaveNan(row) && <span class="badge error">NaN</span>}
      <span class="note">{recording.rowNote(row)}</span>
      <span class="cost">{time > 0 ? timeText(time) : ""}</span>
      <span class="bars" aria-hidden="true" title={`${timeText(time)}, makes ${bytesText(memory)}`}>
        <i class="bar time" style={{ width: `${Math.min(100, (100 * time) / most)}%` }} />
        <i class="bar memory" style={{ width: `${Math.min(100, (100 * memory) / mostMemory)}%` }} />
      </span>
    </div>
  );
}

function rowClass(recording: Recording, row: number): string {
  const ref = recording.ref[row];
  switch (recording.kind[row]) {
    case OP: {
      const raised = recording.raised(row) ? " raised" : "";
      return `op ${recording.run.phases[recording.opPhase[ref]]}${raised}`;
    }
    case CALL:
      return recording.raised(row) ? "call raised" : "call";
    case LINE:
      return "line";
    case GROUP:
      return `group ${rowClass(recording, row + 1)}`;
    case ASIDE:
      return "not-model";
    case PHASE:
      return `phase ${recording.strings[recording.label[row]]}`;
    default:
      return "step";
  }
}

function indexOf(rows: Int32Array, row: number): number {
  let low = 0;
  let high = rows.length - 1;
  while (low <= high) {
    const at = (low + high) >> 1;
    if (rows[at] === row) return at;
    if (rows[at] < row) low = at + 1;
    else high = at - 1;
  }
  return -1;
}

/** The keys of a tree, as in file browsers. */
function move(state: State, event: KeyboardEvent): void {
  const { recording } = state;
  const rows = state.rows.value;
  const row = state.row.value;
  const at = indexOf(rows, row);
  const select = (index: number): void => {
    if (rows.length) state.selectAndEnter(rows[Math.max(0, Math.min(rows.length - 1, index))]);
  };
  const isOpen = !recording.isLeaf(row) && state.open.value.has(row);
  switch (event.key) {
    case "ArrowDown":
      select(at + 1);
      break;
    case "ArrowUp":
      select(at - 1);
      break;
    case "PageDown":
      select(at + 20);
      break;
    case "PageUp":
      select(at - 20);
      break;
    case "Home":
      select(0);
      break;
    case "End":
      select(rows.length - 1);
      break;
    case "ArrowRight":
      if (row < 0) select(0);
      else if (!recording.isLeaf(row) && !isOpen) state.toggle(row, true);
      else select(at + 1);
      break;
    case "ArrowLeft":
      if (isOpen) state.toggle(row, false);
      else if (row >= 0 && recording.parent[row] >= 0) state.selectAndEnter(recording.parent[row]);
      break;
    case "Enter":
    case " ":
      if (row >= 0 && !recording.isLeaf(row)) state.toggle(row);
      break;
    default:
      return;
  }
  event.preventDefault();
}
