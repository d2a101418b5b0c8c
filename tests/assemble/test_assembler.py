"""A recording cut into batches anywhere says what one in one piece says, and each beginning is valid."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sightline as sl
from sightline.assemble.batch import Batch, LateRows, Tables
from sightline.assemble.last_ops import keep_last, merge_batches
from sightline.assemble.memory_sink import assemble
from sightline.data.validate import validate
from sightline.recording.atomic import exhaust
from sightline.recording.plain import hooks
from sightline.recording.snapshot import tables_of
from sightline.recording.streaming.batches import BatchCutter
from sightline.recording.torchapi import without_modes
from tests.recording.streaming.streams import awkward, differences, session_of


class Cuts:
    """Cuts right after rows are written, anywhere inside the recorder: as another thread might."""

    def __init__(self, session: Any, seed: int, chance: float) -> None:
        self._random, self._chance = random.Random(seed), chance  # always the same cuts
        self.cutter = BatchCutter(session)
        self.batches: list[Batch] = []

    def __call__(self, frame: Any, event: str, function: Any) -> None:
        written = event == "c_return" and (function.__name__ == "fromlist" or function == exhaust)
        if written and self._random.random() < self._chance:
            self.batches.append(self.cutter.cut())


def recorded(work: Callable[[], Any], seed: int, chance: float, **asked: Any) -> tuple[Tables, list[Batch]]:
    """The batches of a run."""
    trace = sl.trace(engine="python", **asked)  # its rows are written by a function that can be watched
    trace.start()
    session = session_of(trace)
    cuts = Cuts(session, seed, chance)
    sys.setprofile(cuts)
    try:
        work()
    finally:
        sys.setprofile(None)
        hooks.uninstall(session)
    without_modes(session.finish)
    if session.observer is not None:
        without_modes(session.observer.finish)
    return tables_of(session), [*cuts.batches, cuts.cutter.cut(last=True)]


def recompute() -> Any:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def work() -> None:
        for _ in range(2):
            checkpoint(layer, torch.randn(2, 3, 8, requires_grad=True), use_reentrant=False).sum().backward()

    return layer, work


RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "both": (awkward, {}),
    "aten with statistics": (lambda: awkward(torch.optim.SGD), {"ops": "aten", "stats": True}),
    "api": (awkward, {"ops": "api"}),
    "none": (awkward, {"ops": "none"}),
    "recompute with captures": (recompute, {"capture": True, "stats": True}),
}


@pytest.mark.parametrize("chance", [0.03, 0.5])
@pytest.mark.parametrize("run", RUNS)
def test_batches_say_what_one_piece_says(run: str, chance: float) -> None:
    made, asked = RUNS[run]
    model, work = made()
    tables, batches = recorded(work, seed=1, chance=chance, model=model, **asked)
    assert len(batches) > 2
    whole, _ = assemble(tables, [([merge_batches(batches)], True)], LateRows())
    validate(whole)
    late = LateRows.of(batches)
    alone, _ = assemble(tables, [([batch], batch is batches[-1]) for batch in batches], late)
    assert differences(whole, alone, set()) == []
    pairs = [batches[at : at + 2] for at in range(0, len(batches), 2)]
    paired, assembler = assemble(tables, [(pair, pair is pairs[-1]) for pair in pairs], late)
    assert differences(whole, paired, set()) == []
    assert len(assembler._live) < len(whole.values)


@pytest.mark.parametrize("run", RUNS)
def test_every_beginning_is_a_valid_recording(run: str) -> None:
    made, asked = RUNS[run]
    model, work = made()
    tables, batches = recorded(work, seed=2, chance=0.06, model=model, **asked)
    ops = []
    for end in range(1, len(batches)):
        some = batches[:end]
        parts = [([batch], batch is some[-1]) for batch in some]
        data, _ = assemble(tables, parts, LateRows.of(some))
        assert validate(data).external == 0
        ops.append(len(data.ops))
    assert ops[-1] > ops[0] or run == "none"


@pytest.mark.parametrize("count", [1, 10, 100, 100_000])
@pytest.mark.parametrize("run", RUNS)
def test_the_last_ops_are_a_valid_recording(run: str, count: int) -> None:
    made, asked = RUNS[run]
    model, work = made()
    tables, batches = recorded(work, seed=3, chance=0.05, model=model, **asked)
    whole, _ = assemble(tables, [([merge_batches(batches)], True)], LateRows())
    batch, dropped = keep_last(merge_batches(batches), count, tables.operations)
    tables.sequences = dropped.sequences
    data, _ = assemble(tables, [([batch], True)], LateRows(), sparse=True)
    validate(data)
    rows, kept = (whole.ops, data.ops) if len(whole.ops) else (whole.calls, data.calls)
    assert dropped.ops == max(len(rows) - count, 0)
    assert len(whole.ops) == 0 or len(kept) == min(count, len(rows))
    names = [whole.names[name] for name in whole.ops.name]
    assert [data.names[name] for name in data.ops.name] == names[len(names) - len(data.ops) :]
    if not dropped.ops:
        assert differences(whole, data, set()) == []
