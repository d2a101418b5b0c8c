"""Problems of where tensors are: waits for a device, several devices in one op, copies in every forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import Mask, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.trace.data import KINDS, RAISED
from sightline.trace.forms import Form

_COPIES: Final = frozenset("_to_copy copy_ _copy_from".split())
#: Ops whose result the host must wait for: a Python number, or a shape that depends on the data.
_AWAITED: Final = {
    "_local_scalar_dense": "a tensor is read as a Python number",
    "item": "a tensor is read as a Python number",
    "is_nonzero": "a tensor is read as a Python number",
    "equal": "two tensors are compared as a whole",
    "nonzero": "the shape of nonzero depends on the data",
    "masked_select": "the shape of masked_select depends on the data",
    "_unique2": "the shape of unique depends on the data",
    "unique_dim": "the shape of unique depends on the data",
    "unique_consecutive": "the shape of unique depends on the data",
}
_MASKED: Final = "the shape of x[mask] depends on the data"


@check(
    "host-sync",
    Severity.NOTE,
    "On a GPU each one waits until the device has caught up, so that it runs dry in every forward: keep it a "
    "tensor (torch.where, clamp, x.max()), or read it outside the model.",
)
def waits_for_device(context: ProblemContext) -> Iterator[Finding]:
    """Inside a module call the host reads a number, or needs a shape that depends on the data.

    Of tensors on a CPU nobody waits for these; there only lines of the user's own are told.
    """
    away = _away(context)
    boolean = context.of_meta(lambda meta: meta.dtype in ("bool", "uint8") and bool(meta.shape))
    here = context.forward & (context.data.ops.call >= 0)
    awaited = here & context.named(frozenset(_AWAITED))
    masked = (
        here & context.named(frozenset({"index"})) & _mask_index(context, boolean) & context.any_input(away)
    )
    home = ~context.of_meta(lambda meta: meta.device != "cpu")
    read_back = here & context.named(_COPIES) & _any_output(context, home) & context.any_input(away)
    for op in np.flatnonzero(awaited | masked | read_back).tolist():
        if read_back[op] and _is_asynchronous(context.data.forms[int(context.data.ops.form[op])]):
            continue
        source = next((value for value in context.inputs(op) if away[value]), -1)
        if source < 0 and (not context.is_own(op) or not _is_model(context, op)):
            continue
        source = source if source >= 0 else context.inputs(op)[0]
        reason = "a tensor is copied to the CPU" if read_back[op] else _MASKED
        title = f"{context.written(op)} of {context.meta(source)}: {_AWAITED.get(context.name(op), reason)}"
        yield Finding(title, context.module(op), int(context.frames[op]), op, source)


def _is_model(context: ProblemContext, op: int) -> bool:
    """Whether an op reads floating numbers that a model computed: not a mask, an index, or a counter."""
    given = context.inputs(op)
    maker = context.producer(given[0]) if given else -1
    return maker >= 0 and (
        bool(context.floating[given[0]]) or any(context.floating[one] for one in context.inputs(maker))
    )


@check(
    "mixed-devices",
    Severity.ERROR,
    "An op works on one device: move its tensors there, or make them there.",
)
def mixed_devices(context: ProblemContext) -> Iterator[Finding]:
    """An op failed that was given tensors on several devices."""
    data = context.data
    failed = _mixed(context) & ((data.ops.flags & RAISED) != 0)
    inner = data.ops.parent[failed]
    failed[inner[inner >= 0]] = False  # an API call fails with the aten op inside it
    for op in np.flatnonzero(failed).tolist():
        title = f"{data.names[data.ops.name[op]]} failed on tensors of {_devices(context, op)}"
        yield Finding(title, context.module(op), int(context.frames[op]), op)


@check(
    "device-copy",
    Severity.NOTE,
    "The same copy is made in every forward; make the tensor on the device it is used on, or keep it there "
    "as a buffer.",
)
def copied_to_device(context: ProblemContext) -> Iterator[Finding]:
    """Inside a module call a tensor is copied to a device, though the model does not live on both.

    Some ops do so themselves: an index on the CPU is accepted, and copied.
    """
    if not _away(context).any():
        return
    homes = _homes(context)
    inside = context.forward & (context.data.ops.call >= 0)
    copies = context.named(_COPIES)
    for op in np.flatnonzero(inside & (copies | _mixed(context))).tolist():
        given, made = context.inputs(op), context.outputs(op)
        goal = context.meta(made[0]).device if made else "cpu"
        source = next((value for value in given[::-1] if context.meta(value).device != goal), -1)
        if source < 0 or goal in ("cpu", "meta"):  # a copy to the CPU is a wait: see host-sync
            continue
        meta = context.meta(source)
        if meta.device != "meta" and not {meta.device, goal} <= homes and (meta.shape or copies[op]):
            title = f"{context.written(op)} copies {meta} to {goal}"
            yield Finding(title, context.module(op), int(context.frames[op]), op, source)


def _mixed(context: ProblemContext) -> Mask:
    """Ops with inputs on several devices; scalars may be anywhere."""
    data = context.data
    devices = sorted({meta.device for meta in data.metas})
    numbers = np.array([devices.index(meta.device) if meta.shape else -1 for meta in data.metas] or [-1])
    of_input = numbers[data.values.meta][data.ops.inputs]
    placed = of_input >= 0
    lowest, highest = np.full(len(data.ops), len(devices)), np.full(len(data.ops), -1)
    np.minimum.at(lowest, context.readers[placed], of_input[placed])
    np.maximum.at(highest, context.readers[placed], of_input[placed])
    mask: Mask = highest > lowest
    return mask & (highest >= 0)


def _away(context: ProblemContext) -> Mask:
    """Tensors on a device the host has to wait for."""
    return context.of_meta(lambda meta: meta.device not in ("cpu", "meta"))


def _homes(context: ProblemContext) -> set[str]:
    """The devices that hold parameters."""
    values = context.data.values
    found = np.unique(values.meta[values.kind == KINDS.index("parameter")])
    return {context.data.metas[meta].device for meta in found.tolist()}


def _mask_index(context: ProblemContext, boolean: Mask) -> Mask:
    """Ops with a mask after their first input."""
    ops = context.data.ops
    later = np.ones(len(ops.inputs), dtype=np.bool_)
    later[ops.input_offsets[:-1][np.diff(ops.input_offsets) > 0]] = False
    found = np.zeros(len(ops), dtype=np.bool_)
    found[context.readers[later & boolean[ops.inputs]]] = True
    return found


def _any_output(context: ProblemContext, tensors: Mask) -> Mask:
    ops = context.data.ops
    found = np.zeros(len(ops), dtype=np.bool_)
    writers = np.repeat(np.arange(len(ops)), np.diff(ops.output_offsets))
    found[writers[tensors[ops.outputs]]] = True
    return found


def _is_asynchronous(form: Form) -> bool:
    return bool((form.kwargs or {}).get("non_blocking"))


def _devices(context: ProblemContext, op: int) -> str:
    metas = [meta for meta in map(context.meta, context.inputs(op)) if meta.shape]
    given = ", ".join(dict.fromkeys(map(str, metas)))
    return f"{' and '.join(dict.fromkeys(meta.device for meta in metas))}: {given}"
