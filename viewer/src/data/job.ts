// A distributed job as the page holds it: the overview of all ranks, and the ranks with a recording.

import type { ProblemText } from "./recording";
import type { Sections } from "./sections";

/** Ranks that ran the same ops. */
export interface RankKind {
  /** The one whose recording the page holds; -1 without one. */
  rank: number;
  text: string;
  ops: number;
}

/** The action of some ranks where others did something else. */
export interface Side {
  ranks: string;
  text: string;
  place: string;
  /** The rank like them that the page holds, and the op on it; -1 without one. */
  rank: number;
  op: number;
}

export interface JobProblem extends ProblemText {
  sides: Side[];
  since: string;
  parting: Side[];
}

/** A text and its style, as a terminal shows it. */
export type Span = [string, string];

export type JobBlock = { line: Span[] } | { columns: [string, boolean][]; rows: Span[][][] } | { problem: number };

interface JobTable {
  name: string;
  world: number;
  kinds: RankKind[];
  blocks: JobBlock[];
  problems: JobProblem[];
}

export class Job {
  readonly name: string;
  readonly world: number;
  readonly kinds: RankKind[];
  readonly blocks: JobBlock[];
  readonly problems: JobProblem[];

  constructor(sections: Sections) {
    ({ name: this.name, world: this.world, kinds: this.kinds, blocks: this.blocks, problems: this.problems } = sections.table<JobTable>("job"));
  }

  /** The kinds of ranks whose recordings are here. */
  get held(): RankKind[] {
    return this.kinds.filter(({ rank }) => rank >= 0);
  }
}
