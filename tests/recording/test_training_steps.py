"""Training steps are found where they are, and each is a recording of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from tests.recording import training_loops as loops
from tests.recording.engines import BOTH_ENGINES


def calls(trace: sl.Trace) -> list[int]:
    """How often the whole model was called in each step."""
    return [sum(call.parent is None for call in step.module_calls) for step in trace.steps]


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten", "api", "none"])
def test_a_step_ends_with_the_optimizer(engine: Any, ops: Any) -> None:
    model = loops.net()
    with sl.trace(model, engine=engine, ops=ops) as t:
        loops.plain(model, 3)
    assert [step.name for step in t.steps] == ["step0", "step1", "step2"]
    assert calls(t) == [1, 1, 1]
    for step in t.steps:
        assert 0 < step.duration < t.info["duration_ns"]


@BOTH_ENGINES
def test_the_step_holds_its_batch_and_what_is_read_of_its_loss(engine: Any) -> None:
    model = loops.net()
    with sl.trace(model, engine=engine, ops="aten") as t:
        loops.plain(model, 3)
    for step in t.steps:
        assert (step.ops[0].name, step.ops[-1].name) == ("randn", "_local_scalar_dense")


@BOTH_ENGINES
def test_building_the_model_is_in_no_step(engine: Any) -> None:
    with sl.trace(engine=engine) as t:
        loops.plain(loops.net(), 2)
    assert t.steps[0].ops[0].name == "torch.randn"
    assert t.steps[0].ops[0].id > 10


def test_gradient_accumulation_is_one_step() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.accumulating(model, 9, 3)
    assert calls(t) == [3, 3, 3]


def test_a_step_that_the_scaler_skips_is_a_step() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.scaled(model, 4, overflow=2)
    assert calls(t) == [1, 1, 1, 1]
    stepped = [any(op.phase == "optimizer" for op in step.ops) for step in t.steps]
    assert stepped == [True, True, False, True]


def test_two_optimizers_that_take_turns_end_one_step() -> None:
    generator, critic = loops.net(4, 4), loops.net()
    with sl.trace() as t:
        loops.adversarial(generator, critic, 3)
    assert calls(t) == [4, 4, 4]
    assert t.steps[0].ops[0].name == "torch.randn"


def test_a_closure_runs_inside_its_step() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.with_closure(model, 2)
    assert len(t.steps) == 2
    assert min(calls(t)) > 1


def test_an_evaluation_between_steps_is_in_neither() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.evaluating(model, 3)
    assert calls(t) == [1, 1, 1]


def test_a_run_without_an_optimizer_has_no_steps() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        model(torch.ones(2, 4)).sum().backward()
    assert len(t.steps) == 0
    with pytest.raises(sl.SightlineError, match=r"^step=0: this recording has no steps: one ends with opt"):
        t.code(step=0)


def test_an_optimizer_that_raises_leaves_the_names_of_steps_alone() -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails() -> Any:
        raise RuntimeError("no loss")

    with sl.trace(model) as t:
        with pytest.raises(RuntimeError, match="no loss"), sl.step("a"):
            optimizer.step(fails)
        with sl.step("b"):
            model(torch.ones(2, 4))
    assert [(step.name, len(step.module_calls)) for step in t.steps] == [("a", 0), ("b", 4)]


def test_named_steps_are_the_steps_and_their_numbers_count() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        for number in (7, 8):
            with sl.step(f"step{number}"):
                loops.plain(model, 2)
        loops.plain(model, 1)
    assert [step.name for step in t.steps] == ["step7", "step8", "step2"]
    with sl.trace(model) as t:
        for number in (7, 8):
            with sl.step(f"step{number}"):
                loops.plain(model, 1)
    assert len(t.step(8).module_calls) == 4
    assert len(t.step("step7").module_calls) == 4
    with pytest.raises(sl.SightlineError, match=r"^step=0 is not there; .* has the steps 7 to 8\.$"):
        t.step(0)


@BOTH_ENGINES
@pytest.mark.parametrize("how", ["memory", "stream", "last"])
def test_a_step_is_a_sound_recording_in_every_way_of_recording(engine: Any, how: str, tmp_path: Path) -> None:
    ways: dict[str, Any] = {"memory": {}, "stream": {"path": tmp_path / "run.sight"}, "last": {"last": 400}}
    given = ways[how]
    model = loops.net()
    with sl.trace(model, engine=engine, stats=True, capture=True, **given) as t:
        loops.plain(model, 6)
    assert len(t.steps) == 6 if how != "last" else 0 < len(t.steps) < 6
    last = t.step("last")
    last.validate()
    t.step(slice(1, None)).validate()
    assert len(last.ops) == len(t.steps[-1].ops)
    whole = [op.name for op in t.steps[-1].ops]
    assert [op.name for op in last.ops] == whole
    assert [str(op) for op in last.ops] == [str(op) for op in t.steps[-1].ops]
    assert {value.kind for value in last.values} <= set(
        "input parameter state activation gradient constant".split()
    )
    assert [tensor.key for tensor in last.tensors.where(role="output")] != []
    for view in (last.code, last.log, last.summary, last.source, last.memory, last.problems, last.call_order):
        assert str(view())
    assert str(last)
    last.graph().lint()
    last.save(tmp_path / "one.sight")
    again = sl.load(tmp_path / "one.sight")
    again.validate()
    assert [op.name for op in again.ops] == whole


def test_a_range_of_steps_and_every_view_of_one() -> None:
    model = loops.net()
    with sl.trace(model, stats=True) as t:
        loops.plain(model, 5)
    assert len(t.step("1:3").steps) == 2
    assert [step.name for step in t.step("3:").steps] == ["step3", "step4"]
    assert len(t.step("3:").step(4).module_calls) == 4
    assert str(t.code(step=3)) == str(t.step(3).code())
    for name in "code source log call_order summary memory problems nonfinite".split():
        assert str(getattr(t, name)(step="last")) == str(getattr(t.step(4), name)())
    assert len(t.graph(step=2).nodes) == len(t.step(2).graph().nodes)
    assert str(t.lineage("loss", step=1)).splitlines()[0].startswith("loss was last set at")


def test_the_memory_of_a_step_is_that_of_the_step() -> None:
    model = nn.Linear(64, 64)
    with sl.trace(model) as t:
        loops.plain_of(model, [8, 512, 8])
    from sightline.analysis.memory import usage_of

    peaks = [usage_of(t.step(number).index)[0].peak.nbytes for number in range(3)]
    assert peaks[1] > peaks[0]
    assert peaks[1] == usage_of(t.index)[0].peak.nbytes


@pytest.mark.parametrize("step", ["x:3", -1, "", True, 2.5, slice(3, 1), "5:3", slice(0, 4, 2)])
def test_what_is_no_step_is_said_in_one_sentence(step: Any) -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.plain(model, 1)
    with pytest.raises(sl.UsageError, match=r"^step=.* must be a step, counted from 0: 3, '3:5', 'last'"):
        t.step(step)


@pytest.mark.parametrize("ops", ["api", "both", "aten"])
def test_an_evaluation_belongs_to_no_step_at_any_level(ops: Any) -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, ops=ops) as t:
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(8, 4)).sum().item()
    assert calls(t) == [1, 1, 1]


def test_a_loss_that_is_read_after_an_average_of_weights_belongs_to_its_step() -> None:
    model = loops.net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with sl.trace(model) as t:
        for _ in range(3):
            loss = model(torch.randn(5, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            losses.append(loss.item())
    for number, loss in enumerate(losses):
        assert f"; loss {loss:.3g}\n" in str(t.step(number))
        assert next(op.name for op in t.step(number).ops.where(level="api")) == "torch.randn"


def test_a_loop_without_modules_has_its_steps_apart() -> None:
    weight = torch.ones(4, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with sl.trace() as t:
        for number in range(3):
            x = torch.full((5, 4), float(number))
            loss = (x @ weight).relu().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    names = [[op.name for op in step.ops.where(level="api", phase="forward")] for step in t.steps]
    assert names == [["torch.full", "@", "Tensor.relu", "Tensor.square", "Tensor.mean", "Tensor.item"]] * 3


def test_what_a_program_does_once_is_in_no_step() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        batches = [torch.randn(5, 4) for _ in range(3)]
        mean = torch.stack([each.mean(0) for each in batches]).mean(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            model(batch - mean).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [t.ops[step.first_op].name for step in t.index.step_infos] == ["-", "-", "-"]


def test_a_step_begins_with_a_line() -> None:
    model, grid = loops.net(), torch.linspace(0, 1, 4)
    with sl.trace(model) as t:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            batch = torch.sin(3 * grid[None, :] + torch.rand(5, 1))
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [t.ops[step.first_op].name for step in t.index.step_infos] == ["[]", "[]", "[]"]


def test_a_single_step_begins_after_the_last_pause() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        batch = torch.randn(5, 4)
        time.sleep(0.1)  # an optimizer may take as long to build
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch.abs()).sum().backward()
        optimizer.step()
    (step,) = t.index.step_infos
    assert "abs" in t.ops[step.first_op].name
    assert step.duration < 100_000_000
