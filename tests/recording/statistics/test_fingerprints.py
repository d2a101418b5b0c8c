"""Fingerprints: they see order, sign, dtype and shape, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sightline as sl
from sightline.recording.statistics.cpu import read
from sightline.recording.statistics.device import DeviceStatistics
from sightline.recording.statistics.fingerprints import ROW, fingerprints_of, matrix_on, row_weights_on

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from([(2,), (3, 5), (7, 1, 2), (1, 1030), (33, 65), (257, 4), (1024,), (2, 512)])


def fingerprint(tensor: Any) -> int:
    lanes = np.array([read(tensor, fingerprint=True).lanes], dtype=np.int64)
    return int(fingerprints_of(lanes, [(str(tensor.dtype), tuple(tensor.shape))])[0])


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def places(tensor: Any, seed: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randint(0, tensor.numel(), (2,), generator=generator).tolist()
    return first, second


@settings(max_examples=150, deadline=None)
@given(seeds, shapes, st.sampled_from(DTYPES[:4]))
def test_a_flipped_sign_changes_it(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = drawn(seed, shape, dtype)
    other = tensor.clone()
    at, _ = places(tensor, seed)
    other.view(-1)[at] = -other.view(-1)[at]
    assert fingerprint(tensor) != fingerprint(other)


def test_minus_zero_is_another_number() -> None:
    assert fingerprint(torch.tensor([0.0, 1.0])) != fingerprint(torch.tensor([-0.0, 1.0]))


@settings(max_examples=150, deadline=None)
@given(seeds, shapes, st.sampled_from(DTYPES[:4]))
def test_two_elements_that_change_places_change_it(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = drawn(seed, shape, dtype)
    first, second = places(tensor, seed)
    other = tensor.clone()
    flat = other.view(-1)
    assume(flat[first] != flat[second])
    flat[first], flat[second] = tensor.view(-1)[second].clone(), tensor.view(-1)[first].clone()
    assert fingerprint(tensor) != fingerprint(other)


@pytest.mark.parametrize("size", [2, 64, 1024, 5000])
def test_powers_of_two_that_change_places_change_it(size: int) -> None:
    """Their bits differ in few places, which weak hashes of sums do not see."""
    ones = torch.ones(size)
    seen = {fingerprint(ones)}
    for at in range(0, size, max(1, size // 50)):
        other = ones.clone()
        other[at] = 2.0
        seen.add(fingerprint(other))
    assert len(seen) == 1 + len(range(0, size, max(1, size // 50)))


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([(3, 5), (33, 65), (4, 4), (2, 3, 4)]))
def test_a_transpose_and_a_reshape_change_it(seed: int, shape: tuple[int, ...]) -> None:
    tensor = drawn(seed, shape)
    assert fingerprint(tensor) != fingerprint(tensor.transpose(0, 1))
    assert fingerprint(tensor) != fingerprint(tensor.reshape(-1))


def test_the_dtype_changes_it_though_the_bits_are_equal() -> None:
    bits = torch.zeros(8)
    assert (
        len({fingerprint(bits), fingerprint(bits.view(torch.bfloat16).reshape(2, 8)[:, :8].flatten()[:8])})
        == 2
    )
    assert fingerprint(torch.ones(4)) != fingerprint(torch.ones(4, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(seeds, shapes, st.sampled_from(DTYPES))
def test_the_memory_layout_does_not_change_it(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = drawn(seed, shape, dtype)
    backing = torch.zeros((*shape, 3), dtype=dtype)
    backing[..., 1] = tensor
    assert fingerprint(backing[..., 1]) == fingerprint(tensor)
    if len(shape) > 1:
        turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        assert fingerprint(turned) == fingerprint(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_all_nans_are_one(dtype: torch.dtype) -> None:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = torch.randn(300).to(dtype)
    tensor[17] = float("nan")
    other = tensor.clone()
    other.view(width)[17] |= 1
    negative = tensor.clone()
    negative.view(width)[17] |= torch.tensor(-1).to(width) << (8 * dtype.itemsize - 1)
    assert fingerprint(tensor) == fingerprint(other) == fingerprint(negative)


def test_the_lanes_are_what_they_are_said_to_be() -> None:
    """By numpy, in 64 bits: rows of bytes times the matrix, each row with its weight."""
    tensor = drawn(3, (33, 65))
    octets = tensor.numpy().tobytes()
    octets += bytes(-len(octets) % ROW)
    rows = np.frombuffer(octets, dtype=np.int8).reshape(-1, ROW).astype(np.int64)
    cpu = torch.device("cpu")
    weights = row_weights_on(cpu, len(rows)).numpy()[: len(rows)].astype(np.int64)
    expected = (rows @ matrix_on(cpu).numpy().astype(np.int64) * weights[:, None]).sum(0)
    assert read(tensor, fingerprint=True).lanes == expected.tolist()


def test_another_process_agrees() -> None:
    program = (
        "import torch, sys; sys.path.insert(0, '.'); "
        "from tests.recording.statistics.test_fingerprints import drawn, fingerprint; "
        "print(fingerprint(drawn(5, (33, 65))))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) == fingerprint(drawn(5, (33, 65)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_of_devices_agrees(dtype: torch.dtype) -> None:
    """What is done on a device, done on the CPU: the same numbers, and nothing of it reads a value."""
    tensor = (torch.randn(70, 33) * 2).to(dtype)
    plain, deferred = read(tensor, fingerprint=True), DeviceStatistics("fingerprints")
    deferred.add(7, tensor)
    floats, counts = deferred.columns()
    assert counts[0].tolist() == [7, plain.zeros, plain.nans, plain.infs, *plain.lanes]
    assert floats[0].tolist() == pytest.approx(plain[:5], rel=1e-5)


def test_views_have_the_fingerprint_of_what_they_show() -> None:
    x = torch.randn(4, 6)
    with sl.trace(stats=True) as t:
        made = x * 2
        made.view(2, 12)
        made.unsqueeze(0)
        (made.t() * 1.0).sum()
    by_name = {op.name: op.outputs[0] for op in t.ops.where(level="aten")}
    expected = {"view": (made.view(2, 12)), "unsqueeze": made.unsqueeze(0), "mul.Tensor": made.t() * 1.0}
    for name, tensor in expected.items():
        stats = by_name[name].stats
        assert stats is not None
        lanes = np.array([read(tensor, fingerprint=True).lanes], dtype=np.int64)
        assert stats.fingerprint == int(fingerprints_of(lanes, [("float32", tuple(tensor.shape))])[0])


@pytest.mark.parametrize("wanted", [True, "views"])
def test_a_view_in_another_order_has_its_own_fingerprint_when_asked_for(wanted: Any) -> None:
    layer, x = torch.nn.Linear(6, 6), torch.randn(2, 4, 6)
    with sl.trace(layer, stats=sl.Stats(fingerprint=wanted, parameters=False)) as t:
        made = layer(x)
        turned = made.transpose(1, 2)
        flat = turned.unsqueeze(0)
        wide = made[:1].expand(3, 4, 6)
        turned_wide = wide.transpose(1, 2)
        assert turned_wide.shape == (3, 6, 4)
        turned.contiguous()
    by_name = {op.name: op.outputs[0] for op in t.ops.where(level="aten")}
    copied = by_name["clone"].stats
    assert copied is not None
    assert copied.fingerprint
    asked = wanted == "views"
    for name, tensor in {"transpose.int": turned, "unsqueeze": flat}.items():
        first = next(op for op in t.ops.where(level="aten") if op.name == name).outputs[0].stats
        lanes = np.array([read(tensor, fingerprint=True).lanes], dtype=np.int64)
        bits = int(fingerprints_of(lanes, [("float32", tuple(tensor.shape))])[0])
        assert first is not None
        assert first.fingerprint == (bits if asked else 0)
        assert first.std == pytest.approx(tensor.std().item(), rel=1e-4)
    repeats, parameter = by_name["expand"].stats, by_name["t"].stats
    assert repeats is not None
    assert repeats.fingerprint == 0  # it shows elements more than once
    assert parameter is None  # nobody asked for parameters
