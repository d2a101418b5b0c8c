"""The numbers C++ reads off a tensor are those of torch's own reductions, for every dtype and layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.recording.native.engine import load
from sightline.recording.native.session import NativeSession
from sightline.recording.statistics.cpu import read
from tests.recording.engines import needs_native

pytestmark = needs_native

BYTES = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz)
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16, *BYTES)
COMPLEX = (torch.complex64, torch.complex128)
SHAPES = ((), (1,), (3,), (17, 5), (4096,), (300, 701), (8, 3, 33, 31))


@pytest.fixture
def recording() -> Iterator[Any]:
    """The C++ side of a recording that has not begun."""
    session = NativeSession(load(), None, "", "aten", None)
    yield session.recording
    session.abandon()


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Random numbers, the same every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def assert_read(recording: Any, tensor: Any) -> None:
    """What C++ reads is what torch's reductions give, extremes, counts and fingerprints to the last bit."""
    *numbers, zeros, nans, infs, lanes = recording.read_numbers(tensor, True)
    expected = read(tensor.detach(), fingerprint=True)
    assert (zeros, nans, infs) == (expected.zeros, expected.nans, expected.infs)
    assert lanes == expected.lanes
    assert numbers[:2] == pytest.approx(expected[:2], rel=0, abs=0, nan_ok=True)
    # The mean of what cancels out is small: what it may be off by goes by the size of the numbers.
    size = 0.0 if math.isnan(expected.l2) else expected.l2 / math.sqrt(tensor.numel())
    assert numbers[2:] == pytest.approx(expected[2:5], rel=1e-5, abs=1e-5 * size, nan_ok=True)


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_dtype_and_layout(recording: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = made(shape, dtype)
    assert_read(recording, tensor)
    if tensor.dim() > 1:
        assert_read(recording, tensor.transpose(0, 1))
        assert_read(recording, tensor[1:, ::2])
        assert_read(recording, tensor[0].expand(3, *tensor.shape[1:]))
    if dtype.is_complex:
        assert_read(recording, tensor.conj())
        assert_read(recording, tensor.conj().imag)


@pytest.mark.parametrize("dtype", [d for d in REAL if d not in BYTES] + list(COMPLEX), ids=str)
def test_zeros_and_what_is_not_finite(recording: Any, dtype: torch.dtype) -> None:
    tensor = made((300, 701), dtype)
    tensor.view(-1)[::3] = 0
    assert_read(recording, tensor)
    tensor[7, 3], tensor[299, 700], tensor[0, 0] = float("nan"), float("inf"), -float("inf")
    assert_read(recording, tensor)
    assert_read(recording, tensor.t())
    assert_read(recording, torch.full_like(tensor, float("nan")))
    assert_read(recording, torch.full_like(tensor, float("inf")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_two_bytes(recording: Any, dtype: torch.dtype) -> None:
    assert_read(recording, torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_every_number_of_a_byte(recording: Any, dtype: torch.dtype) -> None:
    assert_read(recording, torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((1000,), 1e30),
        torch.rand(100) * 1e-30,
        made((1000,), torch.float64) * 1e200,
        made((1000,), torch.float64) * 1e-200,
        made((1000,), torch.float32) * 1e-3 + 1e4,  # the deviation is small beside the mean
        torch.tensor([1e6] + [1e-3] * 100_000),  # and the first number like no other
        torch.full((4096,), 1.001),
    ],
    ids=["large", "small", "large double", "small double", "far off", "one far off", "alike"],
)
def test_numbers_that_lose_their_digits_easily(recording: Any, tensor: Any) -> None:
    found = recording.read_numbers(tensor, False)
    wide = tensor.double() / tensor.abs().max().double()  # so that squares are in range
    scale = tensor.abs().max().item()
    assert found[2] == pytest.approx(wide.mean().item() * scale, rel=1e-5)
    assert found[3] == pytest.approx(wide.std().item() * scale, rel=1e-4, abs=1e-12 * scale)
    assert found[4] == pytest.approx(wide.norm().item() * scale, rel=1e-5)


def test_threads_change_nothing(recording: Any) -> None:
    tensor = made((1024, 1024), torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(recording.read_numbers(tensor, True))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.int64), torch.ones(0), torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(), torch._efficientzerotensor(3),
    ],
    ids=["whole numbers", "empty", "meta", "sparse", "zeros without memory"],
)  # fmt: skip
def test_what_has_no_numbers(recording: Any, tensor: Any) -> None:
    assert recording.read_numbers(tensor, True) is None


def test_a_view_of_what_is_odd_is_odd_too() -> None:
    with sl.trace(ops="aten", stats=True, check=sl.Check(nonfinite=True, on="report"), engine="native") as t:
        odd = torch.zeros(2, 3) / 0
        odd.t() + 1
    assert str(t.nonfinite()).startswith("div")
    assert str(t.problems()).count("div.Tensor made 6 NaN of 6") == 1
