"""Numbers as a person reads them: `35.8k` stands for everything that is rounded to it."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZES = {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
_TIMES = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
_NUMBER = re.compile(r"(-?[\d,]+)(\.\d+)?(e[+-]\d+)?")
COUNT = r"[\d,]+(?:\.\d+)?[kMGT]?"
SIZE = r"[\d.,]+ (?:B|KiB|MiB|GiB)"
TIME = r"[\d.,]+ (?:ns|µs|ms|s)"
FLOAT = r"(?:-?[\d.]+(?:e[+-]\d+)?|-?inf|nan)"


@dataclass(frozen=True)
class Quantity:
    """A rounded number: the value that is written, and how far the truth may be from it."""

    value: float
    tolerance: float

    def holds(self, truth: float) -> bool:
        """Whether the truth is rounded to this text."""
        if math.isnan(self.value) or math.isinf(self.value):
            return math.isnan(self.value) == math.isnan(truth) and (math.isnan(truth) or self.value == truth)
        return abs(self.value - truth) <= self.tolerance * (1 + 1e-6)


def count(text: str) -> Quantity:
    """`950`, `1,234` and `35.8k`."""
    unit = text[-1] if text[-1] in "kMGT" else ""
    return _scaled(text.removesuffix(unit), _COUNTS[unit], exact=not unit)


def counted(names: Counter[str]) -> str:
    """`ReLU ×2, MSELoss ×12`."""
    return ", ".join(f"{name} ×{count:,}" for name, count in names.items())


def size(text: str) -> Quantity:
    """`512 B`, `1.50 KiB`, in bytes."""
    number, unit = text.split()
    return _scaled(number, _SIZES[unit], exact=unit == "B")


def duration(text: str) -> Quantity:
    """`850 ns`, `4.56 ms`, in nanoseconds."""
    number, unit = text.split()
    return _scaled(number, _TIMES[unit], exact=False)


def number(text: str) -> Quantity:
    """A number in three digits, as `%.3g` writes it: `0.001`, `1.23e+05`."""
    value = float(text)
    if not math.isfinite(value) or value == 0:
        return Quantity(value, 0.0)
    return Quantity(value, 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - 2) + 1e-7 * abs(value))


def _scaled(text: str, unit: float, *, exact: bool) -> Quantity:
    match = _NUMBER.fullmatch(text)
    assert match is not None, f"{text!r} is no number"
    digits = len(match[2] or ".") - 1
    tolerance = 0.0 if exact else 0.5 * 10.0**-digits
    return Quantity(float(text.replace(",", "")) * unit, tolerance * unit)
