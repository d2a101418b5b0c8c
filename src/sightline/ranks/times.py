"""``t.rank_times()``: where the time of ranks differs — by module, by line, and by collective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.notation import time_text
from sightline.ranks.collective_waits import Waiting
from sightline.ranks.merge import Run
from sightline.views.rendering import WIDTH, Block, Column, Grid, Span, View, grid, line
from sightline.views.table_layout import fit_blocks


@dataclass(frozen=True)
class Spread:
    """The time that each rank spends on one thing."""

    text: str
    times: NDArray[np.int64]  #: in ns, in the order of the ranks

    @property
    def width(self) -> int:
        """The time between the fastest and the slowest rank."""
        return int(self.times.max() - self.times.min())


def module_spreads(run: Run, most: int) -> list[Spread]:
    """The modules whose calls differ most in time between ranks."""
    times = np.zeros((len(run.names.modules.all), len(run.records)), dtype=np.int64)
    for column, record in enumerate(run.records.values()):
        times[record.modules, column] = record.module_times
    return _widest(
        [Spread(label, row) for label, row in zip(run.names.modules.all, times, strict=True)], most
    )


def line_spreads(run: Run, most: int) -> list[Spread]:
    """The lines whose time differs most between ranks, waiting for others left out."""
    rows: dict[int, NDArray[np.int64]] = {}
    for column, record in enumerate(run.records.values()):
        for place, time in record.spent.items():
            if place not in rows:
                rows[place] = np.zeros(len(run.records), dtype=np.int64)
            rows[place][column] = time
    texts = run.names.places.all
    return _widest([Spread(texts[place], row) for place, row in rows.items() if texts[place]], most)


def _widest(spreads: list[Spread], most: int) -> list[Spread]:
    used = [each for each in spreads if each.times.any()]
    return sorted(used, key=lambda each: (-each.width, each.text))[:most]


def spread_grid(run: Run, title: str, spreads: list[Spread]) -> Grid | None:
    """A table of times: of the fastest rank, the one in the middle and the slowest."""
    if not spreads:
        return None
    columns = (Column(title, least=20, end=True), Column("least", right=True), Column("median", right=True),
               Column("most", right=True), Column("most on"))  # fmt: skip
    return grid(
        columns,
        [
            (
                Span(each.text, "op"), time_text(int(least)) if (least := each.times.min()) else "none",
                time_text(float(np.median(each.times))), time_text(int(each.times.max())),
                f"rank {run.ranks[int(each.times.argmax())]}" if each.width else "",
            )
            for each in spreads
        ],
    )  # fmt: skip


def rank_times(run: Run, top: int) -> View:
    """The spread of time over ranks: modules, lines, and collectives by the time others waited in them."""
    waiting = Waiting.of(run)
    waited = np.array([waiting.waited[rank] for rank in run.ranks], dtype=np.int64)
    tables = [
        spread_grid(run, "time of a rank in a module", module_spreads(run, top)),
        spread_grid(
            run, "at and before a line", [Spread("waiting for other ranks", waited), *line_spreads(run, top)]
        ),
    ]
    waits = [each for each in waiting.lines() if each.waited][:top]
    if waits:
        columns = (
            Column("collective"), Column("at", least=20, end=True), Column("calls", right=True),
            Column("waited by all", right=True), Column("longest", right=True), Column("most often last"),
        )  # fmt: skip
        rows = [
            (
                Span(each.kind, "op"), each.place, f"{each.count:,}", time_text(each.waited),
                time_text(each.longest), f"rank {each.last}, ×{each.times_last:,}",
            )
            for each in waits
        ]  # fmt: skip
        tables.append(grid(columns, rows))
    blocks: list[Block] = []
    for table in tables:
        if table is not None:
            blocks += [*([line()] if blocks else []), table]
    if len(run.records) < 2 or not blocks:
        blocks = [line(("There is only one rank here: there is nothing to compare its times with.", "dim"))]

    def fit(room: int) -> list[Block]:
        return fit_blocks(blocks, min(room, WIDTH))

    return View(tuple(fit(WIDTH)), fit=fit)
