// Costs: rows of the tree as boxes whose widths are their shares, each below the one it is part of.

import { GROUP, LINE, OP, ROUND, type Recording } from "./recording";

export type Metric = "time" | "flops" | "memory";

export interface IcicleBox {
  row: number;
  /** How many equal rows it stands for, whose costs it adds up. */
  count: number;
  cost: number;
  depth: number;
  /** From 0 to 1. */
  from: number;
  to: number;
}

const NARROWEST = 0.0015; // of the whole width; a narrower box is invisible
const DEEPEST = 24;
const EXACT = 1e-9; // shares are sums, which are not quite exact

/** The cost of a row, for sums: 0 for an op whose time is that of other rows. */
export function costOf(recording: Recording, row: number, metric: Metric): number {
  if (metric === "flops") return Math.max(0, recording.flops[row]);
  if (metric === "memory") return Math.max(0, recording.memory[row]);
  return recording.kind[row] === OP && recording.isApart(recording.ref[row]) ? 0 : Math.max(0, recording.time[row]);
}

/** The boxes inside a row, -1 for the run; those of equal layers are one, with the sum of all of them. */
export function icicleOf(recording: Recording, root: number, metric: Metric): IcicleBox[] {
  const boxes: IcicleBox[] = [];
  const sum = (rows: number[]): number => rows.reduce((total, row) => total + costOf(recording, row, metric), 0);

  /** Equal rows side by side: their children, position by position. */
  const inside = (rows: number[]): number[][] => {
    if (recording.kind[rows[0]] === GROUP) return [rows.flatMap((row) => recording.children(row))];
    return recording.children(rows[0]).map((child) => rows.map((row) => row + child - rows[0]).filter((row) => row < recording.rows));
  };
  const place = (rows: number[], depth: number, from: number, to: number): void => {
    if (to - from < NARROWEST || depth > DEEPEST) return;
    const [row] = rows;
    const kind = recording.kind[row];
    let below = depth;
    if (kind !== LINE && kind !== ROUND && !(depth > 0 && isGroupOf(recording, row, rows.length))) {
      boxes.push({ row, count: rows.length, cost: sum(rows), depth, from, to });
      below = depth + 1;
    }
    if (!recording.isLeaf(row)) spread(inside(rows), below, from, to, kind === GROUP ? 0 : sum(rows));
  };
  const spread = (sets: number[][], depth: number, from: number, to: number, whole: number): void => {
    const shares = sets.map(sum);
    const total = Math.max(whole, shares.reduce((a, b) => a + b, 0));
    if (total <= 0) return;
    let at = from;
    sets.forEach((rows, index) => {
      const width = ((to - from) * shares[index]) / total;
      place(rows, depth, at, at + width);
      at += width;
    });
  };
  if (root < 0) spread(recording.children(-1).map((row) => [row]), 0, 0, 1, 0);
  else place([root], 0, 0, 1);
  return boxes;
}

/** Whether a row is a member of the group right above it, which says the same already. */
function isGroupOf(recording: Recording, row: number, count: number): boolean {
  const parent = recording.parent[row];
  return count > 1 && parent >= 0 && recording.kind[parent] === GROUP;
}

/** The costs of the ops in a row by their names as written, the most expensive first. */
export function costsByName(recording: Recording, root: number, metric: Metric): { name: string; count: number; cost: number }[] {
  const found = new Map<string, { name: string; count: number; cost: number }>();
  const end = root < 0 ? recording.rows : recording.end[root];
  for (let row = Math.max(0, root); row < end; row++) {
    if (recording.kind[row] !== OP || (row !== root && recording.parent[row] >= 0 && recording.kind[recording.parent[row]] === OP)) continue;
    const name = recording.opLabel(recording.ref[row]);
    const each = found.get(name) ?? { name, count: 0, cost: 0 };
    found.set(name, each);
    each.count++;
    each.cost += costOf(recording, row, metric);
  }
  return [...found.values()].filter((each) => each.cost > 0).sort((a, b) => b.cost - a.cost);
}

/** The row of the box that an arrow key leads to; the first without a selection, -1 for another key or at an end. */
export function neighbour(boxes: IcicleBox[], row: number, key: string): number {
  const here = boxes.find((box) => box.row === row);
  if (!here) return key.startsWith("Arrow") ? (boxes[0]?.row ?? -1) : -1;
  const level = boxes.filter(({ depth }) => depth === here.depth).sort((a, b) => a.from - b.from);
  const middle = (here.from + here.to) / 2;
  switch (key) {
    case "ArrowLeft":
      return level[level.indexOf(here) - 1]?.row ?? -1;
    case "ArrowRight":
      return level[level.indexOf(here) + 1]?.row ?? -1;
    case "ArrowUp":
      return boxes.find((box) => box.depth === here.depth - 1 && box.from <= middle && middle <= box.to)?.row ?? -1;
    case "ArrowDown":
      return boxes.find((box) => box.depth === here.depth + 1 && box.from >= here.from - EXACT && box.to <= here.to + EXACT)?.row ?? -1;
    default:
      return -1;
  }
}
