"""What C++ has written, as Python reads it: rows, stacks, and what each tensor is."""

from __future__ import annotations

from functools import partial
from operator import setitem
from types import CodeType
from typing import Any

import numpy as np

from sightline.recording.atomic import at_once
from sightline.recording.torchapi import quiet
from sightline.recording.values import KnownTensors, metadata_of, note_bytes
from sightline.trace.assembly.arrays import EMPTY, IntArray
from sightline.trace.data import TensorMeta

#: How objects of a type are read by C++: positions in its ``TypeKind``.
TENSOR, SEQUENCE, MAPPING, SINGLETON, NAMED, PYTHON, DEVICE = range(7)


class NativeStream:
    """Rows that C++ has written."""

    def __init__(self, recording: Any, name: str) -> None:
        self._recording, self._name = recording, name

        self._frozen: IntArray | None = None

    def numbers(self) -> IntArray:
        """Everything so far."""
        return self._read(take=False) if self._frozen is None else self._frozen

    def take(self) -> IntArray:
        """Everything here, which is then no longer here."""
        if self._frozen is None:
            return self._read(take=True)
        found, self._frozen = self._frozen, EMPTY
        return found

    @property
    def held(self) -> int:
        """How many numbers are here."""
        return len(self.numbers())

    def freeze(self) -> None:
        """Hold what there is: C++ is about to forget it."""
        if self._frozen is None:
            self._frozen = self._read(take=False)

    def _read(self, take: bool) -> IntArray:
        return np.frombuffer(self._recording.rows(self._name, take), dtype=np.int64)


class NativeStacks:
    """The trie of frames, as far as it was read back."""

    def __init__(self) -> None:
        self.codes: list[CodeType] = []  # kept alive: C++ knows them by address
        self.parents: list[int] = []
        self.code_ids: list[int] = []
        self.instructions: list[int] = []

    def refresh(self, recording: Any) -> None:
        """Read back what is new."""
        nodes = np.frombuffer(recording.rows("stacks", False), dtype=np.int64).reshape(-1, 3)
        parents, codes, instructions = nodes[len(self.parents) :].T.tolist()
        self.parents += parents
        self.code_ids += codes
        self.instructions += instructions


class NativeValues(KnownTensors):
    """Every tensor seen in one recording: identity is kept by C++, names and metadata here."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.stream: NativeStream
        self.fresh: NativeStream
        self.refs: dict[int, Any] = {}  # none: `Arguments` then asks for every tensor
        self.metas: list[TensorMeta] = []
        self._meta_ids: dict[TensorMeta, int] = {}
        self.storage_bytes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.kinds: dict[int, int] = {}
        self._types: set[type] = set()

    def _tell_type(self, tensor: Any) -> None:
        kind = type(tensor)
        if kind not in self._types:
            self._types.add(kind)
            self.recording.type_kind(kind, TENSOR)

    def known(self, tensor: Any) -> int | None:
        """The current value of a tensor, if it has been seen."""
        self._tell_type(tensor)
        found: int = self.recording.known(tensor)
        return None if found < 0 else found

    def known_all(self, tensors: list[Any]) -> list[int | None]:
        """The same for many, in one call: an optimizer's gradients are asked for before each step."""
        for kind in set(map(type, tensors)) - self._types:
            self._types.add(kind)
            self.recording.type_kind(kind, TENSOR)
        found: list[int | None] = self.recording.known_all(tensors)
        return found

    def let_go(self, tensor: Any) -> int | None:
        """Hold no weak reference to a tensor; the value it was known by."""
        self._tell_type(tensor)
        found: int = self.recording.let_go(tensor)
        return None if found < 0 else found

    def know_as(self, tensor: Any, value: int) -> None:
        """A tensor object is known by a value, whatever it looks like by now."""
        self._tell_type(tensor)
        self.recording.know_as(tensor, value)

    def value(self, tensor: Any) -> int:
        """The current value of a tensor; one never seen before is explained and added."""
        self._tell_type(tensor)
        found: int = self.recording.value(tensor)
        return found

    def first_sight(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """A tensor that no recorded op made: say what it is."""
        if kind is None:
            return self.value(tensor)
        self._tell_type(tensor)
        with quiet():
            number: int = self.recording.add(tensor, kind, -1, -1, int(bool(tensor.requires_grad)))
            self.note(tensor, number, name)
        return number

    def note(self, tensor: Any, number: int, name: str) -> None:
        """What is kept of a tensor that was not made in the block."""
        if name:
            self.names[number] = name
        note_bytes(self.storage_bytes, number, tensor)

    def describe(self, tensor: Any) -> int:
        """The number of the metadata of any tensor."""
        with quiet():
            return self.describe_as(metadata_of(tensor)[1])

    def describe_as(self, meta: TensorMeta) -> int:
        """The number of metadata."""
        found = self._meta_ids.get(meta)
        if found is None:
            found = len(self.metas)
            at_once(partial(self.metas.append, meta), partial(setitem, self._meta_ids, meta, found))
        return found

    def living(self) -> list[tuple[int, Any]]:
        """Values and their tensors, of those that are still there."""
        found: list[tuple[int, Any]] = self.recording.living()
        return found

    def alive(self) -> IntArray:
        """The values of living tensors."""
        return np.frombuffer(self.recording.rows("alive", False), dtype=np.int64)

    def sharing(self, tensor: Any) -> int:
        """The newest value whose memory a tensor shows; -1 if there is none."""
        self._tell_type(tensor)
        found: int = self.recording.sharing(tensor)
        return found
