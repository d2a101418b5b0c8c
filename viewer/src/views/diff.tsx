// The page of a comparison: the verdict, the error along the depth, and both runs side by side.

import type { JSX } from "preact";
import { batch, effect, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Comparison, errorShare, errorText, LINE_ROW, MODULE_ROW, OP_ROW, STATES, type Divergence, type Place } from "../data/comparison";
import type { Recording } from "../data/recording";
import { State } from "../state";
import { Detail } from "./detail";
import { tokens } from "./python";
import { SourceText, SourceView } from "./source";
import { ThemeButton } from "./theme";
import { useVirtualRows } from "./virtual_rows";

const HEIGHT = 22; // pixels of a row
const SIGNS = ["·", "=", "≈", "≠"];

type Tab = "ops" | "sources";

/** The selection in a comparison: a row, and with it an op of either run. */
export class DiffState {
  readonly row = signal(-1);
  readonly tab = signal<Tab>("ops");
  readonly a: State;
  readonly b: State;

  constructor(readonly comparison: Comparison) {
    this.a = new State(comparison.a);
    this.b = new State(comparison.b);
    this.select(comparison.firstRow >= 0 ? comparison.firstRow : comparison.kind.indexOf(OP_ROW));
    for (const side of [this.a, this.b]) {
      side.tab.value = "graph";
      effect(() => {
        if (side.tab.value === "source") this.tab.value = "sources"; // a line was requested
        side.tab.value = "graph";
      });
    }
  }

  select(row: number): void {
    const { comparison } = this;
    if (row < 0 || row >= comparison.rows || comparison.kind[row] === MODULE_ROW) return;
    batch(() => {
      this.row.value = row;
      for (const [side, op] of [[this.a, comparison.opA[row]], [this.b, comparison.opB[row]]] as [State, number][]) {
        if (op >= 0) side.selectOp(op);
        else side.row.value = -1;
      }
    });
  }

  get fragment(): string {
    return this.row.value < 0 ? "" : `pair-${this.row.value}`;
  }

  follow(fragment: string): void {
    const found = /^#?pair-(\d+)$/.exec(fragment);
    if (found) this.select(Number(found[1]));
  }
}

export function DiffPage({ state }: { state: DiffState }): JSX.Element {
  const nothing = state.row.value < 0 ? "Select a line or an op." : "Only the other run has this op.";
  return (
    <div class="page diff-page">
      <Header state={state} />
      <VerdictView state={state} />
      <Modules state={state} />
      <Middle state={state} />
      <section class="both-details" aria-label="Detail of both sides">
        <Detail state={state.a} label={`Detail of ${sideName(state, 0)}`} empty={nothing} />
        <Detail state={state.b} label={`Detail of ${sideName(state, 1)}`} empty={nothing} />
      </section>
    </div>
  );
}

function sideName(state: DiffState, side: 0 | 1): string {
  const { names } = state.comparison.verdict;
  const letter = "ab"[side];
  return names[side] && names[0] !== names[1] ? names[side] : letter;
}

function Header({ state }: { state: DiffState }): JSX.Element {
  const { names, ops, paired, by, weights } = state.comparison.verdict;
  return (
    <header class="header">
      <h1>
        <span class="side-letter">a</span> {names[0] || "a run"} <span class="against">against</span>{" "}
        <span class="side-letter">b</span> {names[1] || "a run"}
      </h1>
      <dl class="facts">
        {ops.length === 2 && (
          <div>
            <dd>{paired.toLocaleString("en")}</dd>
            <dt>
              pairs of {ops[0].toLocaleString("en")} and {ops[1].toLocaleString("en")} ops
            </dt>
          </div>
        )}
        {by.length > 0 && (
          <div>
            <dt>compared by {by.join(" and ")}</dt>
          </div>
        )}
        <div>
          <dt>{weights.includes("weights") ? weights : `weights: ${weights}`}</dt>
        </div>
      </dl>
      <ThemeButton />
    </header>
  );
}

function VerdictView({ state }: { state: DiffState }): JSX.Element {
  const { verdict, text, divergences, more, parting, differing, besides, notes } = state.comparison.verdict;
  const [first, ...others] = divergences;
  return (
    <section class={`verdict ${verdict}`} aria-label="Verdict">
      <p class="answer">
        <span class={`badge ${verdict === "different" ? "error" : verdict === "unknown" ? "warning" : "good"}`}>{verdict}</span>
        {first ? <strong>{first.reason}</strong> : <strong>{text}</strong>}
        {first && <span class="dim">{first.inputs}; the results differ by {first.error}</span>}
      </p>
      {parting && <p class="dim">The ops part: {parting}</p>}
      {first && <Sides state={state} divergence={first} />}
      <More state={state} others={others} more={more} facts={[...differing, ...besides, ...notes]} />
    </section>
  );
}

function Sides({ state, divergence }: { state: DiffState; divergence: Divergence }): JSX.Element {
  return (
    <div class="sides">
      {([["a", divergence.a], ["b", divergence.b]] as [string, Place | null][]).map(([letter, place]) => (
        <div key={letter} class="side-line">
          <span class="side-letter">{letter}</span>
          {place ? (
            <div>
              <div class="where">
                <button class="link" type="button" onClick={() => select(state, divergence)}>
                  {place.place || place.name}
                </button>{" "}
                <span class="dim">{place.module}</span>
              </div>
              {place.code && <div class="frame-text"><SourceText line={tokens([place.code])[0]} /></div>}
            </div>
          ) : (
            <span class="dim">nothing</span>
          )}
        </div>
      ))}
    </div>
  );
}

function select(state: DiffState, { a, b }: Divergence): void {
  state.select(state.comparison.rowOfOps(a?.op ?? -1, b?.op ?? -1));
}

function More({ state, others, more, facts }: { state: DiffState; others: Divergence[]; more: number; facts: string[] }): JSX.Element | null {
  const count = others.length + more;
  if (!count && !facts.length) return null;
  const title = [
    ...(count ? [`${count} more ${count === 1 ? "place" : "places"} that part by themselves`] : []),
    ...(facts.length ? [`${facts.length} ${facts.length === 1 ? "note" : "notes"}`] : []),
  ].join(", ");
  return (
    <details class="more">
      <summary>{title}</summary>
      <ul>
        {others.map((each, at) => (
          <li key={at}>
            <button class="link" type="button" onClick={() => select(state, each)}>
              {each.text}
            </button>
          </li>
        ))}
        {facts.map((text) => (
          <li key={text} class="dim">{text}</li>
        ))}
      </ul>
    </details>
  );
}

/** The error of each pair of module calls, in the order they ended. */
function Modules({ state }: { state: DiffState }): JSX.Element {
  const { modules } = state.comparison;
  const { box, first, last, onScroll, spacer, reveal } = useVirtualRows(modules.length, HEIGHT);
  const current = currentModule(state);
  useEffect(() => {
    if (current >= 0) reveal(current);
  }, [current]);
  return (
    <nav class="side" aria-label="Modules along the depth">
      <h2 class="list-title">Error along the depth</h2>
      <DepthChart state={state} current={current} />
      {modules.length === 0 && <p class="empty">No module calls were compared.</p>}
      <div ref={box} class="rows" tabIndex={0} role="group" aria-label="Pairs of module calls" onScroll={onScroll}>
        <ol class="spacer" style={spacer}>
          {modules.slice(first, last).map(([a, b, typeA, typeB, depth, kind, error, callA, callB], at) => (
            <li key={first + at} class="module-pair" style={{ transform: `translateY(${(first + at) * HEIGHT}px)` }}>
              <button
                type="button"
                class={`${STATES[kind]}${first + at === current ? " current" : ""}`}
                title={`${a} (${typeA}) | ${b} (${typeB}), ${kind ? `${STATES[kind]} ${errorText(error)}` : "not measured"}`}
                onClick={() => state.select(state.comparison.rowOfCalls(callA, callB))}
              >
                <span class="name" style={{ paddingLeft: depth * 5 }}><bdi>{a === b ? a : `${a} | ${b}`}</bdi></span>
                <span class="sign">{SIGNS[kind]}</span>
                <span class="number">{errorText(error)}</span>
                <span class="track" aria-hidden="true"><i style={{ width: `${100 * errorShare(error)}%` }} /></span>
              </button>
            </li>
          ))}
        </ol>
      </div>
    </nav>
  );
}

/** The pair of module calls in which the selected op ran, the innermost; -1 for none. */
function currentModule({ row, comparison }: DiffState): number {
  if (row.value < 0) return -1;
  const op = comparison.opA[row.value];
  const call = op < 0 ? -1 : comparison.a.opCall[op];
  return comparison.modules.findIndex((module) => module[7] === call);
}

/** The error of all module calls at a glance: a bar for each, by its power of ten. */
function DepthChart({ state, current }: { state: DiffState; current: number }): JSX.Element | null {
  const { comparison } = state;
  const { modules } = comparison;
  if (!modules.some((module) => module[6])) return null;
  return (
    <svg class="depth-chart" viewBox={`0 0 ${modules.length} 40`} preserveAspectRatio="none" aria-hidden="true">
      {modules.map((module, at) => (
        <g key={at} class={STATES[module[5]]} onClick={() => state.select(comparison.rowOfCalls(module[7], module[8]))}>
          <rect class={at === current ? "place current" : "place"} x={at} y="0" width="1" height="40" />
          <rect class="error" x={at + 0.1} y={40 - 40 * errorShare(module[6])} width="0.8" height={40 * errorShare(module[6])} />
        </g>
      ))}
    </svg>
  );
}

function Middle({ state }: { state: DiffState }): JSX.Element {
  const tabs: [Tab, string][] = [["ops", "Ops side by side"], ["sources", "Sources"]];
  return (
    <main class="middle">
      <div class="tabs" role="tablist" aria-label="Views">
        {tabs.map(([name, title]) => (
          <button
            key={name}
            id={`tab-${name}`}
            role="tab"
            type="button"
            aria-selected={state.tab.value === name}
            aria-controls="tab-panel"
            onClick={() => (state.tab.value = name)}
          >
            {title}
          </button>
        ))}
      </div>
      <div class="panel" id="tab-panel" role="tabpanel" aria-labelledby={`tab-${state.tab.value}`}>
        {state.tab.value === "ops" ? (
          <Aligned state={state} />
        ) : (
          <div class="both-sources">
            <SourceView state={state.a} label="a" />
            <SourceView state={state.b} label="b" />
          </div>
        )}
      </div>
    </main>
  );
}

function Aligned({ state }: { state: DiffState }): JSX.Element {
  const { comparison } = state;
  const { box, first, last, onScroll, spacer, reveal } = useVirtualRows(comparison.rows, HEIGHT);
  const selected = state.row.value;
  const seen = useRef(-2);
  useEffect(() => {
    if (selected >= 0 && seen.current !== selected) reveal(selected);
    seen.current = selected;
  }, [selected]);
  if (!comparison.rows) return <p class="empty">No ops were compared.</p>;
  return (
    <div
      ref={box}
      class="rows aligned"
      role="listbox"
      tabIndex={0}
      aria-label="Lines and ops of both runs"
      aria-activedescendant={selected >= 0 ? `pair-${selected}` : undefined}
      onScroll={onScroll}
      onKeyDown={(event) => {
        if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
        const step = event.key === "ArrowDown" ? 1 : -1;
        let row = state.row.value + step;
        while (row >= 0 && row < comparison.rows && comparison.kind[row] === MODULE_ROW) row += step;
        state.select(row);
        event.preventDefault();
      }}
    >
      <div class="spacer" style={spacer} role="presentation">
        {Array.from({ length: last - first }, (_, at) => (
          <Pair key={first + at} state={state} row={first + at} />
        ))}
      </div>
    </div>
  );
}

function Pair({ state, row }: { state: DiffState; row: number }): JSX.Element {
  const { comparison } = state;
  const kind = comparison.kind[row];
  const [opA, opB] = [comparison.opA[row], comparison.opB[row]];
  const name = STATES[comparison.state[row]];
  const style = { transform: `translateY(${row * HEIGHT}px)` };
  if (kind === MODULE_ROW) {
    const texts = [moduleName(comparison.a, opA), moduleName(comparison.b, opB)];
    const both = texts[0] === texts[1] || !texts[1] ? texts[0] : !texts[0] ? texts[1] : texts.join(" | ");
    return (
      <div class="pair module" role="presentation" style={style}>
        {both || "outside every module"}
      </div>
    );
  }
  const isLone = opA < 0 || opB < 0;
  const sign = isLone ? (opA < 0 ? "›" : "‹") : SIGNS[comparison.state[row]];
  const text = kind === LINE_ROW ? lineText : opText;
  return (
    <div
      id={`pair-${row}`}
      role="option"
      aria-selected={state.row.value === row}
      class={`pair ${kind === OP_ROW ? "op" : "line"} ${name}${comparison.first[row] ? " first" : ""}${isLone ? " lone" : ""}`}
      style={style}
      onClick={() => state.select(row)}
    >
      <span class="half">{text(comparison.a, opA)}</span>
      <span class="sign" title={isLone ? "only on one side" : name}>{sign}</span>
      <span class="half">{text(comparison.b, opB)}</span>
      <span class="error-text">{kind === OP_ROW || comparison.first[row] ? errorText(comparison.error[row]) : ""}{comparison.first[row] && kind === LINE_ROW ? " ← first" : ""}</span>
    </div>
  );
}

function moduleName(recording: Recording, call: number): string {
  if (call < 0) return "";
  return recording.modulePathOf(call) || recording.moduleTypeOf(call);
}

function lineText(recording: Recording, op: number): JSX.Element | string {
  if (op < 0) return "";
  const frame = recording.opLine[op];
  const source = recording.sourceLine(frame).trim();
  return (
    <>
      <span class="dim line-number">{frame >= 0 ? recording.frameLine[frame] : ""}</span>
      {source ? <SourceText line={tokens([source])[0]} /> : <span class="dim">{recording.position(frame) || "no source line"}</span>}
    </>
  );
}

function opText(recording: Recording, op: number): JSX.Element | string {
  if (op < 0) return "";
  return (
    <>
      <span class="op-name">{recording.opLabel(op)}</span>{" "}
      <span class="shape">{recording.opOutputs.of(op).map((value) => recording.shape(value)).join(", ")}</span>
    </>
  );
}
