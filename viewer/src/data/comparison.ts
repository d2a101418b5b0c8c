// A comparison as the page holds it: the verdict, the pairs of modules, and the rows of both runs in order.

import type { Recording } from "./recording";
import type { Numbers, Sections } from "./sections";

export interface Place {
  op: number;
  name: string;
  place: string;
  code: string;
  module: string;
}

export interface Divergence {
  text: string;
  reason: string;
  kind: string;
  inputs: string;
  error: string;
  a: Place | null;
  b: Place | null;
}

export interface Verdict {
  verdict: "same" | "close" | "different" | "unknown";
  text: string;
  names: [string, string];
  ops: [number, number] | [];
  paired: number;
  by: string[];
  divergences: Divergence[];
  more: number;
  parting: string;
  weights: string;
  differing: string[];
  besides: string[];
  notes: string[];
}

/** Both names, both classes, depth, state, error or null, both calls. */
export type ModulePair = [string, string, string, string, number, number, number | null, number, number];

/** The kinds of rows, as `sightline/page/comparison.py` numbers them. */
export const MODULE_ROW = 0, LINE_ROW = 1, OP_ROW = 2;

/** How two results compare, as `State` in `sightline/compare/values.py` numbers it. */
export const STATES = ["unknown", "same", "close", "different"] as const;
const DIFFERENT = 3;

const SMALLEST = -8; // an error of this power of ten is the shortest bar

export class Comparison {
  readonly verdict: Verdict;
  readonly modules: ModulePair[];
  readonly kind: Numbers;
  readonly opA: Numbers;
  readonly opB: Numbers;
  readonly state: Numbers;
  readonly error: Numbers;
  readonly first: Numbers;

  constructor(
    sections: Sections,
    readonly a: Recording,
    readonly b: Recording,
  ) {
    this.verdict = sections.table<Verdict>("verdict");
    this.modules = sections.table<ModulePair[]>("modules");
    this.kind = sections.column("rows.kind");
    this.opA = sections.column("rows.a");
    this.opB = sections.column("rows.b");
    this.state = sections.column("rows.state");
    this.error = sections.column("rows.error");
    this.first = sections.column("rows.first");
  }

  get rows(): number {
    return this.kind.length;
  }

  /** The row of the first divergence; -1 without one. */
  get firstRow(): number {
    return this.firstOf((row) => this.first[row] === 1 && this.kind[row] === OP_ROW);
  }

  /** The first op row of a pair of module calls: one that differs before any other. */
  rowOfCalls(callA: number, callB: number): number {
    const isIn = (row: number): boolean => {
      if (this.kind[row] !== OP_ROW) return false;
      return inCall(this.a, this.opA[row], callA) || inCall(this.b, this.opB[row], callB);
    };
    const worst = this.firstOf((row) => this.state[row] === DIFFERENT && isIn(row));
    return worst >= 0 ? worst : this.firstOf(isIn);
  }

  /** The row of a pair of ops, either of which may be -1. */
  rowOfOps(a: number, b: number): number {
    return this.firstOf((row) => this.kind[row] === OP_ROW && ((a >= 0 && this.opA[row] === a) || (b >= 0 && this.opB[row] === b)));
  }

  private firstOf(test: (row: number) => boolean): number {
    for (let row = 0; row < this.rows; row++) if (test(row)) return row;
    return -1;
  }
}

function inCall(recording: Recording, op: number, call: number): boolean {
  for (let at = op < 0 ? -1 : recording.opCall[op]; at >= 0; at = recording.callParent[at]) if (at === call) return true;
  return false;
}

/** An error as a share from 0 to 1, by its power of ten. */
export function errorShare(error: number | null): number {
  if (error === null || !(error > 0)) return 0;
  return Math.max(0.04, Math.min(1, (Math.log10(error) - SMALLEST) / -SMALLEST));
}

export function errorText(error: number | null): string {
  if (error === null || Number.isNaN(error)) return "";
  return error === 0 ? "" : error.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
}
