"""The arguments of every operation in a recording, as its own schema has them: names and defaults.

A view binds arguments by name without torch, so they are stored as texts: ``("self", "other", "alpha=1")``.
Dispatcher ops have one schema each. A function written in Python has its signature; one written in C has that
of the op of its name, where there is only one it could be.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from itertools import islice
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Final

import torch

from sightline.recording.operations import OpInfo
from sightline.recording.torchapi import OpOverload

_IN_C: Final = (BuiltinFunctionType, MethodDescriptorType)
_MOST: Final = 80  #: characters of a default; longer ones are tables, not settings


def schemas_of(infos: Iterable[OpInfo]) -> dict[str, tuple[str, ...]]:
    """For each operation the texts of its arguments; those of which nothing is known are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for info in infos:
        if info.name not in found and (arguments := arguments_of(info.function)):
            found[info.name] = arguments
    return found


def arguments_of(function: Any) -> tuple[str, ...]:
    """The arguments of one operation.

    >>> arguments_of(torch.ops.aten.add.Tensor), arguments_of(torch.nn.functional.glu)
    (('self', 'other', 'alpha=1'), ('input', 'dim=-1'))
    """
    if isinstance(function, OpOverload):
        return _of_overload(function)
    try:
        if isinstance(function, _IN_C) and getattr(function, "__text_signature__", None) is None:
            return _of_namesake(function.__name__)  # asking for its signature takes long to fail
        parameters = inspect.signature(function).parameters.values()
    except Exception:  # a signature may be code of the user's
        name = getattr(function, "__name__", "")
        return _of_namesake(name) if isinstance(name, str) else ()
    return tuple(_text(one) for one in parameters if one.kind is not one.VAR_KEYWORD)


@cache  # ops live as long as the process, and the next trace has the same ones
def _of_overload(function: OpOverload) -> tuple[str, ...]:
    return _of_schema(function._schema)


def _of_schema(schema: Any) -> tuple[str, ...]:
    return tuple(
        _with_default(one.name, one.default_value) if one.has_default_value() else one.name
        for one in schema.arguments
    )


@cache
def _of_namesake(name: str) -> tuple[str, ...]:
    """Those of the dispatcher op of the same name: of ``torch.sum``, which has several, nothing."""
    packet: Any = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return ()
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    few = (one for one in schemas if not any(each.is_out or _is_named(each) for each in one.arguments))
    plain = list(islice(few, 2))
    return _of_schema(plain[0]) if len(plain) == 1 else ()


def _is_named(argument: Any) -> bool:
    """Whether it is a dimension by name, a second form of many ops that nobody means."""
    return "Dimname" in str(argument.type)


def _text(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.default is parameter.empty:
        return parameter.name
    return _with_default(parameter.name, parameter.default)


def _with_default(name: str, default: Any) -> str:
    try:
        text = repr(default)
    except Exception:  # somebody else's code, run only to be shown
        text = f"<{type(default).__name__}>"
    return f"{name}={text}" if len(text) <= _MOST else f"{name}=…"
