"""Whether the memory of a tensor is there: whoever reads elements of a tensor of the program asks here first.

A storage may have been freed or made smaller while tensors still show it, as FSDP does with its weights:
torch itself would read what is not there, and crash. C++ has the same rule in ``native/storages.h``.
"""

from __future__ import annotations

import gc
from collections import deque
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
    TracebackType,
)
from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_OBJECTS = 20_000  #: that are looked at, in the search of one object
#: Types of objects that do not show the objects they refer to.
_CLOSED = (
    BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType, type,
)  # fmt: skip
#: Where an exception has those before it, also if its class overrides them.
_EARLIER: tuple[Any, ...] = BaseException.__cause__, BaseException.__context__
_plain_dispatch = torch.Tensor.__torch_dispatch__
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_functorch_unwrapped = torch._C._functorch.get_unwrapped
#: Address of the first byte of a storage, 0 without any; a storage that is copied on write stays as it is.
_data_address = torch._C._data_address  # type: ignore[attr-defined]
_as_strided = torch._C._VariableFunctions.as_strided


def has_memory(tensor: Any) -> bool:
    """Whether every element of a tensor is in memory of its own that is there and can be read.

    Some tensors have none: fake and meta ones, sparse and nested ones, wrappers of functorch and of
    subclasses, the zeros of forward-mode differentiation. It runs an op, and is called where nothing of the
    program's would see it.
    """
    return _is_strided(tensor) and _reaches_its_elements(tensor)


def is_freed(tensor: Any) -> bool:
    """Whether a tensor, or one that it is made of, shows memory that is no longer there."""
    if _is_strided(tensor):
        return not _reaches_its_elements(tensor)
    return any(is_freed(part) for part in _parts(tensor))


def holds_freed(item: Any) -> bool:
    """Whether a freed tensor can be reached from an object, or the search for one would take too long.

    The text of such an object may read memory that is not there: code of the program makes it, from
    attributes, slots, keys of dicts and parts of other objects. The search runs none of that code.
    """
    seen = {id(item)}
    waiting = deque([item])  # those near to the object come first
    while waiting:
        item = waiting.popleft()
        if issubclass(type(item), torch.Tensor):
            if is_freed(item):
                return True
            continue
        parts = gc.get_referents(item)
        if issubclass(type(item), BaseException):  # the exceptions before it have texts of their own
            others = tuple(slot.__get__(item) for slot in _EARLIER)
            parts = [part for part in parts if not any(part is other for other in others)]
        for part in parts:
            if gc.is_tracked(part) or issubclass(type(part), torch.Tensor):
                if id(part) not in seen and not issubclass(type(part), _CLOSED):
                    seen.add(id(part))
                    waiting.append(part)
        if len(seen) > _MAX_OBJECTS:
            return True
    return False


def _is_strided(tensor: Any) -> bool:
    """Whether a tensor should have its elements in a storage of its own."""
    kind = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    if kind not in _PLAIN and getattr(kind, "__torch_dispatch__", None) is not _plain_dispatch:
        return False
    if _is_functorch_wrapped(tensor) or torch._is_functional_tensor(tensor) or tensor._is_zerotensor():
        return False
    return not tensor._has_symbolic_sizes_strides


def _reaches_its_elements(tensor: Any) -> bool:
    if tensor.numel() == 0:
        return True
    try:
        if not _data_address(tensor):
            return False
        # Torch compares sizes and strides with the storage. The object that `untyped_storage` makes would
        # stay, one more user of the storage, and autograd would no longer add to a gradient in place.
        _as_strided(tensor, tensor.size(), tensor.stride(), tensor.storage_offset())
        return True
    except (RuntimeError, NotImplementedError):  # out of bounds, or an opaque tensor
        return False


def _parts(tensor: Any) -> list[Any]:
    """The tensors that one without a storage of its own is made of."""
    if _is_functorch_wrapped(tensor):
        return [_functorch_unwrapped(tensor)]
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is not None:
        return [getattr(tensor, name) for name in flatten(tensor)[0]]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
