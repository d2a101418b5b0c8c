"""The constants among the arguments of two ops, and which of them differ."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from sightline.data.forms import SLOT, Elided, Record, Symbol
from sightline.data.index import Op

#: Arguments that decide where and how a result is stored, not its numbers.
_STORAGE: Final = frozenset(
    "dtype device layout memory_format pin_memory non_blocking copy out inplace requires_grad generator "
    "output_mask impl_index deterministic cudnn_enabled benchmark allow_tf32 half_to_float enable_gqa "
    "compute_log_sumexp need_attn_weights momentum".split()
)
_HUGE: Final = 6e4  #: masks are filled with larger numbers, in any precision
#: Limits of a dtype that code may use, in each dtype: the spacing of numbers around one, and the smallest
#: normal number.
_LIMITS: Final = (
    (2.0**-52, 2.0**-23, 2.0**-10, 2.0**-7),
    (2.2250738585072014e-308, 2.0**-126, 2.0**-14),
)
_ROUNDED: Final = 8e-3  #: relative error of a constant that was rounded to bfloat16


class Constant(NamedTuple):
    """A constant argument of two ops, with its value in each."""

    name: str
    a: Any
    b: Any


_ABSENT: Final = Symbol("absent")


def differing_constants(one: Op, other: Op) -> list[Constant]:
    """The constants in which two ops differ, without those about storage."""
    if one.form == other.form:
        return []
    first, second = dict(constants(one)), dict(constants(other))
    rank = max((len(value.shape) for value in one.inputs), default=0)
    differences = []
    for name in dict.fromkeys([*first, *second]):
        x, y = first.get(name, _ABSENT), second.get(name, _ABSENT)
        x = _default(one, name) if x is _ABSENT else x
        y = _default(other, name) if y is _ABSENT else y
        if x is _ABSENT or y is _ABSENT:  # part of a longer list, or an argument that only one op has
            continue
        if not same_constant(x, y, rank):
            differences.append(Constant(name, x, y))
    return differences


def _default(op: Op, name: str) -> Any:
    """The default of an argument, from the schema of the op."""
    for argument in op._data.raw.schemas.get(op.name, ()):
        key, sign, text = argument.partition("=")
        if key == name and sign:
            try:
                return ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return text
    return _ABSENT


def constants(op: Op) -> Iterator[tuple[str, Any]]:
    """The names and values of all arguments that are not tensors; the items of a list one by one."""
    names = op._data.argument_names(op)
    for at, item in enumerate(op.form.args):
        yield from _parts(names[at] if at < len(names) else f"argument {at}", item)
    for key, item in (op.form.kwargs or {}).items():
        yield from _parts(key, item)


def significant_floats(op: Op) -> list[float]:
    """The floats among the constants, without 0, 1, infinities and the numbers that fill masks."""
    return [
        float(item)
        for _, item in constants(op)
        if isinstance(item, float)
        and math.isfinite(item)
        and abs(item) not in (0.0, 1.0)
        and abs(item) < _HUGE
    ]


def lone_floats(
    ops: Iterable[Op], others: Iterable[Op]
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """The significant floats of each of two groups of ops that the other lacks, with the ids of their ops."""
    first = [(number, op.id) for op in ops for number in significant_floats(op)]
    second = [(number, op.id) for op in others for number in significant_floats(op)]
    return (
        [each for each in first if not any(same_constant(each[0], other[0]) for other in second)],
        [each for each in second if not any(same_constant(each[0], other[0]) for other in first)],
    )


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


def same_constant(x: Any, y: Any, rank: int = 0) -> bool:
    """Whether two constants mean the same; numbers up to the rounding of a coarse precision.

    >>> same_constant(1e-5, 1e-6), same_constant(0.1, 0.0996)
    (False, True)
    >>> same_constant(-1, 3, rank=4), same_constant(-3.4e38, -65504.0)
    (True, True)
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
        for limits in _LIMITS:
            if all(any(math.isclose(each, limit, rel_tol=1e-6) for limit in limits) for each in (x, y)):
                return True
        return math.isclose(x, y, rel_tol=_ROUNDED)
    if isinstance(x, Symbol) and isinstance(y, Symbol):
        return x.text == y.text or (" at 0x" in x.text and " at 0x" in y.text)
    return False
