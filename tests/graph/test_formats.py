"""Every format: its content, that its own tools can read it, and that names are data in all of them."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import pytest

from sightline.data.forms import Elided, Record, Symbol
from sightline.data.trace_data import TensorMeta
from sightline.errors import DamagedFile, SightlineError, UsageError
from sightline.graph.formats.drawing import hyperparameters
from sightline.graph.formats.files import render_dot
from sightline.graph.graph import Edge, Graph, Node, Ref

META = TensorMeta((2, 8), (8, 1), "float32", "cpu")
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
ROW = "  relu    relu(x, w, size=(2, [3, None]), eps=nan, mode='re…) ×3 -> f32[2, 8], f32[2, 8]  [blocks.0]"
HOSTILE = [
    "</script><script>alert(1)</script>",
    'a"b', "a\nb\r\n", '"; rm -rf /; "', "\\", "<b>&amp;", "\x1b[31m\x00",
    "]] -->|x| end", "`x`", "${HOME} $(id)", "#quot;", "\u202etxt", "%n{}", "\\N", "\ud800", "]>", "",
]  # fmt: skip


def graph(name: str = "net", op: str = "relu", path: str = "blocks.0") -> Graph:
    args = {
        "self": Ref("x"), "other": Ref("w"), "size": (2, [3, None]), "eps": float("nan"), "mode": op,
        "dtype": Symbol("torch.float32"), "many": [1, Elided(3)], "out": Record(op, {"a": Ref("x")}),
        "keys": {1: "one", "$ref": "none"}, "flag": True, "inf": float("-inf"),
    }  # fmt: skip
    return Graph(
        (
            Node(0, "x", op, "input", outputs=(META,)),
            Node(1, "w", f"{path}.w", "parameter", module=path, outputs=(META,)),
            Node(2, "relu", op, "call", args, path, f"{path}:3 in {op}", (META, META), 3, "forward", op,
                 {"flops": 12, "duration": 5, "statistics": [{"mean": float("nan"), "std": 1.0}, None]}),
            Node(3, "add", "+", "call", {"self": Ref("relu", 1)}, path, "", (META,), 3),
            Node(4, "output", op, "output", {op or "result": Ref("add")}),
        ),
        (
            Edge(0, 2, 0, "self", META), Edge(1, 2, 0, op, META), Edge(2, 3, 1, "self", META, 3),
            Edge(3, 2, 0, "self", META, 2, loop=True), Edge(3, 4, 0, op, None),
        ),
        name, {"": op, path: op}, {"calls": [], "note": op},
    )  # fmt: skip


def test_dot_says_kinds_shapes_modules_and_loops() -> None:
    text = graph().to_dot()
    assert "rankdir=TB" in text
    assert 'label="  f32[2, 8]\\l"' in text
    assert "subgraph cluster_" in text
    assert "<B>blocks.0</B>" in text
    assert "style=dashed" in text
    assert text.count("->") == 4  # the parameter is a line in its reader
    assert "w f32[2, 8]" in text


def test_everything_that_comes_around_a_loop_is_drawn() -> None:
    x, norm = Node(0, "x", "x", "input"), Node(1, "norm", "norm", args={"a": Ref("x")}, repeat=9)
    add = Node(2, "add", "+", args={"a": Ref("x"), "b": Ref("norm")}, repeat=9)
    entering = (Edge(0, 1, 0, "a"), Edge(0, 2, 0, "a"), Edge(1, 2, 0, "b", repeat=9))
    around = (Edge(2, 1, 0, "a", repeat=8, loop=True), Edge(2, 2, 0, "a", repeat=8, loop=True))
    text = Graph((x, norm, add), entering + around).lint().to_dot()
    drawn = [line.split(" [")[0] for line in text.splitlines() if "dir=back" in line]
    assert drawn == ["  n1 -> n2", "  n2 -> n2"]


def test_a_loop_inside_a_module_repeats_its_ops_and_not_the_module() -> None:
    x = Node(0, "x", "x", "input")
    ops = [Node(i, f"op_{i}", "relu", args={"a": Ref("x")}, module="two", repeat=6) for i in (1, 2)]
    other = Node(3, "other", "sin", args={"a": Ref("op_2")}, module="out")
    edges = (Edge(0, 1, 0, "a"), Edge(1, 2, 0, "a", repeat=6), Edge(2, 3, 0, "a"))
    modules = {"": "Net", "two": "Two", "out": "Out"}
    looped = Graph(
        (x, *ops, other), edges, modules=modules, info={"folds": {"two": ["two.2", 3]}}
    ).to_mermaid()
    assert 'two … two.2 Two ×3"' in looped
    assert looped.count('"relu ×2"') == 2
    once = Graph((x, *ops, other), edges, modules=modules).to_mermaid()
    assert 'two Two"' in once
    assert once.count('"relu ×6"') == 2


def test_a_buffer_that_nothing_reads_is_not_drawn() -> None:
    g = graph()
    idle = Node(9, "idle", "bn.num_batches_tracked", "buffer", outputs=(META,))
    assert "num_batches_tracked" not in Graph((*g.nodes, idle), g.edges).to_dot()
    assert "num_batches_tracked" in Graph((idle,), ()).to_dot()


@pytest.mark.parametrize(
    ("op", "args", "text"),
    [
        (
            "conv2d",
            {"input": Ref("x"), "stride": (2, 2), "padding": (3, 3), "groups": 1},
            "stride=2 padding=3",
        ),
        ("conv2d", {"stride": [2, 1], "dilation": 1, "groups": 4}, "stride=[2, 1] groups=4"),
        ("max_pool2d", {"kernel_size": 2, "stride": None, "ceil_mode": False}, "kernel_size=2"),
        ("max_pool2d", {"kernel_size": [2, 2], "stride": []}, "kernel_size=2"),
        ("scaled_dot_product_attention", {"attn_mask": None, "is_causal": True}, "is_causal=True"),
        ("add.Tensor", {"self": Ref("x"), "other": Ref("x"), "alpha": 1}, ""),
        ("add.Tensor", {"self": Ref("x"), "other": Ref("x"), "alpha": 3}, "alpha=3"),
        ("softmax", {"dim": Ref("x")}, ""),
        ("einsum", {"equation": "b" * 80}, ""),
    ],
)
def test_a_picture_tells_what_an_op_was_told(op: str, args: dict[str, object], text: str) -> None:
    assert hyperparameters(Node(0, "n", op, args=args)) == text


@needs_dot
@pytest.mark.parametrize("text", HOSTILE)
def test_graphviz_reads_whatever_the_names_are(text: str, tmp_path: Path) -> None:
    g = graph(text, text, text or "blocks.0").lint()
    g.save(tmp_path / "g.svg")
    svg = (tmp_path / "g.svg").read_text("utf-8")
    ET.fromstring(svg)
    assert "<script" not in svg
    assert "<script" not in g._repr_html_()


@needs_dot
@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".dot", ".gv", ".mmd", ".json"])
def test_every_format_can_be_saved(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"g{suffix}"
    graph().save(file)
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".mmd": b"flowchart TB", ".json": b"{"}
    assert file.read_bytes().startswith(starts.get(suffix, b'digraph "net" {'))


def test_an_unknown_format_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'g.bmp' names no format of a graph; end it in '.svg', '.png'"):
        graph().save(tmp_path / "g.bmp")


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no folder '.*none' to save the graph in"):
        graph().save(tmp_path / "none" / "g.json")


@needs_dot
def test_what_graphviz_cannot_read_is_one_sentence() -> None:
    with pytest.raises(SightlineError, match=r"^graphviz could not draw the graph: .*syntax error.*[^.]\.$"):
        render_dot("digraph {", "svg", 0)


def test_without_graphviz_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        UsageError, match=r"apt-get install graphviz.*brew install graphviz.*conda install graphviz"
    ):
        graph().save(tmp_path / "g.png")
    assert not (tmp_path / "g.png").exists()
    shown = graph("<b>")._repr_html_()
    assert shown.startswith("<pre>&lt;b&gt;: 5 nodes")


@pytest.mark.parametrize("text", HOSTILE)
def test_mermaid_labels_cannot_end_early(text: str) -> None:
    made = graph(text, text, text or "m").to_mermaid()
    for line in made.splitlines()[1:]:
        assert re.fullmatch(
            r'\s*(n\d+(\(\["|\["|\(")[^"]*("\]\)|"\]|"\)):::\w+|subgraph s\d+\["[^"]*"\]|end'
            r'|n\d+ (-->|-\.->)(\|"[^"|]*"\|)? n\d+|classDef .*)',
            line,
        ), line
    assert "<script" not in made
    assert "`" not in made


@pytest.mark.parametrize("text", ["relu", *HOSTILE])
def test_json_brings_the_same_graph_back(text: str) -> None:
    g = graph(text, text, text or "m")
    back = Graph.from_json(g.to_json())
    again = Graph.from_json(back.to_json())
    assert back.to_json() == g.to_json() == again.to_json()
    assert repr(back) == repr(g)
    assert back.nodes[2].args["out"] == Record(text, {"a": Ref("x")})
    assert back.nodes[2].args["keys"] == {1: "one", "$ref": "none"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nonsense", "This is no graph: the text is not JSON"),
        ("[]", "the JSON does not say that its format is 'sightline-graph'"),
        (
            '{"format": "sightline-graph", "version": 99}',
            "This graph has the version 99; this sightline reads 1",
        ),
        ('{"format": "sightline-graph", "version": 1}', "This graph is damaged: KeyError 'metas'"),
        ("[" * 100_000, "This is no graph"),
    ],
)
def test_a_damaged_text_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(DamagedFile, match=sentence):
        Graph.from_json(text)


def test_a_contradiction_in_a_file_is_found() -> None:
    broken = json.loads(graph().to_json())
    broken["edges"][0][0] = 77
    with pytest.raises(DamagedFile, match="contradicts itself: An edge goes from node 77"):
        Graph.from_json(json.dumps(broken))
    broken = json.loads(graph().to_json())
    broken["nodes"][0]["outputs"] = [-1]
    with pytest.raises(DamagedFile, match="damaged: ValueError -1 is no position"):
        Graph.from_json(json.dumps(broken))


@pytest.mark.parametrize("text", ["relu", *HOSTILE])
def test_networkx_has_plain_attributes(text: str) -> None:
    made = graph(text, text, text or "m").to_networkx()
    assert isinstance(made, nx.MultiDiGraph)
    assert list(made.nodes) == ["x", "w", "relu", "add", "output"]
    json.dumps(nx.node_link_data(made, edges="edges"), allow_nan=False)
    assert made.edges["x", "relu", 0]["shape"] == "f32[2, 8]"


@pytest.mark.parametrize("text", ["relu", *HOSTILE])
def test_model_explorer_gets_its_fields(text: str) -> None:
    made = graph(text, text, "blocks.0").to_model_explorer()
    json.dumps(made, allow_nan=False)
    (inner,) = made["graphs"]
    node = inner["nodes"][2]
    assert set(node) >= {"id", "label", "namespace", "incomingEdges", "attrs", "outputsMetadata"}
    assert node["namespace"] == "blocks/0"
    assert node["incomingEdges"][1] == {
        "sourceNodeId": "w",
        "sourceNodeOutputId": "0",
        "targetNodeInputId": "1",
    }
    assert {"key": "flops", "value": "12"} in node["attrs"]
    if text:
        assert inner["groupNodeAttributes"]["blocks/0"]["module"] == "blocks.0"
    assert {data["name"] for data in made["nodeData"]} == {"duration", "flops", "std"}
    assert all(isinstance(attr["value"], str) for each in inner["nodes"] for attr in each["attrs"])


@pytest.mark.parametrize("text", HOSTILE)
def test_the_listing_is_one_line_a_node(text: str) -> None:
    lines = str(graph(text, text, text or "m")).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in "".join(lines)


def test_the_listing_reads_well() -> None:
    assert str(graph()).splitlines() == [
        "net: 5 nodes, 5 edges, standing for 9 nodes",
        "  x       input relu -> f32[2, 8]",
        "  w       parameter blocks.0.w -> f32[2, 8]",
        ROW,
        "  add     +(relu[1]) ×3 -> f32[2, 8]  [blocks.0]",
        "  output  relu(add)",
    ]
