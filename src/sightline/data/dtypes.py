"""The dtypes of torch, without torch: their sizes, their names in a file, their numbers in numpy.

A dtype goes by the name torch prints, without ``torch.``. One that is not in the table is stored as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.errors import UsageError

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Dtype:
    """The storage of the elements of one dtype."""

    itemsize: int
    stored: str  #: the name in a safetensors file, one that every version of the format has
    numpy: str | None  #: the numpy dtype with the same bits, if there is one
    pair: bool = False  #: an element is two stored ones, its real and its imaginary part


# Only names that the first readers of the format knew: a newer one would make the whole file unreadable to
# them. A dtype without such a name is stored as bytes, and its own name is in the file's metadata.
_DTYPES: Final = {
    "float64": Dtype(8, "F64", "f8"),
    "float32": Dtype(4, "F32", "f4"),
    "float16": Dtype(2, "F16", "f2"),
    "bfloat16": Dtype(2, "BF16", None),
    "int64": Dtype(8, "I64", "i8"),
    "int32": Dtype(4, "I32", "i4"),
    "int16": Dtype(2, "I16", "i2"),
    "int8": Dtype(1, "I8", "i1"),
    "uint64": Dtype(8, "U64", "u8"),
    "uint32": Dtype(4, "U32", "u4"),
    "uint16": Dtype(2, "U16", "u2"),
    "uint8": Dtype(1, "U8", "u1"),
    "bool": Dtype(1, "BOOL", "?"),
    "complex128": Dtype(16, "F64", "c16", pair=True),
    "complex64": Dtype(8, "F32", "c8", pair=True),
    "complex32": Dtype(4, "F16", None, pair=True),
    "float8_e4m3fn": Dtype(1, "F8_E4M3", None),
    "float8_e5m2": Dtype(1, "F8_E5M2", None),
    "float8_e4m3fnuz": Dtype(1, "U8", None),
    "float8_e5m2fnuz": Dtype(1, "U8", None),
    "float8_e8m0fnu": Dtype(1, "U8", None),
}

#: Bytes of one element of each dtype that a file may name.
STORED_SIZES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

#: The mantissa bits and the exponent bias of eight-bit floats.
_EIGHT_BIT: Final = {"float8_e4m3fn": (3, 7), "float8_e4m3fnuz": (3, 8), "float8_e5m2fnuz": (2, 16)}


def nbytes_of(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a dense tensor; None for an unknown dtype.

    >>> nbytes_of("bfloat16", (2, 3)), nbytes_of("complex128", ()), nbytes_of("qint9", (2,))
    (12, 16, None)
    """
    known = _DTYPES.get(dtype)
    return None if known is None else known.itemsize * math.prod(shape)


def stored_as(dtype: str, shape: Sequence[int], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape under which a file holds a tensor.

    >>> stored_as("complex64", (3,), 24), stored_as("qint9", (2,), 5)
    (('F32', (3, 2)), ('U8', (5,)))
    """
    known = _DTYPES.get(dtype)
    if known is None:
        return "U8", (nbytes,)
    return known.stored, (*shape, 2) if known.pair else tuple(shape)


def element_bits(data: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> Array:
    """The elements as unsigned integers of their width; sixteen bytes as two of eight.

    >>> element_bits(np.array([0, 0, 128, 63], dtype=np.uint8), "float32", ())
    array(1065353216, dtype=uint32)
    """
    count = math.prod(shape)
    known = _DTYPES.get(dtype)
    itemsize = known.itemsize if known else data.nbytes // count if count else 1
    if not known and (itemsize not in (1, 2, 4, 8) or itemsize * count != data.nbytes):
        return data
    if itemsize == 16:
        return data.view(np.uint64).reshape(*shape, 2)
    return data.view(f"u{itemsize}").reshape(shape)


def element_numbers(data: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> Array:
    """The elements as numpy numbers; dtypes that numpy lacks are widened without loss.

    >>> element_numbers(np.array([128, 63], dtype=np.uint8), "bfloat16", ())
    array(1., dtype=float32)
    """
    known = _DTYPES.get(dtype)
    if known is None:
        raise UsageError(f"numpy has no numbers for {dtype}; `.raw` has the bits.")
    if known.numpy is not None:
        return data.view(known.numpy).reshape(shape)
    wide: Array
    if dtype == "bfloat16":
        wide = np.left_shift(data.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    elif dtype == "complex32":
        wide = data.view(np.float16).astype(np.float32).view(np.complex64)
    else:
        wide = _eight_bit_numbers(dtype)[data]
    wide = wide.reshape(shape)
    wide.flags.writeable = False
    return wide


@cache
def _eight_bit_numbers(dtype: str) -> NDArray[np.float32]:
    """The numbers of the 256 bit patterns."""
    patterns = np.arange(256)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (patterns.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "float8_e8m0fnu":  # a power of two, no sign
        powers = np.ldexp(np.float64(1), patterns - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    mantissa_bits, bias = _EIGHT_BIT[dtype]
    exponent = (patterns & 127) >> mantissa_bits
    mantissa = patterns & ((1 << mantissa_bits) - 1)
    normal = np.where(exponent > 0, 1 << mantissa_bits, 0)
    values = np.ldexp((normal + mantissa).astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(patterns >= 128, -values, values)
    # "fn" has one NaN of each sign in place of infinity; "uz" has one in place of minus zero.
    values[[128] if dtype.endswith("uz") else [127, 255]] = np.nan
    return np.asarray(values, dtype=np.float32)
