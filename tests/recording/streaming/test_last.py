"""``last=N``: the last N ops of a run however long, and what they refer to."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.errors import UsageError
from sightline.recording.streaming import writer as stream_writer
from sightline.recording.streaming.batches import BatchCutter
from tests.recording.streaming.streams import Awkward, awkward, both_ways, differences, session_of, train


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches as small as they can be."""
    monkeypatch.setattr(stream_writer, "SECONDS", 0.001)
    monkeypatch.setattr(stream_writer, "_MAX_STALE", 1 << 12)


def names(trace: sl.Trace) -> list[str]:
    return [op.name for op in trace.ops]


@pytest.mark.parametrize("ops", ["both", "aten", "api"])
@pytest.mark.parametrize("count", [1, 37, 400])
def test_it_holds_exactly_the_last_ops(ops: str, count: int) -> None:
    whole, last = both_ways(awkward, {"ops": ops}, last=count)
    kept = min(count, len(whole.ops))
    assert names(last) == names(whole)[len(whole.ops) - kept :]
    assert last.info["dropped"] == len(whole.ops) - kept
    forward = [
        at for at, op in enumerate(last.ops) if op.phase == "forward"
    ]  # others follow their forward op
    assert [last.ops[at].call is None for at in forward] == [
        whole.ops[at - kept].call is None for at in forward
    ]
    assert [[value.shape for value in op.inputs] for op in last.ops] == [
        [value.shape for value in op.inputs] for op in whole.ops[-kept:]
    ]


def test_what_a_dropped_op_made_is_evicted_and_never_external() -> None:
    with sl.trace(last=1) as t:
        x = torch.ones(2, 3).exp()
        for _ in range(20):
            torch.zeros(1).cos()
        x.relu()
    [op] = t.ops
    assert (op.name, [value.kind for value in op.inputs]) == ("relu", ["evicted"])
    assert (t.info["evicted"], t.info["external"]) == (1, 0)
    assert t.values.where(kind="evicted")[0].producer is None


def test_parameters_stay_what_they_are() -> None:
    model = Awkward()
    with sl.trace(model, last=60) as t:
        train(model, 5)
    assert t.values.where(name="first.weight")[0].kind == "parameter"
    assert {value.kind for op in t.ops for value in op.inputs} <= {
        "parameter", "state", "gradient", "activation", "evicted", "constant", "buffer", "input"
    }  # fmt: skip


def test_fewer_ops_than_asked_for_are_the_whole_recording() -> None:
    whole, last = both_ways(awkward, {}, last=100_000)
    assert differences(whole.data, last.data) == []
    assert last.info["dropped"] == 0


@pytest.mark.parametrize("stale", [1 << 30, 0])
def test_a_journal_on_disk_says_what_came_before(
    tmp_path: Path, stale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it still has the frames that the ring has dropped, or was rewritten without them."""
    monkeypatch.setattr(stream_writer, "_MAX_STALE", stale)
    with sl.trace(path=tmp_path / "run.sight", last=10) as t:
        for step in range(1, 6):
            for _ in range(20):
                torch.ones(2).exp()
            assert t.info["dropped"] == step * 80 - 10
            assert sl.load(tmp_path / "run.sight").info["dropped"] == step * 80 - 10


def test_memory_holds_frames_of_the_last_ops_only() -> None:
    model = Awkward()
    trace = sl.trace(model, last=50)
    trace.start()
    writer = session_of(trace).stream_writer
    held = []
    for _ in range(12):
        train(model, 1)
        writer.flush()
        held.append(writer._last.ops)
    trace.stop()
    assert max(held) <= 50 + 2 * max(held[0], 300)  # what is needed, and the batch it begins in
    assert writer._last.ops == 0


def test_steps_and_snapshots() -> None:
    model = Awkward()
    with sl.trace(model, last=40, stats=True) as t:
        train(model, 3)
        assert len(t.ops) == 40
        with sl.step("the last"):
            model(torch.randn(5, 8))
    assert t.steps[-1].name == "the last"
    assert any(value.stats is not None for op in t.ops for value in op.outputs)


def test_together_with_path(tmp_path: Path) -> None:
    model = Awkward()
    with sl.trace(model, last=80, path=tmp_path / "run.sight") as t:
        for _ in range(20):
            train(model, 1)
        size = (tmp_path / "run.sight" / "rank0.journal").stat().st_size
        early = sl.load(tmp_path / "run.sight")  # what another process would see now
        early.validate()
    assert len(early.ops) <= 80
    assert size < 400_000
    assert os.listdir(tmp_path / "run.sight") == ["rank0.db"]
    assert len(t.ops) == 80
    assert names(sl.load(tmp_path / "run.sight")) == names(t)


def test_module_calls_count_where_no_ops_are_recorded() -> None:
    model = Awkward()
    with sl.trace(model, ops="none", last=5) as t:
        for _ in range(10):
            model(torch.randn(5, 8))
    assert [call.module.path for call in t.module_calls] == ["", "second", "", "first", "norm", "second"]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "10"])
def test_a_wrong_number_says_what_is_meant(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"is how many ops to keep: a whole number from 1 up\."):
        sl.trace(last=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [False, True])
def test_weights_keep_their_names_through_a_training_loop(inside: bool) -> None:
    model = None if inside else torch.nn.Linear(3, 2)
    with sl.trace(model, last=60) as t:
        model = torch.nn.Linear(3, 2) if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    t.validate()
    read = [op.inputs[0] for op in t.ops.where(name="addmm")]
    assert {(value.kind, value.name) for value in read} == {("parameter", "bias")}
    assert {value.name for value in t.values if value.kind == "parameter"} == {"weight", "bias"}


def test_weights_named_while_a_batch_is_taken_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows come with the next batch, and so must their names."""
    armed, taking, named = threading.Event(), threading.Event(), threading.Event()
    alive = BatchCutter._alive

    def paused(self: BatchCutter, batch: Any) -> Any:
        if armed.is_set() and not taking.is_set():
            taking.set()
            assert named.wait(60)
        return alive(self, batch)

    monkeypatch.setattr(BatchCutter, "_alive", paused)
    with sl.trace(last=60) as t:
        torch.ones(1)
        armed.set()
        assert taking.wait(60)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 3))
        named.set()
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    read = [op.inputs[0] for op in t.ops.where(name="addmm")]
    assert {(value.kind, value.name) for value in read} == {("parameter", "bias")}
