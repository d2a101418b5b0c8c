"""Captures for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.data.dtypes import nbytes_of
from sightline.data.trace_data import CaptureInfo
from sightline.store.shards.writer import ShardWriter

#: Every dtype whose size is known.
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool", "complex128", "complex64", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def capture(
    module: str = "fc", name: str = "output", call: int = 0, *, step: str = "", slot: int = 0,
    role: str | None = None, value: int = -1, shape: Sequence[int] = (2,), dtype: str = "float32",
) -> CaptureInfo:  # fmt: skip
    role = role or ("output" if name == "output" else "input" if name == "input" else "op")
    return CaptureInfo(step, module, name, call, slot, role, "", value, tuple(shape), dtype)


def some_bytes(info: CaptureInfo, seed: int = 0) -> NDArray[np.uint8]:
    nbytes = nbytes_of(info.dtype, info.shape)
    assert nbytes is not None
    return np.random.default_rng(seed).integers(0, 2, nbytes, dtype=np.uint8)


def put(writer: ShardWriter, info: CaptureInfo, data: Any = None) -> None:
    data = some_bytes(info) if data is None else data
    writer.put(info.key, info.dtype, info.shape, data, info)


def written(folder: Path, *infos: CaptureInfo) -> Path:
    """A folder with these captures."""
    with ShardWriter(folder) as writer:
        for seed, info in enumerate(infos):
            put(writer, info, some_bytes(info, seed))
    return folder
