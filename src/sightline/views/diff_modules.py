"""``d.summary()``: the pairs of module calls, with how far apart what they return is, along the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sightline.diff.module_errors import ModuleRow
from sightline.diff.values import State
from sightline.views.diff import bar, error_text
from sightline.views.outline import Block, Column, Span, View, cut_end, grid, line

if TYPE_CHECKING:
    from sightline.diffs import Diff

_WIDTH: Final = 100
_STATES: Final = {
    State.UNKNOWN: ("not measured", "dim"),
    State.SAME: ("same", "dim"),
    State.CLOSE: ("close", ""),
    State.DIFFERENT: ("different", "error"),
}


def modules_view(diff: Diff) -> View:
    """The table of a comparison, a row for each pair of calls in the order in which they ended."""
    rows = diff.modules

    def made(room: int) -> list[Block]:
        if not rows:
            return [line("(no module calls to compare)")]
        plot = "".join(bar(row.error) for row in rows if row.state is not State.UNKNOWN)
        table = grid(
            (Column("module"), Column("class"), Column("result"), Column("error", right=True), Column("")),
            [_row(row, diff, min(room, _WIDTH)) for row in rows],
        )
        along = line(("along the depth  ", "dim"), (plot[: room - 17], "number"))
        return [table, line(), along]

    return View(tuple(made(_WIDTH)), fit=made)


def _row(row: ModuleRow, diff: Diff, room: int) -> tuple[Span | str | tuple[str, str], ...]:
    text, style = _STATES[row.state]
    kind = row.type_a if row.type_a == row.type_b else f"{row.type_a} | {row.type_b}"
    divergence = diff.divergence
    first = divergence is not None and divergence.reason.a is not None and divergence.reason.a.module == row.a
    mark = " ← first" if first and row.state is not State.SAME else ""
    error = error_text(row.error) if row.state is not State.UNKNOWN else ""
    name = cut_end(row.name, room * 45 // 100)
    return (Span(name, "module"), Span(cut_end(kind, room // 4), "dim"), Span(text, style), error,
            Span(f"{bar(row.error)}{mark}", "number"))  # fmt: skip
