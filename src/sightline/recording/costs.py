"""FLOPs of aten ops, by torch's own formulas, worked out from recorded shapes when a trace is built.

Each distinct signature is computed once, on meta tensors: nothing is allocated and nothing runs. An op that
torch's counter would take apart first (as in inference mode, where ``linear`` arrives whole) is taken apart
here in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sightline.recording.operations import OpInfo, is_composite
from sightline.recording.torchapi import OpOverload, undisturbed
from sightline.trace.data import I64, TensorMeta
from sightline.trace.forms import SLOT, Elided, Form, Record, Symbol

Numbers = NDArray[np.int64]


def flops_of(
    infos: list[OpInfo],
    info: Numbers,
    form: Numbers,
    result: Numbers,
    level: Numbers,
    input_counts: Numbers,
    output_counts: Numbers,
    inputs: Numbers,
    outputs: Numbers,
    value_meta: NDArray[np.int32],
    metas: list[TensorMeta],
    forms: list[Form],
) -> I64:
    """The FLOPs of every op; -1 where torch has no formula."""
    from torch.utils.flop_counter import flop_registry

    flops = np.full(len(info), -1, dtype=np.int64)
    wanted = np.array([_has_formula(one, flop_registry) for one in infos] or [False])
    starts, made_starts = _starts(input_counts), _starts(output_counts)
    known: dict[Any, int] = {}
    with undisturbed(), torch.no_grad():
        for op in np.flatnonzero(wanted[info] & (level == 1)).tolist():
            look = value_meta[inputs[starts[op] : starts[op + 1]]]
            made = value_meta[outputs[made_starts[op] : made_starts[op + 1]]]
            key = (int(form[op]), look.tobytes(), made.tobytes())
            if key not in known:
                known[key] = _flops(
                    infos[int(info[op])], forms[int(form[op])], forms[int(result[op])],
                    [metas[i] for i in look], [metas[i] for i in made], flop_registry,
                )  # fmt: skip
            flops[op] = known[key]
    return flops


def _starts(counts: Numbers) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]


def _has_formula(info: OpInfo, registry: Any) -> bool:
    function = info.function
    if not isinstance(function, OpOverload):
        return False
    return function.overloadpacket in registry or is_composite(function) or _attention(function) is not None


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
