// A small recording by hand: two layers of one op each, inside a model, and the loss after them.
//
//   0 call Net
//   1   group blocks.0 … blocks.1 ×2
//   2     call blocks.0
//   3       op relu        x -> $1
//   4     call blocks.1
//   5       op relu        $1 -> $2
//   6   line net.py:9
//   7     op sum           $2 -> $3
//   8     op mul           $3, x -> $4

import { Recording } from "../src/data/recording";
import type { Sections } from "../src/data/sections";

const STRINGS = ["", "Net", "blocks.0 … blocks.1", "blocks.0", "blocks.1", "Block", "relu", "sum", "mul", "f32[2]", "f32[]", "x", "loss", "\0\nself"];

const COLUMNS: Record<string, number[]> = {
  "ops.name": [6, 6, 7, 8], "ops.level": [1, 1, 1, 1], "ops.phase": [0, 0, 0, 1], "ops.flags": [0, 0, 0, 0],
  "ops.call": [1, 2, 0, 0], "ops.parent": [-1, -1, -1, -1], "ops.forward": [-1, -1, -1, -1],
  "ops.start": [10, 20, 30, 40], "ops.duration": [5, 5, 5, 5], "ops.span": [5, 5, 5, 5], "ops.flops": [-1, -1, -1, -1],
  "ops.line": [-1, -1, 0, 0], "ops.form": [13, 13, 13, 13], "ops.device": [],
  "ops.input_count": [1, 1, 1, 2], "ops.inputs": [0, 1, 2, 3, 0], "ops.output_count": [1, 1, 1, 1], "ops.outputs": [1, 2, 3, 4],
  "values.meta": [9, 9, 9, 10, 10], "values.kind": [0, 5, 5, 5, 5], "values.producer": [-1, 0, 1, 2, 3],
  "values.base": [-1, -1, -1, -1, -1], "values.name": [11, 0, 0, 12, 0], "values.bytes": [8, 8, 8, 4, 4],
  "calls.module": [0, 1, 2], "calls.index": [0, 0, 0], "calls.phase": [0, 0, 0], "calls.parent": [-1, 0, 0],
  "calls.start": [5, 10, 20], "calls.duration": [40, 6, 6], "calls.span": [40, 6, 6], "calls.line": [-1, -1, -1],
  "calls.flags": [0, 0, 0], "calls.input_count": [1, 1, 1], "calls.inputs": [0, 0, 1],
  "calls.output_count": [1, 1, 1], "calls.outputs": [4, 1, 2],
  "modules.path": [0, 3, 4], "modules.type": [1, 5, 5], "modules.extra": [0, 0, 0],
  "frames.parent": [-1], "frames.file": [0], "frames.function": [0], "frames.line": [9], "frames.column": [0], "frames.end_column": [4],
  "tree.kind": [2, 5, 2, 4, 2, 4, 3, 4, 4], "tree.ref": [0, -1, 1, 0, 2, 1, 0, 2, 3], "tree.depth": [0, 1, 2, 3, 2, 3, 1, 2, 2],
  "tree.inside": [8, 4, 1, 0, 1, 0, 2, 0, 0], "tree.count": [1, 2, 1, 1, 1, 1, 1, 1, 1],
  "tree.label": [1, 2, 3, 0, 4, 0, 0, 0, 0], "tree.time": [20, 10, 5, 0, 5, 0, 10, 0, 0],
  "tree.memory": [0, 0, 0, 0, 0, 0, 0, 0, 0], "tree.flops": [0, 0, 0, 0, 0, 0, 0, 0, 0],
  "ops.id": [], "values.id": [],
  "device.name": [6], "device.lane": [0], "device.op": [0], "device.start": [12], "device.span": [4],
  "captures.value": [2], "captures.key": [12], "captures.slice": [0], "captures.low": [-1], "captures.high": [1],
  "captures.least": [-1], "captures.most": [1], "captures.bin_count": [2], "captures.bins": [1, 3],
  "captures.rows": [1], "captures.cell_count": [2], "captures.cells": [0, 255],
  "stats.value": [3], "stats.min": [-1], "stats.max": [2], "stats.mean": [0.5], "stats.std": [1], "stats.l2": [3],
  "stats.zeros": [0], "stats.nans": [1], "stats.infs": [0],
};

const TABLES: Record<string, unknown> = {
  run: {
    name: "by hand", version: "0", ops: 4, values: 5, recordedOps: 4, capturesLeftOut: 0, begin: 0, duration: 50, parameters: 0, unfinished: false,
    levels: ["api", "aten"], phases: ["forward", "backward", "recompute", "optimizer"],
    kinds: ["input", "parameter", "buffer", "state", "constant", "activation"],
    rows: ["step", "phase", "call", "line", "op", "group", "round"],
  },
  strings: STRINGS,
  streams: ["cuda:0"],
  files: [{ path: "/net.py", name: "net.py", installed: false, text: [[9, ["loss = x.sum() * x"]]], lines: [] }],
  problems: { found: [], notLookedAt: [] },
  timeline: { phases: [], steps: [], memory: null },
  parameters: [[], [], []],
};

export function byHand(): Recording {
  const sections = {
    column: (name: string) => Float64Array.from(COLUMNS[name]),
    table: (name: string) => TABLES[name],
  };
  return new Recording(sections as unknown as Sections);
}
