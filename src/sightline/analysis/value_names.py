"""Names of values: `value_names` has the variable that a source line assigns each result to, for display.

In ``h = self.fc(x)`` that is ``h``. There is a name only if the expression is the whole value assigned, so
that it can be trusted; in any doubt (unreadable source, an unknown position) there is none, and no error.

`find_value` goes the other way: the value that a row, an id or a name stands for. A name is the key of a
capture, a parameter, a module (for its result) or a variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np

from sightline.argument_checks import argument_text
from sightline.data.file_owners import torch_file
from sightline.data.index import Frame, Index, Module, ModuleCall, Op, Row, Value
from sightline.data.source_files import SourceFiles, syntax_tree
from sightline.data.trace_data import I64, PHASES, TraceData
from sightline.errors import NothingMatched, UsageError
from sightline.patterns import did_you_mean

Position = tuple[int, int, int, int]  # line, end line, column, end column
Target = str | tuple["Target | None", ...]

_ITEM = re.compile(r"\[(\d+)\]")
_DISPATCH: Final = "handle_torch_function"


def assigned_name(
    lines: SourceFiles, file: str, line: int, end_line: int, column: int, end_column: int, path: str = ""
) -> str | None:
    """The name the expression at a position is assigned to, if it is the whole value.

    ``path`` leads to the tensor in the result: ``""`` for the result itself, ``[1]`` for its second item.
    """
    target = _parse_source(lines.text(file)).targets.get((line, end_line, column, end_column))
    while target is not None and not isinstance(target, str):
        item = _ITEM.match(path)
        if item is None or int(item[1]) >= len(target):
            return None
        target, path = target[int(item[1])], path[item.end() :]
    return None if target is None else target + path


def root_names(index: Index) -> dict[int, str]:
    """The variable of each outermost module in the user's code: ``G`` in ``G(noise)``.

    Only where there are several of them, and where all calls of one have the same name.
    """
    data = index.raw
    called: dict[int, set[str | None]] = {}
    outermost = (data.calls.parent < 0) & (data.calls.phase == PHASES.index("forward"))
    for call in np.flatnonzero(outermost).tolist():
        frame = int(index.user_frames[data.calls.frame[call]])
        name = None
        if frame >= 0:
            lines, file, line, end_line, column, end_column = _position(index, frame)
            name = _parse_source(lines.text(file)).called.get((line, end_line, column, end_column))
        called.setdefault(int(data.calls.module[call]), set()).add(name)
    names = {module: next(iter(each)) for module, each in called.items() if len(each) == 1}
    known = {module: name for module, name in names.items() if name is not None}
    return known if len(called) > 1 and len(set(known.values())) == len(known) else {}


class ModuleNames:
    """How texts name modules: where a program calls several models, as it does, ``D.0``; else by their paths.

    The modules inside the first model keep their paths, which begin with no name.
    """

    def __init__(self, index: Index) -> None:
        self._modules = index.raw.modules
        self._roots = root_names(index)
        self._prefixes = {
            self._modules[root].path: name for root, name in self._roots.items() if self._modules[root].path
        }
        either = "|".join(map(re.escape, self._prefixes))
        self._prefix = re.compile(rf"(?<![\w.])({either})(?=\.\w)") if either else None

    def label(self, module: int) -> str:
        """The name of a module; the class of a model that is the only one."""
        return self._roots.get(module) or self.text(self._modules[module].label)

    def text(self, text: str) -> str:
        """A text in which paths of modules and parameters begin with the program's name of their model."""
        return text if self._prefix is None else self._prefix.sub(lambda at: self._prefixes[at[1]], text)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value and a variable it was assigned to, with the frame of the assignment."""

    value: int
    name: str
    frame: int
    call: int  #: the module call whose code assigns it; -1 outside


def value_names(index: Index) -> dict[int, str]:
    """The variable in the user's code that each value was assigned to, where the source shows it.

    A value that a module returns and its caller assigns again has the caller's name.
    """
    return {each.value: each.name for each in assignments(index)}


def assignments(index: Index) -> Iterator[Assignment]:
    """Every assignment of a value to a variable in the user's code, where the source shows it.

    Those of API calls and of aten ops outside them come first, then those of module calls.
    """
    name_at = _name_at(index)
    for value, frame, call, path in _produced_values(index):
        name = name_at(frame, path)
        if name is not None:
            yield Assignment(value, name, frame, call)


def returned_assignments(index: Index) -> Iterator[Assignment]:
    """Assignments of the results of the user's functions: ``loss = step(x)``.

    Of a function that assigns the variable it returns several times, the last assignment counts.
    """
    name_at, parents = _name_at(index), index.raw.frames.parent
    returns = cache(lambda frame, name: _returns(*_position(index, frame), name))
    for value, frame, call, path in _produced_values(index):
        name = name_at(frame, path)
        while frame >= 0 and not path and returns(frame, name):
            frame = int(parents[frame])
            name = name_at(frame, "") if frame >= 0 else None
            if name is not None:
                yield Assignment(value, name, frame, call)


def _name_at(index: Index) -> Callable[[int, str], str | None]:
    """`assigned_name` of a frame and a path in its result, each read once."""
    return cache(lambda frame, path: assigned_name(*_position(index, frame), path))


def _produced_values(index: Index) -> Iterator[tuple[int, int, int, str]]:
    """Each value that the user's code produced: its id, frame, module call, and path in the result."""
    data = index.raw
    ops, calls = data.ops, data.calls
    own = np.array([not torch_file(code.file) for code in data.codes] + [False])[data.frames.code]
    own = np.append(own, False)  # frame -1: no source
    # A result is the one argument of its form.
    paths = cache(lambda form: [path.removeprefix("[0]") for path in data.forms[form].slots()])
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
    """For each frame the one that made the call: for torch functions written in Python, two frames out.

    Such a function (``F.mse_loss``) passes its whole call to torch's dispatch on a line of its own.
    """
    frames = data.frames
    parents = np.append(frames.parent, -1).astype(np.int64)
    dispatches = np.array([code.function == _DISPATCH and torch_file(code.file) for code in data.codes])
    callers = np.append(np.arange(len(frames), dtype=np.int64), -1)
    if dispatches.any():
        inner = np.flatnonzero(dispatches[frames.code])
        callers[inner] = parents[parents[inner]]
    return callers


def _position(index: Index, frame: int) -> tuple[SourceFiles, str, int, int, int, int]:
    """The source, file and position of a frame's expression."""
    frames = index.raw.frames
    numbers = (frames.line, frames.end_line, frames.column, frames.end_column)
    line, end_line, column, end_column = (int(each[frame]) for each in numbers)
    file = index.raw.codes[frames.code[frame]].file
    return index.raw.source_lines, file, line, end_line, column, end_column


@dataclass(frozen=True)
class _Source:
    """The assignments and returns of one source file."""

    targets: dict[Position, Target] = field(default_factory=dict)
    returned: frozenset[Position] = frozenset()  #: whole values of ``return``
    called: dict[Position, str] = field(default_factory=dict)  #: names of called objects, without ``self``
    #: Functions by their first and last line, with the variables that ``return`` names.
    functions: tuple[tuple[int, int, frozenset[str]], ...] = ()


def _returns(
    lines: SourceFiles, file: str, line: int, end_line: int, column: int, end_column: int,
    name: str | None = None,
) -> bool:  # fmt: skip
    """Whether a function returns the expression at a position, or the variable it is assigned to."""
    source = _parse_source(lines.text(file))
    if (line, end_line, column, end_column) in source.returned:
        return True
    enclosing = [each for each in source.functions if each[0] <= line <= each[1]]
    return name is not None and bool(enclosing) and name in max(enclosing)[2]


@lru_cache(maxsize=256)
def _parse_source(text: str) -> _Source:
    """The assignments, returns and calls of a text; empty if it cannot be parsed."""
    tree = syntax_tree(text)
    if tree is None:
        return _Source()
    targets: dict[Position, Target] = {}
    returned: set[Position] = set()
    called: dict[Position, str] = {}
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
        elif isinstance(node, ast.Call) and isinstance(name := _target(node.func), str):
            called.update(dict.fromkeys(_positions(node), name.removeprefix("self.")))
    return _Source(targets, frozenset(returned), called, tuple(functions))


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, Target]]:
    """Pairs of a whole value and its target."""
    if isinstance(node, ast.Assign):
        target = _target(node.targets[0])
        yield from _pairs(node.value, target)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from _pairs(node.value, _target(node.target))
    elif isinstance(node, ast.AugAssign):
        target = _target(node.target)
        if target is not None:
            yield node, target  # the operation has the position of the whole statement


def _pairs(value: ast.expr, target: Target | None) -> Iterator[tuple[ast.expr, Target]]:
    """A value and its target; those of the parts where both are tuples of one length."""
    if target is None:
        return
    if isinstance(value, ast.Tuple | ast.List) and isinstance(target, tuple):
        if len(value.elts) == len(target) and not any(isinstance(e, ast.Starred) for e in value.elts):
            for part, name in zip(value.elts, target, strict=True):
                yield from _pairs(part, name)
        return
    yield value, target


def _target(node: ast.expr) -> Target | None:
    """The name that an expression assigns to or calls, ``self.x``, or a tuple of names; else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _target(node.value)
        return f"{owner}.{node.attr}" if isinstance(owner, str) else None
    if isinstance(node, ast.Tuple | ast.List) and not any(isinstance(e, ast.Starred) for e in node.elts):
        return tuple(_target(part) for part in node.elts)
    return None


def _positions(node: ast.expr | ast.stmt) -> Iterator[Position]:
    """The positions that the instruction of a value may have in the compiled code."""
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    yield node.lineno, end_line, node.col_offset, end
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func  # a method call broken over lines has the position of the method's name
        name_line, name_end = name.end_lineno or name.lineno, name.end_col_offset or 0
        if name_line != name.value.lineno:
            yield name_line, end_line, name_end - len(name.attr.encode()), end


_ID = re.compile(r"\$(\d{1,18})")  # Python refuses to read a number of thousands of digits


@dataclass(frozen=True, slots=True)
class FoundValue:
    """A value, and the line that set it where it is a variable of a script or function."""

    value: Value
    set_by: Frame | None = None


def find_value(index: Index, reference: Any) -> FoundValue:
    """The value that a row, an id or a name stands for; where several have the name, the last of them.

    A row is looked up in the recording it came from: inside the block every snapshot has its own.
    """
    if isinstance(reference, Value):
        return FoundValue(reference)
    if isinstance(reference, Row):
        for call in reference.calls[-1:] if isinstance(reference, Module) else [reference]:
            if isinstance(call, Op | ModuleCall) and len(call.outputs):
                return FoundValue(call.outputs[0])
        raise NothingMatched(f"{reference!r} returned no tensor.")
    if isinstance(reference, int) and not isinstance(reference, bool):
        return FoundValue(_value_of_id(index, reference))
    if not isinstance(reference, str):
        raise UsageError(
            f"{argument_text(reference)} is no value of a trace; give a row of t.values or t.ops, an id like "
            "'$12' or a name."
        )
    number = _ID.fullmatch(reference)
    if number:
        return FoundValue(_value_of_id(index, int(number[1])))
    value = _recorded_value(index, reference)
    if value >= 0:
        return FoundValue(index.values[value])
    # A variable of a function that ran in a module, ``blocks.0.attn.q``, or outside all, ``loss``.
    variables, in_module = list(_variables(index)), "." in reference
    matches = [each for each, names in variables if reference in names]
    if not matches and not in_module:  # or of any function: the last value it had counts
        matches = [each for each, _ in variables if each.name == reference]
        matches += [each for each in returned_assignments(index) if each.name == reference]
    if not matches:
        raise _no_value(index, reference)
    variable = max(matches, key=lambda each: each.value)
    return FoundValue(index.values[variable.value], None if in_module else index.frames[variable.frame])


def _no_value(index: Index, name: str) -> NothingMatched:
    """The error for a name without a value: a module that returned none, or the nearest names."""
    for module in index.modules:
        if name in module.aliases or (not module.path and name == module.type):
            if module.calls:
                return NothingMatched(f"{name!r} is a module that returned no tensor.")
            return NothingMatched(
                f"{name!r} is a module that was never called in this recording: there is no value of it."
            )
    names = [module.path for module in index.modules if module.calls]
    names += [index.name(id) for id in np.unique(index.raw.values.name).tolist()]
    for each, qualified in _variables(index):
        names += [*qualified, each.name]
    names += [each.name for each in returned_assignments(index)]
    names += [each.key for each in index.raw.captures]
    near = did_you_mean(name, (each for each in names if each != name))
    return NothingMatched(f"{name!r} names no value, module or variable of this trace{near}")


def _value_of_id(index: Index, id: int) -> Value:
    count = len(index.values)
    if not 0 <= id < count:
        present = f"its values are $0 … ${count - 1}" if count else "it has no values"
        raise NothingMatched(f"There is no value ${id} in this trace; {present}.")
    return index.values[id]


def _recorded_value(index: Index, name: str) -> int:
    """The value of a capture, of a named tensor at the end of the run, or of a module's last result."""
    captured = next((each.value for each in reversed(index.raw.captures) if each.key == name), -1)
    if captured >= 0:
        return captured
    names, values = index.raw.names, index.raw.values
    ids = np.flatnonzero(values.name == names.index(name)).tolist() if name in names else []
    if ids:
        newest: int = ids[-1]
        for version in np.flatnonzero(values.previous >= 0).tolist():  # in the order of the run
            if values.previous[version] == newest:
                newest = version
        return newest
    for module in index.modules:
        if name in module.aliases or (not module.path and name == module.type):
            for call in reversed(module.calls):
                if len(call.outputs):
                    return call.outputs[0].id
    return -1


def _variables(index: Index) -> Iterator[tuple[Assignment, list[str]]]:
    """Each assignment to a variable, and its qualified names: ``blocks.0.attn.q``, ``Net.q``."""
    for each in assignments(index):
        if each.call < 0:
            yield each, [each.name]
            continue
        module = index.module_calls[each.call].module
        paths = module.aliases if module.path else (*module.aliases, module.type)
        yield each, [f"{path}.{each.name}" if path else each.name for path in paths]
