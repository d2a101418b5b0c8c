// A recording as the page holds it: columns as they were packed, and the look-ups that the views share.

import type { Numbers, Sections } from "./sections";

export interface Run {
  name: string;
  version: string;
  ops: number;
  values: number;
  /** How many ops the recording has; more than `ops` if the page holds the folded run. */
  recordedOps: number;
  capturesLeftOut: number;
  /** When the model first runs, in nanoseconds; the recording may have begun much earlier. */
  begin: number;
  duration: number;
  parameters: number;
  unfinished: boolean;
  levels: string[];
  phases: string[];
  kinds: string[];
  rows: string[];
}

/** A problem as the page lists it. */
export interface ProblemText {
  kind: string;
  severity: "error" | "warning" | "note";
  title: string;
  why: string;
  module: string;
  place: string;
  called: string;
  detail: string;
  /** How often it occurs: `in 2 of 3 steps`, `×12`; empty for once. */
  times: string;
}

export interface Problem extends ProblemText {
  op: number;
  value: number;
}

/** Phase, ops, shapes, nanoseconds, how many raised. */
export type LinePhase = [string, string[], string[], number, number];
/** Number, runs, nanoseconds, and the ops there phase by phase. */
export type LineRow = [number, number, number, LinePhase[]];

export interface SourceFile {
  path: string;
  name: string;
  installed: boolean;
  text: [number, string[]][];
  lines: LineRow[];
}

export interface Memory {
  device: string;
  exact: boolean;
  curve: number[];
  over: number;
  peak: number;
  moment: number;
  op: number;
  kinds: [string, number][];
  /** Its name or shape, bytes, use, the reason why it is kept, value. */
  largest: [string, number, string, string, number][];
}

export interface Timeline {
  phases: [string, number, number, number][];
  steps: [string, number, number][];
  memory: Memory | null;
}

/** Name, shape, elements, whether it is trained, whether it is a buffer. */
export type Parameter = [string, string, number, boolean, boolean];

export interface Statistics {
  min: number;
  max: number;
  mean: number;
  std: number;
  l2: number;
  zeros: number;
  nans: number;
  infs: number;
}

/** A captured tensor, drawn: the histogram of its numbers, and the means of its cells. */
export interface Capture {
  key: string;
  low: number;
  high: number;
  bins: number[];
  /** The part that the map shows; empty for all of it. */
  slice: string;
  rows: number;
  /** From 0 to 255 between `least` and `most`; -1 for a NaN, -2 for an infinity. */
  cells: number[];
  least: number;
  most: number;
}

export const RAISED = 1;

/** The kinds of rows, as `sightline/page/tree.py` numbers them. */
export const STEP = 0, PHASE = 1, CALL = 2, LINE = 3, OP = 4, GROUP = 5, ROUND = 6, ASIDE = 7;

/** Lists in one flat column: the items of row `i` are `flat[offsets[i]] … flat[offsets[i + 1] - 1]`. */
class Lists {
  readonly offsets: Int32Array;

  constructor(counts: Numbers, readonly flat: Numbers) {
    this.offsets = new Int32Array(counts.length + 1);
    for (let i = 0; i < counts.length; i++) this.offsets[i + 1] = this.offsets[i] + counts[i];
  }

  of(row: number): number[] {
    return Array.from(this.flat.subarray(this.offsets[row], this.offsets[row + 1]));
  }
}

/** The columns and tables of a recording. */
class Packed {
  constructor(protected readonly sections: Sections) {}

  protected column(name: string): Numbers {
    return this.sections.column(name);
  }
}

export class Recording extends Packed {
  readonly run = this.sections.table<Run>("run");
  readonly strings = this.sections.table<string[]>("strings");
  readonly files = this.sections.table<SourceFile[]>("files");
  readonly problems = this.sections.table<{ found: Problem[]; notLookedAt: string[] }>("problems");
  readonly timeline = this.sections.table<Timeline>("timeline");
  readonly parameters = this.sections.table<Parameter[][]>("parameters");

  readonly opName = this.column("ops.name");
  readonly opLevel = this.column("ops.level");
  readonly opPhase = this.column("ops.phase");
  readonly opFlags = this.column("ops.flags");
  readonly opCall = this.column("ops.call");
  readonly opParent = this.column("ops.parent");
  readonly opForward = this.column("ops.forward");
  readonly opStart = this.column("ops.start");
  readonly opDuration = this.column("ops.duration");
  readonly opFlops = this.column("ops.flops");
  /** How long it is drawn on the timeline: to the end of all that ran inside it. */
  readonly opSpan = this.column("ops.span");
  readonly opLine = this.column("ops.line");
  readonly opForm = this.column("ops.form");
  readonly opDevice = this.column("ops.device");
  readonly opInputs = new Lists(this.column("ops.input_count"), this.column("ops.inputs"));
  readonly opOutputs = new Lists(this.column("ops.output_count"), this.column("ops.outputs"));

  readonly valueMeta = this.column("values.meta");
  readonly valueKind = this.column("values.kind");
  readonly valueProducer = this.column("values.producer");
  readonly valueBase = this.column("values.base");
  readonly valueName = this.column("values.name");
  readonly valueBytes = this.column("values.bytes");

  readonly callModule = this.column("calls.module");
  readonly callIndex = this.column("calls.index");
  readonly callPhase = this.column("calls.phase");
  readonly callParent = this.column("calls.parent");
  readonly callStart = this.column("calls.start");
  readonly callDuration = this.column("calls.duration");
  readonly callSpan = this.column("calls.span");
  readonly callLine = this.column("calls.line");
  readonly callFlags = this.column("calls.flags");
  readonly callInputs = new Lists(this.column("calls.input_count"), this.column("calls.inputs"));
  readonly callOutputs = new Lists(this.column("calls.output_count"), this.column("calls.outputs"));

  readonly modulePath = this.column("modules.path");
  readonly moduleType = this.column("modules.type");
  readonly moduleExtra = this.column("modules.extra");
  readonly frameParent = this.column("frames.parent");
  readonly frameFile = this.column("frames.file");
  readonly frameFunction = this.column("frames.function");
  readonly frameLine = this.column("frames.line");
  readonly frameColumn = this.column("frames.column");
  readonly frameEnd = this.column("frames.end_column");

  readonly kind = this.column("tree.kind");
  readonly ref = this.column("tree.ref");
  readonly depth = this.column("tree.depth");
  readonly count = this.column("tree.count");
  readonly label = this.column("tree.label");
  readonly memory = this.column("tree.memory");
  readonly flops = this.column("tree.flops");
  /** The rows inside row `i` are `i + 1 … end[i] - 1`. */
  readonly end = new Int32Array(this.kind.length);
  readonly parent = new Int32Array(this.kind.length).fill(-1);
  readonly time = Float64Array.from(this.column("tree.time"));
  readonly opRow = new Int32Array(this.run.ops).fill(-1);
  /** The first row of each call: where it ran; later ones are its part of the backward pass. */
  readonly callRow = new Int32Array(this.callModule.length).fill(-1);

  /** The work of devices: names, streams, the op that launched it, its start and its duration. */
  readonly deviceName = this.column("device.name");
  readonly deviceLane = this.column("device.lane");
  readonly deviceOp = this.column("device.op");
  readonly deviceStart = this.column("device.start");
  readonly deviceSpan = this.column("device.span");
  readonly streams = this.sections.table<string[]>("streams");

  private readonly captures = {
    column: (name: string): Numbers => this.column(`captures.${name}`),
    bins: new Lists(this.column("captures.bin_count"), this.column("captures.bins")),
    cells: new Lists(this.column("captures.cell_count"), this.column("captures.cells")),
  };
  private readonly captureRow = new Map<number, number>();
  private readonly opIds = this.column("ops.id");
  private readonly valueIds = this.column("values.id");
  private readonly stats = Object.fromEntries(
    ["min", "max", "mean", "std", "l2", "zeros", "nans", "infs"].map((name) => [name, this.column(`stats.${name}`)]),
  ) as Record<keyof Statistics, Numbers>;
  private readonly statRow = new Map<number, number>();
  private apart: Uint8Array | undefined;
  private readers: { offsets: Int32Array; ops: Int32Array } | undefined;

  constructor(sections: Sections) {
    super(sections);
    const inside = this.column("tree.inside");
    const open: number[] = [];
    for (let row = 0; row < inside.length; row++) {
      this.end[row] = row + 1 + inside[row];
      open.length = this.depth[row];
      if (open.length) this.parent[row] = open[open.length - 1];
      open.push(row);
      const ref = this.ref[row];
      if (this.kind[row] === OP) {
        this.opRow[ref] = row;
        this.time[row] = Math.max(0, this.opDuration[ref]);
      } else if (this.kind[row] === CALL && this.callRow[ref] < 0) this.callRow[ref] = row;
    }
    this.column("captures.value").forEach((value: number, at: number) => {
      if (!this.captureRow.has(value)) this.captureRow.set(value, at);
    });
    this.column("stats.value").forEach((value: number, at: number) => this.statRow.set(value, at));
  }

  get rows(): number {
    return this.kind.length;
  }

  /** The rows directly inside a row; -1 gives the outermost. */
  children(row: number): number[] {
    const found: number[] = [];
    const end = row < 0 ? this.rows : this.end[row];
    for (let at = row + 1; at < end; at = this.end[at]) found.push(at);
    return found;
  }

  /** The rows around a row, the outermost first. */
  around(row: number): number[] {
    const found: number[] = [];
    for (let at = this.parent[row]; at >= 0; at = this.parent[at]) found.push(at);
    return found.reverse();
  }

  isLeaf(row: number): boolean {
    return this.end[row] === row + 1;
  }

  /** From when to when the ops of a row ran; nothing for no row, and for one without ops. */
  spanOf(row: number): [number, number] | undefined {
    let from = Infinity;
    let to = -Infinity;
    for (let at = row; row >= 0 && at < this.end[row]; at++) {
      if (this.kind[at] !== OP) continue;
      const op = this.ref[at];
      from = Math.min(from, this.opStart[op]);
      to = Math.max(to, this.opStart[op] + this.opSpan[op]);
    }
    return from <= to ? [from, to] : undefined;
  }

  /** Whether equal layers and steps are here once: the run was too long to hold all of it. */
  get isFolded(): boolean {
    return this.run.ops < this.run.recordedOps;
  }

  /** The number of an op in the recording, as `t.ops` counts. */
  opNumber(op: number): number {
    return this.opIds.length ? this.opIds[op] : op;
  }

  /** The number of a value in the recording, as `t.values` counts. */
  valueNumber(value: number): number {
    return this.valueIds.length ? this.valueIds[value] : value;
  }

  /** The op as it was written, in which an op ran; itself where none did. */
  written(op: number): number {
    let row = this.opRow[op];
    while (this.parent[row] >= 0 && this.kind[this.parent[row]] === OP) row = this.parent[row];
    return this.ref[row];
  }

  /** Whether the ops inside an op have rows elsewhere, as those of `loss.backward()`: its time is theirs. */
  isApart(op: number): boolean {
    this.apart ??= this.findApart();
    return this.apart[op] === 1;
  }

  private findApart(): Uint8Array {
    const apart = new Uint8Array(this.run.ops);
    for (let op = 0; op < apart.length; op++) {
      const parent = this.opParent[op];
      if (parent < 0) continue;
      const row = this.opRow[parent];
      if (this.opRow[op] <= row || this.opRow[op] >= this.end[row]) apart[parent] = 1;
    }
    return apart;
  }

  shape(value: number): string {
    return this.strings[this.valueMeta[value]];
  }

  valueLabel(value: number): string {
    return this.strings[this.valueName[value]];
  }

  opLabel(op: number): string {
    return this.strings[this.opName[op]];
  }

  modulePathOf(call: number): string {
    return this.strings[this.modulePath[this.callModule[call]]];
  }

  moduleTypeOf(call: number): string {
    return this.strings[this.moduleType[this.callModule[call]]];
  }

  /** `net.py:9`; empty without a source line. */
  position(frame: number): string {
    const file = frame < 0 ? -1 : this.frameFile[frame];
    return file < 0 ? "" : `${this.files[file].name}:${this.frameLine[frame]}`;
  }

  /** The text of a frame's line as it stands in the file. */
  sourceLine(frame: number): string {
    const file = frame < 0 ? -1 : this.frameFile[frame];
    if (file < 0) return "";
    const number = this.frameLine[frame];
    for (const [first, lines] of this.files[file].text) {
      if (first <= number && number < first + lines.length) return lines[number - first];
    }
    return "";
  }

  /** The title of a row. */
  rowLabel(row: number): string {
    if (this.kind[row] === OP) return this.opLabel(this.ref[row]);
    if (this.kind[row] === LINE) return this.position(this.ref[row]).replace(/^.*\//, "");
    return this.strings[this.label[row]];
  }

  /** The text beside it: the class of a module, the shapes of an op's outputs, the text of a line. */
  rowNote(row: number): string {
    const ref = this.ref[row];
    switch (this.kind[row]) {
      case CALL: {
        const type = this.moduleTypeOf(ref);
        return type === this.strings[this.label[row]] ? "" : type;
      }
      case OP:
        return this.opOutputs.of(ref).map((value) => this.shape(value)).join(", ");
      case LINE:
        return this.sourceLine(ref).trim();
      case GROUP: {
        const first = row + 1;
        return this.kind[first] === CALL ? this.moduleTypeOf(this.ref[first]) : "";
      }
      default:
        return "";
    }
  }

  /** The frame of the line that a row stands on; -1 where there is none. */
  rowFrame(row: number): number {
    const ref = this.ref[row];
    if (this.kind[row] === OP) return this.opLine[ref];
    if (this.kind[row] === CALL) return this.callLine[ref];
    return this.kind[row] === LINE ? ref : -1;
  }

  statistics(value: number): Statistics | undefined {
    const at = this.statRow.get(value);
    if (at === undefined) return undefined;
    return Object.fromEntries(
      Object.entries(this.stats).map(([name, column]) => [name, column[at]]),
    ) as unknown as Statistics;
  }

  /** Whether an op or a module call ended in an exception. */
  raised(row: number): boolean {
    const ref = this.ref[row];
    if (this.kind[row] === OP) return (this.opFlags[ref] & RAISED) > 0;
    return this.kind[row] === CALL && (this.callFlags[ref] & RAISED) > 0;
  }

  /** Whether an op or a module call, or one in a group of them, gave a NaN, where statistics were taken. */
  gaveNan(row: number): boolean {
    if (!this.statRow.size) return false;
    if (this.kind[row] === GROUP || this.kind[row] === ROUND) return this.children(row).some((child) => this.gaveNan(child));
    const ref = this.ref[row];
    const isCall = this.kind[row] === CALL && this.callRow[ref] === row;
    const outputs = this.kind[row] === OP ? this.opOutputs.of(ref) : isCall ? this.callOutputs.of(ref) : [];
    return outputs.some((value) => this.stats.nans[this.statRow.get(value) ?? -1] > 0);
  }

  /** The tensor that was captured of a value, drawn. */
  capture(value: number): Capture | undefined {
    const at = this.captureRow.get(value);
    if (at === undefined) return undefined;
    const { column, bins, cells } = this.captures;
    return {
      key: this.strings[column("key")[at]],
      slice: this.strings[column("slice")[at]],
      low: column("low")[at],
      high: column("high")[at],
      least: column("least")[at],
      most: column("most")[at],
      rows: column("rows")[at],
      bins: bins.of(at),
      cells: cells.of(at),
    };
  }

  /** The ops that read a value, each once, in the order they ran. */
  consumers(value: number): number[] {
    const { offsets, ops } = (this.readers ??= this.findReaders());
    return [...new Set(ops.subarray(offsets[value], offsets[value + 1]))];
  }

  private findReaders(): { offsets: Int32Array; ops: Int32Array } {
    const { flat, offsets: bounds } = this.opInputs;
    const offsets = new Int32Array(this.run.values + 1);
    for (let i = 0; i < flat.length; i++) offsets[flat[i] + 1]++;
    for (let i = 0; i < this.run.values; i++) offsets[i + 1] += offsets[i];
    const next = offsets.slice();
    const ops = new Int32Array(flat.length);
    for (let op = 0; op + 1 < bounds.length; op++) {
      for (let i = bounds[op]; i < bounds[op + 1]; i++) ops[next[flat[i]]++] = op;
    }
    return { offsets, ops };
  }
}
