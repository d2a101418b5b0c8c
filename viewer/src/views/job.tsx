// The page of a distributed job: all ranks first, then the run of one of each kind.

import type { JSX } from "preact";
import { batch, signal } from "@preact/signals";
import type { Job, JobBlock, JobProblem, RankKind, Side, Span } from "../data/job";
import { Recording } from "../data/recording";
import type { Sections } from "../data/sections";
import { State } from "../state";
import { Page } from "./page";
import { ProblemCard } from "./problems";
import { ThemeButton } from "./theme";

export const ALL_RANKS = -1;

/** Which rank is shown; the recording of a rank is read when it is first requested. */
export class JobState {
  readonly rank = signal(ALL_RANKS);
  private readonly states = new Map<number, State>();
  private readonly reading = new Map<number, Promise<void>>();
  private asked = ALL_RANKS;

  constructor(
    readonly job: Job,
    private readonly read: (id: string) => Promise<Sections>,
  ) {}

  /** Show a rank, or all; `fragment` gives the selection on it, and `tab` the view. */
  async show(rank: number, fragment = "", tab?: "source"): Promise<void> {
    this.asked = rank;
    if (rank !== ALL_RANKS) {
      let reading = this.reading.get(rank);
      if (!reading) this.reading.set(rank, (reading = this.load(rank)));
      await reading;
    }
    if (this.asked !== rank) return; // another one was requested meanwhile
    batch(() => {
      const state = this.states.get(rank);
      if (fragment) state?.follow(fragment);
      if (tab && state) state.tab.value = tab;
      this.rank.value = rank;
    });
  }

  private async load(rank: number): Promise<void> {
    this.states.set(rank, new State(new Recording(await this.read(`recording-${rank}`))));
  }

  /** The state of the rank that is shown. */
  get shown(): State | undefined {
    return this.states.get(this.rank.value);
  }

  get fragment(): string {
    const inner = this.shown?.fragment;
    return this.rank.value === ALL_RANKS ? "" : `rank-${this.rank.value}${inner ? `/${inner}` : ""}`;
  }

  follow(fragment: string): void {
    const found = /^#?rank-(\d{1,7})(?:\/([\w-]+))?$/.exec(fragment);
    const rank = found ? Number(found[1]) : ALL_RANKS;
    if (!found || this.job.held.some((kind) => kind.rank === rank)) void this.show(rank, found?.[2]);
  }
}

export function JobPage({ state }: { state: JobState }): JSX.Element {
  const chooser = <RankChooser state={state} />;
  const { shown } = state;
  return shown ? <Page key={state.rank.value} state={shown} before={chooser} /> : <AllRanks state={state} chooser={chooser} />;
}

function RankChooser({ state }: { state: JobState }): JSX.Element {
  const { held } = state.job;
  const choice = (rank: number, text: string, title: string): JSX.Element => (
    <button key={rank} type="button" title={title} aria-pressed={state.rank.value === rank} onClick={() => void state.show(rank)}>
      {text}
    </button>
  );
  return (
    <div class="choice ranks" role="group" aria-label="Ranks">
      {choice(ALL_RANKS, "all ranks", "What is said of all ranks")}
      {held.map((kind) => choice(kind.rank, kind.text, aboutKind(kind)))}
    </div>
  );
}

function aboutKind({ rank, text, ops }: RankKind): string {
  const one = `${ops.toLocaleString("en")} ops`;
  return text === `rank ${rank}` ? one : `They ran the same ${one}; the page holds those of rank ${rank}`;
}

function AllRanks({ state, chooser }: { state: JobState; chooser: JSX.Element }): JSX.Element {
  const { job } = state;
  const placed = new Set(job.blocks.map((block) => ("problem" in block ? block.problem : -1)));
  return (
    <div class="page job-page">
      <header class="header">
        <h1>{job.name}</h1>
        {chooser}
        <ThemeButton />
      </header>
      <main class="job" tabIndex={0} aria-label="All ranks">
        {stretches(job.blocks).map((blocks, at) =>
          "line" in blocks[0] ? (
            <div key={at} class="lines">
              {blocks.map((block, line) => (
                <p key={line}>{"line" in block && <Spans spans={block.line} />}</p>
              ))}
            </div>
          ) : "columns" in blocks[0] ? (
            <Table key={at} {...blocks[0]} />
          ) : (
            <JobProblemRow key={at} state={state} problem={job.problems[blocks[0].problem]} />
          ),
        )}
        {job.problems.map((problem, at) => !placed.has(at) && <JobProblemRow key={`problem-${at}`} state={state} problem={problem} />)}
        <Held job={job} />
      </main>
    </div>
  );
}

/** Consecutive lines as one block; any other block alone. */
function stretches(blocks: JobBlock[]): JobBlock[][] {
  const found: JobBlock[][] = [];
  for (const block of blocks) {
    const last = found[found.length - 1];
    if ("line" in block && !block.line.length) found.push([]); // an empty line ends a stretch
    else if ("line" in block && last?.length && "line" in last[0]) last.push(block);
    else found.push([block]);
  }
  return found.filter((each) => each.length);
}

function Spans({ spans }: { spans: Span[] }): JSX.Element {
  return (
    <>
      {spans.map(([text, style], at) => (
        <span key={at} class={style && `style-${style}`}>
          {text}
        </span>
      ))}
    </>
  );
}

function Table({ columns, rows }: { columns: [string, boolean][]; rows: Span[][][] }): JSX.Element {
  return (
    <table class="numbers">
      <thead>
        <tr>
          {columns.map(([title, isRight]) => (
            <th key={title} scope="col" class={isRight ? "right" : ""}>
              {title}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.map((row, at) => (
          <tr key={at}>
            {row.map((cell, column) => (
              <td key={column} class={columns[column][1] ? "right" : ""}>
                <Spans spans={cell} />
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function JobProblemRow({ state, problem }: { state: JobState; problem: JobProblem }): JSX.Element {
  return (
    <ProblemCard problem={problem}>
      {problem.sides.length > 0 && <Sides state={state} title={problem.sides[0].text ? "On each side" : "This line on each rank"} sides={problem.sides} />}
      {problem.parting.length > 0 && <Sides state={state} title={`They part ${problem.since}`} sides={problem.parting} />}
    </ProblemCard>
  );
}

function Sides({ state, title, sides }: { state: JobState; title: string; sides: Side[] }): JSX.Element {
  return (
    <table class="sides-table">
      <caption>{title}</caption>
      <colgroup>
        <col class="who" />
        <col />
        <col class="place" />
        <col class="go" />
      </colgroup>
      <tbody>
        {sides.map(({ ranks, text, place, rank, op }) => (
          <tr key={ranks + text}>
            <th scope="row">{ranks}</th>
            <td>{text}</td>
            <td>
              <code>{place}</code>
            </td>
            <td class="go">
              {rank >= 0 && op >= 0 ? (
                <button type="button" aria-label={`Show the line on ${ranks}`} onClick={() => void state.show(rank, `op-${op}`, "source")}>
                  Show the line
                </button>
              ) : rank < 0 ? (
                <span class="dim">not in this page</span>
              ) : null}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Which recordings the page holds. */
function Held({ job }: { job: Job }): JSX.Element {
  const left = job.kinds.length - job.held.length;
  return (
    <p class="hint">
      This page holds the recording of {job.held.map(({ rank, text }) => (text === `rank ${rank}` ? text : `rank ${rank} (for ${text})`)).join(", ")}: one of
      each kind of ranks that ran the same ops{left > 0 && `, without ${left} more ${left === 1 ? "kind" : "kinds"}`}.
    </p>
  );
}
