// Draws the timeline on a canvas, and finds the op or the call at a point.

import { CALL, OP, STEP, type Memory, type Recording } from "../data/recording";
import type { State } from "../state";
import { bytesText, timeText } from "../text";

const LANE = 15; // pixels of a lane
const LANES = 4; // depths of module calls that have one
const STREAMS = 4; // streams of devices that have one
const MEMORY = 84; // pixels of the curve of memory
const TOP = 16; // the axis
export const LEFT = 74; // the names of the lanes

/** How high the timeline is: as many lanes as there is something to show in. */
export function timelineHeight(recording: Recording): number {
  const lanes = 2 + (hasSteps(recording) ? 1 : 0) + Math.max(1, callLanes(recording).length) + streamCount(recording);
  return TOP + lanes * LANE + (recording.timeline.memory ? MEMORY : 8);
}

function hasSteps(recording: Recording): boolean {
  return recording.timeline.steps.length > 1;
}

function streamCount(recording: Recording): number {
  return Math.min(STREAMS, recording.streams.length);
}

/** Draws the timeline, and finds the op or the call at a point. */
export class Drawing {
  private readonly recording: Recording;
  private readonly lanes: number[][]; // rows of calls by depth, in the order they began
  private readonly drawn: Uint8Array; // for each op whether it is drawn by itself
  private readonly probe: HTMLElement;
  private width = 0;
  private height = 0;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly state: State,
  ) {
    this.recording = state.recording;
    this.lanes = callLanes(this.recording);
    this.drawn = drawnOps(this.recording);
    this.probe = canvas.parentElement ?? canvas;
  }

  /** The moment that is drawn at a place. */
  moment(x: number): number {
    const [from, to] = this.state.span.value;
    return Math.max(0, from + ((x - LEFT) / Math.max(1, this.width - LEFT)) * (to - from));
  }

  private x(moment: number): number {
    const [from, to] = this.state.span.value;
    return LEFT + ((moment - from) / (to - from)) * (this.width - LEFT);
  }

  private get laneTops(): { steps: number; phases: number; calls: number; ops: number; device: number; memory: number } {
    const phases = TOP + (hasSteps(this.recording) ? LANE : 0);
    const calls = phases + LANE;
    const ops = calls + this.lanes.length * LANE;
    const device = ops + LANE;
    return { steps: TOP, phases, calls, ops, device, memory: device + streamCount(this.recording) * LANE + 4 };
  }

  rowAt(x: number, y: number): number {
    const tops = this.laneTops;
    const moment = this.moment(x);
    if (x < LEFT || y < TOP) return -1;
    if (y < tops.phases) {
      const step = this.stepAt(moment);
      return step ? this.stepRow(step[0]) : -1;
    }
    if (y >= tops.device && y < tops.memory) {
      const op = this.recording.deviceOp[this.workAt(Math.floor((y - tops.device) / LANE), moment)] ?? -1;
      return op < 0 ? -1 : this.recording.opRow[op];
    }
    if (y >= tops.calls && y < tops.ops) return this.callAt(Math.floor((y - tops.calls) / LANE), moment);
    if (y >= tops.ops) {
      const op = this.opAt(moment);
      return op < 0 ? -1 : this.recording.opRow[op];
    }
    return -1;
  }

  textAt(x: number, y: number): string {
    const { recording } = this;
    const tops = this.laneTops;
    if (y >= tops.memory) {
      const memory = recording.timeline.memory;
      if (!memory) return "";
      const share = memory.exact ? this.moment(x) / memory.over : (x - LEFT) / (this.width - LEFT);
      const held = memory.curve[Math.floor(share * memory.curve.length)];
      return held === undefined ? "" : `${bytesText(held)} held at ${timeText(this.moment(x))}${this.peakText(x, memory)}`;
    }
    if (y >= TOP && y < tops.phases) {
      const step = this.stepAt(this.moment(x));
      return step ? `${step[0]}, ${timeText(step[2])}` : "";
    }
    if (y >= tops.device && y < tops.memory) {
      const lane = Math.floor((y - tops.device) / LANE);
      const work = this.workAt(lane, this.moment(x));
      if (work < 0) return "";
      const op = recording.deviceOp[work];
      const from = op < 0 ? "" : `, launched by ${recording.opLabel(op)}`;
      return `${recording.streams[lane]}: ${recording.strings[recording.deviceName[work]]}, ${timeText(recording.deviceSpan[work])}${from}`;
    }
    if (y >= tops.phases && y < tops.calls) {
      const moment = this.moment(x);
      const phase = recording.timeline.phases.find(([, from, to]) => from <= moment && moment < to);
      return phase ? `${phase[0]}, ${timeText(phase[2] - phase[1])}` : "";
    }
    const row = this.rowAt(x, y);
    if (row < 0) return "";
    return `${recording.rowLabel(row)}  ${recording.rowNote(row)}  ${timeText(recording.time[row])}`;
  }

  /** The tensors that hold the memory, if the pointer is at the peak. */
  private peakText(x: number, memory: Memory): string {
    const [first, last] = memory.exact ? this.state.span.value : [0, memory.over];
    const peak = LEFT + ((memory.moment - first) / (last - first)) * (this.width - LEFT);
    if (Math.abs(x - peak) > 12) return "";
    const held = memory.largest.slice(0, 3).map(([name, bytes]) => `${name} ${bytesText(bytes)}`);
    return `; the peak, most of it ${held.join(", ")}`;
  }

  private stepAt(moment: number): [string, number, number] | undefined {
    return this.recording.timeline.steps.find(([, from, took]) => from <= moment && moment < from + took);
  }

  private stepRow(name: string): number {
    const { recording } = this;
    for (let row = 0; row < recording.rows; row++) {
      if (recording.kind[row] === STEP && recording.rowLabel(row) === name) return row;
    }
    return -1;
  }

  /** The device work of a stream that ran at a moment; -1 for none. */
  private workAt(lane: number, moment: number): number {
    const { deviceLane, deviceStart, deviceSpan } = this.recording;
    const slack = this.moment(1) - this.moment(0); // a short one is drawn a pixel wide
    for (let work = 0; work < deviceStart.length; work++) {
      if (deviceLane[work] !== lane) continue;
      if (deviceStart[work] - slack <= moment && moment <= deviceStart[work] + deviceSpan[work] + slack) return work;
    }
    return -1;
  }

  private callAt(lane: number, moment: number): number {
    const { recording } = this;
    for (const row of this.lanes[lane] ?? []) {
      const call = recording.ref[row];
      if (recording.callStart[call] <= moment && moment < recording.callStart[call] + recording.callSpan[call]) return row;
    }
    return -1;
  }

  /** The op that ran at a moment: the last that began before it, the innermost one. */
  private opAt(moment: number): number {
    const { opStart, opSpan } = this.recording;
    let low = 0;
    let high = opStart.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (opStart[middle] <= moment) low = middle + 1;
      else high = middle - 1;
    }
    for (let op = high; op >= 0 && op > high - 50; op--) if (opStart[op] + opSpan[op] >= moment) return op;
    return high;
  }

  /** The op that is drawn after the selected one, or before it; the first visible one without a selection. */
  nextOp(step: 1 | -1): number {
    const { recording, state } = this;
    const row = state.row.value;
    const [from] = state.brushed.value ?? state.span.value;
    let op = row >= 0 && recording.kind[row] === OP ? recording.ref[row] + step : this.firstOp(state.selectedSpan?.[0] ?? from);
    while (op >= 0 && op < this.drawn.length && !this.drawn[op]) op += step;
    return op < this.drawn.length ? op : -1;
  }

  private firstOp(moment: number): number {
    const { opStart } = this.recording;
    let op = 0;
    while (op < opStart.length && opStart[op] < moment) op++;
    return op;
  }

  private color(name: string): string {
    const before = this.probe.style.outlineColor;
    this.probe.style.outlineColor = `var(--${name})`;
    const found = getComputedStyle(this.probe).outlineColor;
    this.probe.style.outlineColor = before;
    return found;
  }

  draw(): void {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    canvas.width = this.width * scale;
    canvas.height = this.height * scale;
    const pen = canvas.getContext("2d");
    if (!pen || this.width <= LEFT) return;
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis(pen);
    this.drawPhases(pen);
    this.drawCalls(pen);
    this.drawOps(pen);
    this.drawSteps(pen);
    this.drawDevice(pen);
    this.drawMemory(pen);
    this.drawSelection(pen);
    this.drawNames(pen);
  }

  private drawAxis(pen: CanvasRenderingContext2D): void {
    const [from, to] = this.state.span.value;
    const rough = ((to - from) * 110) / (this.width - LEFT);
    const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? rough;
    pen.fillStyle = this.color("dim");
    pen.strokeStyle = this.color("rule");
    for (let at = Math.ceil(from / step) * step; at < to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, TOP - 4);
      pen.lineTo(x, this.height);
      pen.stroke();
      pen.fillText(at ? timeText(at).replace(/\.0+(?= )/, "") : "0", x + 3, 7);
    }
  }

  private drawPhases(pen: CanvasRenderingContext2D): void {
    const { phases } = this.laneTops;
    const colors = new Map(["forward", "backward", "recompute", "optimizer"].map((name) => [name, this.color(name)]));
    for (const [name, from, to] of this.recording.timeline.phases) {
      this.bar(pen, from, to, phases, LANE - 3, colors.get(name) ?? "", name, "on-phase");
    }
  }

  private drawCalls(pen: CanvasRenderingContext2D): void {
    const { recording } = this;
    const { calls } = this.laneTops;
    const fill = this.color("call-fill");
    this.lanes.forEach((rows, lane) => {
      let drawn = -1;
      for (const row of rows) {
        const call = recording.ref[row];
        const from = recording.callStart[call];
        const to = from + recording.callSpan[call];
        if (this.x(to) < drawn + 0.4) continue;
        this.bar(pen, from, to, calls + lane * LANE, LANE - 2, fill, recording.strings[recording.label[row]], "ink");
        drawn = this.x(to);
      }
    });
  }

  private drawOps(pen: CanvasRenderingContext2D): void {
    const { recording } = this;
    const { ops } = this.laneTops;
    const colors = recording.run.phases.map((name) => this.color(name));
    const [from, to] = this.state.span.value;
    let drawn = -1;
    for (let op = 0; op < recording.run.ops; op++) {
      const start = recording.opStart[op];
      if (start > to) break;
      const end = start + recording.opSpan[op];
      if (end < from || !this.drawn[op]) continue;
      const right = this.x(end);
      if (right < drawn + 0.5) continue;
      this.bar(pen, start, end, ops, LANE - 2, colors[recording.opPhase[op]], recording.opLabel(op), "on-phase");
      drawn = right;
    }
  }

  private drawSteps(pen: CanvasRenderingContext2D): void {
    if (!hasSteps(this.recording)) return;
    const fill = this.color("rule");
    for (const [name, from, took] of this.recording.timeline.steps) {
      this.bar(pen, from, from + took, this.laneTops.steps, LANE - 2, fill, name, "ink");
    }
  }

  private drawDevice(pen: CanvasRenderingContext2D): void {
    const { recording } = this;
    const { device } = this.laneTops;
    const fill = this.color("device");
    const drawn = recording.streams.map(() => -1);
    for (let work = 0; work < recording.deviceStart.length; work++) {
      const lane = recording.deviceLane[work];
      const start = recording.deviceStart[work];
      const end = start + recording.deviceSpan[work];
      const right = this.x(end);
      if (lane >= STREAMS || right < drawn[lane] + 0.5) continue;
      this.bar(pen, start, end, device + lane * LANE, LANE - 2, fill, recording.strings[recording.deviceName[work]], "on-phase");
      drawn[lane] = right;
    }
  }

  private drawMemory(pen: CanvasRenderingContext2D): void {
    const memory = this.recording.timeline.memory;
    const { memory: top } = this.laneTops;
    const room = this.height - top - 2;
    if (!memory || memory.peak <= 0 || room < 10) return;
    const [first, last] = memory.exact ? this.state.span.value : [0, memory.over];
    const place = (moment: number): number => LEFT + ((moment - first) / (last - first)) * (this.width - LEFT);
    const level = (bytes: number): number => this.height - 2 - (bytes / memory.peak) * (room - 4);
    const width = memory.over / memory.curve.length;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, top, this.width - LEFT, room + 2);
    pen.clip();
    pen.beginPath();
    pen.moveTo(place(0), this.height);
    memory.curve.forEach((bytes, at) => {
      pen.lineTo(place(at * width), level(bytes));
      pen.lineTo(place((at + 1) * width), level(bytes));
    });
    pen.lineTo(place(memory.over), this.height);
    pen.fillStyle = this.color("memory-fill");
    pen.fill();
    pen.strokeStyle = this.color("memory");
    pen.stroke();
    const x = place(memory.moment);
    pen.strokeStyle = this.color("ink");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, this.height);
    pen.stroke();
    pen.setLineDash([]);
    const text = `peak ${bytesText(memory.peak)}`;
    const long = pen.measureText(text).width;
    const left = x + long + 8 > this.width ? x - long - 5 : x + 5;
    pen.fillStyle = this.color("paper");
    pen.globalAlpha = 0.8;
    pen.fillRect(left - 2, top + 1, long + 4, 14);
    pen.globalAlpha = 1;
    pen.fillStyle = this.color("ink");
    pen.fillText(text, left, top + 8);
    pen.restore();
  }

  private drawSelection(pen: CanvasRenderingContext2D): void {
    const found = this.state.selectedSpan;
    if (!found) return;
    const left = Math.max(LEFT, this.x(found[0]));
    const right = Math.min(this.width, Math.max(this.x(found[1]), left + 2));
    if (right < LEFT || left > this.width) return;
    pen.fillStyle = this.color("select-fill");
    pen.fillRect(left, TOP, right - left, this.height - TOP);
    pen.strokeStyle = this.color("select");
    pen.strokeRect(left + 0.5, TOP + 0.5, Math.max(1, right - left - 1), this.height - TOP - 1);
  }

  private drawNames(pen: CanvasRenderingContext2D): void {
    const tops = this.laneTops;
    pen.clearRect(0, 0, LEFT - 2, this.height);
    pen.fillStyle = this.color("dim");
    const names: [string, number][] = [["phases", tops.phases], ["ops", tops.ops]];
    if (this.lanes.length) names.push(["modules", tops.calls]);
    if (hasSteps(this.recording)) names.push(["steps", tops.steps]);
    this.recording.streams.slice(0, STREAMS).forEach((name, lane) => names.push([name, tops.device + lane * LANE]));
    if (this.recording.timeline.memory) names.push(["memory", tops.memory + 2]);
    for (const [name, y] of names) pen.fillText(name, 12, y + LANE / 2);
  }

  private bar(pen: CanvasRenderingContext2D, from: number, to: number, top: number, height: number, fill: string, name: string, ink: string): void {
    const left = Math.max(LEFT, this.x(from));
    const right = Math.min(this.width, this.x(to));
    if (right < LEFT || left > this.width || right < left) return;
    pen.fillStyle = fill;
    pen.fillRect(left, top, Math.max(0.7, right - left - 0.5), height);
    const room = right - left - 8;
    if (room < 18) return;
    const most = Math.floor(room / 6.6);
    pen.fillStyle = this.color(ink);
    pen.fillText(name.length <= most ? name : `${name.slice(0, most - 1)}…`, left + 4, top + height / 2 + 0.5);
  }
}

/** Module calls by depth, where they ran; the deepest ones have no lane. */
function callLanes(recording: Recording): number[][] {
  const lanes: number[][] = [];
  const depth = new Int32Array(recording.callModule.length);
  for (let call = 0; call < depth.length; call++) {
    const parent = recording.callParent[call];
    depth[call] = parent < 0 ? 0 : depth[parent] + 1;
    const row = recording.callRow[call];
    if (depth[call] < LANES && row >= 0 && recording.kind[row] === CALL) (lanes[depth[call]] ??= []).push(row);
  }
  return lanes;
}

/** Calls as they were written; but not one whose ops stand by themselves, as those of `loss.backward()` do. */
function drawnOps(recording: Recording): Uint8Array {
  const drawn = new Uint8Array(recording.run.ops);
  for (let op = 0; op < drawn.length; op++) drawn[op] = recording.written(op) === op && !recording.isApart(op) ? 1 : 0;
  return drawn;
}
