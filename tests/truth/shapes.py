"""Reads the exchange of a module, `f32[4…6, 8] → […, 4] ×2`, and compares it with every call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tests.truth.findings import Auditor
from tests.truth.ground_truth import Call

_ITEM = re.compile(r"(?:(?P<label>\w+)=)?(?P<dtype>[a-z]\w*)?\[(?P<sizes>[^\]]*)\](?: ×(?P<count>\d+))?")
_OTHER = re.compile(r" \+(\d+) other$")
_REST = re.compile(r" \+(\d+)$")
_TENSOR = re.compile(r"(\w+)\[(.*)\]")


@dataclass(frozen=True)
class _Side:
    """What stands on one side of the arrow: tensors, and how many more there are."""

    items: tuple[tuple[str, tuple[str, ...]], ...]
    rest: int = 0


def check_shapes(auditor: Auditor, text: str, calls: Sequence[Call], name: str) -> None:
    """Compare the exchange of some calls with these calls."""
    statement = f"{name}: {text}"
    if not text:
        has_tensors = any(call.inputs or call.outputs for call in calls)
        auditor.expect(not calls or not has_tensors, "shapes", statement, "it was called with tensors")
        return
    if text in ("not called", "in compiled code"):
        auditor.equal(len(calls), 0, "not called", statement)
        return
    if not calls:
        auditor.expect(False, "shapes", statement, "it was never called")
        return
    other = _OTHER.search(text)
    kinds = list(dict.fromkeys((tuple(call.inputs), tuple(call.outputs)) for call in calls))
    if other:
        auditor.equal(int(other[1]), len(kinds) - 1, "other calls", statement)
        kinds, text = kinds[:1], text[: other.start()]
    left, arrow, right = text.partition("→")
    if not arrow or right.rstrip().endswith("…"):  # cut
        return
    if right.strip() == "raised":
        auditor.expect(any(call.raised for call in calls), "raised", statement, "no call raised")
        return
    inputs = _side(left.strip())
    truths = [kind[0] for kind in kinds]
    if left.strip():
        _compare(auditor, inputs, truths, statement, [])
    if right.strip() == "same":
        same = all(len(kind[1]) == 1 and kind[1][0] == (kind[0] or [""])[0] for kind in kinds)
        auditor.expect(same, "shapes", statement, kinds)
        return
    leading = [_sizes(truth[0]) if truth else [] for truth in truths]
    dtype = truths[0][0].partition("[")[0] if truths[0] else ""
    _compare(auditor, _side(right.strip()), [kind[1] for kind in kinds], statement, leading, dtype)


def _side(text: str) -> _Side:
    rest = _REST.search(text)
    items: list[tuple[str, tuple[str, ...]]] = []
    for match in _ITEM.finditer(text):
        sizes = tuple(match["sizes"].split(", ")) if match["sizes"] else ()
        items += [(match["dtype"] or "", sizes)] * int(match["count"] or 1)
    return _Side(tuple(items), int(rest[1]) if rest else 0)


def _sizes(tensor: str) -> list[int]:
    match = _TENSOR.fullmatch(tensor)
    assert match is not None
    return [int(size) for size in match[2].split(", ")] if match[2] else []


def _compare(
    auditor: Auditor,
    side: _Side,
    truths: Sequence[Sequence[str]],
    statement: str,
    leading: Sequence[list[int]],
    dtype: str = "",
) -> None:
    """Compare what one side says with the tensors of each call."""
    for truth in truths:
        if not auditor.equal(
            len(side.items) + side.rest, len(truth), "number of tensors", f"{statement} ({side})"
        ):
            return
    for at, (kind, sizes) in enumerate(side.items):
        tensors = [truth[at] for truth in truths]
        kinds = {tensor.partition("[")[0] for tensor in tensors}
        auditor.equal({kind or dtype}, kinds, "dtype", statement)
        columns = [_sizes(tensor) for tensor in tensors]
        if sizes and sizes[0] == "…":
            skipped = len(columns[0]) - (len(sizes) - 1)
            as_input = all(
                column[:skipped] == lead[:skipped] for column, lead in zip(columns, leading, strict=True)
            )
            auditor.expect(
                as_input, "leading sizes as in the input", statement, list(zip(leading, columns, strict=True))
            )
            columns, sizes = [column[skipped:] for column in columns], sizes[1:]
        texts = [_range(column) for column in zip_longest(*columns)]
        auditor.equal(list(sizes), texts, "sizes", statement)


def _range(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return "not of one rank"
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{min(known)}…{max(known)}"
