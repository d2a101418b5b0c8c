"""Audits `t.memory()`: the peak, its parts, which must add up, and the largest tensors."""

from __future__ import annotations

import re

from tests.truth import quantities as q
from tests.truth.findings import Auditor
from tests.truth.running import Run
from tests.truth.screens import Table, screen

_HEAD = re.compile(
    rf"peak (?P<peak>{q.SIZE})  at (?P<at>{q.TIME}) of (?P<over>{q.TIME})(?: · (?:held before the block|"
    r"in (?P<phase>\w+), (?P<op>.+)))?"
)
_MARGIN = 11


def audit_memory(run: Run) -> Auditor:
    """The false statements of the memory view."""
    auditor = MemoryAuditor(run)
    auditor.audit()
    return auditor


class MemoryAuditor(Auditor):
    """Reads the memory view."""

    def __init__(self, run: Run) -> None:
        super().__init__("memory")
        self.run = run
        self.peak = q.Quantity(0, 0)
        storages = [getattr(each, "_local_tensor", each).untyped_storage()
                    for each in run.truth.parameters().values()]  # fmt: skip
        self.parameters = sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def audit(self) -> None:
        text = str(self.run.trace.memory())
        parts = screen(text, _MARGIN)
        for title, fact in parts.facts:
            if title == "memory":
                self._head(fact.replace("\n", " "))
            elif (
                title not in ("counted", "note")
                and "│" not in f"{title}{fact}"
                and "└" not in f"{title}{fact}"
            ):
                self.unknown(f"{title}  {fact}")
        for table in parts.tables:
            first = table.titles[0]
            if first.startswith("at the peak"):
                self._kinds(table)
            elif first in ("by module", "by line"):
                self._shares(table)
            elif first.strip() == "largest":
                self._largest(table)
            else:
                self.unknown(" | ".join(table.titles))

    def _head(self, text: str) -> None:
        match = _HEAD.fullmatch(text)
        if match is None:
            self.unknown(text)
            return
        self.peak = q.size(match["peak"])
        if self.run.program.options.get("ops") != "none":
            self.expect(
                self.peak.value + self.peak.tolerance >= self.parameters,
                "peak",
                text,
                f"parameters alone are {self.parameters} B",
            )
        self.expect(q.duration(match["over"]).value <= self.run.wall * 1.01, "duration", text, self.run.wall)
        at = q.duration(match["at"])
        over = q.duration(match["over"])
        self.expect(
            at.value - at.tolerance <= over.value + over.tolerance, "moment of the peak", text, match["over"]
        )

    def _kinds(self, table: Table) -> None:
        sizes = {row[0]: q.size(row[1]) for row in table.rows}
        total = sum(each.value for each in sizes.values())
        tolerance = self.peak.tolerance + sum(each.tolerance for each in sizes.values())
        self.expect(abs(total - self.peak.value) <= tolerance, "sum of kinds", table.rows, self.peak.value)
        if "parameters" in sizes:
            self.expect(
                sizes["parameters"].holds(self.parameters),
                "bytes of parameters",
                table.rows[0],
                self.parameters,
            )
        self._percentages(table)

    def _shares(self, table: Table) -> None:
        sizes = [q.size(row[1]) for row in table.rows]
        total = sum(each.value for each in sizes)
        tolerance = self.peak.tolerance + sum(each.tolerance for each in sizes)
        self.expect(
            abs(total - self.peak.value) <= tolerance, f"sum {table.titles[0]}", total, self.peak.value
        )
        self._percentages(table)

    def _percentages(self, table: Table) -> None:
        at = next((number for number, cell in enumerate(table.rows[0]) if cell.endswith("%")), None)
        if at is None:
            self.unknown(" | ".join(table.rows[0]))
            return
        for row in table.rows:
            share, part = q.size(row[1]).value / max(self.peak.value, 1), float(row[at].rstrip("%")) / 100
            self.expect(abs(share - part) <= 0.0101, "share of the peak", row, f"{share:.1%}")

    def _largest(self, table: Table) -> None:
        sizes = [q.size(row[0].strip()).value for row in table.rows]
        self.equal(sizes, sorted(sizes, reverse=True), "order of the largest")
        lines = self.run.program.source.splitlines()
        for row in table.rows:
            for file, line in re.findall(r"(\w+)\.py:(\d+)", " ".join(row)):
                if file == self.run.path.stem:
                    self.expect(0 < int(line) <= len(lines), "a line", row, f"{len(lines)} lines")
