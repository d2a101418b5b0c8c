"""FLOPs of aten ops, by torch's own formulas, worked out from recorded shapes when a trace is built.

Each distinct signature is computed once, on meta tensors: nothing is allocated and nothing runs. An op that
torch's counter would take apart first (as in inference mode, where ``linear`` arrives whole) is taken apart
here in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sightline.recording.operations import OpInfo, is_composite
from sightline.recording.torchapi import OpOverload, undisturbed
from sightline.trace.assembly.raw import FlopsOf
from sightline.trace.data import TensorMeta
from sightline.trace.forms import SLOT, Elided, Form, Record, Symbol


def flops_of(infos: list[OpInfo], metas: list[TensorMeta], forms: list[Form]) -> FlopsOf:
    """A function that knows the FLOPs of a call by its operation, its forms and what its tensors are."""
    from torch.utils.flop_counter import flop_registry

    known: dict[tuple[Any, ...], int] = {}

    def find(info: int, form: int, result: int, given: tuple[int, ...], made: tuple[int, ...]) -> int:
        key = (info, form, given, made)
        if key not in known:
            with undisturbed(), torch.no_grad():
                known[key] = _flops(
                    infos[info], forms[form], forms[result], [metas[i] for i in given],
                    [metas[i] for i in made], flop_registry,
                )  # fmt: skip
        return known[key]

    return find


def has_formula(info: OpInfo) -> bool:
    """Whether torch may know the FLOPs of an op."""
    function = info.function
    if not isinstance(function, OpOverload):
        return False
    return has_plain_formula(info) or is_composite(function)


def has_plain_formula(info: OpInfo) -> bool:
    """Whether it knows them without taking the op apart, which no thread but the block's own may do."""
    from torch.utils.flop_counter import flop_registry

    function = info.function
    if not isinstance(function, OpOverload):
        return False
    return function.overloadpacket in flop_registry or _attention(function) is not None


def _flops(info: OpInfo, form: Form, result: Form, look: list[TensorMeta], made: list[TensorMeta],
           registry: Any) -> int:  # fmt: skip
    try:
        tensors = map(_meta_tensor, look)
        args = [_live(item, tensors) for item in form.args]
        kwargs = {key: _live(item, tensors) for key, item in (form.kwargs or {}).items()}
        formula = _attention(info.function) or registry.get(info.function.overloadpacket)
        if formula is not None:
            values = [_live(item, map(_meta_tensor, made)) for item in result.args]
            return int(formula(*args, **kwargs, out_val=values[0] if len(values) == 1 else values))
        return _decomposed(info.function, args, kwargs)
    except Exception:  # a formula that does not know this overload is no reason to lose the trace
        return -1


def _attention(function: Any) -> Any:
    """The formula of the CPU's fused attention, which torch's registry has for every other kernel."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    name = function.name().partition("::")[2]
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return lambda query, key, value, *rest, out_val, **more: sdpa_flop_count(
            query.shape, key.shape, value.shape
        )
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return lambda grad, query, key, value, *rest, out_val, **more: sdpa_backward_flop_count(
            grad.shape, query.shape, key.shape, value.shape
        )
    return None


def _decomposed(function: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function.decompose(*args, **kwargs)
    total = int(counter.get_total_flops())
    return total if total else -1


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
