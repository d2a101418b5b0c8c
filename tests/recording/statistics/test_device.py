"""What stays on a device until the end; here the device is the CPU, which takes the plain way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sightline.recording.statistics.cpu import read
from sightline.recording.statistics.device import DeviceStatistics, _is_dense


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).transpose(1, 2), True),
        (torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last), True),
        (torch.zeros(3, 1, 4).transpose(0, 1), True),
        (torch.zeros(()), True),
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(6)[::2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(8).as_strided((2, 2, 2), (1, 3, 3)), False),
    ],
)
def test_dense_is_without_gaps_in_any_order(tensor: Any, dense: bool) -> None:
    assert _is_dense(tensor) is dense


@pytest.mark.parametrize("fill", ["nonfinite", "numbers", "fingerprints"])
def test_layout_does_not_change_what_is_counted(fill: str) -> None:
    tensor = torch.randn(7, 12, 5)
    tensor[3, 4, 1], tensor[0, 0, 0], tensor[6, 11, 4] = float("nan"), float("inf"), 0.0
    deferred = DeviceStatistics(fill)
    layouts = [tensor, tensor.transpose(0, 1).contiguous().transpose(0, 1), tensor[:, :, :3]]
    for value, one in enumerate(layouts):
        deferred.add(value, one)
    floats, counts = deferred.columns()
    assert counts[:, 0].tolist() == [0, 1, 2]
    expected = [read(one, fingerprint=fill == "fingerprints") for one in layouts]
    assert [tuple(row) for row in counts[:, 1:4].tolist()] == [(e.zeros, e.nans, e.infs) for e in expected]
    assert floats[:, :2].tolist() == [[e.min, e.max] for e in expected]
    assert deferred.alarm(wait=True) == 2 * 3
    if fill == "fingerprints":
        assert counts[:, 4:].tolist() == [e.lanes for e in expected]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_have_the_numbers_and_the_fingerprint_of_the_cpu(dtype: torch.dtype) -> None:
    tensor = (torch.arange(600).view(2, 300) % 201).to(dtype)
    deferred = DeviceStatistics("fingerprints")
    deferred.add(0, tensor)
    deferred.add(1, tensor.t())
    floats, counts = deferred.columns()
    expected = [read(one, fingerprint=True) for one in (tensor, tensor.t())]
    assert floats[:, :2].tolist() == [[e.min, e.max] for e in expected]
    assert counts[:, 1:].tolist() == [[e.zeros, 0, 0, *e.lanes] for e in expected]
    assert deferred.alarm(wait=True) == 0
