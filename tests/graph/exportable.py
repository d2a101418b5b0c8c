"""Models that `export` must take: each with an example and, where sizes are dynamic, another call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model and calls of it: the first is exported, all must run."""

    name: str
    build: Callable[[], nn.Module]
    calls: Callable[[], list[Call]]

    def __str__(self) -> str:
        return self.name


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.pool(self.relu(self.conv(x))).flatten(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.table = nn.Linear(5, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, image: Tensor, table: Tensor) -> Any:
        return self.head(torch.cat([self.image(image), self.table(table)], dim=1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


class Causal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Keywords(nn.Module):
    """Arguments that a table of known ops would lose."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.add(x, x, alpha=3) + F.gelu(x, approximate="tanh")
        return F.max_pool2d(y, 2) * F.max_pool2d(x * x, 2)


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, pair: list[Tensor], batch: dict[str, Any], *, scale: Tensor, power: int = 2) -> Any:
        total = pair[0] + pair[1] * batch["inner"]["x"]
        return {"y": self.fc(total) * scale, "pieces": [total**power, (batch["z"],)]}


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


@dataclass
class Plain:
    """A dataclass nobody registered."""

    logits: Tensor
    inner: dict[str, Tensor]
    label: str = "plain"


class SeveralOutputs(nn.Module):
    def forward(self, x: Tensor) -> Any:
        values, indices = x.max(dim=1)
        return Pair(values, indices), *x.split(1, dim=1)[:2]


class Dataclass(nn.Module):
    def forward(self, x: Tensor) -> Plain:
        return Plain(x * 2, {"half": x / 2})


class InPlace(nn.Module):
    """Ops that change tensors: the recorded values must be those before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.conv(x))
        y[:, 0] = 0
        y.view(-1).mul_(2)
        return y + 1


class Branches(nn.Module):
    """Control flow that an export keeps, and a stretch without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            mean = x.mean()
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (self.fc(x) + mean,))


class Modes(nn.Module):
    """Stretches in other modes: their ops must be seen, and run in them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        y = self.one(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.other(y)
        with torch.enable_grad():
            z = z * y
        return z + 1, z


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.twin = self.fc

    def forward(self, x: Tensor) -> Any:
        return self.twin(self.fc(self.fc(x)))


class Sizes(nn.Module):
    """Sizes that flow through Python into ops, and one that is the result."""

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        return x.view(batch * length, width).mean(0) / length, torch.arange(length) * batch, length


class Nonzero(nn.Module):
    """A size that only the numbers tell."""

    def forward(self, x: Tensor) -> Tensor:
        return x.nonzero().sum(0)


def calls(*shapes: Any) -> Callable[[], list[Call]]:
    """Calls with random tensors: each item is the shape of the only input or a tuple of shapes."""

    def make() -> list[Call]:
        return [
            (tuple(torch.randn(one) for one in (shape if isinstance(shape[0], tuple) else (shape,))), {})
            for shape in shapes
        ]

    return make


def structures() -> list[Call]:
    def one(batch: int) -> Call:
        x = [torch.randn(batch, 4) for _ in range(5)]
        return (x[:2], {"inner": {"x": x[2]}, "z": x[3]}), {"scale": x[4], "power": 3}

    return [one(2), one(5)]


CASES = (
    Case("cnn", Convolutional, calls((2, 3, 16, 16), (5, 3, 16, 16), (1, 3, 20, 12))),
    Case("two inputs", TwoInputs, calls(((2, 3, 8, 8), (2, 5)), ((3, 3, 9, 7), (3, 5)))),
    Case("sequence", lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
        calls((2, 8, 6), (2, 16, 6), (3, 5, 6))),
    Case("sequence, one at a time", lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
        calls((1, 8, 6), (1, 16, 6))),
    Case("lstm", lambda: nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True),
        calls((2, 3, 4), (4, 3, 4))),  # torch fixes the length of a sequence it takes apart
    Case("gru", lambda: nn.GRU(4, 5), calls((3, 2, 4), (3, 5, 4))),
    Case("multihead attention", Attention, calls((2, 5, 8), (3, 7, 8))),
    Case("transformer encoder", lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), calls((2, 5, 8), (3, 6, 8))),
    Case("transposed convolution", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
        calls((2, 3, 5, 6), (3, 3, 4, 7))),
    Case("group norm", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()), calls((2, 4, 6), (3, 4, 5))),
    Case("batch norm", lambda: nn.BatchNorm1d(4), calls((3, 4), (5, 4))),
    Case("causal attention", Causal, calls((2, 2, 5, 4), (3, 2, 7, 4))),
    Case("keyword arguments", Keywords, calls((2, 3, 6, 6), (3, 3, 8, 10))),
    Case("structures", Structures, structures),
    Case("several outputs", SeveralOutputs, calls((3, 4), (5, 4))),
    Case("dataclass", Dataclass, calls((3, 4), (5, 6))),
    Case("in place", InPlace, calls((2, 1, 5, 5), (3, 1, 6, 7))),
    Case("branches", Branches, calls((2, 3), (4, 3))),
    Case("modes", Modes, calls((2, 3), (4, 3))),
    Case("shared", Shared, calls((2, 4), (3, 4))),
    Case("sizes", Sizes, calls((2, 3, 4), (5, 6, 4))),
    Case("nonzero", Nonzero, calls((3, 4), (5, 2))),
    Case("embedding", lambda: nn.Sequential(nn.Embedding(9, 4), nn.Dropout(0.5)), lambda: [
        ((torch.randint(0, 9, (2, 3)),), {}), ((torch.randint(0, 9, (4, 5)),), {})]),
)  # fmt: skip
