"""Activations and layers that pass nothing on: dead, saturated, constant, or masked as a whole.

Also activations in place, which change a tensor that a skip connection still needs as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from sightline.analysis.problems.context import FORWARD, MATMULS, RANDOM, Mask, ProblemContext
from sightline.analysis.problems.losses import computed_by
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.analysis.problems.weights import has_parameters
from sightline.data.op_groups import BATCH_NORMS
from sightline.data.trace_data import KINDS, MUTATES
from sightline.notation import number_text

_MIN_ELEMENTS: Final = 32  #: fewer may be equal by chance
_ACTIVATION_OPS: Final = 2  #: of an activation alone
RECTIFIERS: Final = frozenset(
    "relu relu_ threshold threshold_ hardtanh hardtanh_ clamp_min clamp_min_".split()
)
#: Ops that rectify where their other operand is zero.
_RECTIFIES_AT: Final = frozenset("clamp clamp_ maximum".split())
_NORMS: Final = BATCH_NORMS | {"native_layer_norm", "native_group_norm"}
_BOUNDED: Final = frozenset("tanh tanh_ sigmoid sigmoid_".split())
_FLOOD: Final = 50.0  #: root mean square of an input far outside the range of any activation
_NEARLY: Final = 0.05
_TOLERANCE: Final = 1e-6  #: how far the mean of 1 - x² or x(1 - x) may be from 0
_MASKS: Final = frozenset("masked_fill masked_fill_ where".split())
_SUMS: Final = frozenset("add add_".split())
_MASK_LEVEL: Final = -1e4  #: a mask fills with a number at most this


@check(
    "dead-activation",
    Severity.WARNING,
    "Nothing passes through it, and no gradient comes back to revive it. Look at the bias and the scale of "
    "what comes before, and at the learning rate.",
)
def dead_activation(context: ProblemContext) -> Iterator[Finding]:
    """A rectifier that gives zero for every element in every call, though its input varies."""
    stats = context.data.stats
    for ops in _measured_lines(context, RECTIFIERS | _RECTIFIES_AT):
        op, row = ops[0], _input_row(context, ops[0])
        if context.name(op) in _RECTIFIES_AT and not _rectifies(context, op):
            continue
        pairs = [(_input_row(context, each), _output_row(context, each)) for each in ops]
        zero = all(
            taken >= 0 and stats.min[taken] < stats.max[taken]
            and stats.min[given] == stats.max[given] == 0 and not stats.nans[given]
            for taken, given in pairs
        )  # fmt: skip
        if zero and not _has_constant_weight(context, context.producer(context.inputs(op)[0])):
            high = number_text(float(stats.max[row]))
            effect = f"gives zero for all {context.meta(context.outputs(op)[0])}"
            yield _finding(context, ops, effect, f": the largest it is given is {high}")


def _has_constant_weight(context: ProblemContext, layer: int) -> bool:
    """Whether a layer's op has a weight of one number: some are initialised to zero on purpose."""
    stats = context.data.stats
    for value in context.inputs(layer) if layer >= 0 else ():
        row = context.stat(value)
        if context.kind(value) == "parameter" and len(context.meta(value).shape) > 1 and row >= 0:
            if stats.min[row] == stats.max[row]:
                return True
    return False


def _rectifies(context: ProblemContext, op: int) -> bool:
    """Whether a clamp or a maximum is a rectifier: at zero, of the result of a layer."""
    producer = computed_by(context, context.inputs(op)[0])
    if producer < 0 or context.name(producer) not in MATMULS | _NORMS:
        return False
    if context.name(op) != "maximum":
        bound = next((arg for arg in context.args(op) if arg is None or type(arg) in (int, float)), None)
        return bound == 0
    row = context.stat(context.inputs(op)[-1])
    return row >= 0 and bool(context.data.stats.min[row] == context.data.stats.max[row] == 0)


@check(
    "saturated-activation",
    Severity.WARNING,
    "At its bound it is flat: no gradient passes. Scale what comes in (inputs to about 1, weights by their "
    "fan-in), or normalise before it.",
)
def saturated_activation(context: ProblemContext) -> Iterator[Finding]:
    """A tanh or sigmoid that is at one of its bounds for every element in every call."""
    stats = context.data.stats
    for ops in _measured_lines(context, _BOUNDED):
        saturated = all(_is_saturated(context, op) for op in ops)
        if saturated or all(_is_flooded(context, op) for op in ops):
            row = _input_row(context, ops[0])
            bounds = (stats.min, stats.max)
            low, high = (number_text(float(bound[row])) if row >= 0 else "?" for bound in bounds)
            nearly = "" if saturated else "nearly "
            effect = f"is at its bound for {nearly}all {context.meta(context.outputs(ops[0])[0])}"
            yield _finding(context, ops, effect, f": it is given {low} … {high}")


def _is_flooded(context: ProblemContext, op: int) -> bool:
    """Whether nearly all numbers are at a bound because the input is far too large, as raw data are."""
    row = _input_row(context, op)
    if row < 0:
        return False
    size = float(context.data.stats.l2[row]) / context.meta(context.inputs(op)[0]).numel ** 0.5
    return size > _FLOOD and _is_saturated(context, op, _NEARLY)


def _is_saturated(context: ProblemContext, op: int, tolerance: float = _TOLERANCE) -> bool:
    """Whether all numbers are at a bound, where 1 - x² of a tanh and x - x² of a sigmoid are 0."""
    stats, row, input_row = context.data.stats, _output_row(context, op), _input_row(context, op)
    if stats.nans[row] or stats.infs[row]:
        return False
    if input_row >= 0 and (
        stats.infs[input_row] or stats.nans[input_row] or stats.min[input_row] == stats.max[input_row]
    ):
        return False
    squares = float(stats.l2[row]) ** 2 / context.meta(context.outputs(op)[0]).numel
    rest = 1 - squares if context.name(op).startswith("tanh") else float(stats.mean[row]) - squares
    return abs(rest) < tolerance


@check(
    "masks-everything",
    Severity.WARNING,
    "After a softmax everything counts alike, or is NaN. A mask of numbers is 0 where an element is kept and "
    "-inf where it is left out.",
)
def masks_everything(context: ProblemContext) -> Iterator[Finding]:
    """A mask leaves out every element, in every call of its line."""
    stats = context.data.stats
    for ops in context.derived(_masking_lines):
        row = _output_row(context, ops[0])
        level = "-inf" if stats.infs[row] else number_text(float(stats.max[row]))
        effect = f"masks all {context.meta(context.outputs(ops[0])[0])} with {level}"
        yield replace(_finding(context, ops, effect), why=_mask_sense(context, ops[0]))


def _mask_sense(context: ProblemContext, op: int) -> str:
    """How the function that masks understands True, and how it differs here; empty for a mask of numbers."""
    written, name = context.written(op).rpartition(".")[2], context.name(op).rstrip("_")
    if "multi_head_attention" in written:
        sense = (
            "nn.MultiheadAttention leaves out what is True, and here all is: if True means keep, pass ~mask"
        )
    elif written == "scaled_dot_product_attention":
        sense = f"{written} keeps what is True, and here nothing is: if True means padding, pass ~mask"
    elif name == "masked_fill":
        sense = f"{written} fills where the mask is True, and here all is: if True means keep, pass ~mask"
    elif name == "where":
        sense = "where(mask, a, b) takes a where the mask is True; here it takes the same everywhere"
    else:
        return ""
    return f"{sense}. After a softmax everything counts alike, or is NaN."


def _masking_lines(context: ProblemContext) -> list[list[int]]:
    """The masks that leave out every element, by line."""
    lines = _measured_lines(context, _MASKS | _SUMS)
    return [ops for ops in lines if all(_masks_all(context, op) for op in ops)]


def is_masked(context: ProblemContext, op: int) -> bool:
    """Whether an op is at a line at which everything is masked."""
    line = context.visible(int(context.frames[op]))
    return any(
        context.visible(int(context.frames[ops[0]])) == line for ops in context.derived(_masking_lines)
    )


def _masks_all(context: ProblemContext, op: int) -> bool:
    """Whether a result is very low throughout, though an input of its shape varies and is not."""
    stats, value = context.data.stats, context.outputs(op)[0]
    if not _is_low(context, value) or context.named(RANDOM)[op]:
        return False
    if "scaled_dot_product_attention" in context.written(op):  # it turns a boolean mask into numbers
        return context.name(op) == "where"
    shape = context.meta(value).shape
    same_shape = [each for each in context.inputs(op) if context.meta(each).shape == shape]
    rows = [context.stat(each) for each in same_shape if not _is_low(context, each)]
    varies = any(at >= 0 and stats.min[at] < stats.max[at] for at in rows)
    if context.name(op) in _SUMS:  # the mask is the other summand
        return varies and any(_is_low(context, each) for each in context.inputs(op))
    row = context.stat(value)
    return bool(varies and (stats.infs[row] or stats.min[row] == stats.max[row]))


def _is_low(context: ProblemContext, value: int) -> bool:
    """Whether all numbers of a tensor are those of a mask."""
    stats, row = context.data.stats, context.stat(value)
    if row < 0 or stats.nans[row]:
        return False
    whole = stats.infs[row] == context.meta(value).numel
    return bool(whole or (not stats.infs[row] and stats.max[row] <= _MASK_LEVEL))


def _measured_lines(context: ProblemContext, names: frozenset[str]) -> Iterator[list[int]]:
    """The ops of these names inside module calls, by line and module, where all results are measured."""
    if not len(context.data.stats):
        return
    inside = context.forward & context.named(names) & (context.data.ops.call >= 0)
    for group in context.by_line(
        np.flatnonzero(inside).tolist(), lambda op: (context.module(op), context.name(op))
    ):
        ops = [op for op in group if context.outputs(op)]
        large = all(context.meta(context.outputs(op)[0]).numel >= _MIN_ELEMENTS for op in ops)
        if ops and large and all(_output_row(context, op) >= 0 for op in ops):
            yield ops


def _output_row(context: ProblemContext, op: int) -> int:
    """The row of the statistics of an op's first output, or -1."""
    return context.stat(context.outputs(op)[0])


def _input_row(context: ProblemContext, op: int) -> int:
    """The row of the statistics of an op's first input, or of the tensor it is a view of; -1 without."""
    inputs = context.inputs(op)
    if not inputs:
        return -1
    row, base = context.stat(inputs[0]), int(context.data.values.base[inputs[0]])
    return row if row >= 0 or base < 0 else context.stat(base)


def _finding(context: ProblemContext, ops: list[int], effect: str, cause: str = "") -> Finding:
    title = f"{context.written(ops[0])} {effect} in {len(ops)} of {len(ops)} calls{cause}"
    return context.finding(title, ops[0], context.outputs(ops[0])[0])


@check(
    "dead-layer",
    Severity.WARNING,
    "A layer that gives one number whatever it is given passes nothing on, and where it is flat there is no "
    "gradient to bring it back.",
)
def dead_layer(context: ProblemContext) -> Iterator[Finding]:
    """A module whose input varies and whose output does not.

    Layers with weights of zero begin so on purpose, dropout may drop everything, and a few elements may be
    equal by chance.
    """
    if not len(context.data.stats):
        return
    calls, values, stats = context.data.calls, context.data.values, context.data.stats
    constant, varying = np.zeros((2, len(values)), dtype=np.bool_)  # one number throughout, or several
    finite = (stats.nans == 0) & (stats.infs == 0)
    constant[stats.value] = finite & (stats.min == stats.max)
    varying[stats.value] = finite & (stats.min < stats.max)
    chosen = np.flatnonzero((calls.phase == FORWARD) & (np.diff(calls.output_offsets) > 0))
    outputs = calls.outputs[calls.output_offsets[chosen]]
    producers = values.producer[outputs]
    op_call = np.append(context.data.ops.call, -1)  # producer -1 reads the appended entry
    own = (producers >= 0) & (op_call[producers] == chosen)  # not computed by a submodule
    large = context.of_meta(lambda meta: meta.numel >= _MIN_ELEMENTS)
    on_purpose: set[int] = set()  # modules whose weights were constant at their first call
    for call in chosen[own & constant[outputs] & large[outputs]].tolist():
        value = int(calls.outputs[calls.output_offsets[call]])
        producer, module = context.producer(value), int(calls.module[call])
        if _may_be_flat(context, call, varying):
            on_purpose.add(module)
        elif varying[calls.inputs_of(call)].any() and module not in on_purpose:
            if context.name(producer) in RECTIFIERS or is_masked(context, producer):
                continue  # the checks above report it
            numbers = context.index.numbers(value)
            level = number_text(numbers.max) if numbers is not None and numbers.max else "zero"
            title = f"the output {context.meta(value)} is {level} everywhere, though its input varies"
            yield context.finding(title, producer, value)


def _may_be_flat(context: ProblemContext, call: int, varying: Mask) -> bool:
    """Whether a call drops elements by chance, or uses a parameter not known to hold several numbers.

    A module without parameters that does more than one thing is not a layer either: it may measure something.
    """
    calls, ops = context.data.calls, context.data.ops
    first, end = int(calls.first_op[call]), int(calls.end_op[call])
    works = int(context.forward[first:end].sum())
    if works > _ACTIVATION_OPS and not has_parameters(context, int(calls.module[call])):
        return True
    dropout = "drop" in context.module_type(int(calls.module[call])).lower()
    if dropout or context.named(RANDOM)[first:end].any():
        return True
    inputs = ops.inputs[ops.input_offsets[first] : ops.input_offsets[end]]
    weights = inputs[context.data.values.kind[inputs] == KINDS.index("parameter")]
    return not varying[weights].all()


_IN_PLACE: Final = frozenset(
    "relu_ leaky_relu_ elu_ hardtanh_ silu_ sigmoid_ tanh_ threshold_ hardswish_ celu_ selu_ clamp_ "
    "clamp_min_ mish_ gelu_ hardsigmoid_".split()
)
_JOINS: Final = frozenset("add add_ sub cat".split())
_MAX_OPS: Final = 200  #: how many ops a branch is followed for


@check(
    "changed-before-skip",
    Severity.WARNING,
    "The skip connection adds what the activation has left, not what came in. Take inplace=True out, or "
    "keep a clone for the skip.",
    Confidence.LIKELY,
)
def changed_before_skip(context: ProblemContext) -> Iterator[Finding]:
    """A module changes its input by an activation in place, and later adds it to its own result."""
    ops, calls = context.data.ops, context.data.calls
    in_place = context.forward & context.named(_IN_PLACE) & ((ops.flags & MUTATES) != 0)
    for op in np.flatnonzero(in_place & (ops.call >= 0)).tolist():
        before, after = next(iter(context.inputs(op)), -1), next(iter(context.outputs(op)), -1)
        # The outermost call around the op that takes the tensor. One of at most two ops is the activation
        # module itself, whose job is to change its input.
        owner, call = -1, int(ops.call[op])
        while call >= 0 and before in calls.inputs_of(call):
            owner, call = call, int(calls.parent[call])
        if before < 0 or after < 0 or owner < 0 or calls.end_op[owner] - calls.first_op[owner] <= 2:
            continue
        end = int(calls.end_op[owner])
        joins = [user for user in context.users(after) if user < end and context.name(user) in _JOINS]
        for join in joins:
            others = [value for value in context.inputs(join) if value != after]
            if others and all(_comes_from(context, value, after, op) for value in others[:1]):
                title = (
                    f"{context.written(op)} changes {context.meta(before)} in place, which "
                    f"{context.line(join)} adds as the skip connection"
                )
                yield context.finding(title, op, before)
                break


def _comes_from(context: ProblemContext, value: int, source: int, after: int) -> bool:
    """Whether a value was computed from another after an op, through a layer with weights."""
    stack = [(value, False)]
    for _ in range(_MAX_OPS):
        if not stack:
            return False
        each, weighted = stack.pop()
        if each == source:
            return weighted
        producer = context.producer(each)
        if producer > after:
            layer = weighted or context.name(producer) in MATMULS or "conv" in context.name(producer)
            stack += [(one, layer) for one in context.inputs(producer)]
    return False
