"""Who sees a change made in place: versions of the tensors that share the changed memory.

While recording, an in-place op makes a new version of the tensor it was called on. Its views and its base
show the change too; their new versions are worked out here, where all storages are known, and only for
those that are read again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sightline.trace.assembly.numbers import Mask, Numbers, spread
from sightline.trace.assembly.values import Living


class Change(NamedTuple):
    """A version that an op made in place."""

    op: int
    version: int
    first: int  #: bytes of the storage that changed
    last: int
    graded: bool  #: the op has made an autograd node
    backward: bool  #: it ran in a backward pass


@dataclass
class NewVersions:
    """Values to add: what each looks like, what it replaces, and the op that changed it."""

    like: list[int] = field(default_factory=list)  #: ids of values
    previous: list[int] = field(default_factory=list)  #: ids, or references to new versions
    base: list[int] = field(default_factory=list)  #: ids
    producer: list[int] = field(default_factory=list)  #: places of ops
    graded: list[bool] = field(default_factory=list)
    backward: list[bool] = field(default_factory=list)


def reference(number: int) -> int:
    """How a new version is referred to where ids of values are: they get their places at the end.

    >>> reference(0), reference(5)
    (-2, -7)
    """
    return -number - 2


class Changes:
    """What has changed in place so far."""

    def __init__(self) -> None:
        self.count = 0  #: new versions so far
        self._changed: dict[int, list[Change]] = {}  # storage -> in order
        self._current: dict[int, tuple[int, int]] = {}  # value -> (value now, op it is good since)

    def apply(
        self, mutating: Mask, base: int, input_starts: Numbers, inputs: Numbers, output_starts: Numbers,
        outputs: Numbers, living: Living, spans: tuple[Numbers, Numbers], graded: Mask, backward: Mask,
    ) -> NewVersions:  # fmt: skip
        """Replace, in ``inputs``, every value whose memory was changed through another one since it was made.

        ``base`` is the place of the first op here. Parts of a storage that do not touch do not see each
        other's changes.
        """
        made = NewVersions()
        writers = np.flatnonzero(mutating)
        counts = np.diff(output_starts)[writers]
        held = living.at(outputs[spread(output_starts[:-1][writers], counts)])
        ends = np.cumsum(counts)
        writes = dict(
            zip(writers.tolist(), zip((ends - counts).tolist(), ends.tolist(), strict=True), strict=True)
        )
        touched = {*living.storage[held[held >= 0]].tolist(), *self._changed}
        touched.discard(-1)
        if not touched:
            return made
        rows = living.at(inputs)
        storage = np.where(rows >= 0, living.storage[rows], -1)
        readers = np.repeat(np.arange(len(mutating)), np.diff(input_starts))
        hit = np.flatnonzero(np.isin(storage, list(touched)))
        events = sorted([*((int(readers[at]), 0, at) for at in hit.tolist()),
                         *((op, 1, op) for op in writers.tolist())])  # fmt: skip
        first, last = spans
        for op, is_write, at in events:
            if is_write:
                for place in held[slice(*writes[op])].tolist():
                    if place >= 0 and living.previous[place] >= 0 and living.producer[place] == base + op:
                        change = Change(base + op, int(living.id[place]), int(first[place]), int(last[place]),
                                        bool(graded[op]), bool(backward[op]))  # fmt: skip
                        self._note(int(living.storage[place]), change)
            else:
                here = int(rows[at])
                inputs[at] = self._now(int(inputs[at]), here, int(storage[at]), living, first, last, made)
        return made

    def _note(self, storage: int, change: Change) -> None:
        """Add a change; what a later one covers is never looked at again."""
        before = self._changed.get(storage)
        if before is None:
            self._changed[storage] = [change]
            return
        kept = [one for one in before if one.first < change.first or one.last > change.last]
        self._changed[storage] = [*kept, change]

    def _now(self, value: int, here: int, storage: int, living: Living, first: Numbers, last: Numbers,
             made: NewVersions) -> int:  # fmt: skip
        now, since = self._current.get(value, (value, int(living.producer[here])))
        for change in reversed(self._changed.get(storage, ())):
            if change.op <= since:
                break
            if change.first <= last[here] and first[here] <= change.last:
                made.like.append(value)
                made.previous.append(now)
                made.base.append(change.version)
                made.producer.append(change.op)
                made.graded.append(change.graded)
                made.backward.append(change.backward)
                now = reference(self.count)
                self.count += 1
                self._current[value] = (now, change.op)
                break
        return now

    def forget(self, living: Living) -> None:
        """Drop what no living value can see."""
        storages = set(living.storage.tolist())
        self._changed = {at: changes for at, changes in self._changed.items() if at in storages}
        if self._current:
            ids = set(living.id.tolist())
            self._current = {value: now for value, now in self._current.items() if value in ids}
