"""Which sizes of an exported graph may differ from the example's, which may not, and which line fixed them.

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
from sightline.notation import tensor_text

_LONGEST: Final = 10_000
_MOST: Final = 1 << 128  #: no size, nor anything on the way to one, is larger

_BINARY: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: Final[dict[type[ast.AST], Callable[[Any], Any]]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
}  # fmt: skip
_COMPARED: Final[dict[type[ast.AST], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "max": max, "min": min, "int": int, "float": float, "abs": abs, "bool": bool, "round": round,
    **{f"math.{name}": getattr(math, name) for name in
       ("floor", "ceil", "trunc", "sqrt", "log", "log2", "exp", "sin", "cos", "tan", "tanh", "fabs", "gcd")},
}  # fmt: skip
_CONSTANTS: Final = {"math.inf": math.inf, "math.pi": math.pi, "math.e": math.e}


def evaluated(code: str, symbols: Mapping[str, int]) -> Any:
    """What an expression is for these sizes.

    >>> evaluated("2*s0 + max(s1, 4) // 3 >= 8", {"s0": 3, "s1": 9})
    True
    >>> evaluated("().__class__", {})
    Traceback (most recent call last):
    sightline.errors.DamagedFile: The archive was altered: '().__class__' is no expression over sizes.
    """
    try:
        return _value(_parsed(code), symbols)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise DamagedFile(f"The archive was altered: {code[:60]!a} is no expression over sizes.") from error
    except (ArithmeticError, OverflowError):  # a division by zero: torch asked it of other sizes only
        return None


@lru_cache(maxsize=4096)
def _parsed(code: str) -> ast.expr:
    if len(code) > _LONGEST:
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
        return _combined(node, _value(node.left, symbols), _value(node.right, symbols))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, symbols))
    if isinstance(node, ast.Compare):
        left, held = _value(node.left, symbols), True
        for sign, right in zip(node.ops, (_value(each, symbols) for each in node.comparators), strict=True):
            held, left = held and _COMPARED[type(sign)](left, right), right
        return held
    if isinstance(node, ast.BoolOp):
        parts = (bool(_value(each, symbols)) for each in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, symbols) else node.orelse, symbols)
    if isinstance(node, ast.Call) and not node.keywords:
        return _FUNCTIONS[_dotted(node.func)](*(_value(each, symbols) for each in node.args))
    raise ValueError(type(node).__name__)


def _combined(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, ast.Pow | ast.LShift) and (abs(right) > 128 or abs(left) > _MOST):
        raise OverflowError
    return _BINARY[type(node.op)](left, right)


def _dotted(node: ast.expr) -> str:
    """``max`` or ``math.floor``; nothing else is called."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        return f"math.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


#: Torch asks these questions to lay memory out. Their answers shape no op, so another answer is fine.
_LAYOUT_ONLY: Final = re.compile(r"contiguous|_reshape_view_helper|strides|channels_last|overlapping")
_SYMBOL: Final = re.compile(r"\b[a-z]+\d+\b")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of one input.

    >>> print(Dimension("x", 1, 3, "", "net.py:9 in forward"))
    dimension 1 is fixed at 3 by net.py:9 in forward
    """

    input: str  #: as it is written in a call: ``x``, ``batch['ids']``
    dim: int
    size: int  #: of the example
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


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that held for the example and on which the graph depends: ``s77 > 5``."""

    code: str  #: a Python expression over the symbols
    text: str  #: the same over the inputs: ``x.shape[0] > 5``
    by: str = ""  #: the line that asked


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
    notes: tuple[str, ...] = ()  #: what torch said while it exported, in sentences

    @cached_property
    def inputs(self) -> dict[str, tuple[Dimension, ...]]:
        """The dimensions of each input that is a tensor."""
        found: dict[str, list[Dimension]] = {name: [] for name in self.dtypes or ()}
        for one in self.dimensions:
            found.setdefault(one.input, []).append(one)
        return {name: tuple(dims) for name, dims in found.items()}

    @property
    def dynamic(self) -> tuple[Dimension, ...]:
        """The dimensions that may differ."""
        return tuple(one for one in self.dimensions if one.dynamic)

    @property
    def fixed(self) -> tuple[Dimension, ...]:
        """The dimensions that may not."""
        return tuple(one for one in self.dimensions if not one.dynamic)

    def wanted(self, name: str) -> str:
        """What an input looks like: ``f32[s77, 3]``."""
        sizes: Any = [one.symbol or one.size for one in self.inputs[name]]
        return tensor_text(sizes, (self.dtypes or {}).get(name, "?"))

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise `UsageError` where a size is not one the graph was made for; say which and why."""
        symbols = self._symbols(shapes)
        for condition in self.conditions:
            if not set(_SYMBOL.findall(condition.code)) <= symbols.keys():
                continue
            if not evaluated(condition.code, symbols):
                by = f" ({condition.by})" if condition.by else ""
                raise UsageError(
                    f"This graph was made for {condition.text}{by}, which does not hold for "
                    f"{_sizes_text(condition.text, shapes)}: export again with an example of that size."
                )

    def _symbols(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """What each symbol is in this call; a size that contradicts another one is an error."""
        symbols: dict[str, int] = {}
        from_where: dict[str, str] = {}
        later = []
        for one in self.dimensions:
            size, where = shapes[one.input][one.dim], f"{one.input}.shape[{one.dim}]"
            if not one.symbol:
                if size != one.size:
                    raise UsageError(f"{where} must be {one.size} but is {size}: {one}.")
            elif not _SYMBOL.fullmatch(one.symbol):
                later.append((one, size, where))
            elif symbols.setdefault(one.symbol, size) != size:
                raise UsageError(
                    f"{where} must equal {from_where[one.symbol]}, which is {symbols[one.symbol]}, "
                    f"but is {size}."
                )
            else:
                from_where.setdefault(one.symbol, where)
        for one, size, where in later:
            known = set(_SYMBOL.findall(one.symbol)) <= symbols.keys()
            if known and evaluated(one.symbol, symbols) != size:
                text = _in_words(one.symbol, from_where)
                raise UsageError(
                    f"{where} must be {text}, which is {evaluated(one.symbol, symbols)}, but is {size}."
                )
        return symbols

    def to_plain(self) -> dict[str, Any]:
        """The report as what JSON knows."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Dynamic:
        """The report that `to_plain` described."""
        return cls(
            tuple(Dimension(**one) for one in plain["dimensions"]),
            tuple(Condition(**one) for one in plain["conditions"]),
            dict(plain["dtypes"] or {}),
            tuple(plain["notes"]),
        )

    def __str__(self) -> str:
        lines = []
        for name, dimensions in self.inputs.items():
            lines += [f"{name}  {self.wanted(name)}", *(f"  {one}" for one in dimensions)]
        if self.conditions:
            lines.append("made for")
            lines += [f"  {one.text}" + (f"  ({one.by})" if one.by else "") for one in self.conditions]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _in_words(code: str, sources: Mapping[str, str]) -> str:
    """An expression over inputs instead of symbols."""
    return _SYMBOL.sub(lambda found: sources.get(found.group(), found.group()), code)


def _sizes_text(text: str, shapes: Mapping[str, Sequence[int]]) -> str:
    named = [name for name in shapes if re.search(rf"(?<![\w.]){re.escape(name)}\.shape", text)]
    return " and ".join(f"{name} of shape {tuple(shapes[name])}" for name in named or shapes)


def read_dimensions(
    inputs: Sequence[tuple[str, Any]],
    guards: Sequence[Any],
    places: Mapping[str, str],
    notes: Sequence[str],
    ranges: Mapping[str, tuple[int | None, int | None]],
    asked: str = "",
) -> Dynamic:
    """The report on a fresh export; ``asked`` is the option that fixed every size it does not name.

    ``inputs`` are names and fake tensors, ``guards`` torch's own, and ``places`` says for the text of a guard
    which line of the model was running when torch added it. ``ranges`` are bounds that the user set.
    """
    sources: dict[str, str] = {}
    origins = _origins(inputs)
    dimensions = []
    for name, fake in inputs:
        for dim, size in enumerate(fake.shape):
            known = isinstance(size, int) or size.node.expr.is_number  # torch fixed it, early or late
            symbol = "" if known else _code(size.node.expr)
            if _SYMBOL.fullmatch(symbol):
                sources.setdefault(symbol, f"{name}.shape[{dim}]")
            origin = origins.get((name, dim))
            by = "" if symbol else _fixed_by(origin, guards, places) if origin else asked
            dimensions.append(Dimension(name, dim, size_of(size), symbol, by))
    conditions = []
    for guard in guards:
        if _is_layout_only(guard) or not sources.keys() >= {str(one) for one in guard.expr.free_symbols}:
            continue
        code = _code(guard.expr)
        condition = Condition(code, _in_words(code, sources), places.get(str(guard.expr), ""))
        if condition not in conditions:
            conditions.append(condition)
    for symbol, bounds in ranges.items():
        source = sources.get(symbol)
        for sign, bound in zip((">=", "<="), bounds, strict=True):
            if source and bound is not None:
                conditions.append(Condition(f"{symbol} {sign} {bound}", f"{source} {sign} {bound}"))
    dtypes = {name: str(fake.dtype).removeprefix("torch.") for name, fake in inputs}
    return Dynamic(tuple(dimensions), tuple(conditions), dtypes, tuple(notes))


def size_of(size: Any) -> int:
    """A size of the example: a number, or what torch remembers of a symbol. -1 where it knows nothing."""
    if isinstance(size, int):
        return size
    if size.node.expr.is_number:
        return int(size.node.expr)
    hint = getattr(size.node, "hint", None)
    return -1 if hint is None else int(hint)


def _code(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter  # there is no public one

    return str(PythonPrinter().doprint(expression))


def _origins(inputs: Sequence[tuple[str, Any]]) -> dict[tuple[str, int], str]:
    """The symbol each dimension had before torch fixed it."""
    found: dict[tuple[str, int], str] = {}
    for name, fake in inputs:
        environment = getattr(getattr(fake, "fake_mode", None), "shape_env", None)
        known = getattr(environment, "source_to_var", {})
        for source, symbol in known.items():
            match = re.fullmatch(r"(.*)\.size\(\)\[(\d+)\]", str(source))
            if match and _same_source(match[1], name):
                found[name, int(match[2])] = str(symbol)
    return found


def _same_source(source: str, name: str) -> bool:
    """Whether torch's ``L['batch']['ids']`` is our ``batch['ids']``."""
    match = re.match(r"L\['(\w+)'\](.*)", source)
    return (match[1] + match[2] if match else source) == name


def _fixed_by(symbol: str, guards: Sequence[Any], places: Mapping[str, str]) -> str:
    for guard in guards:
        if type(guard.expr).__name__ == "Equality" and symbol in {
            str(one) for one in guard.expr.free_symbols
        }:
            return places.get(str(guard.expr), "")
    return ""


def _is_layout_only(guard: Any) -> bool:
    frame = getattr(guard.sloc, "framework_loc", None)
    return bool(_LAYOUT_ONLY.search(getattr(frame, "name", "") or ""))
