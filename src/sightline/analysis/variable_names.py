"""The variable a source line assigns a result to: ``h`` in ``h = self.fc(x)``. Display help only.

A name is given only when the expression is the whole value assigned, so that it can be trusted; in any
doubt (unreadable source, a position that fits nothing) there is none. Nothing here raises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Final

import numpy as np

from sightline.trace.data import I64, TraceData
from sightline.trace.index import Index
from sightline.trace.source_files import torch_file
from sightline.trace.source_lines import SourceLines, syntax_tree

Position = tuple[int, int, int, int]  # line, end line, column, end column
Target = str | tuple["Target | None", ...]

_FIRST = re.compile(r"\[(\d+)\]")
_HANDING_OVER: Final = "handle_torch_function"


def assigned_name(
    lines: SourceLines, file: str, line: int, end_line: int, column: int, end_column: int, path: str = ""
) -> str | None:
    """The name the expression at a position is assigned to, if it is the whole value.

    ``path`` is where in the result the tensor is: ``""`` for the result itself, ``[1]`` for its second part.
    """
    target = _read(lines.text(file)).targets.get((line, end_line, column, end_column))
    while target is not None and not isinstance(target, str):
        found = _FIRST.match(path)
        if found is None or int(found[1]) >= len(target):
            return None
        target, path = target[int(found[1])], path[found.end() :]
    return None if target is None else target + path


@dataclass(frozen=True, slots=True)
class Assigned:
    """A value and a variable it was assigned to, with the frame that did it."""

    value: int
    name: str
    frame: int
    call: int  #: the module call in the code of which it was done; -1 outside


def value_names(index: Index) -> dict[int, str]:
    """The variable of the user's that each value was assigned to, where the source says so.

    What is returned by a module and assigned again further out has its outer name.
    """
    return {each.value: each.name for each in assignments(index)}


def assignments(index: Index) -> Iterator[Assigned]:
    """Every assignment of a value to a variable of the user's, where the source says so.

    Read off API calls, aten ops that came from none, and module calls, in the order they ended.
    """
    name_at = _name_at(index)
    for value, frame, call, path in _made(index):
        name = name_at(frame, path)
        if name is not None:
            yield Assigned(value, name, frame, call)


def returned_assignments(index: Index) -> Iterator[Assigned]:
    """What was assigned to a variable after functions of the user's returned it: ``loss = step(x)``.

    A function that sets the variable it returns several times returned the last one of these.
    """
    name_at, parents = _name_at(index), index.raw.frames.parent
    returns = cache(lambda frame, name: _returns(*_position(index, frame), name))
    for value, frame, call, path in _made(index):
        name = name_at(frame, path)
        while frame >= 0 and not path and returns(frame, name):
            frame = int(parents[frame])
            name = name_at(frame, "") if frame >= 0 else None
            if name is not None:
                yield Assigned(value, name, frame, call)


def _name_at(index: Index) -> Callable[[int, str], str | None]:
    """`assigned_name` of a frame and a path in its result, each read once."""
    return cache(lambda frame, path: assigned_name(*_position(index, frame), path))


def _made(index: Index) -> Iterator[tuple[int, int, int, str]]:
    """Each value that a line of the user's made: its id, frame and module call, and where in the result."""
    data = index.raw
    ops, calls = data.ops, data.calls
    own = np.array([not torch_file(code.file) for code in data.codes] + [False])[data.frames.code]
    own = np.append(own, False)  # frame -1: no source
    paths = cache(lambda form: _paths(index, form))
    for ids, frames, inside, forms, offsets, flat in (
        (np.flatnonzero(ops.parent < 0), _callers(data)[ops.frame], ops.call, ops.result,
         ops.output_offsets, ops.outputs),
        (np.argsort(calls.order), calls.frame, calls.parent, calls.output_form,
         calls.output_offsets, calls.outputs),
    ):  # fmt: skip
        bounds = offsets.tolist()
        for id in ids[own[frames[ids]] & (forms[ids] >= 0)].tolist():
            for slot, path in enumerate(paths(int(forms[id]))):
                at = bounds[id] + slot
                if at < bounds[id + 1]:
                    yield int(flat[at]), int(frames[id]), int(inside[id]), path


def _callers(data: TraceData) -> I64:
    """For each frame the one that made the call: of torch's functions in Python that is two further out.

    Such a function, as ``F.mse_loss``, hands over its whole call, in a line of its own, to torch's dispatch.
    """
    frames = data.frames
    parents = np.append(frames.parent, -1).astype(np.int64)
    hands_over = np.array([code.function == _HANDING_OVER and torch_file(code.file) for code in data.codes])
    found = np.append(np.arange(len(frames), dtype=np.int64), -1)
    if hands_over.any():
        handed = np.flatnonzero(hands_over[frames.code])
        found[handed] = parents[parents[handed]]
    return found


def _position(index: Index, frame: int) -> tuple[SourceLines, str, int, int, int, int]:
    """Where the expression of a frame is, and in which text."""
    frames = index.raw.frames
    numbers = (frames.line, frames.end_line, frames.column, frames.end_column)
    line, end_line, column, end_column = (int(each[frame]) for each in numbers)
    file = index.raw.codes[frames.code[frame]].file
    return index.raw.source_lines, file, line, end_line, column, end_column


def _paths(index: Index, form: int) -> list[str]:
    """Where the tensors of a result are; a result is the one argument of its form."""
    return [path.removeprefix("[0]") for path in index.raw.forms[form].slots()]


@dataclass(frozen=True)
class _Source:
    """What one source file says about names."""

    targets: dict[Position, Target] = field(default_factory=dict)
    returned: frozenset[Position] = frozenset()  #: whole values of ``return``
    #: Functions by their first and last line, with the variables that ``return`` names.
    functions: tuple[tuple[int, int, frozenset[str]], ...] = ()


def _returns(
    lines: SourceLines, file: str, line: int, end_line: int, column: int, end_column: int,
    name: str | None = None,
) -> bool:  # fmt: skip
    """Whether a function returns the expression at a position, or the variable it is assigned to."""
    source = _read(lines.text(file))
    if (line, end_line, column, end_column) in source.returned:
        return True
    around = [each for each in source.functions if each[0] <= line <= each[1]]
    return name is not None and bool(around) and name in max(around)[2]


@lru_cache(maxsize=256)
def _read(text: str) -> _Source:
    """What a text says about names."""
    tree = syntax_tree(text)
    if tree is None:
        return _Source()
    targets: dict[Position, Target] = {}
    returned: set[Position] = set()
    functions: list[tuple[int, int, frozenset[str]]] = []
    for node in ast.walk(tree):
        for value, target in _assignments(node):
            for position in _positions(value):
                targets[position] = target
        if isinstance(node, ast.Return) and node.value is not None:
            returned.update(_positions(node.value))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            values = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            names = frozenset(each.id for each in values if isinstance(each, ast.Name))
            functions.append((node.lineno, node.end_lineno or node.lineno, names))
    return _Source(targets, frozenset(returned), tuple(functions))


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
