"""Forms of operator calls from values of C++: dtypes as numbers, tensors as markers, all defaults."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from sightline.data.forms import SLOT, Form, Record, Symbol
from sightline.recording.arguments import plain_argument
from sightline.recording.distributed import group_symbol, note_groups
from sightline.recording.operations import OpTraits, aten_traits
from sightline.recording.torchapi import OpOverload

#: The marker that C++ writes for a tensor.
_TENSOR: Final = Ellipsis
#: C++ names of dtypes; the others are Python's names with capitals.
_DTYPES: Final = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "Float": "float32", "Double": "float64", "ComplexHalf": "complex32", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
_LAYOUTS: Final = (
    "strided", "sparse_coo", "sparse_csr", "_mkldnn", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
)  # fmt: skip
_MEMORY_FORMATS: Final = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


def dtype_name(name: str) -> str:
    """Python's name of a dtype that C++ calls ``name``.

    >>> dtype_name("Float"), dtype_name("BFloat16")
    ('float32', 'bfloat16')
    """
    return _DTYPES.get(name, name.lower())


def operator(name: str, overload: str) -> Any:
    """The operator of a schema's name and overload: ``aten::add`` and ``Tensor``."""
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


@cache
def traits_of(name: str, overload: str) -> tuple[OpTraits, int]:
    """The traits of an operator, and a bit for each argument that it changes in place."""
    traits = aten_traits(operator(name, overload))
    arguments = traits.function._schema.arguments[:64]
    written = (at in traits.mutates or one.name in traits.mutates for at, one in enumerate(arguments))
    return traits, sum(1 << at for at, changes in enumerate(written) if changes)


def form_of_schema(function: Any, values: list[Any], scalar_type: Callable[[int], str]) -> Form:
    """The form of a call as Python's dispatcher would pass it: defaults at the end are left out.

    ``scalar_type`` returns the C++ name of a dtype by its number.
    """
    if not isinstance(function, OpOverload):
        return Form(tuple(_plain(value) for value in values))
    arguments = function._schema.arguments
    positional = [at for at, argument in enumerate(arguments) if not argument.kwarg_only]
    while positional and _is_default(arguments[positional[-1]], values[positional[-1]]):
        positional.pop()
    named = {
        argument.name: _converted(argument, values[at], scalar_type)
        for at, argument in enumerate(arguments)
        if argument.kwarg_only and at < len(values) and not _is_default(argument, values[at])
    }
    return Form(tuple(_converted(arguments[at], values[at], scalar_type) for at in positional), named or None)


def split_arguments(function: Any, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments, from the values of all."""
    arguments = function._schema.arguments if isinstance(function, OpOverload) else ()
    named = {
        argument.name: value
        for argument, value in zip(arguments, values, strict=False)
        if argument.kwarg_only
    }
    return tuple(values[: len(values) - len(named)]), named


def result_form(values: list[Any]) -> Form:
    """The form of the results of an operator."""
    items = [_plain(value) for value in values]
    return Form((items[0] if len(items) == 1 else tuple(items),))


def api_result_form(function: Any, values: list[Any]) -> Form:
    """The same as Python's bindings return it: lists as tuples, and named where the schema has names."""
    form = result_form([tuple(value) if isinstance(value, list) else value for value in values])
    returns = function._schema.returns if isinstance(function, OpOverload) else ()
    names = [one.name for one in returns]
    if len(values) > 1 and len(names) == len(values) and all(names):
        name = function._schema.name.partition("::")[2]
        return Form((Record(name, dict(zip(names, form.args[0], strict=True))),))
    return form


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = argument.default_value
    return type(default) is type(value) and bool(default == value)


def _converted(argument: Any, value: Any, scalar_type: Callable[[int], str]) -> Any:
    if type(value) is int:
        kind = str(argument.real_type)
        if "ScalarType" in kind:
            return Symbol(f"torch.{dtype_name(scalar_type(value))}")
        if "Layout" in kind:
            return Symbol(f"torch.{_LAYOUTS[value]}")
        if "MemoryFormat" in kind:
            return Symbol(f"torch.{_MEMORY_FORMATS[value]}")
    return _plain(value)


def _plain(value: Any) -> Any:
    if value is _TENSOR:
        return SLOT
    if type(value) is tuple and len(value) == 2 and value[0] in ("device", "symbol", "object", "group"):
        kind, text = value
        if kind == "group":
            note_groups()
            return group_symbol(text)
        return Symbol(text if kind != "object" else f"<{text}>")
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds == {type(_TENSOR)}:
            return type(value)([SLOT] * len(value))
        if not kinds & {list, tuple, type(_TENSOR)}:
            return plain_argument(value)
        return type(value)(_plain(item) for item in value)
    return plain_argument(value)
