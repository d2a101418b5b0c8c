"""Blocks of tracy_nn with more than tensors: None, numbers, strings, subscripts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.compat.tracy_nn import Tracer


class _Mixed(nn.Module):
    """Takes and returns more than tensors."""

    def forward(self, x: Tensor, mask: Any = None, count: int = 3, mode: str = "a") -> Any:
        return x, mask, count, mode


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Mixed()

    def forward(self, x: Tensor) -> Any:
        self.inner(x, None, 3, "a")
        self.inner(x, mask=None)
        y = x[:2, 1:]
        y[0] = 1
        return y


def test_none_and_other_types_are_shown_and_subscripts_as_they_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, x = _Outer(), torch.ones(4, 4)
    with Tracer("Outer").trace(model):
        model(x)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.count("├─ Input: [Tensor [4, 4] @ cpu, None, int, str]") == 1
    assert lines.count("└─ Output: [Tensor [4, 4] @ cpu, None, int, str]") == 2
    assert "├─ Input mask: None" in lines
    assert "● Tensor[:2, 1:] @ [_Outer.forward]" in lines
    assert "● Tensor[0] = 1 @ [_Outer.forward]" in lines
