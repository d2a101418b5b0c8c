"""The callback for Lightning, in real trainings of a small module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.integrations import lightning as ours
from tests.recording.engines import BOTH_ENGINES


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A regression that can be told to go wrong at a batch."""

    def __init__(self, wrong: str = "", at: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self._wrong, self._at, self.seen = wrong, at, 0

    def training_step(self, batch: Tensor) -> Tensor:
        now, self.seen = self.seen, self.seen + 1
        loss: Tensor = self.layers(batch).square().mean()
        if now == self._at and self._wrong == "nan":
            return (loss - loss - 1).log()
        if now == self._at and self._wrong == "raise":
            return loss.reshape(1) @ torch.ones(3)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, net: Net, *callbacks: Any) -> None:
    batches: Any = torch.ones(6, 4)
    data: Any = torch.utils.data.DataLoader(batches, batch_size=2)
    lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        callbacks=list(callbacks),
    ).fit(net, data)  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the callback has logged."""
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
