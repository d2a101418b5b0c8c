"""A 64-bit fingerprint of a tensor: equal for equal bits on every device, in every process and memory layout.

The elements in row-major order, with all NaNs equal, are rows of `ROW` bytes (the last one padded with
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

from sightline.assemble.statistics import fingerprints_of, scramble
from sightline.recording.torchapi import int_mm, is_copied_on_write
from sightline.schema.streams import LANES

ROW: Final = 1024  #: bytes


def lanes_of(flat: Any) -> Any:
    """The lanes of a flat contiguous tensor without NaNs of odd payload: four int64 on its own device."""
    octets = flat.view(torch.int8)
    rows = octets.numel() // ROW
    weights = row_weights_on(flat.device, rows + 1)
    lanes = None
    if rows:
        products = _multiply(octets[: rows * ROW].view(rows, ROW))
        lanes = (products.to(torch.int64) * weights[:rows, None]).sum(0)
    rest = octets[rows * ROW :]
    if len(rest):
        last = _multiply(rest.view(1, -1))[0].to(torch.int64) * weights[rows]
        lanes = last if lanes is None else lanes + last
    return lanes


def _multiply(octets: Any) -> Any:
    """Rows of bytes times the matrix."""
    width = octets.shape[1]
    matrix = matrix_on(octets.device)[:width]
    if not octets.is_cuda:
        return int_mm(octets, matrix)
    padded = octets.new_zeros((max(len(octets), 32), -(-width // 8) * 8))  # the smallest that cuBLAS takes
    padded[: len(octets), :width] = octets
    wide = matrix.new_zeros((padded.shape[1], 8))
    wide[:width, :LANES] = matrix
    return int_mm(padded, wide)[: len(octets), :LANES]


def as_array(tensor: Any) -> NDArray[Any]:
    """An array over the memory of a CPU tensor of the program's.

    ``.numpy()`` would make its storage one that cannot be resized, and FSDP resizes those of its weights.
    """
    # Whoever could write to shared memory makes torch copy it, here and in `cpu_lanes`.
    array: NDArray[Any] = np.from_dlpack(tensor.clone() if is_copied_on_write(tensor) else tensor)
    return array


def cpu_lanes(flat: Any) -> list[int]:
    """The lanes of a tensor in CPU memory: transposed, which is faster there, and with few calls."""
    octets = (flat.clone() if is_copied_on_write(flat) else flat).view(torch.int8)
    rows, rest = divmod(octets.numel(), ROW)
    transposed, wide, weights = _cpu_matrices(max(1024, 1 << rows.bit_length()))
    lanes = np.zeros(LANES, dtype=np.int64)
    if rows:
        lanes = int_mm(transposed, octets[: rows * ROW].view(rows, ROW).t()).numpy() @ weights[:rows]
    if rest:
        lanes = lanes + wide[:, :rest] @ as_array(octets[rows * ROW :]) * weights[rows]
    result: list[int] = lanes.tolist()
    return result


@lru_cache(maxsize=40)
def _cpu_matrices(count: int) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    """The transposed matrix, for torch and in 64 bits, and the weights of so many rows."""
    cpu = torch.device("cpu")
    transposed = matrix_on(cpu).t().contiguous()
    weights = row_weights_on(cpu, count).numpy()[:count].astype(np.int64)
    return transposed, transposed.numpy().astype(np.int64), weights


@lru_cache(maxsize=64)
def plain_nan(dtype: torch.dtype) -> Any:
    """The NaN that stands for all NaNs of a dtype."""
    return torch.tensor(float("nan"), dtype=dtype)


@lru_cache(maxsize=16)
def matrix_on(device: torch.device) -> Any:
    """The weights of the bytes of a row, none of them zero."""
    drawn = scramble(np.arange(ROW * LANES, dtype=np.uint64)) % np.uint64(254)
    weights = drawn.astype(np.int16) - 127
    weights[weights >= 0] += 1
    return torch.from_numpy(weights.astype(np.int8).reshape(ROW, LANES)).to(device)


_weights: Final[dict[torch.device, Any]] = {}
_replaced: Final[list[Any]] = []  # kept alive: a launched kernel may still read them


def row_weights_on(device: torch.device, count: int) -> Any:
    """Odd 32-bit weights of the rows, at least ``count``."""
    weights = _weights.get(device)
    if weights is None or len(weights) < count:
        size = max(1024, 1 << (count - 1).bit_length())
        drawn = scramble(np.arange(1 << 40, (1 << 40) + size, dtype=np.uint64)).astype(np.uint32)
        if weights is not None:
            _replaced.append(weights)
        weights = _weights[device] = torch.from_numpy((drawn | np.uint32(1)).view(np.int32)).to(device)
    return weights


__all__ = [
    "LANES",
    "ROW",
    "cpu_lanes",
    "fingerprints_of",
    "lanes_of",
    "matrix_on",
    "plain_nan",
    "row_weights_on",
]
