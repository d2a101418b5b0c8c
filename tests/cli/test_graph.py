"""``sightline graph``: printed, or written in the format of the suffix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import sightline as sl
from sightline.graph.graph import Graph
from tests.cli.recorded import cli, invoke, misused, refused


def test_it_prints_mermaid_and_other_texts(run: Path) -> None:
    graph = sl.load(run).graph(fold=True)
    assert cli("graph", run, "--fold") == graph.to_mermaid().rstrip("\n") + "\n"
    assert cli("graph", run, "--fold", "--to", "dot").startswith("digraph")
    assert cli("graph", run, "--fold", "--to", "list") == f"{graph}\n"
    again = Graph.from_json(cli("graph", run, "--fold", "--to", "json"))
    assert again.to_json() == graph.to_json()


def test_every_option_is_that_of_the_trace(run: Path) -> None:
    trace = sl.load(run)
    options = ["--level", "aten", "--module", "blocks.0", "--phase", "both", "--prune", "views"]
    wanted = trace.graph(
        level="aten", module="blocks.0", phase="both", prune=["views", "parameters"], depth=1
    )
    assert cli("graph", run, *options, "--prune", "parameters", "--depth", 1, "--to", "list") == f"{wanted}\n"
    assert cli("graph", run, "--level", "module", "--to", "list") == f"{trace.graph(level='module')}\n"


@pytest.mark.parametrize("suffix", ["dot", "gv", "mmd", "json", "svg"])
def test_the_end_of_the_name_says_the_format(run: Path, tmp_path: Path, suffix: str) -> None:
    if suffix == "svg" and shutil.which("dot") is None:
        pytest.skip("graphviz is not installed: drawing is tested where it is")
    path = tmp_path / f"g.{suffix}"
    result = invoke("graph", run, "-o", path, "--fold")
    assert (result.exit_code, result.stdout) == (0, "")
    graph = sl.load(run).graph(fold=True)
    assert result.stderr == f"{path}: {len(graph.nodes)} nodes, {len(graph.edges)} edges\n"
    begins = {"dot": "digraph", "gv": "digraph", "mmd": "flowchart", "json": "{", "svg": "<?xml"}[suffix]
    assert begins in path.read_text("utf-8")[:200]
    if suffix == "json":
        assert json.loads(path.read_text("utf-8"))


def test_wrong_calls_are_one_sentence(run: Path, tmp_path: Path) -> None:
    assert misused("graph", run, "-o", "g.svg", "--to", "dot") == (
        "--to is for printing; with -o the suffix of the file decides the format."
    )
    assert refused("graph", run, "-o", tmp_path / "g.xyz").startswith("'g.xyz' names no format of a graph")
    gone = tmp_path / "nowhere" / "g.dot"
    assert str(gone.parent) in refused("graph", run, "-o", gone)
    assert "matches no" in refused("graph", run, "--module", "nowhere")
