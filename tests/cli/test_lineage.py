"""``sightline lineage``: by value, op, name and key."""

from __future__ import annotations

from pathlib import Path

import pytest

import sightline as sl
from tests.cli.recorded import cli, misused, refused


@pytest.mark.parametrize(
    "key", ["$20", "blocks.1", "blocks.0.h", "head.weight", "step1/blocks.0.fc/output/1/0"]
)
def test_whatever_the_trace_understands(run: Path, key: str) -> None:
    assert cli("lineage", run, key) == f"{sl.load(run).lineage(key)}\n"


def test_a_number_is_an_op(run: Path) -> None:
    trace = sl.load(run)
    op = next(op for op in trace.ops if op.name == "relu")
    assert cli("lineage", run, op.id, "--depth", 2, "--level", "aten") == (
        f"{trace.lineage(op, depth=2, level='aten')}\n"
    )


def test_what_is_not_there_is_one_sentence(run: Path) -> None:
    trace = sl.load(run)
    assert refused("lineage", run, 10**6) == (
        f"There is no op 1000000 in this trace; its ops are 0 … {len(trace.ops) - 1}."
    )
    assert refused("lineage", run, "$999999").startswith("There is no value $999999 in this trace")
    assert "did you mean 'head.weight'" in refused("lineage", run, "head.weigth")
    for key in ("9" * 5000, "$" + "9" * 5000):
        assert "names no value, module or variable of this trace" in refused("lineage", run, key)
    assert misused("lineage", run) == "Missing argument 'KEY'."
