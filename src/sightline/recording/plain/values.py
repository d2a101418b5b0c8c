"""Values of the plain engine: the identity of each tensor, by a weak reference that carries its value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from sightline.recording.atomic import append_numbered
from sightline.recording.plain.row_streams import Stream
from sightline.recording.plain.storages import Storages
from sightline.recording.tensor_registry import (
    ACTIVATION,
    EXTERNAL,
    INPUT,
    PLAIN_TENSORS,
    TensorRegistry,
    metadata_of,
    note_bytes,
    plain_key,
    size_of,
)
from sightline.recording.torchapi import Tensor, no_torch_function, storage_address
from sightline.schema.streams import MOVED, VALUE

_SCAN_ALLOWANCE: Final = 100_000
_MIN_PURGE: Final = 4096


class TensorRef(ref):  # type: ignore[type-arg]  # typeshed's ref takes a parameter, a subclass need not
    """A weak reference to a tensor that carries its current value."""

    __slots__ = ("appearance", "value")

    value: int
    appearance: Any  #: memory and layout of the tensor when it became this value


class Values(TensorRegistry):
    """Every tensor seen in one recording."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()
        self.fresh = Stream()  # stays empty
        self.ids = itertools.count()
        self.refs: dict[int, TensorRef] = {}
        self.meta_ids: dict[Any, int] = {}
        self.memory: Storages | None = None
        self._purge_at = _MIN_PURGE  # with more references than this, those to dead tensors are removed
        #: kind, name and producer of a tensor that no recorded op made
        self.explain: Callable[[Any], tuple[int, str, int]] = lambda tensor: (EXTERNAL, "", -1)
        self._scanned = 0
        #: only module calls are recorded, and one is running: tensors between modules are not explained
        self.unexplained = False

    def find(self, tensor: Any) -> int | None:
        reference = self.refs.get(id(tensor))
        return reference.value if reference is not None and reference() is tensor else None

    def forget(self, tensor: Any) -> int | None:
        value = self.find(tensor)
        self.refs.pop(id(tensor), None)
        return value

    def forget_all(self) -> None:
        self.refs.clear()

    def rebind(self, tensor: Any, value: int) -> None:
        self._bind(tensor, value, ())  # equal to no appearance: it is compared anew when it is next used

    def _bind(self, tensor: Any, value: int, appearance: Any) -> None:
        reference = self.refs[id(tensor)] = TensorRef(tensor)
        reference.value, reference.appearance = value, appearance

    def value(self, tensor: Any) -> int:
        reference = self.refs.get(id(tensor))
        if reference is None or reference() is not tensor:
            return self.register(tensor)
        if reference.appearance == _appearance(tensor):
            return reference.value
        return self._add_version(tensor, reference)

    def output(self, tensor: Any, op: int) -> int:
        """The value of a tensor that an op returned: a new one, unless it has been seen."""
        reference = self.refs.get(id(tensor))
        if reference is None or reference() is not tensor:
            return self.add(tensor, op)
        if reference.appearance == _appearance(tensor):
            return reference.value
        if op < 0:
            return self._add_version(tensor, reference)
        return self.add(tensor, op, reference.value)  # the op changed it, though its schema does not say so

    def _add_version(self, tensor: Any, before: TensorRef) -> int:
        """A new version of a tensor that was given other data without an op: ``.data =``, ``module.to()``."""
        with no_torch_function():
            now = _appearance(tensor)
            moved = not before.appearance or not now or before.appearance[0] != now[0]
            base = self.find_storage(tensor) if moved and now else -1
            flags = int(bool(tensor.requires_grad)) | (MOVED if moved and base < 0 else 0)
            return self.add(tensor, -1, before.value, base=base, flags=flags)

    def add(
        self, tensor: Any, op: int, previous: int = -1, kind: int = ACTIVATION, base: int = -1,
        flags: int = 0, offset: int | None = None,
    ) -> int:  # fmt: skip
        """Add a value: the output of an op, or (with ``previous``) a new version made in place.

        ``offset`` is where it begins in its storage, if the caller knows better than the tensor. Like
        `describe` it is called inside `no_torch_function`: reading a shape must not run a mode's code.
        """
        meta = self.describe(tensor)
        address = 0
        if offset is None:
            try:
                address, offset = storage_address(tensor), max(size_of(tensor.storage_offset()), 0)
            except (RuntimeError, NotImplementedError):  # functorch, subclasses: no storage
                offset = 0
            if self.metas[meta].stride is None:  # the storage of sparse and nested tensors is not tracked
                address = offset = 0
        appearance = _appearance(tensor)
        number = next(self.ids)
        self.stream.write([VALUE.width, number, meta, address, offset, kind, op, previous, base, flags])
        self._bind(tensor, number, appearance)  # after the row: an interrupt may come in between
        if self.memory is not None and type(tensor) in PLAIN_TENSORS:
            self.memory.note(tensor, number)
        if len(self.refs) > self._purge_at:
            for key in [key for key, reference in list(self.refs.items()) if reference() is None]:
                self.refs.pop(key, None)
            self._purge_at = max(_MIN_PURGE, 2 * len(self.refs))
        return number

    def register(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        with no_torch_function():
            if self.unexplained and kind is None and type(tensor) is Tensor:
                return self.add(tensor, -1, offset=0)
            base = producer = -1
            if kind is None:
                kind, name, producer = self.explain(tensor)
                if kind in (EXTERNAL, INPUT):
                    base = self.find_base(tensor)
                    kind = kind if base < 0 else ACTIVATION
            number = self.add(tensor, producer, -1, kind, base, int(bool(tensor.requires_grad)))
            if name:
                self.names[number] = name
            note_bytes(self.storage_bytes, number, tensor)
        return number

    def find_storage(self, tensor: Any) -> int:
        """The newest value in the storage of a tensor; -1 if there is none.

        It compares all live tensors, so it gives up once that would cost more than the recording itself.
        """
        if self._scanned > _SCAN_ALLOWANCE + 20 * (len(self.stream) // VALUE.width):
            return -1
        self._scanned += len(self.refs)
        try:
            address = storage_address(tensor)
        except RuntimeError:
            return -1
        best = -1
        for reference in list(self.refs.values()):
            other = reference()
            try:
                if other is None or other is tensor:
                    continue
                if storage_address(other) == address and reference.value > best:
                    best = reference.value
            except RuntimeError:  # a tensor without a storage
                continue
        return best

    def describe(self, tensor: Any) -> int:
        key = plain_key(tensor)
        number = None if key is None else self.meta_ids.get(key)
        if number is None:
            key, meta = metadata_of(tensor)
            number = self.meta_ids.get(key)
            if number is None:
                number = self.meta_ids[key] = append_numbered(self.metas, meta)
        return number

    def live_tensors(self) -> list[tuple[int, Any]]:
        pairs = [(reference.value, reference()) for reference in list(self.refs.values())]
        return [(value, tensor) for value, tensor in pairs if tensor is not None]

    def alive(self) -> NDArray[np.int64]:
        values = [reference.value for reference in list(self.refs.values()) if reference() is not None]
        return np.array(values, dtype=np.int64)


def _appearance(tensor: Any) -> tuple[Any, ...] | None:
    """Memory and layout, which ``.data =`` and ``module.to(…)`` change without an op. None if unreadable."""
    key = plain_key(tensor)
    if key is None:
        return None
    try:
        return storage_address(tensor), tensor.storage_offset(), key
    except (RuntimeError, NotImplementedError):  # functorch's wrappers: no storage
        return None
