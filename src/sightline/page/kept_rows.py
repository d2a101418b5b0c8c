"""`KeptRows`: the part of a recording that its page holds — everything, or the first of each repeat.

A very long run is folded: of the members of a group in the tree, ``step1 … step999 ×999``, the page holds the
first. An op of another member is replaced by the op in its place in the first, and so are its outputs, so
that every link leads somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.row_groups import flat_positions
from sightline.data.trace_data import I32, I64, TraceData
from sightline.page.tree import CALL, GROUP, OP, Tree

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Kept:
    """The rows of one table that the page holds."""

    rows: I64  #: in order
    #: For each row its number on the page, or that of the row it is like; -1 for -1 and without one.
    numbers: I32

    @classmethod
    def all(cls, count: int) -> Kept:
        """Every row."""
        return cls(np.arange(count), np.append(np.arange(count), -1).astype(np.int32))

    @classmethod
    def of(cls, mask: Bools, alike: I64) -> Kept:
        """The rows of a mask; ``alike`` is for each row one that it is like, in the mask or not."""
        numbers = np.where(mask, np.cumsum(mask) - 1, -1)
        return cls(np.flatnonzero(mask), np.append(numbers[alike], -1).astype(np.int32))

    def one(self, id: int | None) -> int:
        """The number of one row on the page; -1 for None."""
        return -1 if id is None else int(self.numbers[id])


@dataclass(frozen=True)
class KeptRows:
    """The ops, calls and values that the page holds, and the tree of them."""

    tree: Tree
    ops: Kept
    calls: Kept
    values: Kept

    @classmethod
    def all(cls, data: TraceData, tree: Tree) -> KeptRows:
        """Everything."""
        return cls(tree, *(Kept.all(len(table)) for table in (data.ops, data.calls, data.values)))

    @classmethod
    def folded(cls, data: TraceData, tree: Tree) -> KeptRows:
        """The first of each repeat; everything if nothing repeats."""
        alike = _alike_rows(tree)
        kept = alike == np.arange(len(tree))
        ops = _kept(tree, OP, len(data.ops), alike, kept)
        calls = _kept(tree, CALL, len(data.calls), alike, kept)
        values = _kept_values(data, ops, calls, _alike_ids(tree, OP, len(data.ops), alike))
        ref = tree.ref.copy()
        for kind, of in ((OP, ops), (CALL, calls)):
            rows = tree.kind == kind
            ref[rows] = of.numbers[tree.ref[rows]]
        # Groups keep their counts and the costs of all their members.
        kept_columns = ("kind", "depth", "count", "time", "memory", "flops")
        columns: dict[str, Any] = {name: getattr(tree, name)[kept] for name in kept_columns}
        label = [text for text, stays in zip(tree.label, kept.tolist(), strict=True) if stays]
        places = np.append(np.cumsum(kept) - kept, kept.sum())
        end = places[tree.end[kept]].astype(np.int32)
        return cls(replace(tree, **columns, ref=ref[kept], end=end, label=label), ops, calls, values)


def _alike_rows(tree: Tree) -> I64:
    """For each row the one in the first member of its group; a row that is kept itself."""
    alike = np.arange(len(tree))
    for row in np.flatnonzero(tree.kind == GROUP).tolist():
        first, size = row + 1, int(tree.end[row + 1]) - row - 1
        member = first + size
        while member < tree.end[row]:
            end = int(tree.end[member])
            if end - member == size:
                alike[member:end] = np.arange(first, first + size)
            member = end
    while True:  # a row of a first member may itself be in the second one of an inner group
        further = alike[alike]
        if (further == alike).all():
            return alike
        alike = further


def _alike_ids(tree: Tree, kind: int, count: int, alike: I64) -> I64:
    """For each op or call the one in its place in the first member; itself if it has no row."""
    ids = np.arange(count)
    rows = np.flatnonzero(tree.kind == kind)[::-1]  # the first row of a call counts: where it ran
    ids[tree.ref[rows]] = tree.ref[alike[rows]]
    return ids


def _kept(tree: Tree, kind: int, count: int, alike: I64, kept: Bools) -> Kept:
    """The ops or calls with a row that is kept, and those without any row."""
    rows = np.flatnonzero(tree.kind == kind)
    mask = np.ones(count, dtype=np.bool_)
    mask[tree.ref[rows]] = False
    mask[tree.ref[rows[kept[rows]]]] = True
    return Kept.of(mask, np.where(mask, np.arange(count), _alike_ids(tree, kind, count, alike)))


def _kept_values(data: TraceData, ops: Kept, calls: Kept, alike_ops: I64) -> Kept:
    """The values that the page refers to; outputs of a left-out op are those of the op like it."""
    alike = np.append(np.arange(len(data.values)), -1)
    left_out = np.setdiff1d(np.arange(len(data.ops)), ops.rows)
    offsets = data.ops.output_offsets
    counts = np.diff(offsets)
    left_out = left_out[counts[left_out] == counts[alike_ops[left_out]]]
    theirs, _ = flat_positions(offsets, left_out)
    ours, _ = flat_positions(offsets, alike_ops[left_out])
    outputs = data.ops.outputs
    alike[outputs[theirs]] = outputs[ours]
    mask = np.zeros(len(data.values) + 1, dtype=np.bool_)
    for table, kept in ((data.ops, ops), (data.calls, calls)):
        for name in ("input", "output"):
            places, _ = flat_positions(getattr(table, f"{name}_offsets"), kept.rows)
            mask[alike[getattr(table, f"{name}s")[places]]] = True
    return Kept.of(mask[:-1], alike[:-1])
