"""Models that DLBacktrace's documents trace, and a prediction compared with the output of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sightline.compat.dl_backtrace import DLBacktrace


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class PictureAndTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picture = Pictures()
        self.table = nn.Linear(5, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, image: Tensor, metadata: Tensor) -> Any:
        return self.head(torch.cat([self.picture(image), self.table(metadata)], dim=1))


class Of(nn.Module):
    """A model of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def output(node_io: dict[str, dict[str, Any]]) -> Any:
    return node_io["output"]["output_values"]


def assert_predicts(dlb: DLBacktrace, *inputs: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    """A prediction with the output of the model itself."""
    node_io = dlb.predict(*inputs, **kwargs)
    with torch.no_grad():
        torch.testing.assert_close(output(node_io), dlb.model(*inputs, **kwargs))
    return node_io
