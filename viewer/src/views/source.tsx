// The source: the user's files, with the runs and the time of each line.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { LineRow, SourceFile } from "../data/recording";
import type { State } from "../state";
import { timeText } from "../text";
import { marked, tokens, type Token } from "./python";

/** The files of a run; `label` tells those of two runs apart. */
export function SourceView({ state, label = "" }: { state: State; label?: string }): JSX.Element {
  const { files } = state.recording;
  if (!files.length) return <p class="empty">No source lines were recorded in this run.</p>;
  const at = Math.min(state.file.value, files.length - 1);
  return (
    <div class="source">
      <div class="source-head">
        <label>
          {label ? <span class="side-letter">{label}</span> : "File"}{" "}
          <select value={at} onChange={(event) => (state.file.value = Number(event.currentTarget.value))}>
            {files.map((file, index) => (
              <option key={file.path} value={index}>
                {file.name}
              </option>
            ))}
          </select>
        </label>
        <span class="dim">{about(files[at])}</span>
      </div>
      <File key={at} state={state} file={files[at]} at={at} label={label} />
    </div>
  );
}

function about(file: SourceFile): string {
  const ran = file.lines.filter(([, , , phases]) => phases.length).length;
  const missing = file.text.length ? "" : "; its text is not in the recording";
  return `${ran} ${ran === 1 ? "line" : "lines"} with ops${missing}`;
}

interface FileProps {
  state: State;
  file: SourceFile;
  at: number;
  label: string;
}

function File({ state, file, at, label }: FileProps): JSX.Element {
  const { recording } = state;
  const box = useRef<HTMLDivElement>(null);
  const stretches = useMemo(
    () =>
      file.text.length
        ? file.text.map(([first, lines]) => ({ first, lines: tokens(lines) }))
        : file.lines.map(([first]) => ({ first, lines: [[]] as Token[][] })),
    [file],
  );
  const ran = useMemo(() => new Map(file.lines.map((line) => [line[0], line])), [file]);
  const most = useMemo(() => Math.max(1, ...file.lines.map((line) => line[2])), [file]);
  const frame = state.frame.value;
  const isHere = frame >= 0 && recording.frameFile[frame] === at;
  const current = isHere ? recording.frameLine[frame] : -1;
  useEffect(() => {
    const line = box.current?.querySelector(".code-line.current") ?? box.current?.querySelector(".code-line.ran");
    line?.scrollIntoView({ block: "center" });
  }, [current, file, state.brushed.value]);
  return (
    <div
      ref={box}
      class="code"
      tabIndex={0}
      role="region"
      aria-label={`Source of ${file.name}${label && `, run ${label}`}; arrows go from line to line that ran ops`}
      onKeyDown={(event) => {
        const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
        const withOps = file.lines.filter(([, , , phases]) => phases.length).map(([number]) => number);
        const next = step > 0 ? withOps.find((number) => number > current) : withOps.reverse().find((number) => number < current);
        if (!step || next === undefined) return;
        state.selectLine(at, next);
        event.preventDefault();
      }}
    >
      {stretches.map(({ first, lines }, stretch) => (
        <div key={first} class="stretch">
          {stretch > 0 && <div class="gap" aria-hidden="true">⋮</div>}
          {lines.map((line, index) => {
            const number = first + index;
            return (
              <CodeLine
                key={number}
                number={number}
                line={line}
                ran={ran.get(number)}
                most={most}
                isBrushed={state.stretch.value?.lines.has(`${at}:${number}`) ?? false}
                mark={number === current ? [recording.frameColumn[frame], recording.frameEnd[frame]] : undefined}
                onSelect={() => state.selectLine(at, number)}
              />
            );
          })}
        </div>
      ))}
    </div>
  );
}

interface CodeLineProps {
  number: number;
  line: Token[];
  ran: LineRow | undefined;
  most: number;
  isBrushed: boolean;
  mark: [number, number] | undefined;
  onSelect: () => void;
}

function CodeLine({ number, line, ran, most, isBrushed, mark, onSelect }: CodeLineProps): JSX.Element {
  const [, runs, time, phases] = ran ?? [0, 0, 0, []];
  const indent = /^\s*/.exec(line.map((token) => token.text).join(""))?.[0].length ?? 0;
  return (
    <div class={`code-line${mark || isBrushed ? " current" : ""}${ran ? " ran" : ""}`} onClick={ran && onSelect}>
      <span class="number">{number}</span>
      <span class="heat" aria-hidden="true">
        {time > 0 && <i style={{ width: `${Math.max(2, (100 * time) / most)}%` }} />}
      </span>
      <span class="runs">{runs > 1 ? `×${runs}` : ""}</span>
      <span class="took">{time > 0 ? timeText(time) : ""}</span>
      <div class="text">
        <SourceText line={line} mark={mark} />
        {phases.map(([phase, ops, shapes, spent, raised]) => (
          <div key={phase} class={`ran-here ${phase}`} style={{ marginLeft: `${indent + 2}ch` }}>
            <span class="phase-dot" title={phase} />
            <span class="ops">{ops.join(", ")}</span>
            {shapes.length > 0 && <span class="shapes"> → {shapes.join(", ")}</span>}
            {phase !== "forward" && <span class="dim"> {phase} {timeText(spent)}</span>}
            {raised > 0 && <span class="badge error">raised</span>}
          </div>
        ))}
      </div>
    </div>
  );
}

/** A line in colour, with a stretch of it marked. */
export function SourceText({ line, mark }: { line: Token[]; mark?: [number, number] | undefined }): JSX.Element {
  const [from, to] = mark ?? [-1, -1];
  return (
    <code>
      {marked(line, from, to).map(([token, isMarked], at) =>
        isMarked ? (
          <mark key={at} class={token.type}>
            {token.text}
          </mark>
        ) : (
          <span key={at} class={token.type}>
            {token.text}
          </span>
        ),
      )}
    </code>
  );
}
