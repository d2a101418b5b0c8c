"""The parts of torch that exporting needs and torch does not publish: every private name, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

__all__ = ["GUARD_LOGGER", "OpOverload", "pytree"]

OpOverload: Final[Any] = torch._ops.OpOverload
#: The logger that reports each guard torch adds on a size; it does so from level INFO on.
GUARD_LOGGER: Final = "torch.fx.experimental.symbolic_shapes"


def children_of(spec: Any) -> list[Any]:
    """The structures inside of a structure: a method in new versions of torch, an attribute in old ones."""
    children = getattr(spec, "children", None)
    return list(spec.children_specs if children is None else children())


def op_schema(target: Any) -> Any:
    """The schema of the op that a node calls; None for a Python function."""
    return getattr(target, "_schema", None)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage
        return id(tensor)


def buffer_hooks() -> dict[Any, Any]:
    """The process-wide hooks that run when any module registers a buffer."""
    hooks: dict[Any, Any] = getattr(torch.nn.modules.module, "_global_buffer_registration_hooks", {})
    return hooks


# -- symbolic sizes -------------------------------------------------------------------------------------


def size_hint(size: Any) -> int:
    """The example's value of a size, which may be symbolic; -1 where torch does not know it."""
    if isinstance(size, int):
        return size
    if size.node.expr.is_number:
        return int(size.node.expr)
    hint = getattr(size.node, "hint", None)
    return -1 if hint is None else int(hint)


def size_code(size: Any) -> str:
    """A symbolic size as a Python expression; "" where torch has fixed it."""
    if isinstance(size, int) or size.node.expr.is_number:
        return ""
    return expression_code(size.node.expr)


def expression_code(expression: Any) -> str:
    """A sympy expression over sizes as Python code."""
    printer = import_module("torch.utils._sympy.printers").PythonPrinter  # slow to import, and only for this
    return str(printer().doprint(expression))


def guards_of(fake: Any) -> list[Any]:
    """The guards torch collected for the export that a fake tensor comes from."""
    return list(getattr(_shape_environment(fake), "guards", ()))


def guard_function(guard: Any) -> str:
    """The function of torch that added a guard; "" where it was the model's own line."""
    frame = getattr(guard.sloc, "framework_loc", None)
    return getattr(frame, "name", "") or ""


def original_symbols(name: str, fake: Any) -> Iterator[tuple[int, str]]:
    """Each dimension of an input and the symbol it had before torch fixed any size."""
    for source, symbol in getattr(_shape_environment(fake), "source_to_var", {}).items():
        match = re.fullmatch(r"(.*)\.size\(\)\[(\d+)\]", str(source))
        # torch's ``L['batch']['ids']`` is our ``batch['ids']``.
        if match and re.sub(r"^L\['(\w+)'\]", r"\1", match[1]) == name:
            yield int(match[2]), str(symbol)


def _shape_environment(fake: Any) -> Any:
    return getattr(getattr(fake, "fake_mode", None), "shape_env", None)
