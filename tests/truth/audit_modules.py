"""Audits the tables of modules: names, classes, shapes, calls, on the first screen and in the summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tests.truth.findings import Auditor
from tests.truth.ground_truth import Call, Truth
from tests.truth.screens import Table
from tests.truth.shapes import check_shapes

_MADE_ANEW = re.compile(r"(?P<type>\w+) ×(?P<count>\d+)")
_NAME = re.compile(
    r"(?P<name>[^\s(,]+)(?: … (?P<last>[^\s(]+)|(?P<others>(?:, [^\s(,]+)+))?"
    r"(?: \((?P<type>[^\s)…]+)(?P<cut>…)?(?: ×(?P<count>\d+))?\)?)?"
)


@dataclass(frozen=True)
class Row:
    """The modules that a row stands for, and where it stands."""

    depth: int
    modules: tuple[nn.Module, ...]
    caller: nn.Module | None  #: the innermost called module that it stands in


class ModuleTruth:
    """The module trees of the models that a program called."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.calls_of: dict[int, list[Call]] = {}
        for call in truth.calls:
            self.calls_of.setdefault(id(call.module), []).append(call)

    def calls(self, modules: Sequence[nn.Module], caller: nn.Module | None) -> list[Call]:
        """The forward calls of some modules that a module made."""
        calls = []
        for call in (call for module in modules for call in self.calls_of.get(id(module), [])):
            parent = self.truth.calls[call.parent].module if call.parent >= 0 else None
            if parent is caller and call.phase == "forward":
                calls.append(call)
        return calls

    def check_table(self, auditor: Auditor, table: Table) -> None:
        """The table of modules on the first screen."""
        stack: list[Row] = []
        self._shown: Counter[str] = Counter()
        for cells in table.rows:
            name = cells[0].strip()
            depth = (len(cells[0]) - len(cells[0].lstrip())) // 2
            del stack[depth:]
            row = self.resolve(auditor, name, stack)
            if row is None:
                return
            stack.append(row)
            check_shapes(auditor, cells[1], self.calls(row.modules, row.caller), name)

    def resolve(self, auditor: Auditor, text: str, above: Sequence[Row]) -> Row | None:
        """The modules that a name in a row stands for."""
        anew = _MADE_ANEW.fullmatch(text) if not above else None
        if anew is not None:
            same = [root for root in self.truth.roots if type(root).__name__ == anew["type"]]
            auditor.equal(int(anew["count"]), len(same), "number of modules", text)
            return Row(0, tuple(same), None)
        match = _NAME.fullmatch(text)
        if match is None:
            auditor.unknown(text)
            return None
        caller = next(
            (row.modules[0] for row in reversed(above) if id(row.modules[0]) in self.calls_of), None
        )
        if not above:
            found = self._roots(match["type"] or match["name"], int(match["count"] or 1))
        elif match["others"]:
            found = self._listed(above[-1].modules[0], match["name"] + match["others"], int(match["count"]))
        else:
            found = self._inside(above[-1].modules[0], match["name"], match["last"])
        if not auditor.expect(bool(found), "module name", text, "there is no such module"):
            return None
        kinds = {type(module).__name__ for module in found}
        stated = match["type"] or match["name"]
        is_kind = all(kind.startswith(stated) if match["cut"] else kind == stated for kind in kinds)
        auditor.expect(is_kind or stated.endswith("…"), "class of a module", text, kinds)
        if match["count"]:
            auditor.equal(int(match["count"]), len(found), "number of modules", text)
        sizes = {tuple(each.shape for each in module.parameters()) for module in found}
        auditor.equal(len(sizes), 1, "sizes of the weights of the modules in one row", text)
        return Row(len(above), tuple(found), caller)

    def _roots(self, kind: str, count: int) -> list[nn.Module]:
        """The roots of a row: of several of one class they stand in the order of their first calls."""
        roots = [root for root in self.truth.roots if type(root).__name__.startswith(kind.rstrip("…"))]
        self._shown[kind] += count
        return roots[self._shown[kind] - count : self._shown[kind]]

    def _listed(self, parent: nn.Module, names: str, count: int) -> list[nn.Module]:
        """The children of a module in a list of names: `q, k, v`, or `query, +2` for those that follow it."""
        children = dict(parent.named_children())
        listed = [name for name in names.split(", ") if not name.startswith("+")]
        order = [name for name in children if name == listed[0] or name.startswith(listed[0].rstrip("…"))]
        if len(listed) < count and order:
            at = list(children).index(order[0])
            return list(children.values())[at : at + count]
        return [children[name] for name in listed if name in children]

    def _inside(self, parent: nn.Module, first: str, last: str | None) -> list[nn.Module]:
        """The modules from one to another inside a module, whether they are its children or deeper."""
        paths = [(path, module) for path, module in parent.named_modules() if path]
        names = [(path.rpartition(".")[2], path, module) for path, module in paths]
        direct = [(name, module) for name, path, module in names if name == path] or []
        if last is not None:
            order = [name for name, _ in direct]
            if first not in order or last not in order:
                return []
            return [module for _, module in direct[order.index(first) : order.index(last) + 1]]
        found = [module for name, module in direct if name == first.rstrip("…")]
        found = found or [module for _, path, module in names if path == first]
        aliases = [module for path, module in parent.named_modules(remove_duplicate=False) if path == first]
        return found[:1] or aliases[:1]
