"""Which tensor is which: identity and metadata, also when ``torch.utils.swap_tensors`` swaps two."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import setitem
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording.atomic import at_once
from sightline.recording.memory import Storages
from sightline.recording.row_streams import Stream
from sightline.recording.thread_state import active
from sightline.recording.torchapi import (
    Parameter,
    Tensor,
    functorch_unwrapped,
    is_functorch_wrapped,
    quiet,
    storage_address,
)
from sightline.trace.assembly.layout import MOVED, V_WIDTH
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


class KnownTensors:
    """What both engines say of tensors, each of which finds them again in its own way."""

    names: dict[int, str]
    kinds: dict[int, int]

    def known(self, tensor: Any) -> int | None:
        """The current value of a tensor, if it has been seen."""
        raise NotImplementedError

    def known_all(self, tensors: list[Any]) -> list[int | None]:
        """The same for many."""
        return [self.known(tensor) for tensor in tensors]

    def let_go(self, tensor: Any) -> int | None:
        """Hold no weak reference to a tensor; the value it was known by."""
        raise NotImplementedError

    def know_as(self, tensor: Any, value: int) -> None:
        """A tensor object is known by a value, whatever it looks like by now."""
        raise NotImplementedError

    def first_sight(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """A tensor that no recorded op made: say what it is."""
        raise NotImplementedError

    def sharing(self, tensor: Any) -> int:
        """The newest value whose memory a tensor shows; -1 if there is none."""
        raise NotImplementedError

    def inside(self, tensor: Any) -> int:
        """The known value whose memory a new tensor object shows, or that a wrapper holds; else -1.

        ``nn.Parameter(t)`` and ``t.data`` make objects that pass no op; functorch and subclasses wrap.
        """
        if is_functorch_wrapped(tensor):
            found = self.known(functorch_unwrapped(tensor))
            return -1 if found is None else found
        flatten = getattr(type(tensor), "__tensor_flatten__", None)
        if flatten is not None:
            parts = (self.known(getattr(tensor, name)) for name in flatten(tensor)[0])
            return next((part for part in parts if part is not None), -1)
        return self.sharing(tensor)

    def label(self, tensors: Iterable[tuple[str, Any]], kind: str, new: bool = True) -> None:
        """Give values a kind and a name (optimizer state, gradients); with ``new`` also unknown ones."""
        named = list(tensors)
        for (name, tensor), number in zip(named, self.known_all([one for _, one in named]), strict=True):
            if number is None:
                if new:
                    self.first_sight(tensor, KIND[kind], name)
            else:
                self.names[number] = name
                self.kinds[number] = KIND[kind]


class Values(KnownTensors):
    """Every tensor seen in one recording."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.fresh = Stream()  #: the native engine's short rows; this one writes none
        self.ids = itertools.count()
        self.refs: dict[int, TensorRef] = {}
        self.metas: list[TensorMeta] = []
        self.meta_ids: dict[Any, int] = {}
        self.storage_bytes: dict[int, int] = {}  # value id -> bytes, for tensors not made in the block
        self.names: dict[int, str] = {}  # value id -> name
        self.kinds: dict[int, int] = {}  # value id -> kind, where it was learned after the value was seen
        self.memory: Storages | None = None
        self._purge_at = _MIN_PURGE  # when so many tensors are known, the dead are forgotten
        #: kind, name and producer of a tensor that no recorded op made
        self.explain: Callable[[Any], tuple[int, str, int]] = lambda tensor: (EXTERNAL, "", -1)
        self._scanned = 0
        #: only module calls are recorded, and one is running: what it passes on needs no explanation
        self.unexplained = False

    def known(self, tensor: Any) -> int | None:
        """The current value of a tensor, if it has been seen."""
        found = self.refs.get(id(tensor))
        return found.value if found is not None and found() is tensor else None

    def let_go(self, tensor: Any) -> int | None:
        """Hold no weak reference to a tensor; the value it was known by."""
        value = self.known(tensor)
        self.refs.pop(id(tensor), None)
        return value

    def know_as(self, tensor: Any, value: int) -> None:
        """A tensor object is known by a value, whatever it looks like by now."""
        self._know(tensor, value, ())  # like no tensor: it is looked at anew when it is next used

    def _know(self, tensor: Any, value: int, appearance: Any) -> None:
        held = self.refs[id(tensor)] = TensorRef(tensor)
        held.value, held.appearance = value, appearance

    def value(self, tensor: Any) -> int:
        """The current value of a tensor; one never seen before is explained and added."""
        found = self.refs.get(id(tensor))
        if found is None or found() is not tensor:
            return self.first_sight(tensor)
        return found.value if found.appearance == _appearance(tensor) else self._replaced(tensor, found)

    def output(self, tensor: Any, op: int) -> int:
        """The value of a tensor that an op returned: a new one, unless it is known already."""
        found = self.refs.get(id(tensor))
        if found is None or found() is not tensor:
            return self.produced(tensor, op)
        if found.appearance == _appearance(tensor):
            return found.value
        if op < 0:
            return self._replaced(tensor, found)
        return self.produced(tensor, op, found.value)  # it was changed, though the op does not say so

    def _replaced(self, tensor: Any, before: TensorRef) -> int:
        """A new version of a tensor that was given other data without an op: ``.data =``, ``module.to()``."""
        with quiet():
            now = _appearance(tensor)
            moved = not before.appearance or not now or before.appearance[0] != now[0]
            base = self.sharing(tensor) if moved and now else -1
            flags = int(bool(tensor.requires_grad)) | (MOVED if moved and base < 0 else 0)
            return self.produced(tensor, -1, before.value, base=base, flags=flags)

    def produced(
        self, tensor: Any, op: int, previous: int = -1, kind: int = ACTIVATION, base: int = -1,
        flags: int = 0, offset: int | None = None,
    ) -> int:  # fmt: skip
        """A new value: the output of an op, or (with ``previous``) a new version made in place.

        ``offset`` is where it begins in its storage, if the caller knows better than the tensor. Like
        `describe` it is called where `quiet` holds: reading a shape must run nobody's code.
        """
        meta = self.describe(tensor)
        address = 0
        if offset is None:
            try:
                address, offset = storage_address(tensor), max(size_of(tensor.storage_offset()), 0)
            except (RuntimeError, NotImplementedError):  # functorch, subclasses: no storage
                offset = 0
            if self.metas[meta].stride is None:  # sparse and nested tensors are not followed
                address = offset = 0
        appearance = _appearance(tensor)
        number = next(self.ids)
        self.stream.write([V_WIDTH, number, meta, address, offset, kind, op, previous, base, flags])
        self._know(tensor, number, appearance)  # by now there is a row: an interrupt may come in between
        if self.memory is not None and type(tensor) in PLAIN_TENSORS:
            self.memory.note(tensor, number)
        if len(self.refs) > self._purge_at:
            self._purge()
        return number

    def first_sight(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """A tensor that no recorded op made: say what it is."""
        with quiet():
            if self.unexplained and kind is None and type(tensor) is Tensor:
                return self.produced(tensor, -1, offset=0)
            base = producer = -1
            if kind is None:
                kind, name, producer = self.explain(tensor)
                if kind in (EXTERNAL, INPUT):
                    base = self.inside(tensor)
                    kind = kind if base < 0 else ACTIVATION
            number = self.produced(tensor, producer, -1, kind, base, int(bool(tensor.requires_grad)))
            if name:
                self.names[number] = name
            note_bytes(self.storage_bytes, number, tensor)
        return number

    def sharing(self, tensor: Any) -> int:
        """Looks at every living tensor, and so only while that stays cheap next to the recording itself."""
        if self._scanned > _SCAN_ALLOWANCE + 20 * (len(self.stream) // V_WIDTH):
            return -1
        self._scanned += len(self.refs)
        try:
            address = storage_address(tensor)
        except RuntimeError:
            return -1
        best = -1
        for held in list(self.refs.values()):
            other = held()
            try:
                if other is None or other is tensor:
                    continue
                if storage_address(other) == address and held.value > best:
                    best = held.value
            except RuntimeError:  # a tensor without a storage
                continue
        return best

    def describe(self, tensor: Any) -> int:
        """The number of the metadata of any tensor."""
        key = _plain_key(tensor)
        found = None if key is None else self.meta_ids.get(key)
        if found is None:
            key, meta = metadata_of(tensor)
            found = self.meta_ids.get(key)
            if found is None:
                found = len(self.metas)
                at_once(partial(self.metas.append, meta), partial(setitem, self.meta_ids, key, found))
        return found

    def living(self) -> list[tuple[int, Any]]:
        """Values and their tensors, of those that are still there."""
        found = [(held.value, held()) for held in list(self.refs.values())]
        return [(value, tensor) for value, tensor in found if tensor is not None]

    def alive(self) -> NDArray[np.int64]:
        """The values of living tensors."""
        found = [held.value for held in list(self.refs.values()) if held() is not None]
        return np.array(found, dtype=np.int64)

    def _purge(self) -> None:
        """Forget tensors that have died."""
        for key in [key for key, found in list(self.refs.items()) if found() is None]:
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
    """How many elements the parts of a nested tensor have; -1 if it does not say."""
    try:
        return size_of((tensor._values if tensor.layout == torch.jagged else tensor).numel())
    except (RuntimeError, TypeError):
        return -1


def _plain_key(tensor: Any) -> tuple[Any, ...] | None:
    """What tells the metadata of plain strided tensors apart, cheaply; None for any other."""
    if type(tensor) not in PLAIN_TENSORS or tensor._has_symbolic_sizes_strides:  # a comparison adds guards
        return None
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except (RuntimeError, NotImplementedError):  # sparse, nested, opaque
        return None


def _appearance(tensor: Any) -> tuple[Any, ...] | None:
    """What ``.data =`` and ``module.to(…)`` change without an op: memory and layout. None: cannot be read."""
    key = _plain_key(tensor)
    if key is None:
        return None
    try:
        return storage_address(tensor), tensor.storage_offset(), key
    except (RuntimeError, NotImplementedError):  # functorch's wrappers: no storage
        return None


def note_bytes(held: dict[int, int], value: int, tensor: Any) -> None:
    """Keep the size of the storage of a tensor that was not made in the block, if it is a number."""
    with suppress(Exception):  # no storage: sparse, functorch, some subclasses
        nbytes = size_of(tensor.untyped_storage().nbytes())
        if nbytes >= 0:
            held[value] = nbytes


def size_of(size: Any) -> int:
    """A size as a number; a symbolic one by its hint, since converting it would add a guard; else -1."""
    if type(size) is int:
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else -1


class SwapWatch:
    """Stands in for ``torch.utils.swap_tensors`` while anything records."""

    def __init__(self) -> None:
        self._real: Any = None

    def install(self) -> None:
        """Take its place."""
        if torch.utils.swap_tensors != self.swap:
            self._real = torch.utils.swap_tensors
            torch.utils.swap_tensors = self.swap

    def remove(self) -> None:
        """Give it back, unless somebody has put another there since."""
        if torch.utils.swap_tensors == self.swap:
            torch.utils.swap_tensors = self._real

    def swap(self, t1: Any, t2: Any) -> None:
        """Swap two tensors, of which no recording knows meanwhile."""
        held: list[tuple[SessionBase, Any, Any]] = []
        for session in _sessions():
            for tensor in (t1, t2):
                try:
                    held.append((session, tensor, session.let_go(tensor)))
                except Exception as error:
                    session.note_fault(error)
        try:
            self._real(t1, t2)
        finally:
            for session, tensor, known in held:
                try:
                    session.take_back(tensor, known)
                except Exception as error:
                    session.note_fault(error)


def _sessions() -> list[SessionBase]:
    """Every recording of the process: any of them may know the tensors."""
    plain = [state.session for states in list(active.values()) for state in states]
    native = sys.modules.get("sightline.recording.native.hooks")
    found = [] if native is None else [one for here in list(native.sessions.values()) for one in here]
    return [*plain, *found]
