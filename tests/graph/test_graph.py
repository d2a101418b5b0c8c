"""The graph type itself: looking up, checking, cutting, pruning, collapsing, on graphs made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.data.trace_data import TensorMeta
from sightline.errors import InvalidGraph, NoSuchNode, NothingMatched, UsageError
from sightline.graph.graph import Edge, Graph, Node, Ref
from sightline.graph.lint import references
from sightline.graph.prune import is_view

META = TensorMeta((2, 8), (8, 1), "float32", "cpu")


def small() -> Graph:
    """x -> mm (fc) -> view -> relu -> output, and a leaf nobody uses."""
    return Graph(
        (
            Node(0, "x", "x", "input", outputs=(META,)),
            Node(1, "fc_weight", "fc.weight", "parameter", module="fc", outputs=(META,)),
            Node(2, "mm", "mm", "call", {"self": Ref("x"), "mat2": Ref("fc_weight")}, "fc", "", (META,)),
            Node(3, "view", "view", "call", {"self": Ref("mm"), "size": (16,)}, "", "", (META,)),
            Node(4, "relu", "relu", "call", {"self": Ref("view")}, "act", "", (META,)),
            Node(5, "unused", "neg", "call", {"self": Ref("view")}, "", "", (META,)),
            Node(6, "output", "output", "output", {"result": Ref("relu")}),
        ),
        (
            Edge(0, 2, 0, "self", META), Edge(1, 2, 0, "mat2", META), Edge(2, 3, 0, "self", META),
            Edge(3, 4, 0, "self", META), Edge(3, 5, 0, "self", META), Edge(4, 6, 0, "result", META),
        ),
        "net",
        {"": "Net", "fc": "Linear", "act": "ReLU"},
    )  # fmt: skip


def names(nodes: object) -> list[str]:
    return [node.name for node in nodes]  # type: ignore[attr-defined]


def test_it_reads_like_a_mapping() -> None:
    g = small().lint()
    assert g["mm"].args["mat2"] == Ref("fc_weight")
    assert "mm" in g
    assert "nothing" not in g
    assert len(g) == 7
    assert names(g) == g.keys() == ["x", "fc_weight", "mm", "view", "relu", "unused", "output"]
    assert repr(g) == "<Graph net: 7 nodes, 6 edges>"


def test_an_unknown_name_offers_near_ones() -> None:
    with pytest.raises(NoSuchNode, match=r"This graph has no node 'rel'; did you mean 'relu'\?") as caught:
        small()["rel"]
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, UsageError)


def test_ways_through_it() -> None:
    g = small()
    assert names(g.ancestors("relu")) == ["x", "fc_weight", "mm", "view"]
    assert names(g.descendants(g["mm"])) == ["view", "relu", "unused", "output"]
    assert names(g.shortest("x", "output")) == ["x", "mm", "view", "relu", "output"]
    with pytest.raises(NothingMatched, match="Nothing flows from 'relu' to 'x'"):
        g.shortest("relu", "x")


def test_nodes_are_found_by_module_op_and_kind() -> None:
    g = small()
    assert names(g.nodes_of(module="fc")) == ["fc_weight", "mm"]
    assert names(g.nodes_of(op="re*")) == ["relu"]
    assert names(g.nodes_of(kind="input")) == ["x"]
    with pytest.raises(NothingMatched, match="op='conv' matches no node"):
        g.nodes_of(op="conv")
    with pytest.raises(NothingMatched, match="module='fd' matches no module of this graph"):
        g.nodes_of(module="fd")
    with pytest.raises(UsageError, match="kind='weight' is no kind of node; choose 'input'"):
        g.nodes_of(kind="weight")


def test_nodes_out_of_order_are_sorted_and_linted() -> None:
    g = small()
    mixed = replace(g, nodes=g.nodes[::-1])
    assert names(mixed)[-1] in ("output", "unused")
    assert names(mixed).index("x") < names(mixed).index("mm") < names(mixed).index("relu")
    with pytest.raises(InvalidGraph, match="'mm' comes before 'x', which it reads"):
        mixed.lint()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g: replace(g, edges=(*g.edges, Edge(0, 99))), "to node 99, which does not exist"),
        (lambda g: replace(g, nodes=(*g.nodes, replace(g.nodes[0], id=9))), "Two nodes are named 'x'"),
        (lambda g: replace(g, nodes=(*g.nodes, replace(g.nodes[0], name="y"))), "have the same id, 0"),
        (lambda g: replace(g, edges=(*g.edges, Edge(4, 3))), "not marked as a loop: view → relu → view"),
        (lambda g: replace(g, edges=g.edges[1:]), "'mm' has the argument x, and no edge brings it"),
        (lambda g: replace(g, edges=(*g.edges, Edge(0, 4, 3))), "reads output 3 of 'x', which has 1 output"),
        (lambda g: replace(g, edges=(*g.edges, Edge(2, 1))), "from 'mm' into the parameter 'fc_weight'"),
        (
            lambda g: replace(g, nodes=(*g.nodes, Node(8, "z", "z", args={"a": [Ref("q")]}))),
            "'z' has the argument q, and no node is named 'q'",
        ),
    ],
)  # fmt: skip
def test_lint_names_the_first_contradiction(change: object, sentence: str) -> None:
    with pytest.raises(InvalidGraph, match=sentence):
        change(small()).lint()  # type: ignore[operator]


def test_a_loop_is_no_cycle() -> None:
    g = small()
    g = replace(g, edges=(*g.edges, Edge(4, 3, 0, "self", META, 3, loop=True)))
    g.lint()
    assert names(g) == names(small())
    assert "relu" in names(g.ancestors("view"))


def test_a_part_has_inputs_and_outputs_where_it_was_cut() -> None:
    part = small().subgraph("fc").lint()
    assert [(node.name, node.kind) for node in part] == [
        ("x", "input"), ("fc_weight", "parameter"), ("mm", "call"), ("output", "output"),
    ]  # fmt: skip
    act = small().subgraph("act").lint()
    assert [(node.name, node.kind) for node in act] == [
        ("view", "input"),
        ("relu", "call"),
        ("output", "output"),
    ]
    assert act["relu"].args == {"self": Ref("view")}


def test_pruning_views_connects_what_they_connected() -> None:
    g = small().prune("views").lint()
    assert "view" not in g
    assert g["relu"].args == {"self": Ref("mm")}
    assert names(g.ancestors("relu")) == ["x", "fc_weight", "mm"]


def test_pruning_parameters_leaves_their_name_and_shape() -> None:
    g = small().prune(["parameters", "leaves"]).lint()
    assert names(g) == ["x", "mm", "view", "relu", "output"]
    assert repr(g["mm"].args["mat2"]) == "fc.weight f32[2, 8]"


def test_an_unknown_thing_to_prune_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="prune='weights' cannot be left out; choose from 'views'"):
        small().prune("weights")


def test_a_collapsed_module_has_its_parameters() -> None:
    g = small().collapse(1).lint()
    assert names(g) == ["x", "fc", "view", "act", "unused", "output"]
    assert g["fc"].op == "Linear"
    assert g["fc"].args == {"input": Ref("x")}
    assert g["fc"].info["parameters"] == 16
    assert g["act"].args == {"input": Ref("view")}
    assert [node.op for node in small().collapse(0)] == ["x", "Net", "output"]
    with pytest.raises(UsageError, match="depth=-1 must be a whole number from 0 up"):
        small().collapse(-1)


def test_a_parameter_that_others_read_too_stays_outside() -> None:
    g = small()
    tied = Node(7, "head", "mm", "call", {"self": Ref("relu"), "mat2": Ref("fc_weight")}, "head", "", (META,))
    g = replace(
        g, nodes=(*g.nodes, tied), edges=(*g.edges, Edge(4, 7, 0, "self", META), Edge(1, 7, 0, "mat2", META)),
        modules={**g.modules, "head": "Linear"},
    )  # fmt: skip
    assert "fc_weight" in g.lint().collapse(1).lint()


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph: nodes in random modules, each reading some of those before it."""
    count = draw(st.integers(2, 14))
    nodes, edges = [Node(0, "n0", "x", "input", outputs=(META,))], []
    paths = ("", "a", "a.b", "a.b.0", "a.b.1", "c")
    for id in range(1, count):
        kind = draw(st.sampled_from(["call"] * 6 + ["parameter", "constant", "input"]))
        sources = draw(st.lists(st.integers(0, id - 1), max_size=3)) if kind == "call" else []
        args = {f"a{at}": Ref(f"n{source}") for at, source in enumerate(sources)}
        edges += [Edge(source, id, 0, f"a{at}", META) for at, source in enumerate(sources)]
        op = draw(st.sampled_from(("view", "mm", "relu", "transpose.int")))
        module = draw(st.sampled_from(paths))
        nodes.append(Node(id, f"n{id}", op, kind, args, module, "", (META,)))
    last = draw(st.integers(0, count - 1))
    nodes.append(Node(count, "output", "output", "output", {"result": Ref(f"n{last}")}))
    edges.append(Edge(last, count, 0, "result", META))
    return Graph(tuple(nodes), tuple(edges), "any", dict.fromkeys(paths, "Module"))


@given(graphs())
def test_pruning_views_keeps_what_can_be_reached(g: Graph) -> None:
    pruned = g.lint().prune("views").lint()
    for node in pruned.nodes:
        before = [name for name in names(g.ancestors(node.name)) if name in pruned]
        assert names(pruned.ancestors(node.name)) == before
    assert all(len(g.incoming(node)) != 1 for node in pruned.nodes if is_view(node))


@given(graphs())
def test_pruning_the_rest_keeps_what_leads_to_an_output(g: Graph) -> None:
    kept = set(names(g.prune("leaves").lint()))
    assert kept == {"output", *names(g.ancestors("output"))}
    bare = g.prune("parameters", "constants").lint()
    assert {node.kind for node in bare.nodes} <= {"input", "call", "output"}
    assert names(bare.ancestors("output")) == [n for n in names(g.ancestors("output")) if n in bare]


@given(graphs(), st.integers(0, 3))
def test_collapsing_keeps_what_can_be_reached(g: Graph, depth: int) -> None:
    small = g.collapse(depth).lint()
    for node in small.nodes:
        for ref in references(node.args):
            assert ref.node in small
    outside = [node.name for node in g.nodes if node.name in small]
    for name in outside:
        # Through a module everything it was given reaches everything it gives: more ways, never fewer.
        before = {other for other in names(g.ancestors(name)) if other in small}
        assert before <= set(names(small.ancestors(name)))


@given(graphs(), st.sampled_from(["a", "a.b", "c", "a.b.*"]))
def test_a_part_holds_all_that_ran_in_its_module(g: Graph, module: str) -> None:
    part = g.subgraph(module).lint()
    inside = {node.name for node in g.nodes_of(module=module) if node.kind == "call"}
    assert {node.name for node in part.nodes if node.kind == "call"} == inside


@given(graphs())
def test_folding_counts_every_node_and_edge(g: Graph) -> None:
    folded = g.fold().lint()
    assert sum(node.repeat for node in folded.nodes) == len(g.nodes)
    assert sum(edge.repeat for edge in folded.edges) == len(g.edges)
