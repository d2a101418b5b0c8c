"""Work that is done twice: the same op on the same tensors, inside one call of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import RANDOM, Mask, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.data.trace_data import MUTATES
from sightline.notation import bytes_text, count_text

_WORTH_NAMING: Final = 0.01  #: of the FLOPs, or of the time, of the forward pass
_MIN_BYTES: Final = 1 << 20  #: of a result that has no FLOPs: below this its time is mostly overhead
#: Recurrent kernels take a dropout between their layers as an argument.
_MAYBE_RANDOM: Final = RANDOM | frozenset("lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn".split())


@check(
    "computed-again",
    Severity.NOTE,
    "The result is known already; keep it instead of computing it a second time.",
)
def computed_again(context: ProblemContext) -> Iterator[Finding]:
    """Inside one call of the model, an op runs again on the same tensors, at a cost worth naming.

    A module call that did nothing new is reported as a whole, instead of the ops inside it.
    """
    again = _repeated(context)
    if not again.any():
        return
    ops, calls = context.data.ops, context.data.calls
    flops = np.maximum(ops.flops, 0)
    total_flops, total_time = int(flops[context.forward].sum()), int(ops.duration[context.forward].sum())
    for (call, *_), members in _by_cause(context, again).items():
        spent, time = int(flops[members].sum()), int(ops.duration[members].sum())
        size = max(sum(context.meta(value).nbytes for value in context.outputs(op)) for op in members)
        slow = time >= _WORTH_NAMING * total_time and size >= _MIN_BYTES
        if slow or (spent and spent >= _WORTH_NAMING * total_flops):
            cost = f"{count_text(spent)} FLOPs" if spent else bytes_text(size)
            if call >= 0:
                module, frame = (int(column[call]) for column in (calls.module, calls.frame))
                title = f"{context.module_type(module)} is called again on the same inputs ({cost})"
                yield Finding(title, module, frame, members[0])
                continue
            op = max(members, key=lambda op: (int(ops.flops[op]), int(ops.duration[op])))
            inputs = ", ".join(str(context.meta(value)) for value in context.inputs(op)[:3])
            yield context.finding(f"{context.written(op)} runs again on the same {inputs} ({cost})", op)


def _by_cause(context: ProblemContext, again: Mask) -> dict[tuple[int, int, int], list[int]]:
    """The repeated ops by the outermost call that repeats as a whole, or by their line and module."""
    calls = context.data.calls
    work = context.forward & ~_makes_views(context) & (np.diff(context.data.ops.input_offsets) > 0)
    done, all_work = (np.concatenate([[0], np.cumsum(mask)]) for mask in (again, work))
    inside = all_work[calls.end_op] - all_work[calls.first_op]
    whole = (inside > 0) & (done[calls.end_op] - done[calls.first_op] == inside)  # nothing in them is new
    parents, op_call = context.data.calls.parent.tolist(), context.data.ops.call
    groups: dict[tuple[int, int, int], list[int]] = {}
    for op in np.flatnonzero(again).tolist():
        cause, at = -1, int(op_call[op])
        while at >= 0 and whole[at]:
            cause, at = at, parents[at]
        line = (-1, -1) if cause >= 0 else (context.visible(int(context.frames[op])), context.module(op))
        groups.setdefault((cause, *line), []).append(op)
    return groups


def _makes_views(context: ProblemContext) -> Mask:
    """Ops whose first output is a view: they cost nothing."""
    ops = context.data.ops
    with_output = np.flatnonzero(np.diff(ops.output_offsets) > 0)
    mask = np.zeros(len(ops), dtype=np.bool_)
    mask[with_output] = context.data.values.base[ops.outputs[ops.output_offsets[with_output]]] >= 0
    return mask


def _repeated(context: ProblemContext) -> Mask:
    """Which ops repeat an earlier one of the same outermost call, views and random ops left out.

    Results of equal ops on equal tensors count as equal, so a layer that transposes its weight again is
    recognised. A tensor changed in place is a new value, so equal ids mean equal contents.
    """
    data = context.data
    ops = data.ops
    deterministic = (
        context.forward & (ops.call >= 0) & ((ops.flags & MUTATES) == 0) & ~context.named(_MAYBE_RANDOM)
    )
    attention = [id for id, name in enumerate(context.bare_names) if "scaled_dot_product" in name]
    drops = [any(type(arg) is float and arg for arg in form.args) for form in data.forms]  # its probability
    drops_out = np.isin(ops.name, attention) & np.array(drops or [False])[ops.form]
    deterministic &= (np.diff(ops.input_offsets) > 0) & ~drops_out
    names, forms, calls = ops.name.tolist(), ops.form.tolist(), ops.call.tolist()
    starts, ends, inputs = (
        ops.input_offsets[:-1].tolist(),
        ops.input_offsets[1:].tolist(),
        ops.inputs.tolist(),
    )
    tops: list[int] = []  # the outermost call of each
    for call, parent in enumerate(data.calls.parent.tolist()):  # a parent always comes first
        tops.append(tops[parent] if parent >= 0 else call)
    same = list(range(len(data.values)))
    first: dict[tuple[int, ...], int] = {}
    again = np.zeros(len(ops), dtype=np.bool_)
    for op in np.flatnonzero(deterministic).tolist():
        tensors = [same[value] for value in inputs[starts[op] : ends[op]]]
        key = (tops[calls[op]], names[op], forms[op], *tensors)
        earlier = first.setdefault(key, op)
        if earlier != op:
            again[op] = True
            for one, other in zip(context.outputs(earlier), context.outputs(op), strict=False):
                same[other] = same[one]
    return again & ~_makes_views(context)
