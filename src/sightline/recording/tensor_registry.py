"""The tensors of a recording: the registry that both engines implement, and the metadata of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.data.trace_data import KIND, TensorMeta
from sightline.recording.distributed import placements_of
from sightline.recording.torchapi import (
    Parameter,
    Tensor,
    functorch_unwrapped,
    is_functorch_wrapped,
    muted,
)

if TYPE_CHECKING:
    from sightline.recording.session import Session

ACTIVATION: Final = KIND["activation"]
EXTERNAL: Final = KIND["external"]
INPUT: Final = KIND["input"]
PLAIN_TENSORS: Final = frozenset({Tensor, Parameter})


class TensorRegistry(ABC):
    """The tensors of one recording, by value; each engine has its own way to find a tensor again."""

    stream: Any  #: rows of values
    fresh: Any  #: the native engine's short rows of values

    def __init__(self) -> None:
        self.metas: list[TensorMeta] = []
        self.storage_bytes: dict[int, int] = {}  #: value -> bytes, for tensors not made in the block
        self.names: dict[int, str] = {}  #: value -> name
        self.kinds: dict[int, int] = {}  #: value -> kind, where it became known after the value was seen

    @abstractmethod
    def find(self, tensor: Any) -> int | None:
        """The current value of a tensor, if it has been seen."""

    def find_all(self, tensors: list[Any]) -> list[int | None]:
        """The same for many."""
        return [self.find(tensor) for tensor in tensors]

    @abstractmethod
    def value(self, tensor: Any) -> int:
        """The current value of a tensor; one never seen before is explained and added."""

    @abstractmethod
    def forget(self, tensor: Any) -> int | None:
        """Drop the weak reference to a tensor; returns its value."""

    @abstractmethod
    def forget_all(self) -> None:
        """Drop Python's weak references to all tensors."""

    @abstractmethod
    def rebind(self, tensor: Any, value: int) -> None:
        """Have a tensor object stand for a value, whatever its memory and layout are by now."""

    @abstractmethod
    def register(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """Add a tensor that no recorded op made, of a kind that is given or found out."""

    def register_all(self, named: list[tuple[str, Any]], kind: int) -> list[int]:
        """The same for many of one kind."""
        return [self.register(tensor, kind, name) for name, tensor in named]

    @abstractmethod
    def describe(self, tensor: Any) -> int:
        """The number of the metadata of any tensor."""

    @abstractmethod
    def find_storage(self, tensor: Any) -> int:
        """The newest value in the storage of a tensor; -1 if there is none."""

    @abstractmethod
    def live_tensors(self) -> list[tuple[int, Any]]:
        """Values and tensors, of the tensors that are still alive."""

    @abstractmethod
    def alive(self) -> NDArray[np.int64]:
        """The values of tensors that are still alive."""

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
    elements = -1
    if nested:
        with suppress(RuntimeError, TypeError):
            elements = size_of((tensor._values if tensor.layout == torch.jagged else tensor).numel())
    meta = TensorMeta(
        shape=tuple(map(size_of, shape)),
        stride=None if stride is None else tuple(map(size_of, stride)),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        layout=layout,
        itemsize=dtype.itemsize,
        type="Tensor" if plain else kind.__name__,
        elements=elements,
        symbols=() if all(type(size) is int for size in shape) else tuple(map(str, shape)),
        placements=() if plain else placements_of(tensor),
    )
    return plain_key(tensor) or meta, meta


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


def plain_key(tensor: Any) -> tuple[Any, ...] | None:
    """A cheap key of the metadata of a plain strided tensor; None for any other."""
    if type(tensor) not in PLAIN_TENSORS or tensor._has_symbolic_sizes_strides:  # a comparison adds guards
        return None
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except (RuntimeError, NotImplementedError):  # sparse, nested, opaque
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
    """Redirects ``torch.utils.swap_tensors`` while anything records: it refuses weakly referenced tensors.

    The code of the function itself is replaced: programs may have imported it by name before.
    """

    def __init__(self, sessions: Callable[[], Iterable[Session]], redirected: CodeType) -> None:
        self._sessions = sessions  # returns every running recording
        self._redirected = redirected  # calls `swap`; its globals are those of ``torch.utils``
        self._function: Any = None
        self._original: Any = None  # another function with the code of torch's

    def install(self) -> None:
        """Put our code in."""
        function: Any = torch.utils.swap_tensors
        if function.__code__ is not self._redirected:
            self._function = function
            self._original = FunctionType(
                function.__code__, function.__globals__, function.__name__, function.__defaults__
            )
            function.__code__ = self._redirected

    def remove(self) -> None:
        """Put torch's code back, unless it was replaced by another since."""
        if self._function is not None and self._function.__code__ is self._redirected:
            self._function.__code__ = self._original.__code__

    def swap(self, t1: Any, t2: Any) -> None:
        """Swap two tensors, to which no recording holds a weak reference meanwhile."""
        forgotten: list[tuple[Session, Any, Any]] = []
        for session in self._sessions():
            for tensor in (t1, t2):
                try:
                    forgotten.append((session, tensor, session.forget(tensor)))
                except Exception as error:
                    session.note_fault(error)
        try:
            muted(partial(self._original, t1, t2))  # it runs an op, for which they would be remembered again
        finally:
            for session, tensor, entries in forgotten:
                try:
                    session.restore(tensor, entries)
                except Exception as error:
                    session.note_fault(error)
