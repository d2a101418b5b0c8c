"""Folding: layers and loops shown once, and nothing merged that is wired differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sightline.data.trace_data import TensorMeta
from sightline.graph.graph import Edge, Graph, Node, Ref


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, None, "float32", "cpu")


class Sketch:
    """A graph in a few lines: ``s.op("relu", x, module="blocks.0")``."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.modules: dict[str, str] = {"": "Net"}

    def source(
        self, name: str, kind: str = "input", *, module: str = "", shape: tuple[int, ...] = (2,)
    ) -> str:
        key = name.replace(".", "_")
        self.nodes.append(Node(len(self.nodes), key, name, kind, module=module, outputs=(meta(*shape),)))
        return key

    def op(self, op: str, *inputs: Any, module: str = "", shape: tuple[int, ...] = (2,), outs: int = 1,
           line: int = 1, **args: Any) -> str:  # fmt: skip
        id, known = len(self.nodes), {node.name: node.id for node in self.nodes}
        refs = [item if isinstance(item, Ref) else Ref(item) for item in inputs]
        self.edges += [Edge(known[ref.node], id, ref.slot, f"a{at}") for at, ref in enumerate(refs)]
        name = f"{op}_{id}"
        if module:
            self.modules.setdefault(module, module.partition(".")[0].title())
        self.nodes.append(
            Node(id, name, op, "call", {f"a{at}": ref for at, ref in enumerate(refs)} | args, module,
                 f"net.py:{line}", (meta(*shape),) * outs, info={"columns": [line, line + 1]})
        )  # fmt: skip
        return name

    def graph(self) -> Graph:
        return Graph(tuple(self.nodes), tuple(self.edges), "sketch", self.modules).lint()


def checked(graph: Graph) -> Graph:
    folded = graph.fold().lint()
    assert sum(node.repeat for node in folded.nodes) == sum(node.repeat for node in graph.nodes)
    assert sum(edge.repeat for edge in folded.edges) == sum(edge.repeat for edge in graph.edges)
    assert folded.fold() == folded or len(folded.fold()) <= len(folded)
    return folded


def shown(graph: Graph) -> list[tuple[str, int]]:
    return [(node.op, node.repeat) for node in graph.nodes]


def layers(count: int, **changes: Any) -> Graph:
    s = Sketch()
    x = s.source("x")
    for i in range(count):
        w = s.source(f"blocks.{i}.w", "parameter", module=f"blocks.{i}")
        change = changes.get(f"at{i}", {})
        h = s.op("mm", x, w, module=f"blocks.{i}", **change)
        x = s.op("add", x, h, module=f"blocks.{i}", line=2)
    s.op("norm", x, line=3)
    return s.graph()


def test_layers_are_shown_once() -> None:
    folded = checked(layers(48))
    assert shown(folded) == [("x", 1), ("blocks.0.w", 48), ("mm", 48), ("add", 48), ("norm", 1)]
    assert folded.info["folds"] == {"blocks.0": ["blocks.47", 48]}
    loops = [(folded.by_id[e.source].op, folded.by_id[e.target].op, e.repeat) for e in folded.edges if e.loop]
    assert loops == [("add", "mm", 47), ("add", "add", 47)]


@pytest.mark.parametrize(
    "change", [{"alpha": 2}, {"shape": (3,)}, {"line": 9}], ids=["argument", "shape", "line"]
)
def test_a_layer_that_differs_stays_apart(change: dict[str, Any]) -> None:
    folded = checked(layers(9, at4=change))
    assert sorted(n.repeat for n in folded.nodes if n.op == "mm") == [1, 4, 4]


def test_a_layer_that_is_wired_differently_stays_apart() -> None:
    s = Sketch()
    x = first = s.source("x")
    for i in range(8):
        h = s.op("mm", x, module=f"blocks.{i}")
        x = s.op("add", first if i == 5 else x, h, module=f"blocks.{i}", line=2)
    folded = checked(s.graph())
    # the fifth reads the input where the others read the layer before
    assert [node.repeat for node in folded.nodes if node.op == "mm"] == [5, 3]


def test_alternating_layers_fold_in_pairs() -> None:
    s = Sketch()
    x = s.source("x")
    for i in range(12):
        x = s.op("local" if i % 2 else "full", x, module=f"blocks.{i}")
    folded = checked(s.graph())
    assert shown(folded) == [("x", 1), ("full", 6), ("local", 6)]


def test_loops_in_loops_multiply() -> None:
    s = Sketch()
    x = s.source("x")
    for i in range(4):
        for j in range(3):
            x = s.op("mm", x, module=f"stages.{i}.blocks.{j}")
        x = s.op("pool", x, module=f"stages.{i}", line=2)
    folded = checked(s.graph())
    assert shown(folded) == [("x", 1), ("mm", 12), ("pool", 4)]
    assert sorted(edge.repeat for edge in folded.edges if edge.loop) == [3, 8]
    collapsed = folded.collapse(2).lint()
    assert [(node.module, node.repeat) for node in collapsed.nodes if node.kind == "call"] == [
        ("stages.0", 4)
    ]
    assert [edge.repeat for edge in collapsed.edges if edge.loop] == [3]  # around the stage, not those within


def test_a_recurrence_reads_its_own_part_of_the_input() -> None:
    s = Sketch()
    x, h = s.source("x"), s.source("h")
    parts = s.op("unbind", x, outs=6)
    for t in range(6):
        h = s.op("cell", Ref(parts, t), h, module="cell")
    s.op("head", h, line=5)
    folded = checked(s.graph())
    assert shown(folded) == [("x", 1), ("h", 1), ("unbind", 1), ("cell", 6), ("head", 1)]
    into = [(folded.by_id[e.source].op, e.repeat, e.loop) for e in folded.incoming(folded.nodes[3])]
    assert into == [("unbind", 6, False), ("h", 1, False), ("cell", 5, True)]


def test_a_loop_over_an_index_folds_and_all_results_meet_in_one_list() -> None:
    s = Sketch()
    x, h = s.source("x"), s.source("h")
    outs = []
    for t in range(5):
        part = s.op("[]", x, index=t, line=2)
        h = s.op("cell", part, h, module="cell")
        outs.append(h)
    s.op("stack", *outs, line=5)
    folded = checked(s.graph())
    assert shown(folded) == [("x", 1), ("h", 1), ("[]", 5), ("cell", 5), ("stack", 1)]
    last = folded.incoming(folded.nodes[-1])
    assert [(edge.argument, edge.repeat) for edge in last] == [("a0…4", 5)]


def test_a_growing_cache_folds_in_one_module_only() -> None:
    s = Sketch()
    x = s.source("x", shape=(1,))
    for t in range(4):
        x = s.op("cat", x, module="model", shape=(t + 2,), size=t)
        x = s.op("head", x, module="model", shape=(t + 2,), line=2)
    folded = checked(s.graph())
    assert shown(folded) == [("x", 1), ("cat", 4), ("head", 4)]
    assert folded.nodes[1].info["varies"] == ["f32[2…5]"]
    other = s.graph()
    apart = replace(
        other, nodes=tuple(replace(n, module=n.module and f"blocks.{n.id}") for n in other.nodes), modules={}
    )
    assert [node.repeat for node in checked(apart).nodes] == [1] * 9


def test_two_readings_on_one_line_are_no_loop() -> None:
    s = Sketch()
    x = s.source("x")
    s.op("-", s.op("[]", x, index=0), s.op("[]", x, index=1), line=1)
    g = s.graph()
    exported = replace(g, nodes=tuple(replace(node, info={}) for node in g.nodes))
    assert [node.repeat for node in checked(exported).nodes] == [1, 1, 1, 1]


def test_collapsed_layers_still_fold_unless_they_hide_a_difference() -> None:
    assert [node.repeat for node in layers(6).collapse(2).lint().fold().lint().nodes] == [1, 6, 1]
    odd = layers(6, at3={"alpha": 2})
    assert [node.repeat for node in odd.collapse(2).fold().lint().nodes] == [1, 3, 1, 2, 1]


def test_folding_first_collapses_to_the_same_picture() -> None:
    collapsed = layers(6).fold().collapse(1).lint()
    assert [(node.name, node.repeat) for node in collapsed.nodes] == [
        ("x", 1),
        ("blocks_0", 6),
        ("norm_19", 1),
    ]
    assert [(edge.repeat, edge.loop) for edge in collapsed.incoming("blocks_0")] == [(1, False), (5, True)]
