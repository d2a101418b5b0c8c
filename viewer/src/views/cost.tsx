// The cost of everything as an icicle: modules, calls and ops, as wide as their share of time, FLOPs or memory.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { costOf, costsByName, icicleOf, neighbour, type IcicleBox, type Metric } from "../data/icicle";
import { CALL, GROUP, OP, PHASE, type Recording } from "../data/recording";
import { ALL } from "../data/stretch";
import type { State } from "../state";
import { bytesText, countText, timeText } from "../text";

const HEIGHT = 22; // pixels of a box
const READABLE = 0.035; // of the width: a narrower box has no room for its name
const MOST_NAMES = 20; // ops in the table
const METRICS: [Metric, string, (cost: number) => string][] = [
  ["time", "Time", timeText],
  ["flops", "FLOPs", countText],
  ["memory", "Memory made", bytesText],
];

export function CostView({ state }: { state: State }): JSX.Element {
  const { recording } = state;
  const [metric, setMetric] = useState<Metric>("time");
  const [root, setRoot] = useState(-1);
  const boxes = useMemo(() => icicleOf(recording, root, metric), [recording, root, metric]);
  const text = METRICS.find(([name]) => name === metric)?.[2] ?? timeText;
  const total = recording.children(-1).reduce((sum, row) => sum + costOf(recording, row, metric), 0);
  const depth = boxes.reduce((most, box) => Math.max(most, box.depth), -1) + 1;
  return (
    <div class="cost-view">
      <div class="cost-head">
        <div class="choice" role="group" aria-label="What is measured">
          {METRICS.map(([name, title]) => (
            <button key={name} type="button" aria-pressed={metric === name} onClick={() => setMetric(name)}>
              {title}
            </button>
          ))}
        </div>
        <nav class="crumbs" aria-label="What the costs are of">
          <button class="link" type="button" aria-current={root < 0 ? "true" : undefined} onClick={() => setRoot(-1)}>
            run
          </button>
          {(root < 0 ? [] : [...recording.around(root), root]).map((row) => (
            <span key={row}>
              {" › "}
              <button class="link" type="button" aria-current={row === root ? "true" : undefined} onClick={() => setRoot(row)}>
                {recording.rowLabel(row)}
              </button>
            </span>
          ))}
        </nav>
        <span class="dim">{boxes.length > 0 && "click selects, double click or enter goes inside"}</span>
      </div>
      {boxes.length ? (
        <div
          class="icicle"
          tabIndex={0}
          role="group"
          aria-label={`Shares of ${text(total)}; arrows go from box to box, enter goes inside, backspace out`}
          onKeyDown={(event) => {
            const row = state.row.value;
            if (event.key === "Enter" && boxes.some((box) => box.row === row)) setRoot(row);
            else if (event.key === "Backspace" && root >= 0) setRoot(recording.parent[root]);
            else {
              const next = neighbour(boxes, row, event.key);
              if (next < 0) return;
              state.select(next);
            }
            event.preventDefault();
          }}
        >
          <div class="spacer" style={{ height: depth * HEIGHT }}>
            {boxes.map((box) => (
              <Box key={`${box.row}-${box.depth}`} state={state} box={box} total={total} text={text} onEnter={setRoot} />
            ))}
          </div>
          <ByName recording={recording} root={root} metric={metric} text={text} />
        </div>
      ) : (
        <p class="empty">{metric === "flops" ? "No FLOPs were counted in this run." : "Nothing was measured in this run."}</p>
      )}
    </div>
  );
}

/** The ops of a row by their names, the most expensive first. */
function ByName({ recording, root, metric, text }: { recording: Recording; root: number; metric: Metric; text: (cost: number) => string }): JSX.Element {
  const found = useMemo(() => costsByName(recording, root, metric), [recording, root, metric]);
  const most = found[0]?.cost || 1;
  const all = found.reduce((sum, each) => sum + each.cost, 0) || 1;
  return (
    <table class="numbers by-name">
      <caption>The same by op{recording.isFolded && ", of equal layers and steps the first"}</caption>
      <thead>
        <tr>
          <th scope="col">op</th>
          <th scope="col">runs</th>
          <th scope="col">{METRICS.find(([name]) => name === metric)?.[1]}</th>
          <th scope="col">share</th>
        </tr>
      </thead>
      <tbody>
        {found.slice(0, MOST_NAMES).map(({ name, count, cost }) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>{count.toLocaleString("en")}</td>
            <td>{text(cost)}</td>
            <td class="share">
              <span class="track" aria-hidden="true"><i style={{ width: `${(100 * cost) / most}%` }} /></span>
              <span class="percent">{((100 * cost) / all).toFixed(1)} %</span>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

interface BoxProps {
  state: State;
  box: IcicleBox;
  total: number;
  text: (cost: number) => string;
  onEnter: (row: number) => void;
}

function Box({ state, box, total, text, onEnter }: BoxProps): JSX.Element {
  const { recording } = state;
  const { row, count, cost } = box;
  const name = boxName(recording, box);
  const share = total > 0 ? `${((100 * cost) / total).toFixed(1)} %` : "";
  const isSelected = state.row.value === row || state.stretch.value?.rows[row] === ALL;
  return (
    <button
      type="button"
      tabIndex={-1}
      class={`icicle-box ${boxClass(recording, row)}${isSelected ? " selected" : ""}`}
      style={{ left: `${100 * box.from}%`, width: `calc(${100 * (box.to - box.from)}% - 1px)`, top: box.depth * HEIGHT }}
      aria-label={name}
      title={`${name} ${recording.rowNote(row)}\n${text(cost)}, ${share}${count > 1 ? `, ${count} together` : ""}`}
      onClick={() => state.select(row)}
      onDblClick={() => onEnter(row)}
    >
      {box.to - box.from > READABLE && (
        <>
          {name} <span>{text(cost)}</span>
        </>
      )}
    </button>
  );
}

function boxName(recording: Recording, { row, count }: IcicleBox): string {
  const times = recording.count[row] > 1 ? recording.count[row] : count;
  return recording.rowLabel(row) + (times > 1 ? ` ×${times}` : "");
}

function boxClass(recording: Recording, row: number): string {
  switch (recording.kind[row]) {
    case OP:
      return `op ${recording.run.phases[recording.opPhase[recording.ref[row]]]}`;
    case PHASE:
      return `phase ${recording.strings[recording.label[row]]}`;
    case CALL:
    case GROUP:
      return "call";
    default:
      return "step";
  }
}
