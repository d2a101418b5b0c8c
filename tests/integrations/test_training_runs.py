"""Views of trainings that transformers and Lightning run: true, folded, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import sightline as sl
from sightline.analysis.step_summaries import step_summaries
from tests.integrations.lightning_training import Net, fit
from tests.integrations.trainer_training import tiny, trainer
from tests.recording.engines import BOTH_ENGINES

STEPS = 12


@pytest.fixture(autouse=True, scope="module")
def first_model() -> None:
    """transformers adds a method to ``nn.Module`` when it makes its first model: no test did that."""
    tiny()


@BOTH_ENGINES
def test_steps_of_a_trainer_have_the_numbers_that_it_logs(tmp_path: Path, engine: Any) -> None:
    model = tiny()
    running = trainer(tmp_path, model, steps=STEPS, logging_steps=1, lr_scheduler_type="linear")
    with sl.trace(model, engine=engine) as t:
        running.train()
    logged = [row for row in running.state.log_history if "grad_norm" in row]
    found = step_summaries(t.index)
    assert len(found) == len(logged) == STEPS
    for row, told in zip(logged, found, strict=True):
        assert [*told.losses[0]] == pytest.approx([float(row["loss"])], abs=1e-3)
        assert told.norm == pytest.approx(float(row["grad_norm"]), rel=1e-3)
    for step in t.steps:
        assert [call.module.path for call in step.module_calls if call.parent is None] == [""]
        assert {op.phase for op in step.ops} == {"forward", "backward", "optimizer"}
    t.step(7).validate()


def test_steps_of_a_trainer_with_a_scheduler_fold(tmp_path: Path) -> None:
    model = tiny()
    running = trainer(tmp_path, model, steps=STEPS, lr_scheduler_type="linear")
    with sl.trace(model) as t:
        running.train()
    folded, whole = (str(t.code(fold=fold)).splitlines() for fold in (True, False))
    assert len(folded) < len(whole) / 6
    assert any("×11" in line for line in folded)  # the first one makes the state of the optimizer
    log = str(t.log()).splitlines()
    assert f"● GPT2LMHeadModel ×{STEPS}" in log
    assert len(log) < 300


def test_a_trainer_that_evaluates_between_steps(tmp_path: Path) -> None:
    model = tiny()
    running = trainer(tmp_path, model, steps=4)
    running.args.eval_strategy, running.args.eval_steps = transformers.IntervalStrategy.STEPS, 2
    running.eval_dataset = running.train_dataset[:4]
    with sl.trace(model) as t:
        running.train()
    assert [sum(call.parent is None for call in step.module_calls) for step in t.steps] == [1, 1, 1, 1]
    assert sum(call.parent is None for call in t.module_calls) > 4


@BOTH_ENGINES
def test_what_lightning_runs_in_a_closure_is_forward_and_backward(tmp_path: Path, engine: Any) -> None:
    net = Net()
    with sl.trace(net, engine=engine) as t:
        fit(tmp_path, net)
    assert len(t.steps) == 6  # three batches in each of two epochs
    for step in t.steps:
        phases = {op.phase for op in step.ops}
        assert phases == {"forward", "backward", "optimizer"}
        assert len([call for call in step.module_calls if call.module.path == "layers"]) == 1
    assert all(call.phase == "forward" for call in t.module_calls)
    layers = next(line for line in str(t.summary()).splitlines() if "layers" in line)
    assert "not called" not in layers


def test_generated_tokens_fold(tmp_path: Path) -> None:
    import torch

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with sl.trace(model, path=tmp_path / "run.sight") as t:
        model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=50, do_sample=False)
    assert len(t.steps) == 0
    folded, whole = (len(str(t.code(fold=fold)).splitlines()) for fold in (True, False))
    assert folded < whole / 10
    assert len(str(t.log()).splitlines()) < len(str(t.log(fold=False)).splitlines()) / 10
