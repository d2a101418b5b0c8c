"""Values: the identity and metadata of tensors, also when ``torch.utils.swap_tensors`` swaps two."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording.atomic import append_numbered
from sightline.recording.memory import Storages
from sightline.recording.process_groups import placements_of
from sightline.recording.row_streams import Stream
from sightline.recording.thread_state import active
from sightline.recording.torchapi import (
    Parameter,
    Tensor,
    functorch_unwrapped,
    is_functorch_wrapped,
    no_torch_function,
    storage_address,
)
from sightline.trace.assembly.row_columns import MOVED, V_WIDTH
from sightline.trace.data import KINDS, TensorMeta

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


KIND: Final = {name: number for number, name in enumerate(KINDS)}
ACTIVATION: Final = KIND["activation"]
EXTERNAL: Final = KIND["external"]
INPUT: Final = KIND["input"]
PLAIN_TENSORS: Final = frozenset({Tensor, Parameter})
_SCAN_ALLOWANCE: Final = 100_000
_MIN_PURGE: Final = 4096


class TensorRef(ref):  # type: ignore[type-arg]  # typeshed's ref takes a parameter, a subclass need not
    """A weak reference to a tensor that carries its current value."""

    __slots__ = ("appearance", "value")

    value: int
    appearance: Any  #: what the tensor looked like when it became this value


class TensorRegistry:
    """The tensors of one recording, by value; each engine has its own way to find a tensor again."""

    stream: Any  #: rows of values
    fresh: Any  #: the native engine's short rows of values

    def __init__(self) -> None:
        self.metas: list[TensorMeta] = []
        self.storage_bytes: dict[int, int] = {}  #: value -> bytes, for tensors not made in the block
        self.names: dict[int, str] = {}  #: value -> name
        self.kinds: dict[int, int] = {}  #: value -> kind, where it became known after the value was seen

    def find(self, tensor: Any) -> int | None:
        """The current value of a tensor, if it has been seen."""
        raise NotImplementedError

    def find_all(self, tensors: list[Any]) -> list[int | None]:
        """The same for many."""
        return [self.find(tensor) for tensor in tensors]

    def value(self, tensor: Any) -> int:
        """The current value of a tensor; one never seen before is explained and added."""
        raise NotImplementedError

    def forget(self, tensor: Any) -> int | None:
        """Drop the weak reference to a tensor; returns its value."""
        raise NotImplementedError

    def rebind(self, tensor: Any, value: int) -> None:
        """Have a tensor object stand for a value, whatever it looks like by now."""
        raise NotImplementedError

    def register(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """Add a tensor that no recorded op made, of a kind that is given or found out."""
        raise NotImplementedError

    def register_all(self, named: list[tuple[str, Any]], kind: int) -> list[int]:
        """The same for many of one kind."""
        return [self.register(tensor, kind, name) for name, tensor in named]

    def describe(self, tensor: Any) -> int:
        """The number of the metadata of any tensor."""
        raise NotImplementedError

    def find_storage(self, tensor: Any) -> int:
        """The newest value in the storage of a tensor; -1 if there is none."""
        raise NotImplementedError

    def live_tensors(self) -> list[tuple[int, Any]]:
        """Values and tensors, of the tensors that are still alive."""
        raise NotImplementedError

    def alive(self) -> NDArray[np.int64]:
        """The values of tensors that are still alive."""
        raise NotImplementedError

    def find_base(self, tensor: Any) -> int:
        """The value whose storage a new tensor object has, or that a wrapper holds; else -1.

        ``nn.Parameter(t)`` and ``t.data`` make objects without an op; functorch and subclasses wrap.
        """
        if is_functorch_wrapped(tensor):
            value = self.find(functorch_unwrapped(tensor))
            return -1 if value is None else value
        flatten = getattr(type(tensor), "__tensor_flatten__", None)
        if flatten is not None:
            parts = (self.find(getattr(tensor, name)) for name in flatten(tensor)[0])
            return next((part for part in parts if part is not None), -1)
        return self.find_storage(tensor)

    def label(self, tensors: Iterable[tuple[str, Any]], kind: str, new: bool = True) -> None:
        """Give tensors a kind and a name (optimizer state, gradients); with ``new``, unseen ones too."""
        named, unseen = list(tensors), []
        for (name, tensor), number in zip(named, self.find_all([one for _, one in named]), strict=True):
            if number is None:
                unseen.append((name, tensor))
            else:
                self.names[number] = name
                self.kinds[number] = KIND[kind]
        if new and unseen:
            self.register_all(unseen, KIND[kind])


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
        """The current value of a tensor, if it has been seen."""
        reference = self.refs.get(id(tensor))
        return reference.value if reference is not None and reference() is tensor else None

    def forget(self, tensor: Any) -> int | None:
        """Drop the weak reference to a tensor; returns its value."""
        value = self.find(tensor)
        self.refs.pop(id(tensor), None)
        return value

    def rebind(self, tensor: Any, value: int) -> None:
        """Have a tensor object stand for a value, whatever it looks like by now."""
        self._bind(tensor, value, ())  # equal to no appearance: it is compared anew when it is next used

    def _bind(self, tensor: Any, value: int, appearance: Any) -> None:
        reference = self.refs[id(tensor)] = TensorRef(tensor)
        reference.value, reference.appearance = value, appearance

    def value(self, tensor: Any) -> int:
        """The current value of a tensor; one never seen before is explained and added."""
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
        self.stream.write([V_WIDTH, number, meta, address, offset, kind, op, previous, base, flags])
        self._bind(tensor, number, appearance)  # after the row: an interrupt may come in between
        if self.memory is not None and type(tensor) in PLAIN_TENSORS:
            self.memory.note(tensor, number)
        if len(self.refs) > self._purge_at:
            self._purge()
        return number

    def register(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """Add a tensor that no recorded op made, of a kind that is given or found out."""
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
        if self._scanned > _SCAN_ALLOWANCE + 20 * (len(self.stream) // V_WIDTH):
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
        """The number of the metadata of any tensor."""
        key = _plain_key(tensor)
        number = None if key is None else self.meta_ids.get(key)
        if number is None:
            key, meta = metadata_of(tensor)
            number = self.meta_ids.get(key)
            if number is None:
                number = self.meta_ids[key] = append_numbered(self.metas, meta)
        return number

    def live_tensors(self) -> list[tuple[int, Any]]:
        """Values and tensors, of the tensors that are still alive."""
        pairs = [(reference.value, reference()) for reference in list(self.refs.values())]
        return [(value, tensor) for value, tensor in pairs if tensor is not None]

    def alive(self) -> NDArray[np.int64]:
        """The values of tensors that are still alive."""
        values = [reference.value for reference in list(self.refs.values()) if reference() is not None]
        return np.array(values, dtype=np.int64)

    def _purge(self) -> None:
        """Remove the references to dead tensors."""
        for key in [key for key, reference in list(self.refs.items()) if reference() is None]:
            self.refs.pop(key, None)
        self._purge_at = max(_MIN_PURGE, 2 * len(self.refs))


def metadata_of(tensor: Any) -> tuple[Any, TensorMeta]:
    """A key and the metadata of any tensor."""
    kind = type(tensor)
    dtype, device = tensor.dtype, tensor.device
    nested = bool(getattr(tensor, "is_nested", False))
    shape = _nested_shape(tensor) if nested else tensor.size()  # a lazy parameter has no `shape`
    try:
        stride = None if nested else tensor.stride()
    except (RuntimeError, NotImplementedError):
        stride = None
    plain = kind in PLAIN_TENSORS
    layout = str(tensor.layout).removeprefix("torch.")
    if nested:
        layout = "nested"
    meta = TensorMeta(
        tuple(map(size_of, shape)),
        None if stride is None else tuple(map(size_of, stride)),
        str(dtype).removeprefix("torch."),
        str(device),
        layout,
        dtype.itemsize,
        "Tensor" if plain else kind.__name__,
        _nested_elements(tensor) if nested else -1,
        () if all(type(size) is int for size in shape) else tuple(map(str, shape)),
        () if plain else placements_of(tensor),
    )
    return _plain_key(tensor) or meta, meta


def _nested_shape(tensor: Any) -> tuple[Any, ...]:
    """The sizes of a nested tensor; -1 is one that differs between its parts."""
    if tensor.layout == torch.jagged:  # it has a symbol for it
        return tuple(tensor.shape)
    sizes: list[int] = []
    for dimension in range(tensor.dim()):
        try:
            sizes.append(tensor.size(dimension))
        except RuntimeError:
            sizes.append(-1)
    return tuple(sizes)


def _nested_elements(tensor: Any) -> int:
    """How many elements the parts of a nested tensor have; -1 if unknown."""
    try:
        return size_of((tensor._values if tensor.layout == torch.jagged else tensor).numel())
    except (RuntimeError, TypeError):
        return -1


def _plain_key(tensor: Any) -> tuple[Any, ...] | None:
    """A cheap key of the metadata of a plain strided tensor; None for any other."""
    if type(tensor) not in PLAIN_TENSORS or tensor._has_symbolic_sizes_strides:  # a comparison adds guards
        return None
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except (RuntimeError, NotImplementedError):  # sparse, nested, opaque
        return None


def _appearance(tensor: Any) -> tuple[Any, ...] | None:
    """What ``.data =`` and ``module.to(…)`` change without an op: memory and layout. None if unreadable."""
    key = _plain_key(tensor)
    if key is None:
        return None
    try:
        return storage_address(tensor), tensor.storage_offset(), key
    except (RuntimeError, NotImplementedError):  # functorch's wrappers: no storage
        return None


def note_bytes(storage_bytes: dict[int, int], value: int, tensor: Any) -> None:
    """Store the size of the storage of a tensor that was not made in the block, if it is a number."""
    with suppress(Exception):  # no storage: sparse, functorch, some subclasses
        nbytes = size_of(tensor.untyped_storage().nbytes())
        if nbytes >= 0:
            storage_bytes[value] = nbytes


def size_of(size: Any) -> int:
    """A size as a number: of a symbolic one the hint, since converting it would add a guard; else -1."""
    if type(size) is int:
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else -1


class SwapPatch:
    """Replaces ``torch.utils.swap_tensors`` while anything records: it refuses weakly referenced tensors."""

    def __init__(self) -> None:
        self._original: Any = None

    def install(self) -> None:
        """Put our function in."""
        if torch.utils.swap_tensors != self.swap:
            self._original = torch.utils.swap_tensors
            torch.utils.swap_tensors = self.swap

    def remove(self) -> None:
        """Put torch's function back, unless it was replaced by another since."""
        if torch.utils.swap_tensors == self.swap:
            torch.utils.swap_tensors = self._original

    def swap(self, t1: Any, t2: Any) -> None:
        """Swap two tensors, to which no recording holds a weak reference meanwhile."""
        forgotten: list[tuple[SessionBase, Any, Any]] = []
        for session in _sessions():
            for tensor in (t1, t2):
                try:
                    forgotten.append((session, tensor, session.forget(tensor)))
                except Exception as error:
                    session.note_fault(error)
        try:
            self._original(t1, t2)
        finally:
            for session, tensor, entries in forgotten:
                try:
                    session.restore(tensor, entries)
                except Exception as error:
                    session.note_fault(error)


def _sessions() -> list[SessionBase]:
    """Every running recording of the process, of either engine."""
    plain = [state.session for states in list(active.values()) for state in states]
    hooks = sys.modules.get("sightline.recording.native.hooks")
    native = [] if hooks is None else [one for each in list(hooks.sessions.values()) for one in each]
    return [*plain, *native]
