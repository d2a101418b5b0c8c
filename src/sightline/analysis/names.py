"""The variable a source line assigns a result to: ``h`` in ``h = self.fc(x)``. Display help only.

A name is given only when the expression is the whole value assigned, so that it can be trusted; in any
doubt (unreadable source, a position that fits nothing) there is none. Nothing here raises.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from sightline.analysis.places import torch_file
from sightline.trace.tables import Index

Position = tuple[int, int, int, int]  # line, end line, column, end column
Target = str | tuple["Target | None", ...]

_FIRST = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True)
class Source:
    """What one source file says about names and loops."""

    targets: dict[Position, Target] = field(default_factory=dict)
    loops: tuple[tuple[int, int, str], ...] = ()  #: first line, last line, and the text of the header


def assigned_name(
    file: str, line: int, end_line: int, column: int, end_column: int, path: str = ""
) -> str | None:
    """The name the expression at a position is assigned to, if it is the whole value.

    ``path`` is where in the result the tensor is: ``""`` for the result itself, ``[1]`` for its second part.
    """
    target = read(file).targets.get((line, end_line, column, end_column))
    while target is not None and not isinstance(target, str):
        found = _FIRST.match(path)
        if found is None or int(found[1]) >= len(target):
            return None
        target, path = target[int(found[1])], path[found.end() :]
    return None if target is None else target + path


def enclosing_loop(file: str, line: int) -> str | None:
    """The header of the innermost loop a line is in: ``for block in self.blocks:``."""
    inside = [loop for loop in read(file).loops if loop[0] < line <= loop[1]]
    return max(inside)[2] if inside else None


def value_names(index: Index) -> dict[int, str]:
    """The variable of the user's that each value was assigned to, where the source says so.

    Read off API calls, aten ops that came from none, and module calls, in the order they ended: what is
    returned and assigned again further out has its outer name.
    """
    data = index.raw
    ops, calls = data.ops, data.calls
    own = np.array([not torch_file(code.file) for code in data.codes] + [False])[data.frames.code]
    own = np.append(own, False)  # frame -1: no source
    names: dict[int, str] = {}
    for ids, frames, forms, offsets, flat in (
        (np.flatnonzero(ops.parent < 0), ops.frame, ops.result, ops.output_offsets, ops.outputs),
        (np.argsort(calls.order), calls.frame, calls.output_form, calls.output_offsets, calls.outputs),
    ):
        bounds = offsets.tolist()
        for id in ids[own[frames[ids]] & (forms[ids] >= 0)].tolist():
            for slot, path in enumerate(_paths(index, int(forms[id]))):
                at = bounds[id] + slot
                name = _frame_name(index, int(frames[id]), path) if at < bounds[id + 1] else None
                if name is not None:
                    names[int(flat[at])] = name
    return names


def _frame_name(index: Index, frame: int, path: str) -> str | None:
    frames = index.raw.frames
    position = (
        int(frames.line[frame]),
        int(frames.end_line[frame]),
        int(frames.column[frame]),
        int(frames.end_column[frame]),
    )
    return assigned_name(index.raw.codes[frames.code[frame]].file, *position, path)


def _paths(index: Index, form: int) -> list[str]:
    """Where the tensors of a result are; a result is the one argument of its form."""
    return [path.removeprefix("[0]") for path in index.raw.forms[form].slots()]


def read(file: str) -> Source:
    """What a file says, read once for each content it had."""
    try:
        return _parsed(file, "".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no Python, or too deep for the parser
        return Source()


@lru_cache(maxsize=256)
def _parsed(_file: str, text: str) -> Source:
    targets: dict[Position, Target] = {}
    loops: list[tuple[int, int, str]] = []
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            last = node.body[0].lineno
            header = " ".join(part.strip() for part in lines[node.lineno - 1 : max(last - 1, node.lineno)])
            loops.append((node.lineno, node.end_lineno or node.lineno, header))
        for value, target in _assignments(node):
            for position in _positions(value):
                targets[position] = target
    return Source(targets, tuple(loops))


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, Target]]:
    """Pairs of a whole value and what it is assigned to."""
    if isinstance(node, ast.Assign):
        target = _target(node.targets[0])
        yield from _pairs(node.value, target)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from _pairs(node.value, _target(node.target))
    elif isinstance(node, ast.AugAssign):
        target = _target(node.target)
        if target is not None:
            yield node, target  # Python places the operation at the whole statement


def _pairs(value: ast.expr, target: Target | None) -> Iterator[tuple[ast.expr, Target]]:
    if target is None:
        return
    if isinstance(value, ast.Tuple | ast.List) and isinstance(target, tuple):
        if len(value.elts) == len(target) and not any(isinstance(e, ast.Starred) for e in value.elts):
            for part, name in zip(value.elts, target, strict=True):
                yield from _pairs(part, name)
        return
    yield value, target


def _target(node: ast.expr) -> Target | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _target(node.value)
        return f"{owner}.{node.attr}" if isinstance(owner, str) else None
    if isinstance(node, ast.Tuple | ast.List) and not any(isinstance(e, ast.Starred) for e in node.elts):
        return tuple(_target(part) for part in node.elts)
    return None


def _positions(node: ast.expr | ast.stmt) -> Iterator[Position]:
    """Where the instruction of a value may be placed in the compiled code."""
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    yield node.lineno, end_line, node.col_offset, end
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func  # a method call broken over lines is placed at the method's name
        name_line, name_end = name.end_lineno or name.lineno, name.end_col_offset or 0
        if name_line != name.value.lineno:
            yield name_line, end_line, name_end - len(name.attr.encode()), end
