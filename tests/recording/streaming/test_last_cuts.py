"""``last=N`` at every op of twenty programs: always a sound recording, and the end of the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from tests.recording.engines import BOTH_ENGINES, needs_native
from tests.recording.streaming.last_programs import PROGRAMS, recorded, wrong_cuts
from tests.recording.streaming.streams import session_of


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten"])
def test_every_cut_through_training_steps_is_sound(engine: Any, ops: str, tmp_path: Path) -> None:
    found = wrong_cuts("linear", tmp_path, lambda count: range(1, count + 1), engine=engine, ops=ops)
    assert list(found) == []


@BOTH_ENGINES
@pytest.mark.parametrize("name", PROGRAMS)
def test_some_cuts_through_every_program_are_sound(engine: Any, name: str, tmp_path: Path) -> None:
    step = 1 + len(recorded(name, engine=engine).ops) // 8
    assert list(wrong_cuts(name, tmp_path, lambda count: range(1, count + 1, step), engine=engine)) == []


@pytest.mark.slow  # a minute on two cores; `make fuzz` has the other levels and engines
@pytest.mark.parametrize(
    ("engine", "ops"),
    [
        pytest.param("native", "both", marks=needs_native),
        pytest.param("native", "api", marks=needs_native),
        ("python", "api"),
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_cut_through_every_program_is_sound(engine: Any, ops: str, name: str, tmp_path: Path) -> None:
    found = wrong_cuts(name, tmp_path, lambda count: range(1, count + 1), engine=engine, ops=ops)
    assert list(found) == []


@BOTH_ENGINES
def test_a_backward_pass_of_what_ran_before_the_block_has_no_forward_ops(engine: Any) -> None:
    t = recorded("only backward", engine=engine)
    assert [op.name for op in t.ops if op.forward is not None] == []


@BOTH_ENGINES
def test_a_gradient_is_added_for_the_forward_op_of_the_same_step(engine: Any) -> None:
    layer = torch.nn.Linear(3, 2)
    with sl.trace(layer, engine=engine, ops="aten") as t:
        for _ in range(3):
            layer(torch.ones(1, 3)).sum().backward()
    begins = [op.id for op in t.ops.where(name="ones")]
    added = t.ops.where(name="add_.Tensor")
    assert len(added) == 4  # weight and bias, in all steps but the first
    for op in added:
        begin = max(begin for begin in begins if begin < op.id)
        assert op.forward is not None
        assert op.forward.id > begin


@BOTH_ENGINES
def test_after_lost_batches_no_op_is_taken_for_the_forward_op_of_what_was_in_them(
    engine: Any, tmp_path: Path
) -> None:
    layer, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    journal = tmp_path / "run.sight" / "rank0.journal"
    trace = sl.trace(layer, path=journal.parent, engine=engine)
    trace.start()
    writer = session_of(trace).stream_writer
    layer(x).sum()
    writer.flush()
    begin = journal.stat().st_size
    loss = layer(x).tanh().sum()
    writer.flush()
    end = journal.stat().st_size
    loss.backward()
    writer.flush()
    x.exp()
    writer.flush()
    left = bytearray(journal.read_bytes())
    trace.stop()
    left[(begin + end) // 2] ^= 1  # in the batch of the forward pass
    (tmp_path / "rank0.journal").write_bytes(left)
    t = sl.load(tmp_path)
    t.validate()
    assert len(t.info["faults"]) == 1
    assert "backward" in {op.phase for op in t.ops}
    assert [op.name for op in t.ops if op.forward is not None] == []
