"""torchspy's tree and graph of a call trace through `sightline.compat.torchspy`, and its command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sightline.cli import main
from sightline.compat.torchspy import digraph
from sightline.compat.torchspy import trace_graph as tg

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")

PATHS = ["encoder.layers.9.attn", "encoder.layers.10.attn", "encoder.layers.10.mlp", "head", "root"]


def test_parsing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tg.parse_trace(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="trace file is empty"):
        tg.parse_trace(tmp_path / "empty.txt")


def test_the_tree_and_its_json(tmp_path: Path) -> None:
    tree = tg.build_tree(PATHS)
    layers = tree.children["encoder"].children["layers"]
    assert (tree.count, layers.count, layers.indices) == (1, 2, {"9", "10"})
    assert layers.parents == [tree.children["encoder"]]
    assert [tree.children[name].first_seen for name in ("encoder", "head")] == [0, 3]
    assert list(tg.build_tree(["0.fc.1"]).children["0"].children) == ["fc"]
    tg.save_tree_json(tree, tmp_path / "tree.json")
    text = (tmp_path / "tree.json").read_text()
    found = json.loads(text)
    assert text.startswith('{\n  "name": "root",\n  "count": 0')
    assert list(found) == ["name", "count", "indices", "children"]
    assert found["children"][0]["children"][0]["indices"] == ["9", "10"]
    assert [one["count"] for one in (found["children"][0], found["children"][0]["children"][0])] == [0, 2]


def test_the_graph() -> None:
    tree = tg.build_tree(PATHS)
    pruned = tg.construct_graph(tree)
    assert "rankdir=TB" in pruned.source
    assert 'label="layers x 2"' in pruned.source
    assert "attn" not in pruned.source
    assert "head" in pruned.source
    assert "label=fc]" in tg.construct_graph(tg.build_tree(["fc.0", "fc.0"])).source  # one index, met twice
    whole = tg.construct_graph(tree, show_repetition=False, prune_leaves_flag=False)
    assert "layers x" not in whole.source
    assert whole.source.count("->") == 3
    twice = tg.build_tree(["a.norm.x", "b.norm.x"])
    assert tg.construct_graph(twice).source.count("norm") == 2
    assert tg.construct_graph(twice, squash_name=True).source.count("norm") == 1


@needs_dot
def test_the_command_writes_the_file_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(PATHS))
    command = [sys.executable, "-m", "sightline", "trace-graph", "--trace-file", "t.txt"]
    more = ["--out", "g.png", "--no-prune-leaves", "--no-show-repetition", "--squash-name", "--dpi", "72",
            "--figwidth", "4", "--figheight", "3", "--save-json", "t.json", "--verbose"]  # fmt: skip
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.png", "t.json", "t.txt"]
    picture = (tmp_path / "g.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == pytest.approx(4 * 72, abs=12)
    assert done.stderr.splitlines() == ["5 calls in t.txt", "wrote t.json", "wrote g.png"]
    assert tg.construct_graph(tg.build_tree(PATHS)).render(tmp_path / "h", cleanup=True).endswith("h.png")


@needs_dot
def test_the_command_without_options_draws_a_pruned_picture(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(PATHS))
    script = (
        "import sys; from sightline.cli import main\n"
        "main(['trace-graph', '--trace-file', 't.txt'], standalone_mode=False)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "wrote trace_graph.png\n")
    dot = tg.construct_graph(tg.build_tree(PATHS), show_repetition=True, prune_leaves_flag=True)
    tg.apply_graph_render_options(dot, dpi=150)
    assert (tmp_path / "trace_graph.png").read_bytes() == dot.pipe("png")


@needs_dot
@pytest.mark.parametrize(("out", "written"), [("g", "g.png"), ("g.SVG", "g.SVG"), ("in/g.pdf", "in/g.pdf")])
def test_the_name_of_the_picture_says_its_format(tmp_path: Path, out: str, written: str) -> None:
    (tmp_path / "t.txt").write_text("\n".join(PATHS))
    given = ["trace-graph", "--trace-file", str(tmp_path / "t.txt"), "--out", str(tmp_path / out)]
    told = CliRunner().invoke(main, given)
    assert (told.exit_code, told.output) == (0, f"wrote {tmp_path / written}\n")
    assert (tmp_path / written).stat().st_size > 0


def test_the_size_of_the_picture() -> None:
    for sides, wanted in (
        ((None, None), ["dpi=99"]),
        ((6, 4), ["dpi=99", 'ratio=fill size="6,4!"']),
        ((6.5, None), ["dpi=99", 'size="6.5!"']),
        ((None, 4.5), ["dpi=99", 'size="4.5!"']),
    ):
        dot = tg.Digraph()
        tg.apply_graph_render_options(dot, 99, *sides)
        assert [line.strip() for line in dot.body] == wanted
        tree = tg.build_tree(["a.b"])
        assert tg.render_graph(tree, True, True, False, 99, *sides).body[-len(wanted) :] == dot.body
    plain = tg.Digraph()
    tg.apply_graph_render_options(plain)
    assert plain.body == ["\tdpi=150\n"]


def test_the_text_is_that_of_the_graphviz_package() -> None:
    dot = tg.construct_graph(tg.build_tree(PATHS))
    wanted = ["digraph {", "rankdir=TB", "n0 [label=encoder]", 'n1 [label="layers x 2"]', "n2 [label=head]"]
    assert [line.strip() for line in dot.source.splitlines()] == [*wanted, "n0 -> n1", "}"]
    assert dot.source.splitlines()[1].startswith("\t")
    dot.attr("node", shape="box", style=None)
    dot.node("a b", color="#ff0000", label="x")
    dot.edge("a b", "n0", label="graph", weight=2)
    dot.edges([("n1", "n2")])
    dot.graph_attr["bgcolor"] = "white"
    dot.node_attr.update(fontsize=9)
    lines = [line.strip() for line in str(dot).splitlines()]
    assert lines[1:3] == ["graph [bgcolor=white]", "node [fontsize=9]"]
    assert lines[-5:] == [
        "node [shape=box]",
        '"a b" [label=x color="#ff0000"]',
        '"a b" -> n0 [label="graph" weight=2]',
        "n1 -> n2",
        "}",
    ]
    with pytest.raises(ValueError, match="graph, node, or edge"):
        dot.attr("cluster", shape="box")


def test_the_text_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dot = tg.construct_graph(tg.build_tree(PATHS))
    assert dot.save("g.gv", tmp_path / "in") == str(tmp_path / "in" / "g.gv")
    assert (tmp_path / "in" / "g.gv").read_text() == dot.source
    monkeypatch.chdir(tmp_path)
    assert Path(dot.save()).read_text() == dot.source


def test_a_picture_can_be_viewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(digraph, "render_dot", lambda text, kind, _nodes: f"<{kind}>{text}".encode())
    dot = tg.render_graph(tg.build_tree(PATHS), dpi=72)
    assert dot.view("g", tmp_path) == str(tmp_path / "g.png")
    assert opened == [(tmp_path / "g.png").resolve().as_uri()]
    assert dot.render("h.png", tmp_path, view=True, cleanup=True) == str(tmp_path / "h.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "g.png", "h.png"]
    assert len(opened) == 2
    assert (tmp_path / "g.png").read_text() == f"<png>{dot.source}"
    assert dot._repr_svg_().startswith("<svg>")
    assert dot.pipe("svg", encoding="utf-8") == dot.pipe("svg").decode()


def test_numbers_are_absorbed_and_last_names_pruned_without_changing_the_tree() -> None:
    by_hand = tg.Node("root", {"h": tg.Node("h", {"2": tg.Node("2", {"fc": tg.Node("fc", count=3)})})})
    squashed = tg.squash_numeric_indices(by_hand).children["h"]
    assert (squashed.indices, squashed.children["fc"].count, squashed.children["fc"].parents) == (
        {"2"},
        3,
        [squashed],
    )
    assert list(by_hand.children["h"].children) == ["2"]
    tree = tg.build_tree(["2.fc", "h.3.fc", "h.11.fc.0.5"])
    assert (list(tree.children), tree.children["h"].indices) == (["2", "h"], {"3", "11"})
    assert tree.children["h"].children["fc"].indices == {"0", "5"}
    pruned = tg.prune_leaves(tree)
    assert [list(node.children) for node in pruned.children.values()] == [[], []]
    assert [list(node.children) for node in tree.children.values()] == [["fc"], ["fc"]]


def test_names_are_data_in_the_graph() -> None:
    source = tg.construct_graph(tg.build_tree(['a"];evil[x="']), prune_leaves_flag=False).source
    assert source.count("[") == 1 + source.count('\\"];evil[')


def test_errors_of_the_command_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for name, sentence in (("none.txt", "trace file not found"), ("empty.txt", "trace file is empty")):
        told = CliRunner().invoke(main, ["trace-graph", "--trace-file", str(tmp_path / name)])
        assert told.exit_code == 1
        assert told.output.startswith(f"Error: {sentence}" if name == "none.txt" else "Error: ")
        assert sentence in told.output
    (tmp_path / "t.txt").write_text("a.b")
    given = ["trace-graph", "--trace-file", str(tmp_path / "t.txt"), "--out", str(tmp_path / "g.jpg")]
    told = CliRunner().invoke(main, given)
    assert told.output == "Error: 'jpg' is no format of a picture here; choose png, svg or pdf.\n"
    assert [path.name for path in tmp_path.glob("g*")] == []
    assert "Examples:" in CliRunner().invoke(main, ["trace-graph", "--help"]).output


# -- torchspy's documents, sentence by sentence -----------------------------------------------------------


def test_a_trace_file_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("  a.b \n\nroot\n")
    assert tg.parse_trace(str(tmp_path / "t")) == ["a.b", "root"]


def test_a_segment_is_a_node_below_the_one_before() -> None:
    tree = tg.build_tree(["a.b.c"])
    assert tree.name == "root"
    assert list(tree.children["a"].children["b"].children) == ["c"]


def test_numbers_are_indices_of_the_name_before() -> None:
    layers = tg.build_tree(["layers.0.fc", "layers.1.fc", "layers.1.fc"]).children["layers"]
    assert (layers.indices, layers.count, list(layers.children)) == ({"0", "1"}, 2, ["fc"])


def test_a_number_in_front_is_a_name() -> None:
    tree = tg.build_tree(["0.fc", "1.fc"])
    assert [(one.name, one.indices, one.count) for one in tree.children.values()] == [
        ("0", set(), 1),
        ("1", set(), 1),
    ]


def test_nodes_remember_their_first_line_and_parents() -> None:
    tree = tg.build_tree(["a.x", "b.y", "a.z"])
    assert [tree.children[name].first_seen for name in "ab"] == [0, 1]
    assert tree.children["a"].children["z"].first_seen == 2
    assert tree.children["a"].parents == [tree]


def test_a_node_has_the_fields_and_defaults_of_the_original() -> None:
    node = tg.Node("n")
    found = (node.name, node.children, node.count, node.first_seen, node.parents, node.indices)
    assert found == ("n", {}, 1, 0, [], set())
    assert {node: 1}[node] == 1


def test_pruning_takes_the_last_name_of_each_path_and_keeps_indices() -> None:
    pruned = tg.prune_leaves(tg.build_tree(["a.layers.0.fc", "a.layers.1.fc", "alone"]))
    layers = pruned.children["a"].children["layers"]
    assert (layers.indices, layers.count, layers.children) == ({"0", "1"}, 2, {})
    assert "alone" in pruned.children


@pytest.mark.parametrize(("shown", "label"), [(True, '"layers x 2"'), (False, "layers")])
def test_repetition_is_shown_or_not(shown: bool, label: str) -> None:
    tree = tg.build_tree(["layers.0.fc", "layers.1.fc"])
    assert f"label={label}]" in tg.construct_graph(tree, show_repetition=shown).source


def test_one_index_met_twice_is_no_repetition() -> None:
    tree = tg.build_tree(["layers.3.a", "layers.3.b"])
    assert "label=layers]" in tg.construct_graph(tree).source


@pytest.mark.parametrize(("squash", "times"), [(False, 2), (True, 1)])
def test_equal_names_are_drawn_once_where_that_is_asked_for(squash: bool, times: int) -> None:
    tree = tg.build_tree(["a.mlp.0.x", "b.mlp.1.x"])
    source = tg.construct_graph(tree, squash_name=squash).source
    assert source.count("mlp") == times
    assert ("mlp x 2" in source) == squash


def test_leaves_are_drawn_where_they_are_not_pruned() -> None:
    tree = tg.build_tree(["a.leaf"])
    assert "leaf" not in tg.construct_graph(tree).source
    assert "leaf" in tg.construct_graph(tree, prune_leaves_flag=False).source


def test_nodes_are_drawn_in_the_order_of_the_trace() -> None:
    source = tg.construct_graph(tg.build_tree(["z.x", "a.x", "m.x"])).source
    assert [source.index(f"n{i} [label={name}]") for i, name in enumerate("zam")] == sorted(
        source.index(f"n{i} [") for i in range(3)
    )


def test_render_graph_is_both_steps_in_one() -> None:
    tree = tg.build_tree(["a.x", "b.x"])
    dot = tg.construct_graph(tree, False, False, True)
    tg.apply_graph_render_options(dot, dpi=99, figwidth=6.0, figheight=4.0)
    assert 'ratio=fill size="6.0,4.0!"' in dot.source
    options: dict[str, Any] = {"dpi": 99, "figwidth": 6.0, "figheight": 4.0}
    assert tg.render_graph(tree, False, False, True, **options).source == dot.source
