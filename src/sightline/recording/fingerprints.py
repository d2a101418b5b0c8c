"""A 64-bit fingerprint of a tensor: equal for equal bits on every device, in every process and memory layout.

The elements in row-major order, their NaNs made alike, are rows of `ROW` bytes (the last one filled up with
zeros). Each row is multiplied with a fixed matrix of small integers, which gives four *lanes* per row that
no change, no swap and no sign flip of elements leaves alone; the lanes of all rows are added up with a
weight for each row. All of it is exact integer arithmetic, so that the order in which a device adds does not
matter, and the multiplication is one that CPUs and GPUs have units for. Shape and dtype are mixed in when
the trace is built (`fingerprints_of`), so that a view that only relabels its elements needs no second pass.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording.torchapi import int_mm
from sightline.trace.assembly.layout import LANES
from sightline.trace.fingerprint import fingerprints_of, scramble

ROW: Final = 1024  #: bytes


def lanes_of(flat: Any) -> Any:
    """The lanes of a flat contiguous tensor without NaNs of odd payload: four int64 on its own device."""
    octets = flat.view(torch.int8)
    rows = octets.numel() // ROW
    weights = row_weights_on(flat.device, rows + 1)
    lanes = None
    if rows:
        products = _multiplied(octets[: rows * ROW].view(rows, ROW))
        lanes = (products.to(torch.int64) * weights[:rows, None]).sum(0)
    rest = octets[rows * ROW :]
    if len(rest):
        last = _multiplied(rest.view(1, -1))[0].to(torch.int64) * weights[rows]
        lanes = last if lanes is None else lanes + last
    return lanes


def _multiplied(octets: Any) -> Any:
    """Rows of bytes times the matrix."""
    width = octets.shape[1]
    matrix = matrix_on(octets.device)[:width]
    if not octets.is_cuda:
        return int_mm(octets, matrix)
    padded = octets.new_zeros((max(len(octets), 32), -(-width // 8) * 8))  # cuBLAS takes no smaller ones
    padded[: len(octets), :width] = octets
    wide = matrix.new_zeros((padded.shape[1], 8))
    wide[:width, :LANES] = matrix
    return int_mm(padded, wide)[: len(octets), :LANES]


def lanes_here(flat: Any) -> list[int]:
    """The same on a CPU, at once: with as few calls as there can be, and the faster way round."""
    octets = flat.view(torch.int8)
    rows, rest = divmod(octets.numel(), ROW)
    turned, wide, weights = _for_cpu(max(1024, 1 << rows.bit_length()))
    lanes = np.zeros(LANES, dtype=np.int64)
    if rows:
        lanes = int_mm(turned, octets[: rows * ROW].view(rows, ROW).t()).numpy() @ weights[:rows]
    if rest:
        lanes = lanes + wide[:, :rest] @ octets[rows * ROW :].numpy() * weights[rows]
    found: list[int] = lanes.tolist()
    return found


@lru_cache(maxsize=40)
def _for_cpu(count: int) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    """The matrix turned around, for torch and in 64 bits, and the weights of so many rows."""
    here = torch.device("cpu")
    turned = matrix_on(here).t().contiguous()
    weights = row_weights_on(here, count).numpy()[:count].astype(np.int64)
    return turned, turned.numpy().astype(np.int64), weights


@lru_cache(maxsize=64)
def plain_nan(dtype: torch.dtype) -> Any:
    """The NaN that stands for all NaNs of a dtype."""
    return torch.tensor(float("nan"), dtype=dtype)


@lru_cache(maxsize=16)
def matrix_on(device: torch.device) -> Any:
    """Weights of the bytes of a row, none of them zero."""
    drawn = scramble(np.arange(ROW * LANES, dtype=np.uint64)) % np.uint64(254)
    weights = drawn.astype(np.int16) - 127
    weights[weights >= 0] += 1
    return torch.from_numpy(weights.astype(np.int8).reshape(ROW, LANES)).to(device)


_weights: Final[dict[torch.device, Any]] = {}
_outgrown: Final[list[Any]] = []  # kept: a kernel that was launched may still read them


def row_weights_on(device: torch.device, count: int) -> Any:
    """Odd 32-bit weights of the rows; there are as many as were ever needed."""
    found = _weights.get(device)
    if found is None or len(found) < count:
        size = max(1024, 1 << (count - 1).bit_length())
        drawn = scramble(np.arange(1 << 40, (1 << 40) + size, dtype=np.uint64)).astype(np.uint32)
        if found is not None:
            _outgrown.append(found)
        found = _weights[device] = torch.from_numpy((drawn | np.uint32(1)).view(np.int32)).to(device)
    return found


__all__ = [
    "LANES",
    "ROW",
    "fingerprints_of",
    "lanes_here",
    "lanes_of",
    "matrix_on",
    "plain_nan",
    "row_weights_on",
]
