"""Source positions: the lines and columns of recorded stacks, and the operators written there."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import islice
from types import CodeType
from typing import Any, Final
from weakref import ref

import torch

from sightline.assemble.batch import SourcePosition
from sightline.data.file_owners import cell_name
from sightline.data.trace_data import CodeInfo, FileInfo
from sightline.recording.stacks import StackTrie

_Position = tuple[int | None, int | None, int | None, int | None]
_NO_POSITION: Final = (None, None, None, None)
_TORCH: Final = os.path.dirname(torch.__file__) + os.sep


class SourcePositions:
    """The lines and columns of the stacks of a recording, each computed once."""

    def __init__(self, stacks: StackTrie) -> None:
        self._stacks = stacks
        self.places: list[SourcePosition] = []
        self.codes: list[CodeInfo] = []
        self.files: dict[str, FileInfo] = {}

    def update(self) -> None:
        """Add the stacks that are new."""
        stacks = self._stacks
        count = len(stacks.parents)  # nodes are only ever added: these are complete
        for code in stacks.codes[len(self.codes) :]:
            self.codes.append(CodeInfo(cell_name(code.co_filename), code.co_qualname, code.co_firstlineno))
        for path in {code.file for code in self.codes} - self.files.keys():
            with suppress(OSError):  # <stdin>, a notebook cell, a file inside a zip
                status = os.stat(path)
                self.files[path] = FileInfo(status.st_mtime_ns, status.st_size)
        nodes = range(len(self.places), count)
        units = [max(stacks.instructions[node], 0) // 2 for node in nodes]
        units_of: dict[int, set[int]] = {}
        for node, unit in zip(nodes, units, strict=True):
            units_of.setdefault(stacks.code_ids[node], set()).add(unit)
        positions = {number: _positions(stacks.codes[number], each) for number, each in units_of.items()}
        for node, unit in zip(nodes, units, strict=True):
            number = stacks.code_ids[node]
            line, end, column, end_column = positions[number][unit]
            line = line if line is not None else self.codes[number].first_line
            self.places.append(SourcePosition(
                stacks.parents[node], number, line, line if end is None else end,
                -1 if column is None else column, -1 if end_column is None else end_column,
            ))  # fmt: skip


#: The positions found in codes that live, by the code's id: the next recording of a loop has the same ones.
_known: Final[dict[int, tuple[ref[CodeType], dict[int, _Position]]]] = {}


def _positions(code: CodeType, units: set[int]) -> dict[int, _Position]:
    """The positions of these units of a code, two bytes each, and perhaps of others.

    Python decodes them one by one from the start; the others are skipped.
    """
    key = id(code)
    entry = _known.get(key)
    if entry is None or entry[0]() is not code:
        entry = _known[key] = ref(code, lambda _: _known.pop(key, None)), {}
    positions = entry[1]
    every, passed = code.co_positions(), 0
    for unit in sorted(units - positions.keys()):
        positions[unit] = next(islice(every, unit - passed, None), _NO_POSITION)
        passed = unit + 1
    return positions


#: The symbol of each unary instruction, and the methods that such an expression calls, the usual one first.
UNARY_METHODS: Final = {
    "UNARY_NEGATIVE": ("-", ("neg", "negative", "__neg__")),
    "UNARY_INVERT": ("~", ("bitwise_not", "__invert__")),
    "UNARY_POSITIVE": ("+", ("positive", "__pos__")),
    "BINARY_SUBSCR": ("[]", ("__getitem__",)),
    "BINARY_SLICE": ("[]", ("__getitem__",)),
    "STORE_SUBSCR": ("[]=", ("__setitem__",)),
    "STORE_SLICE": ("[]=", ("__setitem__",)),
}
#: The methods that each binary operator calls, the usual one first; `operations` names other reflected ones.
BINARY_METHODS: Final = {
    "+": ("add", "__add__", "__radd__"), "-": ("sub", "__sub__"), "*": ("mul", "__mul__", "__rmul__"),
    "/": ("div", "__div__", "__truediv__"), "//": ("floor_divide", "__floordiv__"),
    "%": ("remainder", "__mod__"), "@": ("matmul", "__matmul__"), "**": ("pow", "__pow__"),
    "&": ("__and__", "__rand__", "bitwise_and"), "|": ("__or__", "__ror__", "bitwise_or"),
    "^": ("__xor__", "__rxor__", "bitwise_xor"), "<<": ("__lshift__", "bitwise_left_shift"),
    ">>": ("__rshift__", "bitwise_right_shift"),
}  # fmt: skip
COMPARE_METHODS: Final = {
    "<": ("lt", "__lt__"), "<=": ("le", "__le__"), "==": ("__eq__", "eq"),
    "!=": ("ne", "__ne__"), ">": ("gt", "__gt__"), ">=": ("ge", "__ge__"),
}  # fmt: skip
MIRRORED_COMPARISONS: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def operator_names(stacks: StackTrie) -> Callable[[int, str], str | None]:
    """A function of a stack and a method name that returns the operator written there, or None."""
    cache: dict[tuple[int, str], str | None] = {}

    def operator_at(stack: int, name: str) -> str | None:
        key = (stack, name)
        if key not in cache:
            cache[key] = _operator(stacks, stack, name.rpartition(".")[2])
        return cache[key]

    return operator_at


def _operator(stacks: StackTrie, stack: int, method: str) -> str | None:
    while stack >= 0 and stacks.codes[stacks.code_ids[stack]].co_filename.startswith(_TORCH):
        stack = stacks.parents[stack]
    if stack < 0:
        return None
    symbol, methods = _instruction(stacks.codes[stacks.code_ids[stack]], stacks.instructions[stack])
    if method in methods:
        return symbol
    mirrored = MIRRORED_COMPARISONS.get(symbol, "")
    if method in COMPARE_METHODS.get(mirrored, ()):
        return mirrored  # ``1 < x`` calls ``x.gt(1)``
    in_place = symbol + "="
    bare = (
        method.rstrip("_") if not method.startswith("__") else "__" + method[3:] if method[2] == "i" else ""
    )
    return in_place if symbol in BINARY_METHODS and bare in methods else None


#: How many low bits of the argument of a comparison are flags.
_COMPARE_FLAGS: Final = 0 if sys.version_info < (3, 12) else 4 if sys.version_info < (3, 13) else 5


def unary_name(name: str, argument: int) -> str:
    """The name of an instruction; a unary plus is an intrinsic function from Python 3.12 on."""
    intrinsic = getattr(dis, "_intrinsic_1_descs", ())
    if name == "CALL_INTRINSIC_1" and argument < len(intrinsic):
        return str(intrinsic[argument]).removeprefix("INTRINSIC_")
    return name


def _instruction(code: CodeType, offset: int) -> tuple[str, tuple[str, ...]]:
    raw = code.co_code
    if offset + 1 >= len(raw):
        return "", ()
    name, argument = unary_name(dis.opname[raw[offset]], raw[offset + 1]), raw[offset + 1]
    if name in UNARY_METHODS:
        return UNARY_METHODS[name]
    if name == "BINARY_OP":
        symbol = _binary_symbols()[argument].removesuffix("=")
        if symbol == "[]":  # an instruction of its own before Python 3.14
            return UNARY_METHODS["BINARY_SUBSCR"]
        return symbol, BINARY_METHODS.get(symbol, ())
    if name == "COMPARE_OP":
        index = argument >> _COMPARE_FLAGS
        symbol = dis.cmp_op[index] if index < len(dis.cmp_op) else ""
        return symbol, COMPARE_METHODS.get(symbol, ())
    return "", ()


@cache
def _binary_symbols() -> list[str]:
    table: Any = getattr(dis, "_nb_ops", [])
    return [symbol for _, symbol in table] or [""] * 256
