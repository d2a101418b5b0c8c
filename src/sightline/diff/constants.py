"""What two ops were given beside tensors: which constants of theirs differ, by name."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from sightline.trace.forms import SLOT, Elided, Record, Symbol
from sightline.trace.index import Op

#: Arguments that say where and how a result is stored, not what it is.
_STORAGE: Final = frozenset(
    "dtype device layout memory_format pin_memory non_blocking copy out inplace requires_grad generator "
    "output_mask impl_index deterministic cudnn_enabled benchmark allow_tf32 half_to_float enable_gqa "
    "compute_log_sumexp need_attn_weights momentum".split()
)
_HUGE: Final = 6e4  #: what masks are filled with in any precision
#: What code asks of a dtype, in each: the distance of neighbours around one, and the smallest normal number.
_LIMITS: Final = (
    (2.0**-52, 2.0**-23, 2.0**-10, 2.0**-7),
    (2.2250738585072014e-308, 2.0**-126, 2.0**-14),
)
_ROUNDED: Final = 8e-3  #: a constant that was rounded to bfloat16


class Constant(NamedTuple):
    """An argument of two ops, and what each was given."""

    name: str
    a: Any
    b: Any


_ABSENT: Final = Symbol("absent")


def differing(one: Op, other: Op) -> list[Constant]:
    """The constants in which two ops differ; those about storage are left out."""
    if one.form == other.form:
        return []
    first, second = dict(constants(one)), dict(constants(other))
    rank = max((len(value.shape) for value in one.inputs), default=0)
    found = []
    for name in dict.fromkeys([*first, *second]):
        x, y = first.get(name, _ABSENT), second.get(name, _ABSENT)
        if x is _ABSENT:
            x = _default(one, name)
        if y is _ABSENT:
            y = _default(other, name)
        if x is _ABSENT or y is _ABSENT:  # the rest of a list, or of another op
            continue
        if not same(x, y, rank):
            found.append(Constant(name, x, y))
    return found


def _default(op: Op, name: str) -> Any:
    """What an argument is where it is not given."""
    for argument in op._data.raw.schemas.get(op.name, ()):
        known, given, text = argument.partition("=")
        if known == name and given:
            try:
                return ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return text
    return _ABSENT


def constants(op: Op) -> Iterator[tuple[str, Any]]:
    """Names and values of all that is no tensor; the parts of a list one by one."""
    names = op._data.argument_names(op)
    for at, item in enumerate(op.form.args):
        yield from _parts(names[at] if at < len(names) else f"argument {at}", item)
    for key, item in (op.form.kwargs or {}).items():
        yield from _parts(key, item)


def floats(op: Op) -> list[float]:
    """The numbers among the constants that say something: neither 0 nor 1 nor a filling of masks."""
    return [
        float(item)
        for _, item in constants(op)
        if isinstance(item, float)
        and math.isfinite(item)
        and abs(item) not in (0.0, 1.0)
        and abs(item) < _HUGE
    ]


def _parts(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    if name in _STORAGE or item is SLOT or item is None or isinstance(item, Elided):
        return
    if isinstance(item, list | tuple):
        for at, part in enumerate(item):
            yield from _parts(f"{name}[{at}]" if len(item) > 1 else name, part)
    elif isinstance(item, dict):
        for key, part in item.items():
            yield from _parts(f"{name}[{key!r}]", part)
    elif isinstance(item, Record):
        for key, part in item.fields.items():
            yield from _parts(f"{name}.{key}", part)
    elif not (isinstance(item, Symbol) and item.text.startswith("torch.")):
        yield name, item


def same(x: Any, y: Any, rank: int = 0) -> bool:
    """Whether two constants mean the same; numbers up to the rounding of a coarse precision.

    >>> same(1e-5, 1e-6), same(0.1, 0.0996), same(-1, 3, rank=4), same(-3.4e38, -65504.0)
    (False, True, True, True)
    """
    if x == y:
        return True
    if isinstance(x, bool) or isinstance(y, bool):
        return False
    if isinstance(x, int) and isinstance(y, int):
        return bool(rank) and abs(x - y) == rank and (x < 0) != (y < 0)
    if isinstance(x, int | float) and isinstance(y, int | float):
        if math.isnan(x) and math.isnan(y):
            return True
        if abs(x) >= _HUGE and abs(y) >= _HUGE and (x < 0) == (y < 0):
            return True
        if any(_among(x, limits) and _among(y, limits) for limits in _LIMITS):
            return True
        return math.isclose(x, y, rel_tol=_ROUNDED)
    if isinstance(x, Symbol) and isinstance(y, Symbol):
        return x.text == y.text or (" at 0x" in x.text and " at 0x" in y.text)
    return False


def _among(number: float, limits: tuple[float, ...]) -> bool:
    return any(math.isclose(number, limit, rel_tol=1e-6) for limit in limits)
