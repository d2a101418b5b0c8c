"""The notation of tensors, dtypes, ops, sizes and source positions, the same everywhere.

    f32[2, 8]      a float32 tensor of shape (2, 8); bf16[4]@cuda:0 on another device than the CPU
    f32[2, *, 3]   a size that differs between the parts of a nested tensor
    $12            the value with id 12
    mul.Tensor     an aten op with its overload; the default overload has no suffix
    net.py:9       a source position, with the path shortened
    [f32[] ×64]    a list of 64 equal tensors

It needs no torch: dtypes and devices are given as the text torch prints for them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from sightline.data.forms import Form

#: So many equal tensors of a list are written as one.
MANY_ALIKE: Final = 4
_MOST_BITS: Final = 512  #: of an integer that is printed in full

_DTYPES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "b8",
    "complex32": "c32", "complex64": "c64", "complex128": "c128",
    "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2",
    "float8_e4m3fnuz": "f8e4m3fnuz", "float8_e5m2fnuz": "f8e5m2fnuz", "float8_e8m0fnu": "f8e8m0fnu",
}  # fmt: skip


def dtype_name(dtype: str) -> str:
    """The short name of a dtype; an unknown one keeps its torch name.

    >>> dtype_name("torch.bfloat16"), dtype_name("qint8")
    ('bf16', 'qint8')
    """
    bare = dtype.removeprefix("torch.")
    return _DTYPES.get(bare, bare)


def size_text(size: int | str) -> str:
    """A size or its symbol; ``*`` for one that differs between the parts of a nested tensor.

    >>> size_text(8), size_text(-1)
    ('8', '*')
    """
    return "*" if size == -1 else str(size)


def tensor_text(shape: Sequence[int | str], dtype: str, device: str = "cpu", layout: str = "strided") -> str:
    """A tensor in the notation of fx and DebugMode.

    >>> tensor_text((2, 8), "float32"), tensor_text((4,), "bfloat16", "cuda:0")
    ('f32[2, 8]', 'bf16[4]@cuda:0')
    """
    text = f"{dtype_name(dtype)}[{', '.join(map(size_text, shape))}]"
    if layout not in ("strided", "torch.strided"):
        text += f" {layout.removeprefix('torch.')}"
    return text if device == "cpu" else f"{text}@{device}"


def times_text(text: str, count: int) -> str:
    """A text for several equal items in a row: ``f32[] ×64``."""
    return f"{text} ×{count}"


def value_text(value_id: int) -> str:
    """A value by its id: ``$12``."""
    return f"${value_id}"


class Statistics(Protocol):
    """Statistics of the numbers in a tensor."""

    @property
    def min(self) -> float: ...
    @property
    def max(self) -> float: ...
    @property
    def mean(self) -> float: ...
    @property
    def std(self) -> float: ...
    @property
    def nans(self) -> int: ...
    @property
    def infs(self) -> int: ...


def constant_text(value: Any) -> str:
    """A recorded constant as Python prints it; lists and dicts included.

    >>> constant_text([1, 2.5, None]), constant_text(10**5000)
    ('[1, 2.5, None]', '<an integer of 16610 bits>')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(constant_text, value))}]"
    if isinstance(value, tuple):
        inner = ", ".join(map(constant_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {constant_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python refuses to print a huge one
        return f"<an integer of {value.bit_length()} bits>"
    return repr(value)


def call_text(name: str, form: Form, inputs: Sequence[str], outputs: str = "") -> str:
    """One op with the notation of its tensors filled into its arguments.

    ``inputs`` are the texts of the tensor slots in order; ``outputs`` is the text of the result.
    """
    text = "".join(form.written(name, inputs))
    return f"{text} -> {outputs}" if outputs else text


def count_text(number: float) -> str:
    """A count with a unit: ``1.2k``, ``3.4M``, ``5.6G``.

    >>> count_text(950), count_text(1234), count_text(5_600_000_000)
    ('950', '1.23k', '5.60G')
    """
    return _with_unit(number, 1000.0, ("", "k", "M", "G", "T", "P"))


def bytes_text(number: float) -> str:
    """A size in bytes: ``512 B``, ``1.50 KiB``, ``2.00 GiB``.

    >>> bytes_text(512), bytes_text(1536)
    ('512 B', '1.50 KiB')
    """
    return _with_unit(number, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def time_text(nanoseconds: float) -> str:
    """A duration: ``850 ns``, ``12.3 µs``, ``4.56 ms``, ``1.23 s``.

    >>> time_text(850), time_text(12_300), time_text(4_560_000)
    ('850 ns', '12.3 µs', '4.56 ms')
    """
    return _with_unit(nanoseconds, 1000.0, (" ns", " µs", " ms", " s"))


def number_text(number: float) -> str:
    """A number of a tensor, in three digits.

    >>> number_text(-3.14159), number_text(0.0), number_text(123456.0), number_text(float("nan"))
    ('-3.14', '0', '1.23e+05', 'nan')
    """
    return f"{number:.3g}"


def numbers_text(numbers: Statistics) -> str:
    """The statistics of a tensor on one line: ``-3.14 … 2.9, mean 0.012, std 1.02, 3 NaN``.

    One number where all finite ones are equal, none where there are no finite ones.
    """
    parts = [number_text(numbers.min)] if numbers.min == numbers.max else []
    if numbers.min < numbers.max:
        parts = [f"{number_text(numbers.min)} … {number_text(numbers.max)}"]
        parts += [f"mean {number_text(numbers.mean)}", f"std {number_text(numbers.std)}"]
    parts += [f"{count} {name}" for count, name in ((numbers.nans, "NaN"), (numbers.infs, "Inf")) if count]
    return ", ".join(parts)


def _with_unit(number: float, step: float, units: Sequence[str]) -> str:
    unit = 0
    while abs(number) >= step and unit < len(units) - 1:
        number /= step
        unit += 1
    if unit == 0 or abs(number) >= 99.95:  # three digits, after rounding
        return f"{number:.0f}{units[unit]}"
    return f"{number:.2f}{units[unit]}" if abs(number) < 9.995 else f"{number:.1f}{units[unit]}"


@lru_cache(maxsize=4096)
def short_path(path: str) -> str:
    """A path relative to site-packages or to the working folder, else its last part.

    >>> short_path("/usr/lib/python3/site-packages/transformers/models/gpt2.py")
    'site-packages/transformers/models/gpt2.py'
    """
    norm = path.replace(os.sep, "/")
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in norm:
            return marker.strip("/") + "/" + norm.rsplit(marker, 1)[1]
    stdlib = sysconfig.get_path("stdlib").replace(os.sep, "/")
    if norm.startswith(stdlib + "/"):
        return norm.rsplit("/lib/", 1)[-1]
    try:
        folder = os.getcwd().replace(os.sep, "/")
    except OSError:  # it was removed
        folder = ""
    if folder and norm.startswith(folder + "/"):
        return norm[len(folder) + 1 :]
    return norm.rsplit("/", 1)[-1] if norm.startswith("/") else norm


def position_text(file: str, line: int) -> str:
    """A source position with its path shortened: ``net.py:9``."""
    return f"{short_path(file)}:{line}"
