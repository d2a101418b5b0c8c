"""The rows of the first screen's table of modules: the top of the module tree, equal neighbours in one row.

`ModuleGroups` opens the tree level by level, as long as all of a level fits. Consecutive modules share a row
if they are of one class, with parameters of the same shapes down to the last submodule, and were called with
tensors of the same sizes. Sizes that change from call to call, such as those of a batch, have to overlap.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final

from sightline.analysis.cost import Costs
from sightline.analysis.module_tree import OUTSIDE
from sightline.data.index import Index
from sightline.views.inputs_outputs import Exchange, Exchanges, alike
from sightline.views.rendering import Cell, Span, cut, width

_MIN_LAYERS: Final = 3  #: how many equal modules share a row
_SHORT_NAME: Final = 11  #: to which the name of a module may be cut for its class


@dataclass(frozen=True, slots=True)
class Group:
    """Scopes in one row: consecutive equal siblings, or the same part of several modules."""

    scopes: tuple[int, ...]
    depth: int
    opened: bool  #: whether their parts may have rows of their own


class ModuleGroups:
    """The groups of one recording, in the order of their rows, and their names and exchanges."""

    def __init__(self, index: Index, costs: Costs) -> None:
        self._data = index.raw
        self._scopes = costs.scopes
        self._exchanges = Exchanges(index)
        self._exchange_of: dict[tuple[int, ...], Exchange] = {}
        self._structures = self._number_structures()

    def groups(self, most: int) -> list[Group]:
        """Level by level, as long as it all fits in ``most`` rows; the outermost level may be longer."""
        shown = self._siblings([self._parts(-1)], 0)
        if len(shown) == 1:  # wrappers that are made anew for each call: what they wrap is of interest
            shown = [replace(shown[0], opened=True)]
        while True:
            deeper: list[Group] = []
            for at, group in enumerate(shown):
                deeper.append(group)
                has_parts = at + 1 < len(shown) and shown[at + 1].depth > group.depth
                if group.opened and not has_parts:
                    parts = [self._parts(scope) for scope in group.scopes]
                    deeper += self._siblings(parts, group.depth + 1)
            if len(deeper) == len(shown) or len(deeper) > most:
                return shown
            shown = deeper

    def exchange(self, group: Group) -> Exchange:
        """The inputs and outputs of all calls of a group."""
        return self._exchange(group.scopes)

    def name(self, group: Group, roots: Mapping[int, str], room: int) -> Cell:
        """The first cell of a group's row; ``roots`` has the variables of outermost modules."""
        rows = self._scopes.rows
        modules = [self._data.modules[rows[scope].module] for scope in group.scopes]
        type = modules[0].type
        variables = [roots.get(rows[scope].module) for scope in group.scopes] if not group.depth else []
        indent = "" if any(variables) else "  " * group.depth
        room, count = room - len(indent), f" ×{len(modules)}" * (len(modules) > 1)
        if variables and all(variables):
            names = [name for name in variables if name]
        else:
            names = [module.path.rpartition(".")[2] or type for module in modules]
            if all(_numbered(name) == type for name in names):  # one that is made anew for each call
                names, type = [type], ""
        # A name may be cut; how many modules the row stands for may not.
        left = room - min(_SHORT_NAME, width(names[0])) - len(f" ({count})")
        kind = f" ({cut(type, max(left, 1))}{count})" if type and left > 1 else count
        text = names_text(list(dict.fromkeys(names)), room - width(kind))
        return (Span(indent), Span(text, "module"), Span(kind, "dim"))

    def _exchange(self, scopes: tuple[int, ...]) -> Exchange:
        if scopes not in self._exchange_of:
            calls = [call for scope in scopes for call in self._scopes.rows[scope].calls]
            self._exchange_of[scopes] = self._exchanges.of(calls)
        return self._exchange_of[scopes]

    def _parts(self, scope: int) -> list[int]:
        """The scopes directly inside one in which something was called."""
        rows = self._scopes.rows
        return [
            child
            for child in self._scopes.children(scope)
            if rows[child].module != OUTSIDE and any(row.calls for row in rows[child : rows[child].end])
        ]

    def _siblings(self, parts: Sequence[Sequence[int]], depth: int) -> list[Group]:
        """The parts of one module, or of several that have the same ones; none of several that differ."""
        kinds = [[self._structures[part] for part in one] for one in parts]
        if any(each != kinds[0] for each in kinds):
            return []
        runs: list[list[tuple[int, ...]]] = []  # equal neighbours, in a tuple those of each module
        for row in zip(*parts, strict=True):
            if runs and self._equal(runs[-1][0][0], row[0]):
                runs[-1].append(row)
            else:
                runs.append([row])
        groups = []
        for run in runs:
            if len(run) >= _MIN_LAYERS:
                groups.append(Group(tuple(chain.from_iterable(run)), depth, opened=False))
            else:
                groups += [Group(row, depth, opened=True) for row in run]
        return groups

    def _equal(self, one: int, other: int) -> bool:
        if self._structures[one] != self._structures[other]:
            return False
        line = self._only_line(one)
        if line is not None and line == self._only_line(other):  # the batches of two calls may differ
            return True
        return alike(self._exchange((one,)), self._exchange((other,)))

    def _only_line(self, scope: int) -> tuple[int, int] | None:
        """The code and line of the only call of a module that no model contains: one made anew for it."""
        row, data = self._scopes.rows[scope], self._data
        if len(row.calls) != 1 or data.modules[row.module].root != row.module:
            return None
        frame = int(data.calls.frame[row.calls[0]])
        return (int(data.frames.code[frame]), int(data.frames.line[frame])) if frame >= 0 else None

    def _number_structures(self) -> list[int]:
        """A number for each scope, equal for those of one class with parameters of the same shapes."""
        numbers: dict[Hashable, int] = {}
        of_scope = [0] * len(self._scopes.rows)
        for scope in range(len(of_scope) - 1, -1, -1):  # children have higher numbers than their parent
            row = self._scopes.rows[scope]
            if row.module == OUTSIDE:
                continue
            info = self._data.modules[row.module]
            shapes = tuple((each.name, each.shape, each.dtype) for each in info.parameters)
            children = tuple(of_scope[child] for child in self._scopes.children(scope))
            of_scope[scope] = numbers.setdefault((info.type, shapes, children), len(numbers) + 1)
        return of_scope


def names_text(names: Sequence[str], room: int) -> str:
    """Several names in ``room`` columns: numbers in a row as a range, else as many names as fit.

    >>> names_text(["0", "1", "2", "3"], 9), names_text(["q", "k", "v"], 9)
    ('0 … 3', 'q, k, v')
    >>> names_text(["query", "key", "value"], 12), names_text(["embeddings", "x"], 9)
    ('query, +2', 'embe…, +1')
    """
    ends = _range_of(names)
    if ends and width(text := " … ".join(ends)) <= room:
        return text
    if width(", ".join(names)) <= room:
        return ", ".join(names)
    for kept in range(len(names) - 1, 1, -1):
        text = f"{', '.join(names[:kept])}, +{len(names) - kept}"
        if width(text) <= room:
            return text
    rest = f", +{len(names) - 1}" if len(names) > 1 else ""
    return cut(names[0], max(room - len(rest), 1)) + rest


def _range_of(names: Sequence[str]) -> tuple[str, str] | None:
    """The first and last of names that differ in a number at their end, if none between is missing."""
    stem = names[0].rstrip("0123456789")
    numbers = [name.removeprefix(stem) for name in names]
    if len(names) < _MIN_LAYERS or not all(number.isdecimal() and number.isascii() for number in numbers):
        return None
    order = sorted(range(len(names)), key=lambda at: int(numbers[at]))
    if any(int(numbers[after]) != int(numbers[before]) + 1 for before, after in pairwise(order)):
        return None
    return names[order[0]], names[order[-1]]


def _numbered(name: str) -> str:
    """The name of a module that belongs to no other, without its number: ``CrossEntropyLoss_2``."""
    bare, _, number = name.rpartition("_")
    return bare if number.isdigit() else name
