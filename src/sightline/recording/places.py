"""From code objects and instruction offsets to lines, columns and the operators written there."""

from __future__ import annotations

import dis
import os
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import numpy as np
import torch

from sightline.recording.stacks import Stacks
from sightline.trace.data import CodeInfo, FileInfo, FrameColumns

_Position = tuple[int | None, int | None, int | None, int | None]
_TORCH: Final = os.path.dirname(torch.__file__) + os.sep


def frame_columns(stacks: Stacks) -> tuple[FrameColumns, list[CodeInfo], dict[str, FileInfo]]:
    """The trie of frames with its source positions, its codes and the state of their files."""
    count = len(stacks.parents)  # nodes are only ever added: what is there now is whole
    codes = stacks.codes[:]
    code_ids, instructions = stacks.code_ids[:count], stacks.instructions[:count]
    tables: dict[int, list[_Position]] = {}
    positions = np.full((4, count), -1, dtype=np.int32)
    for node in range(count):
        number = code_ids[node]
        table = tables.get(number)
        if table is None:
            table = tables[number] = list(codes[number].co_positions())
        at = instructions[node] // 2
        found = table[at] if at < len(table) else (None, None, None, None)
        line = found[0] if found[0] is not None else codes[number].co_firstlineno
        positions[:, node] = (
            line,
            found[1] if found[1] is not None else line,
            found[2] if found[2] is not None else -1,
            found[3] if found[3] is not None else -1,
        )
    frames = FrameColumns(
        np.array(stacks.parents[:count], dtype=np.int32), np.array(code_ids, dtype=np.int32),
        positions[0], positions[1], positions[2], positions[3],
    )  # fmt: skip
    infos = [CodeInfo(code.co_filename, code.co_qualname, code.co_firstlineno) for code in codes]
    return frames, infos, _files({info.file for info in infos})


def _files(paths: set[str]) -> dict[str, FileInfo]:
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:  # <stdin>, a notebook cell, a file inside a zip
            continue
        found[path] = FileInfo(status.st_mtime_ns, status.st_size)
    return found


#: What each binary instruction is written as, and the methods such an expression arrives as.
_UNARY: Final = {
    "UNARY_NEGATIVE": ("-", ("neg", "negative", "__neg__")),
    "UNARY_INVERT": ("~", ("bitwise_not", "__invert__")),
    "UNARY_POSITIVE": ("+", ("positive", "__pos__")),
    "BINARY_SUBSCR": ("[]", ("__getitem__",)),
    "STORE_SUBSCR": ("[]=", ("__setitem__",)),
}
_BINARY: Final = {
    "+": ("add", "__add__", "__radd__"), "-": ("sub", "__sub__", "__rsub__", "rsub"),
    "*": ("mul", "__mul__", "__rmul__"), "/": ("div", "__div__", "__truediv__", "__rtruediv__"),
    "//": ("floor_divide", "__floordiv__", "__rfloordiv__"), "%": ("remainder", "__mod__", "__rmod__"),
    "@": ("matmul", "__matmul__", "__rmatmul__"), "**": ("pow", "__pow__", "__rpow__"),
    "&": ("__and__", "__rand__", "bitwise_and"), "|": ("__or__", "__ror__", "bitwise_or"),
    "^": ("__xor__", "__rxor__", "bitwise_xor"), "<<": ("__lshift__", "__rlshift__", "bitwise_left_shift"),
    ">>": ("__rshift__", "__rrshift__", "bitwise_right_shift"),
}  # fmt: skip
_COMPARE: Final = {
    "<": ("lt", "__lt__", "gt", "__gt__"), "<=": ("le", "__le__", "ge", "__ge__"), "==": ("eq", "__eq__"),
    "!=": ("ne", "__ne__"), ">": ("gt", "__gt__", "lt", "__lt__"), ">=": ("ge", "__ge__", "le", "__le__"),
}  # fmt: skip


def operator_names(stacks: Stacks) -> Callable[[int, str], str | None]:
    """A function (stack, method name) → the operator that was written there, or None for a plain call."""
    cache: dict[tuple[int, str], str | None] = {}

    def find(stack: int, name: str) -> str | None:
        key = (stack, name)
        if key not in cache:
            cache[key] = _operator(stacks, stack, name.rpartition(".")[2])
        return cache[key]

    return find


def _operator(stacks: Stacks, stack: int, method: str) -> str | None:
    while stack >= 0 and stacks.codes[stacks.code_ids[stack]].co_filename.startswith(_TORCH):
        stack = stacks.parents[stack]
    if stack < 0:
        return None
    written, methods = _instruction(stacks.codes[stacks.code_ids[stack]], stacks.instructions[stack])
    if method in methods:
        return written
    in_place = written + "="
    bare = (
        method.rstrip("_") if not method.startswith("__") else "__" + method[3:] if method[2] == "i" else ""
    )
    return in_place if written in _BINARY and bare in methods else None


def _instruction(code: CodeType, offset: int) -> tuple[str, tuple[str, ...]]:
    raw = code.co_code
    if offset + 1 >= len(raw):
        return "", ()
    name, argument = dis.opname[raw[offset]], raw[offset + 1]
    if name in _UNARY:
        return _UNARY[name]
    if name == "BINARY_OP":
        symbol = _binary_symbols()[argument].removesuffix("=")
        return symbol, _BINARY.get(symbol, ())
    if name == "COMPARE_OP":
        for symbol in _compare_symbols(argument):
            return symbol, _COMPARE.get(symbol, ())
    return "", ()


def _binary_symbols() -> list[str]:
    table: Any = getattr(dis, "_nb_ops", [])
    return [symbol for _, symbol in table] or [""] * 256


def _compare_symbols(argument: int) -> list[str]:
    shift = 4 if len(dis.cmp_op) and dis.hasjrel and _packed_comparisons() else 0
    index = argument >> shift
    return [dis.cmp_op[index]] if index < len(dis.cmp_op) else []


def _packed_comparisons() -> bool:
    """From Python 3.12 on the operand of COMPARE_OP carries flags in its low bits."""
    import sys

    return sys.version_info >= (3, 12)
