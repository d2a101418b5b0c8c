"""The value columns of a trace: storages, versions, kinds and names, worked out when a trace is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sightline.recording import layout as row
from sightline.recording import values as v
from sightline.recording.columns import Names, Numbers, dense, i8, i32, offsets_of
from sightline.recording.lanes import BACKWARD
from sightline.recording.versions import alias_versions, extent, spans_of
from sightline.trace import data as d

if TYPE_CHECKING:
    from sightline.recording.build_ops import Ops
    from sightline.recording.session import Session


class Values:
    """The value columns in the making, and how to find a value by the id it had while recording."""

    def __init__(self, session: Session, ops: Ops, names: Names) -> None:
        rows = session.values.stream.rows()
        plain = session.values.fresh.numbers().reshape(-1, 3)
        ids = np.concatenate([rows.column(1), plain[:, 0]])
        order = np.argsort(ids, kind="stable")

        def column(position: int, default: int) -> Numbers:
            rest = np.full(len(plain), default, dtype=np.int64)
            return np.concatenate([rows.column(position), rest])[order]

        self.ids = ids[order]
        self.meta = np.concatenate([rows.column(v.V_META), plain[:, 1]])[order]
        self.producer = dense(ops.ids, np.concatenate([rows.column(v.V_PRODUCER), plain[:, 2]])[order])
        self.kind = column(v.V_KIND, v.ACTIVATION)
        self.flags = column(v.V_FLAGS, 0)
        self.previous = self.dense(column(v.V_PREVIOUS, -1))
        self.base = self.dense(column(v.V_BASE, -1))
        self.offset = column(v.V_OFFSET, 0)
        self.name = np.full(len(self.ids), -1, dtype=np.int64)
        self._learned(session, names)
        self.storage, self.storages = self._storages(session, column(v.V_STORAGE, 0))

    def dense(self, wanted: Numbers) -> Numbers:
        """Positions of values by the ids they had while recording."""
        return dense(self.ids, wanted)

    def _learned(self, session: Session, names: Names) -> None:
        """Names and kinds that became known after a value was written."""
        kinds, texts = session.values.kinds, session.values.names
        found = self.dense(np.fromiter(kinds, dtype=np.int64, count=len(kinds)))
        self.kind[found[found >= 0]] = np.array(list(kinds.values()), dtype=np.int64)[found >= 0]
        found = self.dense(np.fromiter(texts, dtype=np.int64, count=len(texts)))
        numbers = np.array([names.id(text) for text in texts.values()], dtype=np.int64)
        self.name[found[found >= 0]] = numbers[found >= 0]

    def _storages(self, session: Session, address: Numbers) -> tuple[Numbers, Numbers]:
        """A storage number for every value: a view shares its base's, a version its predecessor's."""
        storage: list[int] = []
        sizes: list[int] = []
        seen: dict[int, int] = {}  # addresses of tensors not made here, which outlive the block's own
        metas = session.values.metas
        reach = [extent(one) for one in metas]
        known = session.values.storage_bytes
        offset = self.offset.tolist()
        listed = zip(
            self.ids.tolist(), self.meta.tolist(), address.tolist(), self.previous.tolist(),
            self.base.tolist(), strict=True,
        )  # fmt: skip
        for at, (value, look, place, old, view) in enumerate(listed):
            source = view if view >= 0 else old
            if offset[at] == v.INHERITED:
                offset[at] = offset[source] if source >= 0 else 0
            if source >= 0:
                number = storage[source]
            elif place and value in known:
                number = seen.setdefault(place, len(sizes))
            else:
                number = len(sizes)
            if number == len(sizes):
                sizes.append(0)
            size = known.get(value) or reach[look] + offset[at] * metas[look].itemsize
            sizes[number] = max(sizes[number], size)
            storage.append(number)
        self.offset = np.array(offset, dtype=np.int64)
        return np.array(storage, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def add_versions(self, session: Session, ops: Ops) -> None:
        """Give the views and bases of what was changed in place the versions they have since."""
        mutating = (ops.flags & d.MUTATES).astype(bool)
        if not mutating.any():
            return
        spans = spans_of(self.meta, self.offset, session.values.metas)
        new = alias_versions(
            mutating, offsets_of(ops.input_counts), ops.inputs, offsets_of(ops.output_counts), ops.outputs,
            self.storage, self.producer, self.previous, spans,
        )  # fmt: skip
        like = np.array(new.like, dtype=np.int64)
        for name in ("meta", "offset", "storage", "kind", "flags"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(self, name)[like]]))
        count = len(like)
        made = np.isin(self.kind, [v.INPUT, v.EXTERNAL, v.KIND["constant"]])
        self.kind[-count or len(self.kind) :][made[-count or len(made) :]] = v.ACTIVATION
        self.name = np.concatenate([self.name, self.name[like]])
        self.producer = np.concatenate([self.producer, np.array(new.producer, dtype=np.int64)])
        self.previous = np.concatenate([self.previous, np.array(new.previous, dtype=np.int64)])
        self.base = np.concatenate([self.base, np.array(new.base, dtype=np.int64)])

    def _slots(self, ops: Ops) -> Numbers:
        """Which output of its producer a value is; -1 if it is one that was changed along with another."""
        slot = np.full(len(self.producer), -1, dtype=np.int64)
        writers = np.repeat(np.arange(len(ops.ids)), ops.output_counts)
        place = np.arange(len(ops.outputs)) - np.repeat(offsets_of(ops.output_counts)[:-1], ops.output_counts)
        own = (self.producer[ops.outputs] == writers)[::-1]  # the first of equal ones is written last
        slot[ops.outputs[::-1][own]] = place[::-1][own]
        slot[self.producer < 0] = 0
        return slot

    def columns(self, ops: Ops, session: Session) -> d.ValueColumns:
        """The finished columns."""
        made = self.producer >= 0
        gradient = made & (self.kind == v.ACTIVATION)
        gradient[made] &= ops.phase[self.producer[made]] == BACKWARD
        self.kind[gradient] = v.KIND["gradient"]
        self.flags[_has_gradient(ops, self.producer, self.meta, session)] |= d.REQUIRES_GRAD
        return d.ValueColumns(
            meta=i32(self.meta), storage=i32(self.storage), offset=self.offset, kind=i8(self.kind),
            name=i32(self.name), producer=i32(self.producer), slot=i32(self._slots(ops)),
            previous=i32(self.previous), base=i32(self.base), flags=i8(self.flags),
        )  # fmt: skip


def _has_gradient(ops: Ops, producer: Numbers, meta: Numbers, session: Session) -> NDArray[np.bool_]:
    """Floating results of ops that made an autograd node."""
    sequence = ops.rows.column(row.O_SEQUENCE)
    aten = (ops.level == 1) & (ops.phase != BACKWARD)
    advanced = np.zeros(len(sequence), dtype=bool)
    for thread in np.unique(ops.thread):
        here = np.flatnonzero(aten & (ops.thread == thread))
        numbers = sequence[here]
        if len(numbers):
            start = np.concatenate([[session.first_sequence], numbers[:-1]])
            advanced[here] = numbers > start
    floating = np.array(
        [one.dtype.startswith(("float", "bfloat", "complex")) for one in session.values.metas] or [False]
    )
    found = np.zeros(len(producer), dtype=bool)
    made = producer >= 0
    found[made] = advanced[producer[made]] & floating[meta[made]]
    return found
