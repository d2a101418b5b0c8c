"""FLOPs of aten ops, by torch's own formulas, worked out from recorded shapes when a trace is built.

Each distinct signature is computed once, from shapes or on meta tensors: nothing is allocated and nothing
runs. An op that torch's counter would take apart first (as in inference mode, where ``linear`` arrives whole)
is taken apart here in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from sightline.recording.operations import OpInfo, is_composite
from sightline.recording.torchapi import OpOverload, undisturbed
from sightline.trace.assembly.raw import FlopsOf
from sightline.trace.data import TensorMeta
from sightline.trace.forms import SLOT, Elided, Form, Record, Symbol


def flops_of(infos: list[OpInfo], metas: list[TensorMeta], forms: list[Form]) -> FlopsOf:
    """A function that knows the FLOPs of a call by its operation, its forms and what its tensors are."""
    known: dict[tuple[Any, ...], int] = {}

    def find(info: int, form: int, result: int, given: tuple[int, ...], made: tuple[int, ...]) -> int:
        key = (info, form, given, made)
        if key not in known:
            with undisturbed(), torch.no_grad():
                known[key] = _flops(
                    infos[info], forms[form], forms[result], [metas[i] for i in given],
                    [metas[i] for i in made],
                )  # fmt: skip
        return known[key]

    return find


def has_formula(info: OpInfo) -> bool:
    """Whether torch may know the FLOPs of an op."""
    return has_plain_formula(info) or (isinstance(info.function, OpOverload) and is_composite(info.function))


def has_plain_formula(info: OpInfo) -> bool:
    """Whether it knows them without taking the op apart, which no thread but the block's own may do."""
    return isinstance(info.function, OpOverload) and _formula(info.function) is not None


class _Formulas(NamedTuple):
    """What is used of torch's counter, which is imported when it is needed first."""

    registry: dict[Any, Callable[..., Any]]
    attention: dict[str, Callable[..., Any]]  #: of the CPU's fused kernels: the registry has all others
    wrapper: Any  #: the code of a formula of shapes that was made one of tensors


@cache
def _formulas() -> _Formulas:
    from torch.utils import flop_counter

    return _Formulas(
        flop_counter.flop_registry,
        {
            "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *rest, out_val, **more:
                flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape),
            "_scaled_dot_product_flash_attention_for_cpu_backward":
                lambda grad, query, key, value, *rest, out_val, **more:
                flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape),
        },
        flop_counter.shape_wrapper(len).__code__,
    )  # fmt: skip


def _formula(function: Any) -> Any:
    found = _formulas().attention.get(function.name().partition("::")[2])
    return found or _formulas().registry.get(function.overloadpacket)


def _flops(info: OpInfo, form: Form, result: Form, look: list[TensorMeta], made: list[TensorMeta]) -> int:
    try:
        formula = _formula(info.function)
        if getattr(formula, "__code__", None) is _formulas().wrapper:
            # What is under the wrapper takes shapes, and has them without a tensor for each.
            args, kwargs, out = _arguments(form, result, look, made, _shape)
            return int(formula.__wrapped__(*args, out_shape=out, **kwargs))
        args, kwargs, out = _arguments(form, result, look, made, _meta_tensor)
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=out))
        return _decomposed(info.function, args, kwargs)
    except Exception:  # a formula that does not know this overload is no reason to lose the trace
        return -1


def _arguments(
    form: Form, result: Form, look: list[TensorMeta], made: list[TensorMeta],
    tensor: Callable[[TensorMeta], Any],
) -> tuple[list[Any], dict[str, Any], Any]:  # fmt: skip
    """What an op was called with, and its result, with something in the place of every tensor."""
    tensors = map(tensor, look)
    args = [_live(item, tensors) for item in form.args]
    kwargs = {key: _live(item, tensors) for key, item in (form.kwargs or {}).items()}
    values = [_live(item, map(tensor, made)) for item in result.args]
    return args, kwargs, values[0] if len(values) == 1 else values


def _decomposed(function: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function.decompose(*args, **kwargs)
    total = int(counter.get_total_flops())
    return total if total else -1


def _shape(meta: TensorMeta) -> torch.Size:
    return torch.Size(meta.shape)


def _meta_tensor(meta: TensorMeta) -> Any:
    dtype = getattr(torch, meta.dtype)
    if meta.stride is None:
        return torch.empty(meta.shape, dtype=dtype, device="meta")
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")


def _live(item: Any, tensors: Iterator[Any]) -> Any:
    """A recorded argument as one to call with."""
    if item is SLOT:
        return next(tensors)
    if isinstance(item, list | tuple):
        return type(item)(_live(part, tensors) for part in item)
    if isinstance(item, Symbol):
        name = item.text.removeprefix("torch.")
        return getattr(torch, name) if item.text.startswith("torch.") else torch.device("meta")
    if isinstance(item, Elided | Record | dict):
        raise ValueError("not an argument a formula could use")
    return item
