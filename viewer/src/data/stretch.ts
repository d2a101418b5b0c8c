// A stretch of time that the user brushed on the timeline, and the ops in it.

import { OP, type Recording } from "./recording";

export interface OpsByName {
  name: string;
  count: number;
  time: number;
  /** The first of them. */
  op: number;
}

export interface Stretch {
  from: number;
  to: number;
  /** The ops that ran in it, at least in part, in order. */
  ops: number[];
  /** The time of the ops in it; the ops inside other ops do not count twice. */
  time: number;
  flops: number;
  /** Bytes that its ops allocated. */
  made: number;
  /** The most bytes that were held at any moment of it; -1 if unknown. */
  held: number;
  byName: OpsByName[];
  /** For each row of the tree whether all of its ops are in the stretch (2), some (1) or none (0). */
  rows: Uint8Array;
  /** The source lines that ran in it, as `file:line` numbers. */
  lines: ReadonlySet<string>;
}

export const ALL = 2;

export function stretchOf(recording: Recording, from: number, to: number): Stretch {
  const isIn = new Uint8Array(recording.run.ops);
  const found: Stretch = { from, to, ops: [], time: 0, flops: 0, made: 0, held: heldIn(recording, from, to), byName: [], rows: new Uint8Array(0), lines: new Set() };
  const names = new Map<string, OpsByName>();
  const lines = new Set<string>();
  for (let op = 0; op < isIn.length; op++) {
    const start = recording.opStart[op];
    const end = start + recording.opSpan[op];
    if (end < from || start > to) continue;
    isIn[op] = 1;
    found.ops.push(op);
    const row = recording.opRow[op];
    const isInside = recording.parent[row] >= 0 && recording.kind[recording.parent[row]] === OP;
    if (recording.isLeaf(row)) found.flops += Math.max(0, recording.opFlops[op]);
    if (start >= from) found.made += ownBytes(recording, row);
    const frame = recording.opLine[op];
    if (frame >= 0) lines.add(`${recording.frameFile[frame]}:${recording.frameLine[frame]}`);
    if (isInside || recording.isApart(op)) continue;
    const share = end > start ? (Math.min(end, to) - Math.max(start, from)) / (end - start) : 1;
    const time = Math.max(0, recording.opDuration[op]) * share;
    found.time += time;
    const name = recording.opLabel(op);
    const same = names.get(name);
    if (same) {
      same.count++;
      same.time += time;
    } else names.set(name, { name, count: 1, time, op });
  }
  found.byName = [...names.values()].sort((a, b) => b.time - a.time);
  found.rows = rowsOf(recording, isIn);
  found.lines = lines;
  return found;
}

/** The bytes that an op allocated itself: a row counts those of the rows in it, too. */
function ownBytes(recording: Recording, row: number): number {
  return recording.memory[row] - recording.children(row).reduce((sum, child) => sum + recording.memory[child], 0);
}

function rowsOf(recording: Recording, isIn: Uint8Array): Uint8Array {
  const rows = new Uint8Array(recording.rows);
  const sums = new Int32Array(recording.rows + 1); // of the ops before each row, in the stretch
  const all = new Int32Array(recording.rows + 1);
  for (let row = 0; row < recording.rows; row++) {
    const isOp = recording.kind[row] === OP;
    all[row + 1] = all[row] + (isOp ? 1 : 0);
    sums[row + 1] = sums[row] + (isOp ? isIn[recording.ref[row]] : 0);
  }
  for (let row = 0; row < recording.rows; row++) {
    const end = recording.end[row];
    const count = sums[end] - sums[row];
    if (count) rows[row] = count === all[end] - all[row] ? ALL : 1;
  }
  return rows;
}

function heldIn(recording: Recording, from: number, to: number): number {
  const { memory } = recording.timeline;
  if (!memory?.exact || !memory.over) return -1;
  const at = (moment: number): number => Math.max(0, Math.min(memory.curve.length - 1, Math.floor((moment / memory.over) * memory.curve.length)));
  return Math.max(...memory.curve.slice(at(from), at(to) + 1));
}
