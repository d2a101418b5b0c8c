"""Modes of torch that pass everything on: how torch itself behaves under any mode at all."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class EmptyDispatchMode(TorchDispatchMode):
    """Passes everything on. It remembers what went by, which changes nothing for torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes: list[tuple[int, ...]] = []
        self.seen.append((aten_name(func), shapes))  # before it runs, since it may raise
        result = func(*args, **(kwargs or {}))
        shapes += [tuple(one.shape) for one in tensors(result) if not one.is_nested]
        return result


class EmptyFunctionMode(TorchFunctionMode):
    """Passes everything on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EmptyModes(EmptyDispatchMode):
    """Both at once, as a trace of both levels has them."""

    def __enter__(self) -> Any:
        self.functions = EmptyFunctionMode()
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)


def aten_name(function: Any) -> str:
    """The name of a dispatcher op as a trace writes it: ``mul.Tensor``, ``relu``, ``mylib::op``."""
    if not isinstance(function, torch._ops.OpOverload):
        return str(function.__name__)
    return str(function.name()).removeprefix("aten::")


def tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
