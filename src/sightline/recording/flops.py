"""FLOPs of aten ops, computed from recorded shapes when a trace is built or a batch is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sightline.assemble.batch import FlopsOf
from sightline.data.forms import SLOT, Form, Record, Symbol
from sightline.data.trace_data import UNCOUNTED, TensorMeta
from sightline.recording.flop_formulas import FORMULAS, REPLACED, multiplies
from sightline.recording.operations import OPAQUE, OpInfo, is_composite
from sightline.recording.torchapi import DISPATCH_MODES, OpOverload, without_modes


def flops_of(infos: list[OpInfo], metas: list[TensorMeta], forms: list[Form]) -> FlopsOf:
    """A function that returns the FLOPs of a call by its operation, its forms and its tensors' metadata."""
    cache: dict[tuple[Any, ...], int] = {}

    def count(info: int, form: int, result: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
        key = (info, form, inputs, outputs)
        if key not in cache:
            tensors = [metas[i] for i in inputs], [metas[i] for i in outputs]
            cache[key] = without_modes(partial(_flops, infos[info], forms[form], forms[result], *tensors))
        return cache[key]

    return count


def has_formula(info: OpInfo) -> bool:
    """Whether the FLOPs of an op may be known."""
    return has_plain_formula(info) or (isinstance(info.function, OpOverload) and is_composite(info.function))


def has_plain_formula(info: OpInfo) -> bool:
    """Whether they are known without decomposing the op, which only the block's own thread may do."""
    return isinstance(info.function, OpOverload) and _formula(info.function) is not None


def needs_formula(info: OpInfo) -> bool:
    """Whether an op does so much work that views report it where its FLOPs are not known."""
    if info.flavour == OPAQUE:
        return True
    return isinstance(info.function, OpOverload) and multiplies(info.function._schema.name)


class _Formula(NamedTuple):
    """A function that counts the FLOPs of an op, from shapes or from tensors."""

    count: Callable[..., Any]
    of_shapes: bool


def _formula(function: Any) -> _Formula | None:
    """The formula of an op, or of its form out of place; not cached, as one may be registered later."""
    from torch.utils import flop_counter

    name = function._schema.name
    for each in dict.fromkeys((name, name.removesuffix("_"))):
        namespace, _, bare = each.partition("::")
        packet = getattr(getattr(torch.ops, namespace), bare, None)
        registered: Any = flop_counter.flop_registry.get(packet)
        if each in REPLACED and getattr(registered, "__module__", "") == flop_counter.__name__:
            registered = None
        if registered is not None and getattr(registered, "__code__", None) is _shape_wrapper():
            # The wrapped function takes shapes: no tensors need to be made for it.
            return _Formula(registered.__wrapped__, True)
        if registered is not None:
            return _Formula(registered, False)
        if each in FORMULAS:
            return _Formula(FORMULAS[each], True)
    return None


@cache
def _shape_wrapper() -> Any:
    """The code of the functions that torch wraps around formulas which take shapes."""
    from torch.utils import flop_counter

    return flop_counter.shape_wrapper(len).__code__


def _flops(
    info: OpInfo, form: Form, result: Form, inputs: list[TensorMeta], outputs: list[TensorMeta]
) -> int:
    try:
        formula = _formula(info.function)
        if formula is not None and formula.of_shapes:
            args, kwargs, out = _arguments(form, result, inputs, outputs, lambda meta: torch.Size(meta.shape))
            return int(formula.count(*args, out_shape=out, **kwargs))
        args, kwargs, out = _arguments(form, result, inputs, outputs, _meta_tensor)
        if formula is not None:
            return int(formula.count(*args, **kwargs, out_val=out))
        counter = _Counter()
        counter.decompose(info.function, args, kwargs)
        if counter.unknown:
            return UNCOUNTED
        return counter.total if counter.total or needs_formula(info) else -1
    except Exception:  # a formula that does not know this overload is no reason to lose the trace
        return -1


def _arguments(
    form: Form, result: Form, inputs: list[TensorMeta], outputs: list[TensorMeta],
    tensor: Callable[[TensorMeta], Any],
) -> tuple[list[Any], dict[str, Any], Any]:  # fmt: skip
    """The arguments of an op and its result, with ``tensor(meta)`` for every tensor."""
    tensors = map(tensor, inputs)
    args = [_argument(item, tensors) for item in form.args]
    kwargs = {key: _argument(item, tensors) for key, item in (form.kwargs or {}).items()}
    results = map(tensor, outputs)
    values = [_argument(item, results) for item in result.args]
    return args, kwargs, values[0] if len(values) == 1 else values


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of the ops that run, on meta tensors."""

    total = 0
    unknown = False  #: an op ran whose FLOPs are not known

    def decompose(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Decompose an op and count its parts.

        It does not use ``with self:``, which writes globals: another thread may be running ops meanwhile.
        """
        try:
            DISPATCH_MODES.push(self)
            return function.decompose(*args, **kwargs)
        finally:
            DISPATCH_MODES.take(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _formula(function)
        if formula is None and is_composite(function):
            return self.decompose(function, args, kwargs)
        result = function(*args, **kwargs)
        if formula is not None and formula.of_shapes:
            shapes = tree_map_only(torch.Tensor, lambda one: one.shape, (args, kwargs, result))
            self.total += int(formula.count(*shapes[0], out_shape=shapes[2], **shapes[1]))
        elif formula is not None:
            self.total += int(formula.count(*args, **kwargs, out_val=result))
        else:
            self.unknown |= multiplies(function._schema.name)
        return result


def _meta_tensor(meta: TensorMeta) -> Any:
    dtype = getattr(torch, meta.dtype)
    if meta.stride is None:
        return torch.empty(meta.shape, dtype=dtype, device="meta")
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")


def _argument(item: Any, tensors: Iterator[Any]) -> Any:
    """A recorded argument as one to call with; elided items of a long list stay elided."""
    if item is SLOT:
        return next(tensors)
    if isinstance(item, list | tuple):
        return type(item)(_argument(part, tensors) for part in item)
    if isinstance(item, Symbol):
        name = item.text.removeprefix("torch.")
        return getattr(torch, name) if item.text.startswith("torch.") else torch.device("meta")
    if isinstance(item, Record | dict):
        raise ValueError("not an argument a formula could use")
    return item
