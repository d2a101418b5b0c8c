"""A recording that contradicts itself is written, marked and opened, with what is sound in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import sightline as sl
from sightline.api import Trace
from sightline.assemble.forward_links import ForwardLinks
from sightline.data import trace_data as d
from sightline.data.trace_data import TraceData
from sightline.data.validate import validate
from sightline.errors import InvalidTrace
from sightline.schema.columns import Column, all_columns
from sightline.store import load, save
from sightline.store.journal import Journal
from tests.builders import make_trace
from tests.store.bundles import ZOO, all_views

SENTENCE = "This recording contradicts itself: "


@contextmanager
def wrong_forward_ops() -> Iterator[None]:
    """Assemble recordings in which an op is its own forward op."""
    find = ForwardLinks.find

    def wrong(self: ForwardLinks, *stacks: Any) -> None:
        find(self, *stacks)
        self._ops.forward[3:5] = self._ops.base + 4

    with patch.object(ForwardLinks, "find", wrong):
        yield


@contextmanager
def a_wrong_batch(wrong_number: int) -> Iterator[None]:
    """Read journals of which one batch lacks a part of its rows."""
    batch = Journal.batch

    def wrong(self: Journal, number: int, only_late: bool = False) -> Any:
        read = batch(self, number, only_late)
        if number == wrong_number and len(read.rows.fresh):
            read.rows.fresh = read.rows.fresh[:-1]
        return read

    with patch.object(Journal, "batch", wrong):
        yield


def is_marked(path: Path, sentence: str) -> Trace:
    """A recording that opens, says in one line what is wrong, and does not pass for sound."""
    t: Trace = sl.load(path)
    lines = [line for line in str(t).splitlines() if line.startswith("unsound ")]
    assert len(lines) == 1
    assert sentence in lines[0]
    with pytest.raises(InvalidTrace, match=SENTENCE + sentence):
        t.validate()
    assert all(all_views(t).values())
    return t


@pytest.mark.parametrize("options", [{}, {"last": 30}], ids=["whole", "last"])
def test_a_recording_with_a_path_is_written_and_marked(tmp_path: Path, options: dict[str, Any]) -> None:
    layer = torch.nn.Linear(3, 2)
    with wrong_forward_ops(), sl.trace(layer, path=tmp_path / "run.sight", **options) as t:
        for _ in range(3):
            layer(torch.ones(1, 3)).sum().backward()
    assert os.listdir(tmp_path / "run.sight") == ["rank0.db"]
    loaded = is_marked(tmp_path / "run.sight", "backward op 3 comes before its forward op")
    assert [op.name for op in loaded.ops] == [op.name for op in t.ops]
    assert [loaded.ops[at].forward for at in (3, 4)] == [None, None]
    assert sum(op.forward is not None for op in loaded.ops) > 3  # all others are kept


def test_one_in_memory_is_saved_with_a_warning(tmp_path: Path) -> None:
    with wrong_forward_ops():
        with sl.trace() as t:
            x = torch.ones(3, requires_grad=True)
            (x.exp().tanh().sum() * 2).backward()
        assert len(t.ops) > 10  # it is assembled now
    with pytest.raises(InvalidTrace, match=SENTENCE):
        t.validate()
    with pytest.warns(
        UserWarning, match=r"saved to .*run.sight contradicts itself: backward op 3 "
    ) as caught:
        t.save(tmp_path / "run.sight")
    assert caught[0].filename == __file__
    loaded = is_marked(tmp_path / "run.sight", "backward op 3 comes before its forward op")
    with pytest.warns(UserWarning, match="contradicts itself"):
        loaded.save(tmp_path / "again.sight")
    again = is_marked(tmp_path / "again.sight", "backward op 3 comes before its forward op")
    assert again.data.environment == loaded.data.environment  # type: ignore[attr-defined]


def test_a_killed_one_opens(tmp_path: Path) -> None:
    with sl.trace(path=tmp_path / "run.sight") as t:
        x = torch.ones(3, requires_grad=True)
        (x.exp().tanh().sum() * 2).backward()
        assert len(t.ops) > 10  # reading it writes a batch
        with wrong_forward_ops():  # as another process would read it now
            is_marked(tmp_path / "run.sight", "backward op 3 comes before its forward op")


def test_a_batch_that_no_trace_can_be_made_of_is_left_out_with_those_after_it(tmp_path: Path) -> None:
    counts = []

    with sl.trace(path=tmp_path / "run.sight") as running:
        for _ in range(6):
            torch.ones(2).exp()
            counts.append(len(running.ops))
        with a_wrong_batch(4):
            t = sl.load(tmp_path / "run.sight")
    assert len(t.ops) == counts[2]  # the first frame is written before the run
    assert t.info["faults"] == ["Damaged and left out: 3 of its batches."]
    t.validate()


def test_a_bundle_that_cannot_be_assembled_leaves_its_journal(tmp_path: Path) -> None:
    reading, count = ExitStack(), 0
    with sl.trace(path=tmp_path / "run.sight") as t:
        for _ in range(6):
            torch.ones(2).exp()
            count = len(t.ops)
        reading.enter_context(a_wrong_batch(4))
    reading.close()
    assert 0 < len(t.ops) < count
    assert "No bundle was made: " in str(t)
    loaded = sl.load(tmp_path / "run.sight")
    assert len(loaded.ops) == count


def with_wrong_column(data: TraceData, kind: str, name: str, number: int) -> TraceData:
    """A recording in which some rows of a column point at ``number``."""
    columns = getattr(data, kind)
    column = getattr(columns, name).copy()
    column[:: 1 + len(column) // 4] = number
    return replace(data, **{kind: replace(columns, **{name: column})})


@pytest.mark.filterwarnings("ignore:The recording saved to")
@pytest.mark.parametrize("number", [-7, 100])
@pytest.mark.parametrize(
    "column", [one for one in all_columns() if one.is_reference], ids=lambda one: f"{one.table}.{one.name}"
)
def test_any_reference_may_be_wrong(column: Column, number: int, tmp_path: Path) -> None:
    kind, name, target = column.table, column.name, column.meaning.target
    data = max((make().data for make in ZOO.values()), key=lambda data: len(getattr(data, kind)))
    freed = (np.zeros(4, dtype=dtype) for dtype in d.AllocationColumns.dtypes().values())
    data = replace(data, allocations=d.AllocationColumns(*freed))
    wrong = with_wrong_column(data, kind, name, number if number < 0 else 100)
    if target and number >= 0:
        wrong = with_wrong_column(data, kind, name, len(getattr(data, target)))
    with pytest.raises(InvalidTrace, match=SENTENCE):
        validate(wrong)
    save(wrong, tmp_path / "run.sight")
    t = Trace(load(tmp_path / "run.sight"))
    with pytest.raises(InvalidTrace, match=SENTENCE):
        t.validate()
    assert "unsound " in str(t)
    assert all(all_views(t).values())
    assert len(t.ops) == len(data.ops)


def _spans(data: TraceData) -> TraceData:
    return replace(data, calls=replace(data.calls, end_op=data.calls.end_op + 1000))


def _offsets(data: TraceData) -> TraceData:
    return replace(data, ops=replace(data.ops, input_offsets=data.ops.input_offsets[::-1].copy()))


def _statistics(data: TraceData) -> TraceData:
    return replace(data, stats=replace(data.stats, value=data.stats.value[::-1].copy()))


def _circle(data: TraceData) -> TraceData:
    modules = [replace(one, parent=(at + 1) % len(data.modules)) for at, one in enumerate(data.modules)]
    return replace(data, modules=modules)


def _sizes(data: TraceData) -> TraceData:
    return replace(data, metas=[replace(one, shape=(-3,)) for one in data.metas])


def _steps(data: TraceData) -> TraceData:
    return replace(data, steps=[d.StepInfo("first", 0, 3, 0, 1, 0, 0), d.StepInfo("x", 5, 3, 0, 1, 0, 0)])


def _info(data: TraceData) -> TraceData:
    return replace(data, info={**data.info, "pid": "no number", "faults": 3})


@pytest.mark.filterwarnings("ignore:The recording saved to")
@pytest.mark.parametrize("change", [_spans, _offsets, _statistics, _circle, _sizes, _steps, _info])
def test_anything_else_may_be_wrong(change: Any, tmp_path: Path) -> None:
    data = change(ZOO["measured"]().data)
    save(data, tmp_path / "run.sight")
    t = Trace(load(tmp_path / "run.sight"))
    with pytest.raises(InvalidTrace, match=SENTENCE):
        t.validate()
    assert all(all_views(t).values())
    assert len(t.ops) == len(data.ops)


def test_a_sound_recording_is_saved_as_it_is(tmp_path: Path) -> None:
    data = make_trace().data
    save(data, tmp_path / "run.sight")
    t = Trace(load(tmp_path / "run.sight"))
    t.validate()
    assert "contradictions" not in t.info
    assert np.array_equal(t.data.ops.forward, data.ops.forward)
