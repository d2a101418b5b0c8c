"""A small training by Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor, nn


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
