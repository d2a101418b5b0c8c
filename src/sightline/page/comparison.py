"""What the page of a comparison holds beside its two recordings: `comparison_payload(comparison)` packs it.

The verdict comes first, then the pairs of module calls with their error, then the ops of both runs in order:
rows for modules, source lines and ops, each with what it is on either side and how the results compare.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.compare.comparison import Comparison, ModuleRow
from sightline.compare.divergence import Divergence
from sightline.compare.side import OpLabel, Side
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
    made = Sections()
    rows = _rows(comparison)
    made.column("rows.kind", np.array([row.kind for row in rows], dtype=np.int8))
    for name in ("a", "b"):
        made.column(f"rows.{name}", np.array([getattr(row, name) for row in rows], dtype=np.int32))
    made.column("rows.state", np.array([row.state for row in rows], dtype=np.int8))
    made.floats("rows.error", np.array([row.error for row in rows], dtype=np.float64))
    made.column("rows.first", np.array([row.first for row in rows], dtype=np.int8))
    made.table("modules", [_module_row(row) for row in comparison.modules])
    made.table("verdict", _verdict(comparison))
    return made.bytes()


def _module_row(row: ModuleRow) -> list[Any]:
    """Both names, both classes, depth, state, error or None, both calls."""
    error = row.error if math.isfinite(row.error) else None
    return [row.a, row.b, row.type_a, row.type_b, row.depth, int(row.state), error, row.call_a, row.call_b]


def _verdict(comparison: Comparison) -> dict[str, Any]:
    sides = (comparison.a, comparison.b)
    paired = sum(other >= 0 for other in comparison.alignment.ops_a)
    parting = comparison.parting
    return {
        "verdict": comparison.verdict,
        "text": _VERDICTS[comparison.verdict] + _largest_error(comparison) + _outcome(comparison),
        "names": [str(side.data.info.get("name") or "") for side in sides],
        "ops": [int(side.compared.sum()) for side in sides],
        "paired": paired,
        "by": comparison.compared_by,
        "divergences": [_divergence(each) for each in comparison.divergences[:_MOST_OTHERS]],
        "more": max(0, len(comparison.divergences) - _MOST_OTHERS) + comparison.more,
        "parting": parting.text if parting is not None and comparison.verdict == "unknown" else "",
        "weights": comparison.parameters.text,
        "differing": [f"{pair} differs by {error_text(pair.error)}"
                      for pair in comparison.parameters.of("different")],
        "besides": comparison.harmless,
        "notes": comparison.notes,
    }  # fmt: skip


def _largest_error(comparison: Comparison) -> str:
    """How far apart runs are that are equal up to rounding."""
    if comparison.verdict != "close":
        return ""
    worst = comparison.largest_error
    return f" The largest error is {error_text(worst)}." if worst > 0 else ""


def _outcome(comparison: Comparison) -> str:
    """What leaves the runs and differs, or was not compared, where no divergence says it."""
    text = comparison.outcome_text
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _divergence(divergence: Divergence) -> dict[str, Any]:
    reason = divergence.reason
    return {
        "text": divergence.text,
        "reason": reason.text,
        "kind": reason.kind,
        "inputs": divergence.inputs_text,
        "error": error_text(divergence.verdict.error),
        "a": _label(reason.a),
        "b": _label(reason.b),
    }


def _label(label: OpLabel | None) -> dict[str, Any] | None:
    if label is None:
        return None
    return {"op": label.op, "name": label.name, "place": label.position, "code": label.code,
            "module": label.module}  # fmt: skip


def _rows(comparison: Comparison) -> list[_Row]:
    """Modules, lines and ops in the order of the run; a row of a line has the worst state of its ops."""
    lines = [_line_keys(side) for side in (comparison.a, comparison.b)]
    calls = [side.data.ops.call.tolist() for side in (comparison.a, comparison.b)]
    rows: list[_Row] = []
    module: tuple[int, int] | None = None
    line: tuple[int, int] | None = None
    at_line = -1
    for a, b, verdict, first in comparison.aligned_ops():
        state, error = (verdict.state, verdict.error) if verdict is not None else (State.UNKNOWN, math.nan)
        op = _Row(OP, a, b, state, error, first)
        ops = (a, b)
        around = tuple(of[each] if each >= 0 else -1 for of, each in zip(calls, ops, strict=True))
        written = tuple(of[each] if each >= 0 else -1 for of, each in zip(lines, ops, strict=True))
        if around != module:
            rows.append(_Row(MODULE, around[0], around[1]))
            module, line = (around[0], around[1]), None
        if written != line:
            at_line = len(rows)
            rows.append(_Row(LINE, op.a, op.b))
            line = (written[0], written[1])
        rows.append(op)
        rows[at_line] = _worse(rows[at_line], op)
    return rows


def _worse(line: _Row, op: _Row) -> _Row:
    """The row of a line with what one more op says about it."""
    worst = op if op.state > line.state or (op.state == line.state and op.error > line.error) else line
    return line._replace(state=worst.state, error=worst.error, first=line.first or op.first)


def _line_keys(side: Side) -> list[int]:
    """For each op a number that is equal for ops of one line; -1 without one."""
    frames = side.data.frames
    files: dict[str, int] = {}
    of_code = [files.setdefault(code.file, len(files)) for code in side.data.codes]
    keys = [(of_code[code] << 32) + line
            for code, line in zip(frames.code.tolist(), frames.line.tolist(), strict=True)]  # fmt: skip
    return [keys[frame] if frame >= 0 else -1 for frame in TableContext(side.index).op_lines.tolist()]
