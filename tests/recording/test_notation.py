"""How what was recorded is written: operators, slices, and tensors whose sizes are not a list of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from tests.recording.engines import EVERY_WAY, options

X = torch.linspace(0.5, 1, 12)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """torch calls nested tensors a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def api(trace: sl.Trace) -> list[str]:
    return [str(op) for op in trace.ops if op.level == "api"]


@EVERY_WAY
def test_a_number_on_the_left_of_an_operator(engine: str, kept: str, tmp_path: Path) -> None:
    n = torch.arange(1, 4)
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        2 - X, 2.0**X, 1 / X, 7 // n, 7 % n
    assert api(t) == [
        "-(2, f32[12]) -> f32[12]", "**(2.0, f32[12]) -> f32[12]", "/(1, f32[12]) -> f32[12]",
        "//(7, i64[3]) -> i64[3]", "%(7, i64[3]) -> i64[3]",
    ]  # fmt: skip
    assert {op.flavour for op in t.ops if op.level == "api"} == {"operator"}


@EVERY_WAY
def test_a_slice_to_the_end(engine: str, kept: str, tmp_path: Path) -> None:
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        X[9:], X[1::2], X[2:5]
    assert [str(op) for op in t.ops if op.level == "aten"] == [
        "slice.Tensor(f32[12], 0, 9) -> f32[3]", "slice.Tensor(f32[12], 0, 1, None, 2) -> f32[6]",
        "slice.Tensor(f32[12], 0, 2, 5) -> f32[3]",
    ]  # fmt: skip
    assert "9223372036854775807" not in str(t.code())


def made(layout: Any) -> Any:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    return torch.nested.nested_tensor(parts, layout=layout)


@EVERY_WAY
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor(layout: Any, engine: str, kept: str, tmp_path: Path) -> None:
    n = made(layout)
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        n * 2
    t.validate()
    product = next(op for op in t.ops if op.level == "aten" and op.name == "mul.Tensor")
    ragged = n.shape[1] if layout is torch.jagged else "*"  # torch has a symbol for it
    assert str(product) == f"mul.Tensor(f32[2, {ragged}, 3] nested, 2) -> f32[2, {ragged}, 3] nested"
    assert product.outputs[0].meta.numel == 18
    assert product.outputs[0].meta.nbytes == 72
    assert t.data.storages[t.data.values.storage[product.outputs[0].id]] == 72
    t.save(tmp_path / "saved.sight")
    assert str(sl.load(tmp_path / "saved.sight").ops[-1]) == str(t.ops[-1])


@EVERY_WAY
def test_a_quantized_tensor(engine: str, kept: str, tmp_path: Path) -> None:
    with sl.trace(**options(engine, kept, tmp_path)) as t:
        torch.quantize_per_tensor(torch.ones(4, 5), 0.1, 3, torch.quint8)
        torch.quantize_per_channel(torch.ones(4, 5), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
    found = {str(op.outputs[0]): op.outputs[0].meta.nbytes for op in t.ops if "quantize" in op.name}
    assert found == {"quint8[4, 5]": 20, "quint4x2[4, 5]": 10}
