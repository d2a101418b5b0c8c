// The detail at the right: all facts about the selection.

import type { JSX } from "preact";
import { CALL, GROUP, LINE, OP, type Recording } from "../data/recording";
import type { Stretch } from "../data/stretch";
import type { State } from "../state";
import { bytesText, countText, timeText } from "../text";
import { CopyButton } from "./copy";
import { Name } from "./name";
import { tokens } from "./python";
import { SourceText } from "./source";
import { LineageList, OpButton, OpLink, ValueDetail, Values } from "./value_detail";

const MOST_NAMES = 16; // ops of a stretch of time that are listed

/** The note on the timeline of a run of which the page holds a part. */
export const FIRST_ONLY =
  "Of equal layers and steps the timeline has the modules and ops of the first only. Steps, phases and memory are those of the whole run.";

interface DetailProps {
  state: State;
  label?: string;
  /** The text if nothing is selected; without it the run as a whole is described. */
  empty?: string;
}

export function Detail({ state, label = "Detail of the selection", empty = "" }: DetailProps): JSX.Element {
  const row = state.row.value;
  const stretch = state.stretch.value;
  const none = stretch ? <StretchDetail state={state} stretch={stretch} /> : empty ? <p class="empty">{empty}</p> : <Welcome state={state} />;
  return (
    <aside class="detail" aria-label={label} tabIndex={0}>
      {row < 0 ? none : <Selected key={row} state={state} row={row} />}
    </aside>
  );
}

function Welcome({ state }: { state: State }): JSX.Element {
  const { memory } = state.recording.timeline;
  return (
    <>
      <h2>{state.recording.run.name || "a run"}</h2>
      <p class="dim">Select anything: a row of the tree, a line, a node of the graph, a stretch of the timeline.</p>
      {state.recording.isFolded && (
        <p class="hint">
          This run has {state.recording.run.recordedOps.toLocaleString("en")} ops. The page holds the folded run,{" "}
          {state.recording.run.ops.toLocaleString("en")} of them: of equal layers and steps the first. Times and memory
          beside ×N are those of all.
        </p>
      )}
      {state.recording.run.capturesLeftOut > 0 && (
        <p class="hint">{state.recording.run.capturesLeftOut.toLocaleString("en")} captured tensors are not drawn: there are too many.</p>
      )}
      {memory && (
        <section>
          <h3>Memory at the peak, {memory.device}</h3>
          <table class="numbers">
            <tbody>
              {memory.kinds.map(([name, bytes]) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td>{bytesText(bytes)}</td>
                </tr>
              ))}
            </tbody>
          </table>
          <h3>Who holds it</h3>
          <ul class="holders">
            {memory.largest.map(([name, bytes, use, why, value], at) => (
              <li key={at}>
                <span class="size">{bytesText(bytes)}</span>
                <div>
                  {value >= 0 ? (
                    <button class="link shape" type="button" onClick={() => state.selectValue(value)}>
                      <Name text={name} />
                    </button>
                  ) : (
                    <Name text={name} />
                  )}
                  <div class="dim">{[use, why].filter(Boolean).join(", ")}</div>
                </div>
              </li>
            ))}
          </ul>
        </section>
      )}
    </>
  );
}

/** The ops and lines of a stretch of time. */
function StretchDetail({ state, stretch }: { state: State; stretch: Stretch }): JSX.Element {
  const { recording } = state;
  const { from, to, ops, time, flops, made, held, byName } = stretch;
  const facts: [string, string][] = [
    [ops.length === 1 ? "op" : "ops", ops.length.toLocaleString("en")],
    ["op time", timeText(time)],
    ...(flops > 0 ? [["FLOPs", countText(flops)] as [string, string]] : []),
    ...(made > 0 ? [["makes", bytesText(made)] as [string, string]] : []),
    ...(held >= 0 ? [["held at most", bytesText(held)] as [string, string]] : []),
  ];
  const isOnly = state.filter.value.stretch !== undefined;
  return (
    <>
      <h2>{timeText(to - from)} of the run</h2>
      <p class="dim">
        from {timeText(from)} to {timeText(to)}
      </p>
      {recording.isFolded && <p class="hint">{FIRST_ONLY}</p>}
      <Facts facts={facts} />
      <p class="actions">
        <button type="button" onClick={() => state.zoom([from, to])}>
          Zoom in
        </button>
        <button
          type="button"
          aria-pressed={isOnly}
          onClick={() => (state.filter.value = { ...state.filter.value, stretch: isOnly ? undefined : stretch.rows })}
        >
          Only these in the tree
        </button>
        <button type="button" onClick={() => state.deselect()}>
          Select nothing
        </button>
      </p>
      {byName.length > 0 && (
        <section>
          <h3>Ops as written, by time</h3>
          <table class="numbers">
            <tbody>
              {byName.slice(0, MOST_NAMES).map(({ name, count, time: spent, op }) => (
                <tr key={name}>
                  <th scope="row">
                    <OpButton state={state} op={op} value={-1} />
                  </th>
                  <td class="dim">{count > 1 ? `×${count.toLocaleString("en")}` : ""}</td>
                  <td>{timeText(spent)}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {byName.length > MOST_NAMES && <p class="dim">and {byName.length - MOST_NAMES} more</p>}
        </section>
      )}
      {ops.length === 0 && <p class="dim">No op ran in it.</p>}
    </>
  );
}

function Selected({ state, row }: { state: State; row: number }): JSX.Element {
  const { recording } = state;
  const ref = recording.ref[row];
  const kind = recording.kind[row];
  const results = kind === OP ? recording.opOutputs.of(ref) : kind === CALL ? recording.callOutputs.of(ref) : [];
  const shown = state.value.value >= 0 ? state.value.value : (results[0] ?? -1);
  return (
    <>
      <Crumbs state={state} row={row} />
      <h2 class={kind === OP ? "op" : "module"}>
        {recording.rowLabel(row)}{" "}
        {recording.count[row] > 1 && <span class="times">×{recording.count[row]}</span>}
      </h2>
      {kind === OP && <OpDetail state={state} op={ref} />}
      {kind === CALL && <CallDetail state={state} row={row} call={ref} />}
      {(kind === GROUP || kind === LINE || kind < CALL) && <Costs recording={recording} row={row} />}
      {state.value.value >= 0 && <ValueDetail state={state} value={state.value.value} />}
      <Line state={state} frame={recording.rowFrame(row)} />
      <LineageList state={state} value={shown} />
    </>
  );
}

function Crumbs({ state, row }: { state: State; row: number }): JSX.Element {
  const { recording } = state;
  const around = recording.around(row).filter((each) => recording.kind[each] !== LINE);
  return (
    <p class="crumbs">
      {around.map((each) => (
        <span key={each}>
          <button class="link" type="button" onClick={() => state.select(each)}>
            {recording.rowLabel(each)}
          </button>
          {" › "}
        </span>
      ))}
    </p>
  );
}

function OpDetail({ state, op }: { state: State; op: number }): JSX.Element {
  const { recording } = state;
  const { phases, levels } = recording.run;
  const inputs = recording.opInputs.of(op);
  const [form, ...names] = recording.strings[recording.opForm[op]].split("\n");
  const forward = recording.opForward[op];
  const parent = recording.opParent[op];
  const device = recording.opDevice.length ? recording.opDevice[op] : -1;
  const facts: [string, string][] = [["time", timeText(Math.max(0, recording.opDuration[op]))]];
  if (device >= 0) facts.push(["device", timeText(device)]);
  if (recording.opFlops[op] >= 0) facts.push(["FLOPs", countText(recording.opFlops[op])]);
  if (recording.memory[recording.opRow[op]] > 0) facts.push(["makes", bytesText(recording.memory[recording.opRow[op]])]);
  return (
    <>
      <p class="tags">
        <span class={`tag ${phases[recording.opPhase[op]]}`}>{phases[recording.opPhase[op]]}</span>
        <span class="tag">{levels[recording.opLevel[op]]}</span>
        <CopyButton text={`t.ops[${recording.opNumber(op)}]`} />
      </p>
      <Facts facts={facts} />
      {form && (
        <p class="call-text">
          <code>({filled(form, inputs.map((value) => recording.shape(value)))})</code>
        </p>
      )}
      <Values state={state} title="Inputs" values={inputs} names={names} />
      <Values state={state} title="Outputs" values={recording.opOutputs.of(op)} names={[]} />
      {(forward >= 0 || parent >= 0) && (
        <dl class="links">
          {parent >= 0 && <OpLink state={state} term="came from" op={parent} />}
          {forward >= 0 && <OpLink state={state} term="backward of" op={forward} />}
        </dl>
      )}
    </>
  );
}

/** The arguments of an op with its tensors in their places. */
function filled(form: string, tensors: string[]): string {
  let at = 0;
  return form.replace(/\0/g, () => tensors[at++] ?? "?");
}

function CallDetail({ state, row, call }: { state: State; row: number; call: number }): JSX.Element {
  const { recording } = state;
  const module = recording.callModule[call];
  const path = recording.modulePathOf(call);
  const extra = recording.strings[recording.moduleExtra[module]];
  const parameters = recording.parameters[module];
  const ran = recording.callRow[call] === row;
  return (
    <>
      <p class="tags">
        <span class="tag">{recording.moduleTypeOf(call)}</span>
        {recording.callIndex[call] > 0 && <span class="tag">call {recording.callIndex[call]}</span>}
        {!ran && <span class="tag backward">its part of another phase</span>}
        <CopyButton text={path || recording.moduleTypeOf(call)} />
      </p>
      {extra && <p class="call-text"><code>{extra}</code></p>}
      <Costs recording={recording} row={row} call={ran ? call : -1} />
      {ran && <Values state={state} title="Inputs" values={recording.callInputs.of(call)} names={[]} />}
      {ran && <Values state={state} title="Outputs" values={recording.callOutputs.of(call)} names={[]} />}
      {parameters.length > 0 && (
        <section>
          <h3>Parameters</h3>
          <table class="numbers">
            <tbody>
              {parameters.map(([name, shape, count, trained, buffer]) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td class="shape">{shape}</td>
                  <td>{countText(count)}</td>
                  <td class="dim">{buffer ? "buffer" : trained ? "" : "frozen"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      )}
    </>
  );
}

function Costs({ recording, row, call = -1 }: { recording: Recording; row: number; call?: number }): JSX.Element {
  const facts: [string, string][] = [["op time", timeText(recording.time[row])]];
  if (call >= 0) facts.push(["call took", timeText(Math.max(0, recording.callDuration[call]))]);
  if (recording.flops[row] > 0) facts.push(["FLOPs", countText(recording.flops[row])]);
  if (recording.memory[row] > 0) facts.push(["makes", bytesText(recording.memory[row])]);
  return <Facts facts={facts} />;
}

function Facts({ facts }: { facts: [string, string][] }): JSX.Element {
  return (
    <dl class="facts">
      {facts.map(([name, text]) => (
        <div key={name}>
          <dd>{text}</dd>
          <dt>{name}</dt>
        </div>
      ))}
    </dl>
  );
}

function Line({ state, frame }: { state: State; frame: number }): JSX.Element | null {
  const { recording } = state;
  const position = recording.position(frame);
  if (!position) return null;
  const stack: number[] = [];
  for (let at = recording.frameParent[frame]; at >= 0 && stack.length < 50; at = recording.frameParent[at]) stack.push(at);
  return (
    <section>
      <h3>Line</h3>
      <FrameLine state={state} frame={frame} />
      {stack.length > 0 && (
        <details class="stack">
          <summary>called from {stack.length} {stack.length === 1 ? "line" : "lines"}</summary>
          {stack.map((each) => (
            <FrameLine key={each} state={state} frame={each} />
          ))}
        </details>
      )}
    </section>
  );
}

function FrameLine({ state, frame }: { state: State; frame: number }): JSX.Element | null {
  const { recording } = state;
  const position = recording.position(frame);
  if (!position) return null;
  const text = recording.sourceLine(frame);
  const indent = text.length - text.trimStart().length;
  const [line] = tokens([text.trimStart()]);
  const open = (): void => {
    state.file.value = recording.frameFile[frame];
    state.tab.value = "source";
  };
  return (
    <div class="frame-line">
      {text && (
        <div class="frame-text">
          <SourceText line={line} mark={[recording.frameColumn[frame] - indent, recording.frameEnd[frame] - indent]} />
        </div>
      )}
      <button class="link" type="button" onClick={open}>
        <Name text={position} />
      </button>{" "}
      <span class="dim">in {recording.strings[recording.frameFunction[frame]]}</span> <CopyButton text={position} />
    </div>
  );
}
