"""The data of a comparison beside its two recordings: `comparison_payload(comparison)` packs it for the page.

The verdict comes first, then the pairs of module calls with their error, then the ops of both runs in order:
rows for modules, source lines and ops, with the item on each side and the comparison of their results.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.compare.comparison import Comparison
from sightline.compare.side import OpLabel
from sightline.compare.values import State
from sightline.convert.context import TableContext
from sightline.page.sections import Sections
from sightline.views.diff import error_text

MODULE, LINE, OP = range(3)  #: kinds of rows; the viewer knows the numbers
_VERDICTS: Final = {
    "same": "The two runs are the same, to the last bit.",
    "close": "The two runs are equal up to rounding.",
    "different": "The two runs part.",
    "unknown": "Whether the two runs are the same is unknown.",
}
_MOST_OTHERS: Final = 20  #: further divergences that are listed


class _Row(NamedTuple):
    """A module, a line or an op on both sides; -1 where a side has none."""

    kind: int
    a: int
    b: int
    state: State = State.UNKNOWN
    error: float = math.nan
    first: bool = False


def comparison_payload(comparison: Comparison) -> bytes:
    """Everything the page shows of a comparison, apart from the recordings."""
    sections = Sections()
    rows = _rows(comparison)
    sections.column("rows.kind", np.array([row.kind for row in rows], dtype=np.int8))
    for name in ("a", "b"):
        sections.column(f"rows.{name}", np.array([getattr(row, name) for row in rows], dtype=np.int32))
    sections.column("rows.state", np.array([row.state for row in rows], dtype=np.int8))
    sections.floats("rows.error", np.array([row.error for row in rows], dtype=np.float64))
    sections.column("rows.first", np.array([row.first for row in rows], dtype=np.int8))
    modules = [
        [row.a, row.b, row.type_a, row.type_b, row.depth, int(row.state),
         row.error if math.isfinite(row.error) else None, row.call_a, row.call_b]
        for row in comparison.modules
    ]  # fmt: skip
    sections.table("modules", modules)
    sections.table("verdict", _verdict(comparison))
    return sections.bytes()


def _verdict(comparison: Comparison) -> dict[str, Any]:
    sides = (comparison.a, comparison.b)
    verdict, parting = comparison.verdict, comparison.parting
    text, outcome = _VERDICTS[verdict], comparison.outcome_text
    if verdict == "close" and (worst := comparison.largest_error) > 0:
        text += f" The largest error is {error_text(worst)}."
    if outcome:  # a result of the runs that differs, or was not compared
        text += f" {outcome[0].upper()}{outcome[1:]}."
    divergences = [
        {
            "text": each.text,
            "reason": each.reason.text,
            "kind": each.reason.kind,
            "inputs": each.inputs_text,
            "error": error_text(each.verdict.error),
            "a": _label(each.reason.a),
            "b": _label(each.reason.b),
        }
        for each in comparison.divergences[:_MOST_OTHERS]
    ]
    return {
        "verdict": verdict,
        "text": text,
        "names": [str(side.data.info.get("name") or "") for side in sides],
        "ops": list(comparison.op_counts or ()),
        "paired": sum(other >= 0 for other in comparison.alignment.ops_a),
        "by": comparison.compared_by,
        "divergences": divergences,
        "more": max(0, len(comparison.divergences) - _MOST_OTHERS) + comparison.more,
        "parting": parting.text if parting is not None and verdict == "unknown" else "",
        "weights": comparison.parameters.text,
        "differing": [f"{pair} differs by {error_text(pair.error)}"
                      for pair in comparison.parameters.of("different")],
        "besides": comparison.harmless,
        "notes": comparison.notes,
    }  # fmt: skip


def _label(label: OpLabel | None) -> dict[str, Any] | None:
    if label is None or label.op < 0:
        return None
    return {"op": label.op, "name": label.name, "place": label.position, "code": label.code,
            "module": label.module}  # fmt: skip


def _rows(comparison: Comparison) -> list[_Row]:
    """Modules, lines and ops in the order of the run; a row of a line has the worst state of its ops."""
    sides = (comparison.a, comparison.b)
    lines = [TableContext(side.index).line_keys.tolist() for side in sides]
    calls = [side.data.ops.call.tolist() for side in sides]
    rows: list[_Row] = []
    module: tuple[int, ...] | None = None
    line: tuple[int, ...] | None = None
    at_line = -1
    for a, b, verdict, first in comparison.aligned_ops():
        state, error = (verdict.state, verdict.error) if verdict is not None else (State.UNKNOWN, math.nan)
        ops = (a, b)
        around = tuple(of[each] if each >= 0 else -1 for of, each in zip(calls, ops, strict=True))
        written = tuple(of[each] if each >= 0 else -1 for of, each in zip(lines, ops, strict=True))
        if around != module:
            rows.append(_Row(MODULE, around[0], around[1]))
            module, line = around, None
        if written != line:
            at_line = len(rows)
            rows.append(_Row(LINE, a, b))
            line = written
        rows.append(_Row(OP, a, b, state, error, first))
        of_line = rows[at_line]
        if state > of_line.state or (state == of_line.state and error > of_line.error):
            of_line = of_line._replace(state=state, error=error)
        rows[at_line] = of_line._replace(first=of_line.first or first)
    return rows
