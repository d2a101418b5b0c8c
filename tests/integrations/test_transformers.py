"""The callback for ``transformers.Trainer``, in real trainings of a tiny model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import sightline as sl
from sightline.integrations.transformers import SightlineCallback
from tests.integrations.trainer_training import tiny, trainer
from tests.recording.engines import BOTH_ENGINES


@pytest.fixture(autouse=True, scope="module")
def first_model() -> None:
    """transformers adds a method to ``nn.Module`` when it makes its first model: no test did that."""
    tiny()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of the callback."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("transformers.sightline"), "handlers", [handler])
    return found


@BOTH_ENGINES
def test_some_steps_are_recorded(tmp_path: Path, said: list[str], engine: str) -> None:
    plain = tiny()
    trainer(tmp_path / "plain", plain).train()
    model, callback = tiny(), SightlineCallback("2:4", engine=engine)
    trainer(tmp_path, model, callback).train()
    assert sorted(vars(model)) == sorted(vars(plain))
    t = sl.load(tmp_path / "sightline.sight")
    assert [step.name for step in t.steps] == ["step2", "step3"]
    assert t.info["engine"] == engine
    assert t.validate().ops == len(t.ops) > 100
    assert {op.phase for op in t.ops} == {"forward", "backward", "optimizer"}
    assert len(t.module_calls.where(module="lm_head")) == 2
    assert callback.path == tmp_path / "sightline.sight"
    assert len(callback.trace.ops) == len(t.ops)
    assert len(said) == 1
    assert said[0].startswith(f"sightline: step2 … step3, {len(t.ops):,} ops in {callback.path}\n")
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), "the same training, bit for bit"


def test_a_step_is_all_its_accumulated_batches(tmp_path: Path, said: list[str]) -> None:
    trainer(tmp_path, tiny(), SightlineCallback(1), gradient_accumulation_steps=3, steps=3).train()
    t = sl.load(tmp_path / "sightline.sight")
    assert [step.name for step in t.steps] == ["step1"]
    assert len(t.module_calls.where(module="lm_head")) == 3


class Poison(transformers.TrainerCallback):  # type: ignore[misc]
    """Makes a weight infinite at a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                model.lm_head.weight.fill_(3e38)


@BOTH_ENGINES
def test_the_first_nan_is_kept_and_the_training_goes_on(tmp_path: Path, said: list[str], engine: str) -> None:
    callback = SightlineCallback(check="nonfinite", engine=engine)
    training = trainer(tmp_path, tiny(), Poison(), callback, max_grad_norm=0)
    training.train()
    assert training.state.global_step == 5
    assert [folder.name for folder in tmp_path.glob("*.sight")] == ["sightline.sight"]
    t = sl.load(tmp_path / "sightline.sight")
    assert [step.name for step in t.steps] == ["step2"]
    first = str(t.nonfinite()).splitlines()[0]
    assert " made " in first
    assert "(transformer.h.0.ln_1)" in first
    assert len(said) == 1
    assert first.partition(" in ")[0] in said[0]


def test_where_all_is_finite_nothing_is_left(tmp_path: Path, said: list[str]) -> None:
    callback = SightlineCallback("1:3", check="nonfinite")
    trainer(tmp_path, tiny(), callback).train()
    assert (callback.trace, callback.path, said) == (None, None, [])
    assert not list(tmp_path.glob("*.sight"))


class Fails(transformers.TrainerCallback):  # type: ignore[misc]
    """Runs an op that fails, in the third step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            torch.ones(2) @ torch.ones(3)


@BOTH_ENGINES
def test_a_training_that_raises_in_a_block(tmp_path: Path, said: list[str], engine: str) -> None:
    callback = SightlineCallback("1:4", engine=engine)
    with pytest.raises(RuntimeError) as caught, callback:
        trainer(tmp_path, tiny(), Fails(), callback).train()
    assert "sightline: dot failed at" in caught.value.__notes__[0]
    assert repr(callback) == "<SightlineCallback, not recording>"
    t = sl.load(tmp_path / "sightline.sight")
    assert "RuntimeError" in t.info["exception"]
    assert [step.name for step in t.steps] == ["step1", "step2"]


def test_without_a_block_the_next_training_ends_it(tmp_path: Path, said: list[str]) -> None:
    callback = SightlineCallback("1:4")
    training = trainer(tmp_path, tiny(), callback, Fails())
    with pytest.raises(RuntimeError):
        training.train()
    assert repr(callback) == "<SightlineCallback, recording>", "transformers tells callbacks of no exception"
    training.remove_callback(Fails)
    training.train()
    assert repr(callback) == "<SightlineCallback, not recording>"
    assert sorted(folder.name for folder in tmp_path.glob("*.sight")) == [
        "sightline-2.sight", "sightline.sight",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path, said: list[str]) -> None:
    callback = SightlineCallback("1:3", capture="no[")
    (tmp_path / "taken").touch()
    callback._recorder._name = "taken/x"
    training = trainer(tmp_path, tiny(), callback)
    training.train()
    assert training.state.global_step == 5
    assert len(said) == 1
    assert said[0].startswith("sightline: no recording was made: No recording can be written to ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, r'^Choose the steps to record: steps="10:12", or check="nonfinite" for the first NaN\.$'),
        ({"steps": "3:2"}, r"^steps='3:2' means no step; count from 0, and end after the first: 0:5\.$"),
        ({"steps": 1.5}, r"^steps=1\.5 must be a step or a range of them"),
        ({"steps": 1, "path": "x"}, r"^path= is the callback's own: it writes to the trainer's folder"),
        ({"steps": 1, "ops": "all"}, r"^ops='all' is not a choice"),
    ],
)
def test_wrong_calls(given: dict[str, Any], why: str) -> None:
    with pytest.raises(sl.UsageError, match=why):
        SightlineCallback(**given)
