"""Expressions over sizes, as torch's printer writes them: read and worked out, never run as code.

An archive holds them as text. What is allowed is arithmetic, comparisons and a few functions of numbers;
anything else in a text means that the archive was altered.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from sightline.errors import DamagedFile

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
