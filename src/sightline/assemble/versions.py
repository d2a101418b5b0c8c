"""In-place changes seen through other tensors: new versions of those that share the changed memory.

While recording, an in-place op makes a new version of the tensor it was called on. Its views and its base
change too; their new versions are added here, where all storages are known, and only for those that are read
again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from sightline.assemble.values import LiveValues
from sightline.data.arrays import IntArray, Mask, expand_ranges

#: Columns of changes: the storage, then the fields of a `Change`.
_NO_CHANGES: Final[IntArray] = np.zeros((7, 0), dtype=np.int64)


class Change(NamedTuple):
    """A version that an op made in place, and the bytes of the storage that changed."""

    op: int
    version: int
    first: int  #: byte
    last: int
    graded: bool  #: the op has made an autograd node
    backward: bool  #: it ran in a backward pass


@dataclass
class NewVersions:
    """Values to add: the value each is a copy of, the version it replaces, the op that changed it."""

    like: list[int] = field(default_factory=list)  #: ids of values
    previous: list[int] = field(default_factory=list)  #: ids, or references to new versions
    base: list[int] = field(default_factory=list)  #: ids
    producer: list[int] = field(default_factory=list)  #: positions of ops
    graded: list[bool] = field(default_factory=list)
    backward: list[bool] = field(default_factory=list)


def reference(number: int) -> int:
    """The negative id that stands for a new version, whose position is known only at the end.

    >>> reference(0), reference(5)
    (-2, -7)
    """
    return -number - 2


class Changes:
    """The in-place changes so far."""

    def __init__(self) -> None:
        self.count = 0  #: new versions so far
        self._changed: dict[int, list[Change]] = {}  # storage -> in order
        self._current: dict[int, tuple[int, int]] = {}  # value -> (its newest version, op that made it)
        self._waiting = _NO_CHANGES  # not in `_changed` yet, in order

    def apply(
        self, mutating: Mask, base: int, input_starts: IntArray, inputs: IntArray, output_starts: IntArray,
        outputs: IntArray, live: LiveValues, spans: tuple[IntArray, IntArray], graded: Mask, backward: Mask,
    ) -> NewVersions:  # fmt: skip
        """Replace, in ``inputs``, every value whose memory was changed through another since it was made.

        ``base`` is the position of the first op. Parts of a storage that do not overlap do not see each
        other's changes.
        """
        self._note_waiting()
        new = NewVersions()
        # The versions that ops made in place, in order: the storage of each, and its `Change`.
        writers = np.flatnonzero(mutating)
        counts = np.diff(output_starts)[writers]
        written = live.at(outputs[expand_ranges(output_starts[:-1][writers], counts)])
        writers = np.repeat(writers, counts)
        is_new = (written >= 0) & (live.previous[written] >= 0) & (live.producer[written] == base + writers)
        written, writers = written[is_new], writers[is_new]
        changes = np.stack([
            live.storage[written], base + writers, live.id[written], spans[0][written], spans[1][written],
            graded[writers], backward[writers],
        ])  # fmt: skip
        rows = live.at(inputs)
        readers = base + np.repeat(np.arange(len(mutating)), np.diff(input_starts))
        outdated = np.flatnonzero(self._changed_since(rows, readers, changes, live))
        # Few reads come after a change through another value. These, and the changes of the storages they
        # read, go one by one, since each read may make a version that the next one replaces.
        relevant = np.flatnonzero(np.isin(changes[0], live.storage[rows[outdated]]))
        upto = np.searchsorted(changes[1][relevant], readers[outdated])
        done = 0
        for at, here, end in zip(outdated.tolist(), rows[outdated].tolist(), upto.tolist(), strict=True):
            self._note_all(changes[:, relevant[done:end]])
            done = end
            inputs[at] = self._newest(int(inputs[at]), here, live, spans, new)
        self._waiting = np.delete(changes, relevant[:done], axis=1)
        return new

    def _changed_since(self, rows: IntArray, readers: IntArray, changes: IntArray, live: LiveValues) -> Mask:
        """A mask of the reads that come after a change of the storage that is newer than the value."""
        storages = np.concatenate([np.fromiter(self._changed, dtype=np.int64), changes[0]])
        newest = [noted[-1].op for noted in self._changed.values()]
        ops = np.concatenate([newest, changes[1]]).astype(np.int64)
        if not len(ops):
            return np.zeros(len(rows), dtype=bool)
        keys = (storages << 32) + ops
        order = np.argsort(keys, kind="stable")
        storages, ops, storage = storages[order], ops[order], live.storage[rows]
        last = np.searchsorted(keys[order], (storage << 32) + readers) - 1
        same: Mask = (rows >= 0) & (last >= 0) & (storages[last] == storage)
        return same & (ops[last] > live.producer[rows])

    def _note_waiting(self) -> None:
        """Note the changes of the last batch; after the last batch of a recording they are not needed."""
        self._note_all(self._waiting)
        self._waiting = _NO_CHANGES

    def _note_all(self, changes: IntArray) -> None:
        """Add changes; each replaces the earlier ones that it covers."""
        for storage, op, version, first, last, graded, backward in changes.T.tolist():
            change = Change(op, version, first, last, bool(graded), bool(backward))
            before = self._changed.get(storage, ())
            visible = [one for one in before if one.first < first or one.last > last]
            self._changed[storage] = [*visible, change]

    def _newest(
        self, value: int, here: int, live: LiveValues, spans: tuple[IntArray, IntArray], new: NewVersions
    ) -> int:
        newest, since = self._current.get(value, (value, int(live.producer[here])))
        first, last = spans[0][here], spans[1][here]
        for change in reversed(self._changed.get(int(live.storage[here]), ())):
            if change.op <= since:
                break
            if change.first <= last and first <= change.last:
                new.like.append(value)
                new.previous.append(newest)
                new.base.append(change.version)
                new.producer.append(change.op)
                new.graded.append(change.graded)
                new.backward.append(change.backward)
                newest = reference(self.count)
                self.count += 1
                self._current[value] = (newest, change.op)
                break
        return newest

    def forget(self, live: LiveValues) -> None:
        """Drop the changes that no live value can see."""
        self._note_waiting()
        storages = set(live.storage.tolist())
        self._changed = {at: changes for at, changes in self._changed.items() if at in storages}
        if self._current:
            ids = set(live.id.tolist())
            self._current = {id: newest for id, newest in self._current.items() if id in ids}
