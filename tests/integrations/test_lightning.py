"""The callback for Lightning, in real trainings of a small module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.integrations import lightning as ours
from tests.integrations.lightning_training import Net, fit
from tests.recording.engines import BOTH_ENGINES


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of the callback."""
    found: list[str] = []
    monkeypatch.setattr(ours, "rank_zero_info", found.append)
    return found


@BOTH_ENGINES
def test_some_batches_are_recorded_over_epochs(tmp_path: Path, said: list[str], engine: str) -> None:
    plain, net, callback = Net(), Net(), ours.SightlineCallback("2:4", engine=engine)
    fit(tmp_path / "plain", plain)
    fit(tmp_path, net, callback)
    t = sl.load(tmp_path / "sightline.sight")
    assert [step.name for step in t.steps] == ["step2", "step3"]
    assert len(t.module_calls.where(module="layers.2")) == 2
    assert {op.phase for op in t.ops} >= {"forward", "backward", "optimizer"}
    assert callback.path == tmp_path / "sightline.sight"
    assert len(said) == 1
    assert said[0].endswith(f"\n  sightline show {callback.path}")
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, other), "the same training, bit for bit"


@BOTH_ENGINES
def test_the_first_nan_is_kept_and_the_training_goes_on(tmp_path: Path, said: list[str], engine: str) -> None:
    net = Net("nan")
    fit(tmp_path, net, ours.SightlineCallback(check="nonfinite", engine=engine))
    assert net.seen == 6
    t = sl.load(tmp_path / "sightline.sight")
    assert [step.name for step in t.steps] == ["step2"]
    assert str(t.nonfinite()).startswith("log made 1 NaN")
    assert "log made 1 NaN" in said[0]


@BOTH_ENGINES
def test_a_training_that_raises(tmp_path: Path, said: list[str], engine: str) -> None:
    callback = ours.SightlineCallback("1:", engine=engine)
    with pytest.raises(RuntimeError) as caught:
        fit(tmp_path, Net("raise"), callback)
    assert any("failed at" in note for note in caught.value.__notes__)
    assert repr(callback) == "<SightlineCallback, not recording>"
    t = sl.load(tmp_path / "sightline.sight")
    assert "RuntimeError" in t.info["exception"]
    assert [step.name for step in t.steps] == ["step1", "step2"]
