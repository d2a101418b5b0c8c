"""When storages are allocated and freed, as the plain engine sees it: it examines weak references."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from sightline.data.arrays import IntArray
from sightline.recording.plain.row_streams import Stream
from sightline.recording.torchapi import StorageWeakRef, expired

_FEW: Final = 48  #: up to so many are all examined before each op; of more, these:
_NEWEST: Final = 16
_IN_TURN: Final = 16
_FREED: Final = -1


@dataclass(slots=True)
class _LiveStorage:
    """A storage not yet found freed; the reference keeps its address from being reused."""

    ref: StorageWeakRef
    value: int  #: the first value in it
    nbytes: int
    since: int


class Storages:
    """The storages of one recording; shared by its threads, every write is one atomic step."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._stream = Stream()
        self._live: dict[int, _LiveStorage] = {}  # by address
        self._newest: deque[int] = deque(maxlen=_NEWEST)
        self._turn: Iterable[int] = iter(())
        self._bytes = self._limit = 0
        self._over = False

    def note(self, tensor: Any, value: int) -> None:
        """Note the storage of a plain tensor that became a value."""
        if self._over or tensor.is_meta:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, opaque, functorch: they have none
            return
        address, nbytes = storage._cdata, storage.nbytes()
        if type(nbytes) is not int:  # symbolic
            return
        live = self._live.get(address)
        if live is None:
            self._live[address] = _LiveStorage(StorageWeakRef(storage), value, nbytes, self._now())
            self._newest.append(address)
        elif live.nbytes == nbytes:
            return
        else:
            self._bytes -= live.nbytes
            value, live.nbytes = live.value, nbytes
        self._bytes += nbytes
        self._stream.write([value, nbytes, self._now()])
        if self._bytes > self._limit:
            self.examine_all()
            self._limit = max(self._limit, self._bytes + self._bytes // 64)

    def examine(self) -> None:
        """An op is about to run: examine some."""
        if len(self._live) <= _FEW:
            self.examine_all()
            return
        self._examine_at(list(self._newest))
        turn = list(islice(self._turn, _IN_TURN))
        if not turn:
            self._turn = iter(list(self._live))
        self._examine_at(turn)

    def examine_since(self, begin: int) -> None:
        """A module call that began then has ended: examine the storages of that time."""
        self._examine_at([address for address, storage in list(self._live.items()) if storage.since >= begin])

    def examine_all(self) -> None:
        """Examine all of them."""
        self._examine_at(list(self._live))

    def end(self) -> None:
        """The recording has ended: storages that are freed from now on lived to its end."""
        self.examine_all()
        self._over = True

    def _examine_at(self, addresses: Iterable[int]) -> None:
        if self._over:
            return
        for address in addresses:
            storage = self._live.get(address)
            if (
                storage is not None
                and expired(storage.ref.cdata)
                and self._live.pop(address, None) is storage
            ):
                self._bytes -= storage.nbytes
                self._stream.write([storage.value, _FREED, self._now()])

    # -- as a stream ---------------------------------------------------------------------------------------

    def numbers(self) -> IntArray:
        """Everything in it, which stays in it."""
        self.examine_all()
        return self._stream.numbers()

    def take(self) -> IntArray:
        """Everything in it, which is removed from it."""
        self.examine_all()
        return self._stream.take()
