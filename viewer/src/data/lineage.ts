// The history of a value: the ops behind it, the latest first.

import type { Recording } from "./recording";

export interface LineageStep {
  /** The op as it was written. */
  op: number;
  /** Its output on the way to the value. */
  value: number;
}

export interface Lineage {
  steps: LineageStep[];
  /** How many more ops are behind these. */
  more: number;
  /** Whether there may be even more: the walk ended early. */
  isCut: boolean;
  /** Values from outside: inputs and parameters, the nearest first. */
  sources: number[];
}

const MOST_WALKED = 5000;

export function lineageOf(recording: Recording, value: number, most: number): Lineage {
  const found: Lineage = { steps: [], more: 0, isCut: false, sources: [] };
  const pending = new Map<number, number>(); // op -> its output on the way
  const done = new Set<number>();
  const seen = new Set<number>();
  const add = (each: number): void => {
    if (seen.has(each)) return;
    seen.add(each);
    const maker = recording.valueProducer[each];
    if (maker >= 0) {
      const op = recording.written(maker);
      if (!done.has(op) && !pending.has(op)) pending.set(op, each);
    } else if (recording.run.kinds[recording.valueKind[each]] !== "constant") found.sources.push(each);
  };
  add(value);
  while (pending.size) {
    if (done.size >= MOST_WALKED) return { ...found, isCut: true };
    let op = -1;
    for (const each of pending.keys()) if (each > op) op = each;
    const made = pending.get(op) ?? -1;
    pending.delete(op);
    done.add(op);
    if (found.steps.length < most) found.steps.push({ op, value: made });
    else found.more++;
    for (const input of recording.opInputs.of(op)) add(input);
  }
  return found;
}
