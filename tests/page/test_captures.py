from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sightline as sl
from sightline.page import captures
from sightline.page.payload import payload
from tests.page.packed import unpacked


class Shapes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sl.spy("image", x)
        sl.spy("row", x[0, 0, 0])
        sl.spy("one", x.sum())
        sl.spy("wrong", torch.tensor([[1.0, torch.nan], [torch.inf, -1.0]]))
        sl.spy("half", x.to(torch.bfloat16))
        return x * 2


def recorded(**options: Any) -> sl.Trace:
    torch.manual_seed(0)
    model = Shapes()
    with sl.trace(model, capture=True, **options) as t:
        model(torch.randn(2, 3, 40, 100))
    return t


def drawn(page: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The drawings of a page by the names of their tensors."""
    found: dict[str, dict[str, Any]] = {}
    bins = np.split(page["captures.bins"], np.cumsum(page["captures.bin_count"])[:-1])
    cells = np.split(page["captures.cells"], np.cumsum(page["captures.cell_count"])[:-1])
    for at, key in enumerate(page["captures.key"]):
        rows = int(page["captures.rows"][at])
        found[page["strings"][key]] = {
            "bins": bins[at].tolist(), "cells": cells[at].reshape(rows, -1).tolist() if rows else [],
            "slice": page["strings"][page["captures.slice"][at]], "value": int(page["captures.value"][at]),
            "low": float(page["captures.low"][at]), "high": float(page["captures.high"][at]),
        }  # fmt: skip
    return found


def test_a_captured_tensor_has_a_histogram_and_a_map() -> None:
    t = recorded()
    found = drawn(unpacked(payload(t.index)))
    image = found["Shapes/image/0/0"]
    numbers = t.tensors["image"][0].numpy()
    assert sum(image["bins"]) == numbers.size
    assert image["low"] == pytest.approx(numbers.min())
    assert image["slice"] == "[0, 0, :, :]"
    assert (len(image["cells"]), len(image["cells"][0])) == (32, 64)
    assert {min(map(min, image["cells"])), max(map(max, image["cells"]))} == {0, 255}
    assert t.values[image["value"]].shape == (2, 3, 40, 100)


def test_every_kind_of_tensor_is_drawn_or_left_out() -> None:
    found = drawn(unpacked(payload(recorded().index)))
    assert (len(found["Shapes/row/0/0"]["cells"]), len(found["Shapes/row/0/0"]["cells"][0])) == (1, 64)
    assert found["Shapes/one/0/0"]["cells"] == []
    assert found["Shapes/wrong/0/0"]["cells"] == [[255, -1], [-2, 0]]
    assert sum(found["Shapes/half/0/0"]["bins"]) == 2 * 3 * 40 * 100


def test_a_saved_recording_draws_the_same(tmp_path: Path) -> None:
    t = recorded()
    t.save(tmp_path / "run.sight")
    loaded = sl.load(tmp_path / "run.sight")
    assert repr(drawn(unpacked(payload(loaded.index)))) == repr(drawn(unpacked(payload(t.index))))


def test_very_many_are_not_all_drawn_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MOST_TENSORS", 2)
    monkeypatch.setattr("sightline.page.payload.MOST_TENSORS", 2)
    t = recorded()
    page = unpacked(payload(t.index))
    assert len(page["captures.value"]) <= 2
    assert page["run"]["capturesLeftOut"] == len(t.tensors) - 2


def test_a_damaged_file_of_tensors_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    recorded().save(tmp_path / "run.sight")
    for shard in (tmp_path / "run.sight").rglob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-4:] = b"\x01\x02\x03\x04"
        shard.write_bytes(data)
    loaded = sl.load(tmp_path / "run.sight")
    page = unpacked(payload(loaded.index))
    assert page["run"]["ops"] > 0
    assert len(page["captures.value"]) < len(loaded.data.captures)
