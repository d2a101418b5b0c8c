// Which rows of the tree are shown: those that are open, or those that a search or a filter leaves.

import { CALL, GROUP, LINE, OP, type Recording } from "./recording";

export interface Filter {
  /** Words that all must occur in a module, an op, a shape, a variable or a `file:line`. */
  query: string;
  /** A phase, or -1 for all. */
  phase: number;
  /** A level of ops, or -1 for all. */
  level: number;
  /** The row of a step, or -1 for all. */
  step: number;
  /** The rows of a stretch of time, 0 for those outside it; all without one. */
  stretch?: Uint8Array | undefined;
}

export const NO_FILTER: Filter = { query: "", phase: -1, level: -1, step: -1 };

export function isFiltering(filter: Filter): boolean {
  return filter.query.trim() !== "" || filter.phase >= 0 || filter.level >= 0 || filter.step >= 0 || filter.stretch !== undefined;
}

/** The rows to show, in order, without those inside a closed row. */
export function openRows(recording: Recording, isOpen: ReadonlySet<number>): Int32Array {
  const found: number[] = [];
  for (let row = 0; row < recording.rows; row = isOpen.has(row) ? row + 1 : recording.end[row]) found.push(row);
  return Int32Array.from(found);
}

/** The rows that match, with the rows around them; `matches` are those that match themselves. */
export function searchedRows(recording: Recording, filter: Filter): { rows: Int32Array; matches: Set<number> } {
  const words = filter.query.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = words.map((word) => recording.strings.map((text) => text.toLowerCase().includes(word)));
  const files = words.map((word) => linesThatMatch(recording, word));
  const matches = new Set<number>();
  const shown = new Uint8Array(recording.rows);
  for (let row = 0; row < recording.rows; row++) {
    if (!passes(recording, row, filter)) continue;
    const isFound = words.every((_, at) => matchesWord(recording, row, texts[at], files[at]));
    if (!isFound || (words.length === 0 && recording.kind[row] !== OP)) continue;
    matches.add(row);
    for (let at = row; at >= 0 && !shown[at]; at = recording.parent[at]) shown[at] = 1;
  }
  const rows: number[] = [];
  for (let row = 0; row < recording.rows; row++) if (shown[row]) rows.push(row);
  return { rows: Int32Array.from(rows), matches };
}

function passes(recording: Recording, row: number, { phase, level, step, stretch }: Filter): boolean {
  if (stretch && !stretch[row]) return false;
  if (step >= 0 && (row <= step || row >= recording.end[step])) return false;
  if (phase < 0 && level < 0) return true;
  if (recording.kind[row] !== OP) return false;
  const op = recording.ref[row];
  return (phase < 0 || recording.opPhase[op] === phase) && (level < 0 || recording.opLevel[op] === level);
}

/** For each frame whether its `file:line` holds a word. */
function linesThatMatch(recording: Recording, word: string): Uint8Array {
  const found = new Uint8Array(recording.frameLine.length);
  for (let frame = 0; frame < found.length; frame++) {
    if (recording.position(frame).toLowerCase().includes(word)) found[frame] = 1;
  }
  return found;
}

function matchesWord(recording: Recording, row: number, isText: boolean[], isLine: Uint8Array): boolean {
  const ref = recording.ref[row];
  switch (recording.kind[row]) {
    case OP: {
      if (isText[recording.opName[ref]]) return true;
      const { offsets, flat } = recording.opOutputs;
      for (let at = offsets[ref]; at < offsets[ref + 1]; at++) {
        if (isText[recording.valueMeta[flat[at]]] || isText[recording.valueName[flat[at]]]) return true;
      }
      return recording.opLine[ref] >= 0 && isLine[recording.opLine[ref]] === 1;
    }
    case CALL: {
      const module = recording.callModule[ref];
      return isText[recording.label[row]] || isText[recording.modulePath[module]] || isText[recording.moduleType[module]];
    }
    case LINE:
      return isLine[ref] === 1;
    case GROUP:
      return isText[recording.label[row]];
    default:
      return false;
  }
}
