"""Which sizes of an exported graph are dynamic, which are fixed, and which line of the model fixed them.

Expressions over sizes are parsed and evaluated here; they are never run as code.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from sightline.errors import DamagedFile, UsageError
from sightline.graph.exported.torchapi import (
    expression_code,
    guard_function,
    original_symbols,
    size_code,
    size_hint,
)
from sightline.notation import tensor_text
from sightline.text_encoding import for_output, printable

_MAX_LENGTH: Final = 10_000  #: characters of an expression
_MAX_VALUE: Final = 1 << 128  #: of a size and of everything it is computed from

_BINARY: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: Final[dict[type[ast.AST], Callable[[Any], Any]]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
}  # fmt: skip
_COMPARISONS: Final[dict[type[ast.AST], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "max": max, "min": min, "int": int, "float": float, "abs": abs, "bool": bool, "round": round,
    **{f"math.{name}": getattr(math, name) for name in
       ("floor", "ceil", "trunc", "sqrt", "log", "log2", "exp", "sin", "cos", "tan", "tanh", "fabs", "gcd")},
}  # fmt: skip
_CONSTANTS: Final = {"math.inf": math.inf, "math.pi": math.pi, "math.e": math.e}


def evaluate(code: str, symbols: Mapping[str, int]) -> Any:
    """The value of an expression for these sizes.

    >>> evaluate("2*s0 + max(s1, 4) // 3 >= 8", {"s0": 3, "s1": 9})
    True
    >>> evaluate("().__class__", {})
    Traceback (most recent call last):
    sightline.errors.DamagedFile: The archive was altered: '().__class__' is no expression over sizes.
    """
    try:
        return _value(_parse(code), symbols)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise DamagedFile(f"The archive was altered: {code[:60]!a} is no expression over sizes.") from error
    except (ArithmeticError, OverflowError):  # a division by zero, in a condition on other sizes
        return None


@lru_cache(maxsize=4096)
def _parse(code: str) -> ast.expr:
    if len(code) > _MAX_LENGTH:
        raise ValueError("it is too long")
    return ast.parse(code.strip(), mode="eval").body


def _value(node: ast.expr, symbols: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    if isinstance(node, ast.Attribute):
        return _CONSTANTS[_dotted(node)]
    if isinstance(node, ast.BinOp):
        first, second = _value(node.left, symbols), _value(node.right, symbols)
        if isinstance(node.op, ast.Pow | ast.LShift) and (abs(second) > 128 or abs(first) > _MAX_VALUE):
            raise OverflowError
        return _BINARY[type(node.op)](first, second)
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, symbols))
    if isinstance(node, ast.Compare):
        left, holds = _value(node.left, symbols), True
        for sign, right in zip(node.ops, (_value(each, symbols) for each in node.comparators), strict=True):
            holds, left = holds and _COMPARISONS[type(sign)](left, right), right
        return holds
    if isinstance(node, ast.BoolOp):
        parts = (bool(_value(each, symbols)) for each in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, symbols) else node.orelse, symbols)
    if isinstance(node, ast.Call) and not node.keywords:
        return _FUNCTIONS[_dotted(node.func)](*(_value(each, symbols) for each in node.args))
    raise ValueError(type(node).__name__)


def _dotted(node: ast.expr) -> str:
    """The name of a function: ``max`` or ``math.floor``; "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        return f"math.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


#: Functions of torch that add guards to lay out memory. No op depends on these, so they may fail.
_LAYOUT_ONLY: Final = re.compile(r"contiguous|_reshape_view_helper|strides|channels_last|overlapping")
_SYMBOL: Final = re.compile(r"\b[a-z]+\d+\b")


@printable
@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of one input.

    >>> print(Dimension("x", 1, 3, "", "net.py:9 in forward"))
    dimension 1 is fixed at 3 by net.py:9 in forward
    """

    input: str  #: as written in a call: ``x``, ``batch['ids']``
    dim: int
    size: int  #: in the example
    symbol: str = ""  #: ``s77``, or an expression of other symbols; "" where the size is fixed
    by: str = ""  #: the line that fixed it, where one is known

    @property
    def dynamic(self) -> bool:
        """Whether another size than the example's can be run."""
        return bool(self.symbol)

    def __str__(self) -> str:
        if self.dynamic:
            return f"dimension {self.dim} is dynamic ({self.symbol}; {self.size} in the example)"
        if self.by:
            return f"dimension {self.dim} is fixed at {self.size} by {self.by}"
        if self.size in (0, 1):
            return (
                f"dimension {self.dim} is fixed at {self.size}: torch fixes the sizes 0 and 1 of an example; "
                "export with a size of 2 or more to have it dynamic"
            )
        return f"dimension {self.dim} is fixed at {self.size}"


@printable
@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that held for the example and that the graph depends on: ``s77 > 5``."""

    code: str  #: a Python expression over the symbols
    text: str  #: the same over the inputs: ``x.shape[0] > 5``
    by: str = ""  #: the line of the model that depends on it


@printable
@dataclass(frozen=True)
class Dynamic:
    """Which sizes of the inputs are dynamic, and under which conditions: ``print(g.dynamic)``.

    >>> print(Dynamic((Dimension("x", 0, 2, "s77"), Dimension("x", 1, 3)), dtypes={"x": "float32"}))
    x  f32[s77, 3]
      dimension 0 is dynamic (s77; 2 in the example)
      dimension 1 is fixed at 3
    """

    dimensions: tuple[Dimension, ...] = ()
    conditions: tuple[Condition, ...] = ()
    dtypes: Mapping[str, str] | None = None  #: of each input that is a tensor
    notes: tuple[str, ...] = ()  #: messages of torch from the export, in sentences

    @cached_property
    def inputs(self) -> dict[str, tuple[Dimension, ...]]:
        """The dimensions of each input that is a tensor."""
        inputs: dict[str, list[Dimension]] = {name: [] for name in self.dtypes or ()}
        for dimension in self.dimensions:
            inputs.setdefault(dimension.input, []).append(dimension)
        return {name: tuple(dimensions) for name, dimensions in inputs.items()}

    @property
    def dynamic(self) -> tuple[Dimension, ...]:
        """The dimensions that may differ."""
        return tuple(dimension for dimension in self.dimensions if dimension.dynamic)

    @property
    def fixed(self) -> tuple[Dimension, ...]:
        """The dimensions that may not."""
        return tuple(dimension for dimension in self.dimensions if not dimension.dynamic)

    def input_text(self, name: str) -> str:
        """An input in our notation, with symbols for dynamic sizes: ``f32[s77, 3]``."""
        sizes: Any = [dimension.symbol or dimension.size for dimension in self.inputs[name]]
        return tensor_text(sizes, (self.dtypes or {}).get(name, "?"))

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise `UsageError` for a size that the graph cannot run with, naming it and the reason."""
        symbols = self._symbol_values(shapes)
        for condition in self.conditions:
            if not set(_SYMBOL.findall(condition.code)) <= symbols.keys():
                continue
            if not evaluate(condition.code, symbols):
                by = f" ({condition.by})" if condition.by else ""
                named = [
                    name
                    for name in shapes
                    if re.search(rf"(?<![\w.]){re.escape(name)}\.shape", condition.text)
                ]
                sizes = " and ".join(f"{name} of shape {tuple(shapes[name])}" for name in named or shapes)
                raise UsageError(
                    f"This graph is valid only for {condition.text}{by}, not for {sizes}: "
                    "export again with an example of that size."
                )

    def _symbol_values(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The value of each symbol in this call; a size that contradicts another one is an error."""
        symbols: dict[str, int] = {}
        sources: dict[str, str] = {}
        derived = []
        for dimension in self.dimensions:
            size, name = shapes[dimension.input][dimension.dim], f"{dimension.input}.shape[{dimension.dim}]"
            if not dimension.symbol:
                if size != dimension.size:
                    raise UsageError(f"{name} must be {dimension.size} but is {size}: {dimension}.")
            elif not _SYMBOL.fullmatch(dimension.symbol):
                derived.append((dimension, size, name))
            elif symbols.setdefault(dimension.symbol, size) != size:
                raise UsageError(
                    f"{name} must equal {sources[dimension.symbol]}, which is {symbols[dimension.symbol]}, "
                    f"but is {size}."
                )
            else:
                sources.setdefault(dimension.symbol, name)
        for dimension, size, name in derived:
            if not set(_SYMBOL.findall(dimension.symbol)) <= symbols.keys():
                continue
            expected = evaluate(dimension.symbol, symbols)
            if expected != size:
                text = _over_inputs(dimension.symbol, sources)
                raise UsageError(f"{name} must be {text}, which is {expected}, but is {size}.")
        return symbols

    def to_plain(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Dynamic:
        """The inverse of `to_plain`."""
        return cls(
            tuple(Dimension(**one) for one in plain["dimensions"]),
            tuple(Condition(**one) for one in plain["conditions"]),
            dict(plain["dtypes"] or {}),
            tuple(plain["notes"]),
        )

    def __str__(self) -> str:
        lines = []
        for name, dimensions in self.inputs.items():
            lines += [f"{name}  {self.input_text(name)}", *(f"  {one}" for one in dimensions)]
        if self.conditions:
            lines.append("valid for")
            lines += [f"  {one.text}" + (f"  ({one.by})" if one.by else "") for one in self.conditions]
        lines += [f"note: {note}" for note in self.notes]
        return for_output("\n".join(lines))


def _over_inputs(code: str, sources: Mapping[str, str]) -> str:
    """An expression with ``x.shape[0]`` in place of symbols."""
    return _SYMBOL.sub(lambda match: sources.get(match[0], match[0]), code)


def read_dimensions(
    inputs: Sequence[tuple[str, Any]],
    guards: Sequence[Any],
    guard_lines: Mapping[str, str],
    notes: Sequence[str],
    ranges: Mapping[str, tuple[int | None, int | None]],
    fixed_by: str = "",
) -> Dynamic:
    """The report on a fresh export; ``fixed_by`` is the option that fixed every size it does not name.

    ``inputs`` are names and fake tensors, ``guards`` torch's own; ``guard_lines`` has for the text of a guard
    the line of the model that was running when torch added it. ``ranges`` are bounds that the user set.
    """
    sources: dict[str, str] = {}
    originals = {(name, dim): one for name, fake in inputs for dim, one in original_symbols(name, fake)}
    fixing_lines: dict[str, str] = {}
    for guard in guards:
        if type(guard.expr).__name__ == "Equality":
            for symbol in map(str, guard.expr.free_symbols):
                fixing_lines.setdefault(symbol, guard_lines.get(str(guard.expr), ""))
    dimensions = []
    for name, fake in inputs:
        for dim, size in enumerate(fake.shape):
            symbol = size_code(size)
            if _SYMBOL.fullmatch(symbol):
                sources.setdefault(symbol, f"{name}.shape[{dim}]")
            original = originals.get((name, dim))
            by = "" if symbol else fixing_lines.get(original, "") if original else fixed_by
            dimensions.append(Dimension(name, dim, size_hint(size), symbol, by))
    conditions = []
    for guard in guards:
        if _LAYOUT_ONLY.search(guard_function(guard)) or not sources.keys() >= {
            str(one) for one in guard.expr.free_symbols
        }:
            continue
        code = expression_code(guard.expr)
        condition = Condition(code, _over_inputs(code, sources), guard_lines.get(str(guard.expr), ""))
        if condition not in conditions:
            conditions.append(condition)
    for symbol, bounds in ranges.items():
        source = sources.get(symbol)
        for sign, bound in zip((">=", "<="), bounds, strict=True):
            if source and bound is not None:
                conditions.append(Condition(f"{symbol} {sign} {bound}", f"{source} {sign} {bound}"))
    dtypes = {name: str(fake.dtype).removeprefix("torch.") for name, fake in inputs}
    return Dynamic(tuple(dimensions), tuple(conditions), dtypes, tuple(notes))
