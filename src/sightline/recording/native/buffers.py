"""The data of C++, as Python reads it: rows, stacks and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.data.arrays import EMPTY, IntArray
from sightline.data.trace_data import TensorMeta
from sightline.recording.atomic import append_numbered
from sightline.recording.stacks import StackTrie
from sightline.recording.tensor_registry import TensorRegistry, metadata_of
from sightline.recording.torchapi import no_torch_function

#: How objects of a type are read by C++: positions in its ``TypeKind``.
TENSOR, SEQUENCE, MAPPING, SINGLETON, NAMED, PYTHON, DEVICE = range(7)


class NativeStream:
    """Rows that C++ has written."""

    def __init__(self, recording: Any, name: str) -> None:
        self._recording, self._name = recording, name
        self._frozen: IntArray | None = None

    def numbers(self) -> IntArray:
        """Everything in it, which stays in it."""
        return self._read(take=False) if self._frozen is None else self._frozen

    def take(self) -> IntArray:
        """Everything in it, which is removed from it."""
        if self._frozen is None:
            return self._read(take=True)
        taken, self._frozen = self._frozen, EMPTY
        return taken

    def freeze(self) -> None:
        """Copy its rows: C++ is about to free them."""
        if self._frozen is None:
            self._frozen = self._read(take=False)

    def _read(self, take: bool) -> IntArray:
        return np.frombuffer(self._recording.rows(self._name, take), dtype=np.int64)


class NativeStacks(StackTrie):
    """The trie of frames, which C++ builds, as of the last time it was read back."""

    def refresh(self, recording: Any) -> None:
        """Read back the nodes that were added since."""
        nodes = np.frombuffer(recording.rows("stacks", False), dtype=np.int64).reshape(-1, 3)
        parents, codes, instructions = nodes[len(self.parents) :].T.tolist()
        self.parents += parents
        self.code_ids += codes
        self.instructions += instructions


class NativeValues(TensorRegistry):
    """Every tensor seen in one recording: C++ keeps their identity, this the names and metadata."""

    stream: NativeStream
    fresh: NativeStream

    def __init__(self) -> None:
        super().__init__()
        self.recording: Any = None  #: the C++ side
        self._meta_ids: dict[TensorMeta, int] = {}
        self._types: set[type] = set()

    def _register_type(self, tensor: Any) -> None:
        """Have C++ read objects of the tensor's class as tensors."""
        if type(tensor) not in self._types:
            self._register_types([tensor])

    def _register_types(self, tensors: list[Any]) -> None:
        for kind in set(map(type, tensors)) - self._types:
            self._types.add(kind)
            self.recording.type_kind(kind, TENSOR)

    def find(self, tensor: Any) -> int | None:
        self._register_type(tensor)
        value: int = self.recording.find(tensor)
        return None if value < 0 else value

    def find_all(self, tensors: list[Any]) -> list[int | None]:
        """The same for many, in one call: all gradients are looked up before each optimizer step."""
        self._register_types(tensors)
        values: list[int | None] = self.recording.find_all(tensors)
        return values

    def forget(self, tensor: Any) -> int | None:
        self._register_type(tensor)
        value: int = self.recording.forget(tensor)
        return None if value < 0 else value

    def forget_all(self) -> None:
        """Nothing to do: all references are in C++, where Python does not see them."""

    def rebind(self, tensor: Any, value: int) -> None:
        self._register_type(tensor)
        self.recording.rebind(tensor, value)

    def value(self, tensor: Any) -> int:
        self._register_type(tensor)
        value: int = self.recording.value(tensor)
        return value

    def register(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        return self.value(tensor) if kind is None else self.register_all([(name, tensor)], kind)[0]

    def register_all(self, named: list[tuple[str, Any]], kind: int) -> list[int]:
        """The same for many of one kind, in one call: all parameters are added when a recording begins."""
        tensors = [tensor for _, tensor in named]
        self._register_types(tensors)
        numbers: list[int] = []
        for (name, _), (number, nbytes) in zip(named, self.recording.add_all(tensors, kind), strict=True):
            numbers.append(number)
            self.note(number, name, nbytes)
        return numbers

    def note(self, number: int, name: str, nbytes: int) -> None:
        """Store the name and the size of a tensor that was not made in the block."""
        if name:
            self.names[number] = name
        if nbytes >= 0:
            self.storage_bytes[number] = nbytes

    def describe(self, tensor: Any) -> int:
        with no_torch_function():
            return self.describe_as(metadata_of(tensor)[1])

    def describe_as(self, meta: TensorMeta) -> int:
        """The number of this metadata."""
        number = self._meta_ids.get(meta)
        if number is None:
            number = self._meta_ids[meta] = append_numbered(self.metas, meta)
        return number

    def live_tensors(self) -> list[tuple[int, Any]]:
        pairs: list[tuple[int, Any]] = self.recording.live_tensors()
        return pairs

    def alive(self) -> IntArray:
        """The values of living tensors."""
        return np.frombuffer(self.recording.rows("alive", False), dtype=np.int64)

    def find_storage(self, tensor: Any) -> int:
        self._register_type(tensor)
        value: int = self.recording.find_storage(tensor)
        return value
