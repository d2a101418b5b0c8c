"""Audits `t.summary()`: a row for each module, the sums of folded ones, and the totals below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from tests.truth import quantities as q
from tests.truth.audit_modules import ModuleTruth
from tests.truth.findings import Auditor
from tests.truth.running import Run
from tests.truth.screens import Table, screen
from tests.truth.shapes import check_shapes

_PREFIX = re.compile(r"^(?:[│ ] )*(?:[├└] )?")
_NAME = re.compile(r"(?P<name>[^\s(]+)(?: \((?P<type>\w+)\))?(?: shared: (?P<shared>.+))?")
_SEVERAL = re.compile(r"(?P<path>.*?)(?P<first>\d+)…(?P<last>\d+)")
_OWN = re.compile(r"(?P<name>[^×]+?)(?: ×(?P<count>\d+))?")
_PARAMETERS = re.compile(rf"(?P<new>{q.COUNT})(?: \(\+(?P<old>{q.COUNT})\))?|\((?P<seen>{q.COUNT})\)")
_MARGIN = 12


@dataclass
class Row:
    """A row of modules, with the rows of their own ops."""

    text: str
    modules: tuple[nn.Module, ...]
    caller: nn.Module | None
    cells: dict[str, str]
    own: list[str] = field(default_factory=list)


def audit_summary(run: Run) -> Auditor:
    """The false statements of the summary, folded and not."""
    auditor = SummaryAuditor(run)
    apart = auditor.read(str(run.trace.summary(width=None, fold=False)))
    folded = auditor.read(str(run.trace.summary(width=None)))
    auditor.compare_own_ops(apart, folded)
    auditor.read_narrow(str(run.trace.summary()))
    return auditor


class SummaryAuditor(Auditor):
    """Reads a summary row by row."""

    def __init__(self, run: Run) -> None:
        super().__init__("summary")
        self.run, self.truth = run, run.truth
        self.modules = ModuleTruth(run.truth)

    def read(self, text: str) -> list[Row]:
        """Check one table and the facts below it; the rows of modules."""
        parts = screen(text, _MARGIN)
        rows: list[Row] = []
        for table in parts.tables:
            rows = self._table(table)
        for title, fact in parts.facts:
            self._fact(title, fact)
        return rows

    def read_narrow(self, text: str) -> None:
        """The same in 100 columns: nothing may be wider."""
        for line in text.splitlines():
            self.expect(len(line) <= 100, "width", line, "100 columns")
        for title, fact in screen(text, _MARGIN).facts:
            self._fact(title, fact)

    # -- rows ------------------------------------------------------------------------------------------------

    def _table(self, table: Table) -> list[Row]:
        rows: list[Row] = []
        above: list[Row] = []
        titles = _distinct(table.titles)
        roots: Counter[str] = Counter()
        for cells in table.rows:
            prefix = _PREFIX.match(cells[0])
            assert prefix is not None
            depth, name = len(prefix[0]) // 2, cells[0][len(prefix[0]) :]
            values = dict(zip(titles, cells, strict=True))
            if name.startswith("· "):
                if not name.startswith("· outside: ") and above:
                    above[min(depth, len(above)) - 1].own.append(name[2:])
                continue
            del above[depth:]
            row = self._row(name, above, values, roots)
            if row is None:
                break
            above.append(row)
            rows.append(row)
            self._check(row)
        if table.footer:
            footer = dict(zip(titles, table.footer, strict=True))
            total = sum(each.numel() for each in self.truth.parameters().values())
            if footer.get("params"):
                self.expect(
                    q.count(footer["params"]).holds(total), "total of parameters", table.footer, total
                )
        return rows

    def _row(self, name: str, above: Sequence[Row], cells: dict[str, str], roots: Counter[str]) -> Row | None:
        match = _NAME.fullmatch(name)
        if match is None:
            self.unknown(name)
            return None
        kind = match["type"] or match["name"]
        called = [row for row in above if any(id(each) in self.modules.calls_of for each in row.modules)]
        caller = called[-1].modules[0] if called else None
        found = list(self._modules(match["name"], kind, above, roots))
        if not self.expect(bool(found), "module name", name, "there is no such module"):
            return None
        kinds = {type(each).__name__ for each in found}
        self.equal(kinds, {kind}, "class of a module", name)
        if match["shared"]:
            root = above[0].modules[0] if above else found[0]
            paths = [path for path, each in root.named_modules(remove_duplicate=False) if each is found[0]]
            self.equal(
                sorted(
                    re.sub(rf"^{type(root).__name__}(_\d+)?\.", "", each)
                    for each in match["shared"].split(", ")
                ),
                sorted(paths[1:]),
                "other names of a module",
                name,
            )
        return Row(name, tuple(found), caller, cells)

    def _modules(
        self, name: str, kind: str, above: Sequence[Row], roots: Counter[str]
    ) -> Iterator[nn.Module]:
        """The modules that a row stands for: one in each module that the row above stands for."""
        if not above:
            fitting = [root for root in self.truth.roots if type(root).__name__ == kind]
            yield from fitting[roots[kind] : roots[kind] + 1]
            roots[kind] += 1
            return
        several = _SEVERAL.fullmatch(name)
        names = [name]
        if several:
            names = [
                f"{several['path']}{at}" for at in range(int(several["first"]), int(several["last"]) + 1)
            ]
        for parent in above[-1].modules:
            inside = dict(parent.named_modules(remove_duplicate=False))
            for each in names:
                whole = dict(above[0].modules[0].named_modules(remove_duplicate=False))
                if each in inside:
                    yield inside[each]
                elif each in whole:
                    yield whole[each]

    def _check(self, row: Row) -> None:
        each_calls = [self.modules.calls([module], None if row.caller is None else caller)
                      for module, caller in zip(row.modules, self._callers(row), strict=True)]  # fmt: skip
        calls = [call for group in each_calls for call in group]
        check_shapes(self, row.cells["input → output"], calls, row.text)
        stated = row.cells.get("calls", "")
        if stated:
            self.equal(int(stated), len(calls), "calls of a module", f"{row.text}: {stated}")
        unique = {id(p): p.numel() for module in row.modules for p in module.parameters()}
        self._parameters(row, sum(unique.values()))
        trainable = {id(p): p.numel() for m in row.modules for p in m.parameters() if p.requires_grad}
        if row.cells.get("trainable"):
            self.expect(
                q.count(row.cells["trainable"]).holds(sum(trainable.values())), "trainable parameters",
                f"{row.text}: {row.cells['trainable']}", sum(trainable.values()),
            )  # fmt: skip

    def _callers(self, row: Row) -> list[nn.Module | None]:
        """For each module of a row the module that called it."""
        if row.caller is None:
            return [None] * len(row.modules)
        callers: list[nn.Module | None] = []
        for module in row.modules:
            made = [self.truth.calls[call.parent].module for call in self.modules.calls_of.get(id(module), [])
                    if call.parent >= 0]  # fmt: skip
            inside = [each for each in made if each is row.caller]
            callers.append(inside[0] if inside else (made[0] if made else row.caller))
        return callers

    def _parameters(self, row: Row, total: int) -> None:
        text = row.cells.get("params", "")
        if not text:
            self.expect(total == 0 or "params" not in row.cells, "parameters", f"{row.text}: none", total)
            return
        match = _PARAMETERS.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        parts = [q.count(part) for part in (match["new"], match["old"], match["seen"]) if part]
        low = sum(part.value - part.tolerance for part in parts)
        high = sum(part.value + part.tolerance for part in parts)
        self.expect(low <= total <= high, "parameters", f"{row.text}: {text}", total)

    def compare_own_ops(self, apart: Sequence[Row], folded: Sequence[Row]) -> None:
        """A folded row has the own ops of all its modules: their sums."""
        single = {id(row.modules[0]): row for row in apart}
        for row in folded:
            if len(row.modules) < 2:
                continue
            sums: Counter[str] = Counter()
            for module in row.modules:
                one = single.get(id(module))
                for text in one.own if one else []:
                    sums.update(_own_counts(text))
            stated: Counter[str] = Counter()
            for text in row.own:
                stated.update(_own_counts(text))
            hidden = any("…" in text or re.search(r"\+\d+$", text) for text in row.own)
            if not hidden:
                self.equal(dict(stated), dict(sums), "own ops of folded layers", f"{row.text}: {row.own}")

    # -- facts -----------------------------------------------------------------------------------------------

    def _fact(self, title: str, text: str) -> None:
        reader = getattr(self, f"_fact_{title.replace(' ', '_').lower()}", None)
        if reader is None:
            self.unknown(f"{title}  {text}")
        else:
            reader(text)

    def _fact_modules(self, text: str) -> None:
        calls, brief = self.truth.calls, self.truth.brief_modules()
        text, _, besides = text.partition(" · besides ")
        self.equal(besides.removesuffix(", each called once"), q.counted(brief), "modules called once", text)
        called = len({id(call.module) for call in calls}) - brief.total()
        forward = sum(call.phase == "forward" for call in calls) - brief.total()
        backward = sum(call.phase != "forward" for call in calls)
        once = re.fullmatch(r"([\d,]+), each called once", text)
        several = re.fullmatch(r"([\d,]+) · calls ([\d,]+)(?: · ([\d,]+) in backward passes)?", text)
        if once:
            self.equal(
                (int(once[1]), forward + backward), (called, called), "modules, each called once", text
            )
        elif several:
            stated = tuple(int((number or "0").replace(",", "")) for number in several.groups())
            self.equal(stated, (called, forward, backward), "modules and calls", text)
        else:
            self.unknown(f"modules {text}")

    def _fact_parameters(self, text: str) -> None:
        parameters = list(self.truth.parameters().values())
        total = sum(each.numel() for each in parameters)
        trainable = sum(each.numel() for each in parameters if each.requires_grad)
        nbytes = sum(each.numel() * each.element_size() for each in parameters)
        first, *rest = text.split(" · ")
        match = re.fullmatch(rf"([\d,]+) \(({q.SIZE})\)", first)
        if match is None:
            self.unknown(text)
            return
        self.equal(int(match[1].replace(",", "")), total, "parameters", text)
        self.expect(q.size(match[2]).holds(nbytes), "bytes of parameters", text, nbytes)
        truths = {
            "trainable": trainable,
            "not trainable": total - trainable,
            "buffers": sum(each.numel() for each in self.truth.buffers().values()),
        }
        for part in rest:
            if re.fullmatch(r"[\d,]+ tensors? that (is|are) trained belongs? to no module above", part):
                continue
            name, _, number = part.rpartition(" ")
            if name in truths:
                self.equal(int(number.replace(",", "")), truths[name], name, text)
            else:
                self.unknown(part)

    def _fact_flops(self, text: str) -> None:
        known = text.partition("not counted:")[0]
        for name, number in re.findall(rf"(forward|backward|recomputed) ({q.COUNT})", known):
            phase = {"recomputed": "recompute"}.get(name, name)
            if self.truth.flops_known:
                truth = self.truth.flops[phase]
                self.expect(q.count(number).holds(truth), f"FLOPs of {name}", text, truth)

    def _fact_host_time(self, text: str) -> None:
        parts = re.findall(rf"(\w+) ({q.TIME})", text)
        total = sum(q.duration(time).value for _, time in parts)
        self.expect(total <= self.run.wall * 1.01, "host time", text, self.run.wall)
        names = {name for name, _ in parts}
        self.expect(
            names <= {"modules", "other", "backward", "recomputed", "optimizer"}, "phases", text, names
        )

    def _fact_memory(self, text: str) -> None:
        match = re.fullmatch(rf"made by forward ops ({q.SIZE})(?: · peak ({q.SIZE}))?", text)
        if match is None:
            self.unknown(f"memory {text}")

    def _fact_threads(self, text: str) -> None:
        match = re.match(r"([\d,]+|a) module calls? on (?:other threads|another thread) ", text)
        self.expect(match is not None and self.run.program.facts.parallel, "other threads", text, "none ran")

    def _fact_compiled(self, text: str) -> None:
        self.expect(self.run.program.facts.compiled, "compiled", text, "nothing was compiled")

    def _fact_no_room_for(self, text: str) -> None:
        self.expect(text.endswith("width=None shows all"), "no room for", text, "says how to see all")

    def _fact_key(self, text: str) -> None:
        return


def _distinct(titles: Sequence[str]) -> list[str]:
    """The titles, the second of a name after the one that it belongs to: ``FLOPs bwd``."""
    return [f"{titles[at - 1]} bwd" if title == "bwd" else title for at, title in enumerate(titles)]


def _own_counts(text: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in text.split(", "):
        match = _OWN.fullmatch(part)
        if match is not None:
            counts[match["name"]] += int(match["count"] or 1)
    return counts
