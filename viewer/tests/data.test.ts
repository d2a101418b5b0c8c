import { describe, expect, it } from "vitest";
import { Comparison, errorShare, errorText } from "../src/data/comparison";
import { firstExpanded, firstScope, graphOf, graphScope } from "../src/data/graph";
import { costsByName, icicleOf, neighbour } from "../src/data/icicle";
import { lineageOf } from "../src/data/lineage";
import { NO_FILTER, openRows, searchedRows } from "../src/data/search";
import { Sections } from "../src/data/sections";
import { stretchOf } from "../src/data/stretch";
import { State } from "../src/state";
import { byHand } from "./recorded";

describe("sections", () => {
  const packed = async (bytes: Uint8Array): Promise<Uint8Array> => {
    const stream = new Blob([bytes as BlobPart]).stream().pipeThrough(new CompressionStream("deflate-raw"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  const block = (format: number, entry: object, data: Uint8Array): Uint8Array => {
    const header = new TextEncoder().encode(JSON.stringify({ format, sections: [{ ...entry, size: data.length }] }));
    const made = new Uint8Array(4 + header.length + data.length);
    new DataView(made.buffer).setUint32(0, header.length, true);
    made.set(header, 4);
    made.set(data, 4 + header.length);
    return made;
  };

  it("puts the planes of a column together", async () => {
    const data = await packed(new Uint8Array([1, 255, 2, 255])); // low bytes 1 and 255, then high bytes 2 and 255
    const read = await Sections.read(block(1, { name: "a", type: "i2", length: 2 }, data));
    expect([...read.column("a")]).toEqual([513, -1]);
  });

  it("adds up a column that grows", async () => {
    const data = await packed(new Uint8Array([5, 1, 255]));
    const read = await Sections.read(block(1, { name: "a", type: "i1", length: 3, grows: true }, data));
    expect([...read.column("a")]).toEqual([5, 6, 5]);
  });

  it("refuses another format in one sentence", async () => {
    const data = await packed(new Uint8Array([0]));
    await expect(Sections.read(block(2, { name: "a", type: "i1", length: 1 }, data))).rejects.toThrow(/format 2/);
  });
});

describe("the recording", () => {
  const recording = byHand();

  it("knows rows, their children and what is around them", () => {
    expect(recording.children(0)).toEqual([1, 6]);
    expect(recording.around(5)).toEqual([0, 1, 4]);
    expect([...recording.opRow]).toEqual([3, 5, 7, 8]);
  });

  it("knows who reads a value, and its statistics", () => {
    expect(recording.consumers(0)).toEqual([0, 3]);
    expect(recording.statistics(3)?.nans).toBe(1);
    expect(recording.statistics(2)).toBeUndefined();
  });

  it("names rows and says what is beside them", () => {
    expect(recording.rowLabel(6)).toBe("net.py:9");
    expect(recording.rowNote(6)).toBe("loss = x.sum() * x");
    expect(recording.rowNote(1)).toBe("Block");
    expect(recording.rowNote(0)).toBe(""); // its class is its name
  });
});

describe("which rows are shown", () => {
  const recording = byHand();

  it("leaves out what is inside a closed row", () => {
    expect([...openRows(recording, new Set([0]))]).toEqual([0, 1, 6]);
  });

  it.each([
    ["relu", [3, 5]],
    ["f32[]", [7, 8]],
    ["net.py:9", [6, 7, 8]],
    ["loss", [7]],
    ["blocks.1", [1, 4]],
    ["relu f32[2]", [3, 5]],
    ["nothing", []],
  ])("finds %s", (query, expected) => {
    expect([...searchedRows(recording, { query, phase: -1, level: -1, step: -1 }).matches]).toEqual(expected);
  });

  it("filters by phase, and shows what is around", () => {
    const { rows, matches } = searchedRows(recording, { query: "", phase: 1, level: -1, step: -1 });
    expect([...matches]).toEqual([8]);
    expect([...rows]).toEqual([0, 6, 8]);
  });
});

describe("the graph", () => {
  const recording = byHand();
  const edges = (scope: number, expanded: number[]): string[] =>
    graphOf(recording, scope, new Set(expanded)).edges.map(({ from, to, shape }) => `${from} ${to} ${shape}`).sort();

  it("joins who makes a value with who reads it", () => {
    expect(edges(0, [])).toEqual([
      "input-0 row-1 f32[2]",
      "input-0 row-8 f32[2]",
      "row-1 row-7 f32[2]",
      "row-7 row-8 f32[]",
      "row-8 output-4 f32[]",
    ]);
  });

  it("expands a row in place", () => {
    const graph = graphOf(recording, 0, new Set([1]));
    expect(graph.boxes.map((box) => box.id)).toEqual(["row-1"]);
    expect(edges(0, [1])).toContain("row-2 row-4 f32[2]");
  });

  it("opens with nothing expanded where no row holds more than there is", () => {
    expect([...firstExpanded(recording, 0)]).toEqual([]);
    expect([...firstExpanded(recording, -1)]).toEqual([0]);
  });

  it("is that of the module around an op", () => {
    expect(graphScope(recording, 7)).toBe(0);
    expect(graphScope(recording, 3)).toBe(2);
    expect(firstScope(recording)).toBe(0);
  });
});

describe("the selection", () => {
  it("has a fragment that leads back to it", () => {
    for (const [row, fragment] of [[3, "op-0"], [4, "call-2"], [1, "row-1"]] as const) {
      const state = new State(byHand());
      state.select(row);
      expect(state.fragment).toBe(fragment);
      const other = new State(byHand());
      expect(other.follow(`#${fragment}`)).toBe(true);
      expect(other.row.value).toBe(row);
    }
  });

  it("opens what is around it", () => {
    const state = new State(byHand());
    state.open.value = new Set();
    state.selectValue(2);
    expect(state.row.value).toBe(5);
    expect([...state.open.value].sort()).toEqual([0, 1, 4]);
    expect(state.fragment).toBe("value-2");
  });

  it.each(["#op-99", "#call-99", "#row-99", "#value-99", "#nonsense", "", "#op--1"])("ignores %s", (fragment) => {
    const state = new State(byHand());
    expect(state.follow(fragment)).toBe(false);
    expect(state.row.value).toBe(-1);
  });
});

describe("a stretch of time", () => {
  const recording = byHand();

  it("holds what ran in it, with the part of the time that lies in it", () => {
    const stretch = stretchOf(recording, 22, 33);
    expect(stretch.ops).toEqual([1, 2]);
    expect(stretch.time).toBeCloseTo(3 + 3);
    expect(stretch.byName.map(({ name, count }) => [name, count])).toEqual([["relu", 1], ["sum", 1]]);
    expect([...stretch.lines]).toEqual(["0:9"]);
    expect(stretch.held).toBe(-1);
  });

  it("knows the rows that are in it, and those that are in part", () => {
    expect([...stretchOf(recording, 22, 33).rows]).toEqual([1, 1, 0, 0, 2, 2, 1, 2, 0]);
    expect([...stretchOf(recording, 46, 50).rows]).toEqual([0, 0, 0, 0, 0, 0, 0, 0, 0]);
  });

  it("is a selection with a fragment, and ends with another one", () => {
    const state = new State(byHand());
    state.select(3);
    state.selectStretch(33.4, 22.2);
    expect(state.fragment).toBe("time-22-33");
    expect(state.row.value).toBe(-1);
    const other = new State(byHand());
    expect(other.follow("#time-22-33")).toBe(true);
    expect(other.stretch.value?.ops).toEqual([1, 2]);
    other.select(3);
    expect(other.fragment).toBe("op-0");
    expect(other.stretch.value).toBeUndefined();
  });

  it("can be all that the tree shows", () => {
    const { rows } = stretchOf(recording, 22, 33);
    expect([...searchedRows(recording, { ...NO_FILTER, stretch: rows }).rows]).toEqual([0, 1, 4, 5, 6, 7]);
  });

  it("lies within the run", () => {
    const state = new State(byHand());
    state.selectStretch(-5, 9e12);
    expect(state.brushed.value).toEqual([0, 50]);
  });
});

describe("lineage", () => {
  const recording = byHand();

  it("goes back from op to op, the latest first, to what came from outside", () => {
    const { steps, more, sources } = lineageOf(recording, 4, 3);
    expect(steps.map(({ op, value }) => [op, value])).toEqual([[3, 4], [2, 3], [1, 2]]);
    expect(more).toBe(1);
    expect(sources).toEqual([0]);
  });

  it("of what nothing made is that alone", () => {
    expect(lineageOf(recording, 0, 3)).toEqual({ steps: [], more: 0, isCut: false, sources: [0] });
  });
});

describe("the costs", () => {
  const recording = byHand();

  it("are shares of the run, equal layers as one box with the sum of both", () => {
    const boxes = icicleOf(recording, -1, "time");
    expect(boxes.map(({ row, count, depth, from, to }) => [row, count, depth, from, to])).toEqual([
      [0, 1, 0, 0, 1],
      [1, 1, 1, 0, 0.5],
      [3, 2, 2, 0, 0.5],
      [7, 1, 1, 0.5, 0.75],
      [8, 1, 1, 0.75, 1],
    ]);
  });

  it("of one row are shares of that row", () => {
    expect(icicleOf(recording, 2, "time").map(({ row, from, to }) => [row, from, to])).toEqual([[2, 0, 1], [3, 0, 1]]);
  });

  it("by name count every run", () => {
    expect(costsByName(recording, -1, "time")).toEqual([
      { name: "relu", count: 2, cost: 10 },
      { name: "sum", count: 1, cost: 5 },
      { name: "mul", count: 1, cost: 5 },
    ]);
  });

  it.each([
    [-1, "ArrowDown", 0], [0, "ArrowDown", 1], [1, "ArrowRight", 7], [7, "ArrowLeft", 1], [7, "ArrowUp", 0],
    [0, "ArrowUp", -1], [8, "ArrowRight", -1], [7, "ArrowDown", -1], [1, "x", -1],
  ])("are walked by arrows: from %s with %s to %s", (row, key, next) => {
    expect(neighbour(icicleOf(recording, -1, "time"), row, key)).toBe(next);
  });

  it("are none where nothing was counted", () => {
    expect(icicleOf(recording, -1, "flops")).toEqual([]);
  });
});

describe("what went wrong", () => {
  const recording = byHand();

  it("is marked where a NaN came out", () => {
    expect([3, 7, 8].map((row) => recording.gaveNan(row))).toEqual([false, true, false]);
  });
});

describe("a captured tensor", () => {
  const recording = byHand();

  it("belongs to its value", () => {
    expect(recording.capture(2)).toMatchObject({ key: "loss", bins: [1, 3], rows: 1, cells: [0, 255] });
    expect(recording.capture(1)).toBeUndefined();
  });
});

describe("a comparison", () => {
  it.each([
    [0, 0],
    [null, 0],
    [1e-8, 0.04],
    [1e-4, 0.5],
    [3, 1],
  ])("draws an error of %s as %s", (error, share) => {
    expect(errorShare(error)).toBeCloseTo(share);
  });

  it("writes errors as the command line does", () => {
    expect([0.3, 1e-12, 0, null].map(errorText)).toEqual(["3.0e-01", "1.0e-12", "", ""]);
  });

  it("finds the rows of ops and of module calls", () => {
    const columns: Record<string, number[]> = {
      "rows.kind": [0, 1, 2, 0, 1, 2], "rows.a": [1, 0, 0, 0, 2, 2], "rows.b": [1, 0, 0, 0, -1, -1],
      "rows.state": [0, 1, 1, 0, 3, 3], "rows.error": [NaN, 0, 0, NaN, 1, 1], "rows.first": [0, 0, 0, 0, 1, 1],
    };
    const sections = { column: (name: string) => Float64Array.from(columns[name]), table: () => [] };
    const found = new Comparison(sections as unknown as Sections, byHand(), byHand());
    expect(found.firstRow).toBe(5);
    expect(found.rowOfOps(2, -1)).toBe(5);
    expect(found.rowOfOps(-1, 0)).toBe(2);
    expect(found.rowOfCalls(1, -1)).toBe(2);
    expect(found.rowOfCalls(0, 0)).toBe(5); // the one that differs
  });
});
