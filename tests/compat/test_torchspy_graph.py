"""torchspy's tree and graph of a call trace through `sightline.compat.torchspy`, and its command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert (tree.count, layers.count, layers.indices) == (5, 3, {9, 10})
    assert layers.parents == [tree.children["encoder"]]
    assert [tree.children[name].first_seen for name in ("encoder", "head")] == [0, 3]
    assert list(tg.build_tree(["0.fc.1"]).children["0"].children) == ["fc"]
    tg.save_tree_json(tree, tmp_path / "tree.json")
    text = (tmp_path / "tree.json").read_text()
    found = json.loads(text)
    assert text.startswith('{\n  "name": "root",\n  "count": 5')
    assert list(found) == ["name", "count", "indices", "children"]
    assert found["children"][0]["children"][0]["indices"] == [9, 10]


def test_the_graph() -> None:
    tree = tg.build_tree(PATHS)
    pruned = tg.construct_graph(tree)
    assert 'rankdir="TB"' in pruned.source
    assert 'label="layers x 2"' in pruned.source
    assert "attn" not in pruned.source
    assert "head" in pruned.source
    whole = tg.construct_graph(tree, show_repetition=False, prune_leaves_flag=False)
    assert "layers x" not in whole.source
    assert whole.source.count("->") == 3
    twice = tg.build_tree(["a.norm.x", "b.norm.x"])
    assert tg.construct_graph(twice).source.count("norm") == 2
    assert tg.construct_graph(twice, squash_name=True).source.count("norm") == 1


@needs_dot
def test_the_command_writes_the_file_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(PATHS))
    command = [sys.executable, "-m", "sightline.compat.torchspy.trace_graph", "--trace-file", "t.txt"]
    more = ["--out", "g.png", "--no-prune-leaves", "--no-show-repetition", "--squash-name", "--dpi", "72",
            "--figwidth", "4", "--figheight", "3", "--save-json", "t.json", "--verbose"]  # fmt: skip
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.png", "t.json", "t.txt"]
    picture = (tmp_path / "g.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == pytest.approx(4 * 72, abs=12)
    assert "wrote g.png" in done.stderr
    assert tg.construct_graph(tg.build_tree(PATHS)).render(tmp_path / "h", cleanup=True).endswith("h.png")
    assert tg.main(["--trace-file", str(tmp_path / "none.txt")]) == 1
