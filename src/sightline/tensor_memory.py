"""Whether the memory of a tensor is there: whoever reads elements of a tensor of the program asks here first.

A storage may have been freed or made smaller while tensors still show it, as FSDP does with its weights:
torch itself would read what is not there, and crash. C++ has the same rule in ``native/storages.h``.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_PARTS = 1000  #: of a container that are looked at
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


def holds_freed(item: Any, depth: int = 6) -> bool:
    """Whether a tensor in an argument of an exception, or inside a container, is freed.

    The text of such an object would read memory that is not there.
    """
    if isinstance(item, torch.Tensor):
        return is_freed(item)
    if depth == 0:
        return False
    if isinstance(item, BaseException):
        state = object.__getattribute__(item, "__dict__")
        parts = [*BaseException.args.__get__(item), *state.values()]  # type: ignore[attr-defined]
    elif isinstance(item, dict):
        parts = list(item.values())
    elif isinstance(item, list | tuple | set | frozenset):
        parts = list(item)
    else:
        return False
    return any(holds_freed(part, depth - 1) for part in parts[:_MAX_PARTS])


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
