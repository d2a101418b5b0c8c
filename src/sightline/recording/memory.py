"""Memory as the plain engine sees it taken and given back, and what the allocators of CUDA devices report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch

from sightline.recording.row_streams import Stream
from sightline.recording.torchapi import StorageWeakRef, expired
from sightline.trace.assembly.arrays import IntArray

_FEW: Final = 48  #: so many are looked at one and all
_NEWEST: Final = 16
_IN_TURN: Final = 16
_FREED: Final = -1


@dataclass(slots=True)
class _Held:
    """A storage that was not found freed yet; the reference keeps its address from meaning another."""

    ref: StorageWeakRef
    value: int  #: the first that showed it, which stands for it
    nbytes: int
    since: int


class Storages:
    """The storages of one recording; shared by its threads, every write is one atomic step."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._stream = Stream()
        self._held: dict[int, _Held] = {}  # by address
        self._newest: deque[int] = deque(maxlen=_NEWEST)
        self._turn: Iterable[int] = iter(())
        self._bytes = self._limit = 0
        self._over = False

    def note(self, tensor: Any, value: int) -> None:
        """A plain tensor is recorded as a value."""
        if self._over or tensor.is_meta:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, opaque, functorch: they have none
            return
        address, nbytes = storage._cdata, storage.nbytes()
        if type(nbytes) is not int:  # a symbol, which is no number
            return
        held = self._held.get(address)
        if held is None:
            self._held[address] = _Held(StorageWeakRef(storage), value, nbytes, self._now())
            self._newest.append(address)
        elif held.nbytes == nbytes:
            return
        else:
            self._bytes -= held.nbytes
            value, held.nbytes = held.value, nbytes
        self._bytes += nbytes
        self._stream.write([value, nbytes, self._now()])
        if self._bytes > self._limit:
            self.look_at_all()
            self._limit = max(self._limit, self._bytes + self._bytes // 64)

    def look(self) -> None:
        """An op is about to run: look at some."""
        if len(self._held) <= _FEW:
            self.look_at_all()
            return
        self._look_at(list(self._newest))
        turn = list(islice(self._turn, _IN_TURN))
        if not turn:
            self._turn = iter(list(self._held))
        self._look_at(turn)

    def look_since(self, begin: int) -> None:
        """A module call that began then has ended: what its functions held is free."""
        self._look_at([address for address, held in list(self._held.items()) if held.since >= begin])

    def look_at_all(self) -> None:
        """Look at all of them."""
        self._look_at(list(self._held))

    def end(self) -> None:
        """The recording has ended: what is freed from now on was held to its end."""
        self.look_at_all()
        self._over = True

    def _look_at(self, addresses: Iterable[int]) -> None:
        if self._over:
            return
        for address in addresses:
            held = self._held.get(address)
            if held is not None and expired(held.ref.cdata) and self._held.pop(address, None) is held:
                self._bytes -= held.nbytes
                self._stream.write([held.value, _FREED, self._now()])

    # -- as a stream ---------------------------------------------------------------------------------------

    def numbers(self) -> IntArray:
        """Everything so far."""
        self.look_at_all()
        return self._stream.numbers()

    def take(self) -> IntArray:
        """Everything here, which is then no longer here."""
        self.look_at_all()
        return self._stream.take()


#: Of each device what is allocated and reserved, and the most that was ever allocated since the statistics of
#: the process began; bytes.
Reading = dict[str, dict[str, int]]
_STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "most": "allocated_bytes.all.peak",
}


def read_allocators() -> Reading:
    """What is held on each device that holds anything."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    found: Reading = {}
    for device in range(torch.cuda.device_count()):
        told = torch.cuda.memory_stats(device)
        numbers = {name: int(told.get(key, 0)) for name, key in _STATISTICS.items()}
        if any(numbers.values()):
            found[f"cuda:{device}"] = numbers
    return found


def before_and_after(before: Reading, after: Reading) -> dict[str, dict[str, list[int]]]:
    """Both readings of each device.

    >>> before_and_after({}, {"cuda:0": {"allocated": 512, "reserved": 2048, "most": 1024}})
    {'cuda:0': {'allocated': [0, 512], 'reserved': [0, 2048], 'most': [0, 1024]}}
    """
    return {
        device: {
            name: [before.get(device, {}).get(name, 0), after.get(device, {}).get(name, 0)]
            for name in _STATISTICS
        }
        for device in sorted(before.keys() | after.keys())
    }
