"""Who sees a change made in place: versions of the tensors that share the changed memory.

While recording, an in-place op makes a new version of the tensor it was called on. Its views and its base
show the change too; their new versions are worked out here, where all storages are known, and only for
those that are read again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from sightline.trace.assembly.arrays import IntArray, Mask, expand_ranges
from sightline.trace.assembly.values import LiveValues

#: Columns of changes: the storage of each, and what a `Change` has.
_NO_CHANGES: Final[IntArray] = np.zeros((7, 0), dtype=np.int64)


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
        self._waiting = _NO_CHANGES  # not noted yet, in order

    def apply(
        self, mutating: Mask, base: int, input_starts: IntArray, inputs: IntArray, output_starts: IntArray,
        outputs: IntArray, live: LiveValues, spans: tuple[IntArray, IntArray], graded: Mask, backward: Mask,
    ) -> NewVersions:  # fmt: skip
        """Replace, in ``inputs``, every value whose memory was changed through another one since it was made.

        ``base`` is the place of the first op here. Parts of a storage that do not touch do not see each
        other's changes.
        """
        self._settle()
        made = NewVersions()
        changes = _changes(mutating, base, output_starts, outputs, live, spans, graded, backward)
        rows = live.at(inputs)
        readers = base + np.repeat(np.arange(len(mutating)), np.diff(input_starts))
        outdated = np.flatnonzero(self._changed_since(rows, readers, changes, live))
        # Few reads come after a change through another value. These and the changes of what they read go one
        # by one, since each read may make a version that the next one replaces.
        seen = np.flatnonzero(np.isin(changes[0], live.storage[rows[outdated]]))
        upto = np.searchsorted(changes[1][seen], readers[outdated])
        done = 0
        for at, here, end in zip(outdated.tolist(), rows[outdated].tolist(), upto.tolist(), strict=True):
            self._note_all(changes[:, seen[done:end]])
            done = end
            inputs[at] = self._now(int(inputs[at]), here, live, spans, made)
        self._waiting = np.delete(changes, seen[:done], axis=1)
        return made

    def _changed_since(self, rows: IntArray, readers: IntArray, changes: IntArray, live: LiveValues) -> Mask:
        """Which reads of values by ops come after a change of the storage since the value was made."""
        storages = np.concatenate([np.fromiter(self._changed, dtype=np.int64), changes[0]])
        ops = np.concatenate([[held[-1].op for held in self._changed.values()], changes[1]]).astype(np.int64)
        if not len(ops):
            return np.zeros(len(rows), dtype=bool)
        keys = (storages << 32) + ops
        order = np.argsort(keys, kind="stable")
        storages, ops, storage = storages[order], ops[order], live.storage[rows]
        last = np.searchsorted(keys[order], (storage << 32) + readers) - 1
        found: Mask = (rows >= 0) & (last >= 0) & (storages[last] == storage)
        return found & (ops[last] > live.producer[rows])

    def _settle(self) -> None:
        """Note what has changed since anybody asked; of the last batch of a recording nobody does."""
        self._note_all(self._waiting)
        self._waiting = _NO_CHANGES

    def _note_all(self, changes: IntArray) -> None:
        for storage, op, version, first, last, graded, backward in changes.T.tolist():
            self._note(storage, Change(op, version, first, last, bool(graded), bool(backward)))

    def _note(self, storage: int, change: Change) -> None:
        """Add a change; what a later one covers is never looked at again."""
        before = self._changed.get(storage)
        if before is None:
            self._changed[storage] = [change]
            return
        kept = [one for one in before if one.first < change.first or one.last > change.last]
        self._changed[storage] = [*kept, change]

    def _now(
        self, value: int, here: int, live: LiveValues, spans: tuple[IntArray, IntArray], made: NewVersions
    ) -> int:
        now, since = self._current.get(value, (value, int(live.producer[here])))
        first, last = spans[0][here], spans[1][here]
        for change in reversed(self._changed.get(int(live.storage[here]), ())):
            if change.op <= since:
                break
            if change.first <= last and first <= change.last:
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

    def forget(self, live: LiveValues) -> None:
        """Drop what no living value can see."""
        self._settle()
        storages = set(live.storage.tolist())
        self._changed = {at: changes for at, changes in self._changed.items() if at in storages}
        if self._current:
            ids = set(live.id.tolist())
            self._current = {value: now for value, now in self._current.items() if value in ids}


def _changes(
    mutating: Mask, base: int, output_starts: IntArray, outputs: IntArray, live: LiveValues,
    spans: tuple[IntArray, IntArray], graded: Mask, backward: Mask,
) -> IntArray:  # fmt: skip
    """The versions that ops made in place, in order: the storage of each, and its `Change`."""
    writers = np.flatnonzero(mutating)
    counts = np.diff(output_starts)[writers]
    rows = live.at(outputs[expand_ranges(output_starts[:-1][writers], counts)])
    writers = np.repeat(writers, counts)
    made = (rows >= 0) & (live.previous[rows] >= 0) & (live.producer[rows] == base + writers)
    rows, writers = rows[made], writers[made]
    return np.stack([
        live.storage[rows], base + writers, live.id[rows], spans[0][rows], spans[1][rows],
        graded[writers], backward[writers],
    ])  # fmt: skip
