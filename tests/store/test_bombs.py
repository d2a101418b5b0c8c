"""Small files that would fill the memory of a machine: each is one sentence, or stays in proportion."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sightline.data import trace_data as d
from sightline.data.forms import Form
from sightline.store import bundle_schema as schema
from sightline.store import save
from sightline.store.damage import Damage
from sightline.store.limits import Budget, json_cost
from tests.builders import make_trace
from tests.limits import measured
from tests.store.bundles import altered, saved
from tests.store.journals import frame, written

MOST = 700  # MB: Python, numpy and the constant of the budget


def repeated(data: d.TraceData, times: int) -> d.TraceData:
    """A recording whose ops ran again and again, which a file says in a few bytes."""
    columns = {}
    for name in schema.columns_of("ops"):
        column = getattr(data.ops, name)
        if name.endswith("_offsets"):
            columns[name] = np.concatenate([[0], np.cumsum(np.tile(np.diff(column), times))])
        else:
            columns[name] = np.tile(column, times)
    return replace(data, ops=d.OpColumns(**columns))


def with_source(folder: Path, text: str) -> Path:
    path = saved(make_trace(2), folder)
    connection = sqlite3.connect(path / schema.DATABASE, isolation_level=None)
    raw = text.encode()
    connection.execute(
        "UPDATE sources SET size = ?, data = ?, whole = 1", (len(raw), zlib.compress(raw, 9))
    ).fetchall()
    connection.close()
    return altered(path)


def with_names(folder: Path, length: int, times: int) -> Path:
    data = repeated(make_trace(1).data, times)
    save(replace(data, names=[f"{number}{'n' * length}" for number in range(len(data.names))]), folder)
    return folder


def with_forms(folder: Path) -> Path:
    data = repeated(make_trace(1).data, 400)
    save(replace(data, forms=[Form(("x" * 500_000,)) for _ in data.forms]), folder)
    return folder


def with_streams(folder: Path) -> Path:
    packed = zlib.compress(bytes(8 * 4_000_000), 9)
    folder.mkdir()
    return written(folder, *[frame({"streams": [["alive", 4_000_000, len(packed)]]}, packed)] * 40)


def with_heads(folder: Path) -> Path:
    folder.mkdir()
    return written(folder, *[frame({"pad": [[]] * 400_000})] * 40)


def with_journal_sources(folder: Path) -> Path:
    folder.mkdir()
    return written(folder, *[frame({"sources": [["net.py", "a\n" * 4_000_000]]})] * 40)


BOMBS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "lines without end": (
        lambda path: with_source(path, "\n" * (8 << 20)),
        "source",
        "would take more memory",
    ),
    "a tree of syntax": (lambda path: with_source(path, "a;" * (1 << 19)), "source", ""),
    "a line without end": (lambda path: with_source(path, "x" * (2 << 20)), "code", ""),
    "one long name, many ops": (lambda path: with_names(path, 1 << 20, 200), "code", "more text than a file"),
    "many long names": (lambda path: with_names(path, 1 << 20, 1), "to_perfetto", ""),
    "long arguments, many ops": (with_forms, "code", "more text than a file"),
    "streams that are small one by one": (with_streams, "load", "would take more memory"),
    "heads that are small one by one": (with_heads, "load", "would take more memory"),
    "sources of a journal": (with_journal_sources, "load", "would take more memory"),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """What became of every bomb, one after the other in one process."""
    folder = tmp_path_factory.mktemp("bombs")
    code = [f"out = {str(folder / 'out.json')!r}"]
    for number, (name, (make, view, _)) in enumerate(BOMBS.items()):
        path = str(make(folder / f"{number}"))
        asked = {"load": "", "to_perfetto": ".to_perfetto().save(out)"}.get(view, f".{view}()")
        code.append(f"attempt({name!r}, lambda: load({path!r}){asked})")
    return measured("\n".join(code))


@pytest.mark.parametrize("name", BOMBS)
def test_no_small_file_fills_the_memory(outcome: dict[str, tuple[str, int]], name: str) -> None:
    text, peak = outcome[name]
    assert BOMBS[name][2] in text
    assert bool(text) == bool(BOMBS[name][2])
    assert peak < MOST


def test_what_is_read_again_is_taken_once() -> None:
    budget = Budget(0)
    left = budget.left
    for _ in range(5):
        budget.take("its names", 1000)
    assert budget.left == left - 1000
    budget.take("its names", 1500)
    assert budget.left == left - 1500
    with pytest.raises(Damage, match="its ops would take more memory than a file of 0 bytes may"):
        budget.take("its ops", left)


def test_the_cost_of_json_follows_its_objects() -> None:
    assert json_cost("[" + "[]," * 1000 + "0]") > 64_000
    assert json_cost('"' + "x" * 1000 + '"') < 3000
