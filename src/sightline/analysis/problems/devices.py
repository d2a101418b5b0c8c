"""Devices: waits for one, several of them in one op, copies in every forward or step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import FORWARD, Mask, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.data.trace_data import KINDS, RAISED

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
_LEAST_COPIES: Final = 3  #: of one tensor to a device
_MANY: Final = 16  #: copies of a line in one step
_SMALL: Final = 1 << 16  #: bytes
_MASKED: Final = "the shape of x[mask] depends on the data"


@check(
    "host-sync",
    Severity.NOTE,
    "On a GPU each one waits until the GPU has finished all its work, and then the GPU is idle. "
    "Keep it a tensor (torch.where for a branch), or read it outside the model.",
)
def waits_for_device(context: ProblemContext) -> Iterator[Finding]:
    """Inside a module call the host reads a number, or needs a shape that depends on the data.

    On a CPU this costs nothing; there, only lines of the user's own code are reported.
    """
    remote = _on_device(context)
    boolean = context.of_meta(lambda meta: meta.dtype in ("bool", "uint8") and bool(meta.shape))
    inside = _in_model(context)
    awaited = inside & context.named(frozenset(_AWAITED))
    ops = context.data.ops
    later = np.ones(len(ops.inputs), dtype=np.bool_)  # inputs after the first of an op
    later[ops.input_offsets[:-1][np.diff(ops.input_offsets) > 0]] = False
    mask_index = np.zeros(len(ops), dtype=np.bool_)
    mask_index[context.readers[later & boolean[ops.inputs]]] = True
    masked = inside & context.named(frozenset({"index"})) & mask_index & context.any_input(remote)
    on_cpu = context.of_meta(lambda meta: meta.device == "cpu")
    read_back = inside & context.named(_COPIES) & _any_output(context, on_cpu) & context.any_input(remote)
    for op in np.flatnonzero(awaited | masked | read_back).tolist():
        keywords = context.data.forms[int(context.data.ops.form[op])].kwargs or {}
        if read_back[op] and keywords.get("non_blocking"):
            continue
        source = next((value for value in context.inputs(op) if remote[value]), -1)
        if source < 0:
            # On a CPU only floating-point results of a model: no mask, index, counter or random draw.
            inputs = context.inputs(op)
            producer = context.producer(inputs[0]) if inputs and context.is_own(op) else -1
            read = [inputs[0], *context.inputs(producer)] if producer >= 0 else []
            makers = [context.producer(value) for value in read if context.floating[value]]
            if not any(maker < 0 or context.inputs(maker) for maker in makers):
                continue
            source = inputs[0]
        reason = "a tensor is copied to the CPU" if read_back[op] else _MASKED
        title = f"{context.written(op)} of {context.meta(source)}: {_AWAITED.get(context.name(op), reason)}"
        yield context.finding(title, op, source, _without_wait(context, op))


def _in_model(context: ProblemContext) -> Mask:
    """Forward ops inside module calls, without those of ``DistributedDataParallel`` and its like."""
    wrappers = [module.type_module.startswith("torch.nn.parallel.") for module in context.data.modules]
    wrapped: Mask = np.array([*wrappers, False])[context.index.op_modules]  # -1: outside, the last
    return context.forward & (context.data.ops.call >= 0) & ~wrapped


def _without_wait(context: ProblemContext, op: int) -> str:
    """How to avoid waiting for an op; empty where only the general advice fits."""
    written = context.written(op).rpartition(".")[2]
    waits = "On a GPU each one waits until the GPU has finished all its work, and then the GPU is idle. "
    if written == "item":
        instead = "the 0-d tensor works as well, with .detach() if no gradient should flow through it"
        return f"{waits}Leave .item() out: {instead}."
    if written in ("__bool__", "is_nonzero"):
        return f"{waits}Choose with torch.where(condition, a, b) instead of if."
    if context.name(op) in ("index", "masked_select", "nonzero"):
        return f"{waits}Keep the shape: torch.where(mask, x, 0), or x * mask."
    return ""


@check(
    "mixed-devices",
    Severity.ERROR,
    "An op works on one device: move its tensors there, or make them there.",
)
def mixed_devices(context: ProblemContext) -> Iterator[Finding]:
    """An op with inputs on several devices failed."""
    data = context.data
    failed = _mixed(context) & ((data.ops.flags & RAISED) != 0)
    inner = data.ops.parent[failed]
    failed[inner[inner >= 0]] = False  # an API call fails with the aten op inside it
    for op in np.flatnonzero(failed).tolist():
        metas = [meta for meta in map(context.meta, context.inputs(op)) if meta.shape]
        devices = " and ".join(dict.fromkeys(meta.device for meta in metas))
        inputs = ", ".join(dict.fromkeys(map(str, metas)))
        title = f"{data.names[data.ops.name[op]]} failed on tensors of {devices}: {inputs}"
        yield context.finding(title, op)


@check(
    "device-copy",
    Severity.NOTE,
    "The same copy is made in every forward; make the tensor on the device it is used on, or keep it there "
    "as a buffer.",
)
def copied_to_device(context: ProblemContext) -> Iterator[Finding]:
    """Inside a module call a tensor is copied to a device, though the model does not live on both.

    Some ops copy by themselves: an index on the CPU is accepted.
    """
    if not _on_device(context).any():
        return
    values = context.data.values
    metas = np.unique(values.meta[values.kind == KINDS.index("parameter")])
    parameter_devices = {context.data.metas[meta].device for meta in metas.tolist()}
    copies = context.named(_COPIES)
    for op in np.flatnonzero(_in_model(context) & (copies | _mixed(context))).tolist():
        inputs, outputs = context.inputs(op), context.outputs(op)
        target = context.meta(outputs[0]).device if outputs else "cpu"
        source = next((value for value in inputs[::-1] if context.meta(value).device != target), -1)
        if source < 0 or target in ("cpu", "meta"):  # a copy to the CPU is a wait: see host-sync
            continue
        meta = context.meta(source)
        if (
            meta.device != "meta"
            and not {meta.device, target} <= parameter_devices
            and (meta.shape or copies[op])
        ):
            yield context.finding(f"{context.written(op)} copies {meta} to {target}", op, source)


@check(
    "copied-in-loop",
    Severity.NOTE,
    "Each copy waits for the host and for the bus. Copy what does not change once, before the loop; stack "
    "small tensors on the host, and copy them together.",
)
def copied_in_loop(context: ProblemContext) -> Iterator[Finding]:
    """Outside module calls, one tensor is copied to a device again and again, or many small ones."""
    remote = _on_device(context)
    if not remote.any():
        return
    copies = context.named(_COPIES) & _any_output(context, remote) & (context.data.ops.call < 0)
    copies &= context.data.ops.phase == FORWARD
    by_line: dict[int, list[tuple[int, int]]] = {}
    for op in np.flatnonzero(copies).tolist():
        source = next((v for v in context.inputs(op)[::-1] if context.meta(v).device == "cpu"), -1)
        if source >= 0:
            by_line.setdefault(context.visible(int(context.frames[op])), []).append((op, source))
    steps = len(context.derived(LoopRecord).steps)
    for pairs in by_line.values():
        op, source = pairs[0]
        meta, target = context.meta(source), context.meta(context.outputs(op)[0]).device
        again, count = Counter(value for _, value in pairs).most_common(1)[0]
        small = all(context.meta(value).nbytes <= _SMALL for _, value in pairs)
        if count >= _LEAST_COPIES:
            title = f"the same {context.meta(again)} is copied to {target} {count} times"
            yield context.finding(title, op, again)
        elif small and steps > 1 and len(pairs) >= _MANY * steps:
            title = f"{len(pairs)} small tensors such as {meta} are copied to {target} in {steps} steps"
            yield context.finding(title, op, source)


def _mixed(context: ProblemContext) -> Mask:
    """Ops with inputs on several devices, scalars aside."""
    data = context.data
    devices = sorted({meta.device for meta in data.metas})
    numbers = np.array([devices.index(meta.device) if meta.shape else -1 for meta in data.metas] or [-1])
    of_input = numbers[data.values.meta][data.ops.inputs]
    has_shape = of_input >= 0
    lowest, highest = np.full(len(data.ops), len(devices)), np.full(len(data.ops), -1)
    np.minimum.at(lowest, context.readers[has_shape], of_input[has_shape])
    np.maximum.at(highest, context.readers[has_shape], of_input[has_shape])
    mask: Mask = highest > lowest
    return mask & (highest >= 0)


def _on_device(context: ProblemContext) -> Mask:
    """Tensors on a device the host has to wait for."""
    return context.of_meta(lambda meta: meta.device not in ("cpu", "meta"))


def _any_output(context: ProblemContext, tensors: Mask) -> Mask:
    """Ops that return any of these tensors; ``tensors`` is a mask over values."""
    ops = context.data.ops
    mask = np.zeros(len(ops), dtype=np.bool_)
    writers = np.repeat(np.arange(len(ops)), np.diff(ops.output_offsets))
    mask[writers[tensors[ops.outputs]]] = True
    return mask
