// The state of the page: the selection and the visible parts, which every view reads and writes.

import { batch, computed, signal } from "@preact/signals";
import { firstExpanded, firstScope, graphScope } from "./data/graph";
import { ASIDE, CALL, LINE, OP, type Recording } from "./data/recording";
import { isFiltering, NO_FILTER, openRows, searchedRows, type Filter } from "./data/search";
import { stretchOf } from "./data/stretch";

export type Tab = "problems" | "graph" | "source" | "cost";

const MOST_AT_FIRST = 24; // rows that the tree opens with

export class State {
  /** The selected row of the tree; -1 for none. */
  readonly row = signal(-1);
  /** The selected value of it; -1 for none. */
  readonly value = signal(-1);
  /** The stretch of time that is selected instead of a row, from and to in nanoseconds. */
  readonly brushed = signal<[number, number] | undefined>(undefined);
  readonly tab = signal<Tab>("graph");
  readonly open = signal<ReadonlySet<number>>(new Set());
  readonly filter = signal<Filter>(NO_FILTER);
  readonly expanded = signal<ReadonlySet<number>>(new Set());
  /** The row whose inside the graph shows; -1 for the whole run. */
  readonly scope = signal(-1);
  /** The stretch of time that the timeline shows, in nanoseconds. */
  readonly span = signal<[number, number]>([0, 1]);
  readonly file = signal(0);

  readonly isFiltering = computed(() => isFiltering(this.filter.value));
  private readonly searched = computed(() => searchedRows(this.recording, this.filter.value));
  readonly rows = computed(() =>
    this.isFiltering.value ? this.searched.value.rows : openRows(this.recording, this.open.value),
  );
  readonly matches = computed(() => (this.isFiltering.value ? this.searched.value.matches : new Set<number>()));
  /** The ops and lines in the selected stretch of time. */
  readonly stretch = computed(() => this.brushed.value && stretchOf(this.recording, ...this.brushed.value));
  /** The frame of the selected row's line; -1 without one. */
  readonly frame = computed(() => (this.row.value < 0 ? -1 : recordedFrame(this.recording, this.row.value)));

  constructor(readonly recording: Recording) {
    this.span.value = [recording.run.begin, Math.max(recording.run.begin + 1, recording.run.duration)];
    this.scope.value = firstScope(recording);
    this.open.value = firstOpen(recording, this.scope.value);
    this.expanded.value = firstExpanded(recording, this.scope.value);
    this.file.value = firstFile(recording);
    const [worst] = recording.problems.found;
    if (worst && worst.severity === "error" && worst.op >= 0) this.selectOp(worst.op);
    if (recording.problems.found.some((problem) => problem.severity !== "note")) this.tab.value = "problems";
    else if (this.scope.value < 0 && recording.files.length) this.tab.value = "source";
  }

  /** Select a row everywhere; `value` is one of its values. */
  select(row: number, value = -1): void {
    if (row < 0 || row >= this.recording.rows) return;
    batch(() => {
      this.row.value = row;
      this.value.value = value;
      this.brushed.value = undefined;
      this.reveal(row);
      const frame = this.frame.value;
      if (frame >= 0 && this.recording.frameFile[frame] >= 0) this.file.value = this.recording.frameFile[frame];
    });
  }

  /** Select nothing: the detail describes the run. */
  deselect(): void {
    batch(() => {
      this.row.value = -1;
      this.value.value = -1;
      this.brushed.value = undefined;
    });
  }

  /** Select a stretch of time. */
  selectStretch(from: number, to: number): void {
    const { duration } = this.recording.run;
    const ends = [from, to].map((moment) => Math.round(Math.max(0, Math.min(duration, moment)))).sort((a, b) => a - b);
    batch(() => {
      this.deselect();
      this.brushed.value = [ends[0], ends[1]];
      const stretch = this.stretch.value;
      if (this.filter.value.stretch) this.filter.value = { ...this.filter.value, stretch: stretch?.rows };
      if (stretch?.ops.length) this.reveal(this.recording.opRow[stretch.ops[0]]);
    });
  }

  /** The begin and the end of the selection. */
  get selectedSpan(): [number, number] | undefined {
    return this.brushed.value ?? this.recording.spanOf(this.row.value);
  }

  /** Let the timeline show a stretch of time; without one the whole run. */
  zoom(span: [number, number] = [0, this.recording.run.duration]): void {
    this.span.value = [span[0], Math.max(span[0] + 1, span[1])];
  }

  /** Select a row and let the graph show the inside of it, or of the row around it. */
  selectAndEnter(row: number): void {
    batch(() => {
      this.select(row);
      const scope = graphScope(this.recording, row);
      if (scope !== this.scope.value) this.enter(scope);
    });
  }

  selectOp(op: number, value = -1): void {
    if (op >= 0) this.select(this.recording.opRow[op], value);
  }

  /** Select a value at its producer, or at its first consumer. */
  selectValue(value: number): void {
    const { recording } = this;
    const maker = recording.valueProducer[value];
    const op = maker >= 0 ? maker : (recording.consumers(value)[0] ?? -1);
    if (op >= 0) this.selectOp(op, value);
  }

  /** Select the first op that ran on a source line. */
  selectLine(file: number, line: number): void {
    const { recording } = this;
    for (let op = 0; op < recording.run.ops; op++) {
      const frame = recording.opLine[op];
      if (frame >= 0 && recording.frameLine[frame] === line && recording.frameFile[frame] === file) {
        this.selectOp(op);
        return;
      }
    }
  }

  toggle(row: number, open = !this.open.value.has(row)): void {
    const rows = new Set(this.open.value);
    if (open) rows.add(row);
    else rows.delete(row);
    this.open.value = rows;
  }

  expand(row: number): void {
    const rows = new Set(this.expanded.value);
    if (!rows.delete(row)) rows.add(row);
    this.expanded.value = rows;
  }

  /** Show the inside of a row as the graph. */
  enter(row: number): void {
    batch(() => {
      this.scope.value = row;
      this.expanded.value = new Set();
    });
  }

  /** Open the rows around a row, and let the graph show its place. */
  private reveal(row: number): void {
    const around = this.recording.around(row);
    if (around.some((each) => !this.open.value.has(each))) this.open.value = new Set([...this.open.value, ...around]);
    const { scope } = this;
    const isInside = scope.value < 0 || (row >= scope.value && row < this.recording.end[scope.value]);
    if (!isInside) this.enter(graphScope(this.recording, row));
  }

  // -- the fragment of the address ------------------------------------------------------------------------

  /** The fragment of the address for the selection. */
  get fragment(): string {
    const { recording } = this;
    const row = this.row.value;
    if (this.brushed.value) return `time-${this.brushed.value.join("-")}`;
    if (row < 0) return "";
    if (this.value.value >= 0) return `value-${this.value.value}`;
    if (recording.kind[row] === OP) return `op-${recording.ref[row]}`;
    if (recording.kind[row] === CALL && recording.callRow[recording.ref[row]] === row) return `call-${recording.ref[row]}`;
    return `row-${row}`;
  }

  /** Select the target of a fragment; false if the page does not hold it. */
  follow(fragment: string): boolean {
    const stretch = /^#?time-(\d{1,15})-(\d{1,15})$/.exec(fragment);
    if (stretch) {
      this.selectStretch(Number(stretch[1]), Number(stretch[2]));
      return true;
    }
    const found = /^#?(op|call|value|row)-(\d+)$/.exec(fragment);
    if (!found) return false;
    const id = Number(found[2]);
    const { recording } = this;
    if (found[1] === "value") {
      if (id < recording.run.values) this.selectValue(id);
      return id < recording.run.values;
    }
    const row = found[1] === "op" ? recording.opRow[id] : found[1] === "call" ? recording.callRow[id] : id;
    if (row === undefined || row < 0 || row >= recording.rows) return false;
    this.select(row);
    return true;
  }
}

/** The first visible file: of those the user wrote, the one with most lines that ran ops. */
function firstFile(recording: Recording): number {
  const ran = recording.files.map((file) => (file.installed ? 0 : file.lines.filter(([, , , phases]) => phases.length).length));
  return Math.max(0, ran.indexOf(Math.max(...ran)));
}

/** The line of a row: its own, or that of the first row in it. */
function recordedFrame(recording: Recording, row: number): number {
  for (let at = row; at < recording.end[row]; at++) {
    const frame = recording.rowFrame(at);
    if (frame >= 0 && recording.frameFile[frame] >= 0) return frame;
  }
  return -1;
}

/** The rows that are open at first: the way to the row of the graph, then as many levels as fit on a screen. */
function firstOpen(recording: Recording, scope: number): Set<number> {
  const open = new Set<number>(scope < 0 ? [] : [...recording.around(scope), scope]);
  let level = scope < 0 ? recording.children(-1) : recording.children(scope);
  let shown = level.length;
  for (const row of open) shown += recording.children(row).length;
  while (level.length) {
    const next: number[] = [];
    for (const row of level) {
      const inside = [OP, LINE, ASIDE].includes(recording.kind[row]) ? [] : recording.children(row);
      if (!inside.length || shown + inside.length > MOST_AT_FIRST) continue;
      open.add(row);
      shown += inside.length;
      next.push(...inside);
    }
    level = next;
  }
  return open;
}
