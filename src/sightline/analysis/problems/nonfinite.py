"""The first NaN or infinity, where statistics were taken: the op, its inputs, and the repair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from sightline.analysis.nonfinite import (
    NonFiniteOp,
    call_text,
    first_call,
    nonfinite_sources,
    serious_findings,
)
from sightline.analysis.nonfinite_spread import Spread
from sightline.analysis.op_text import statistics_text
from sightline.analysis.problems.activations import RECTIFIERS
from sightline.analysis.problems.context import BACKWARD, MATMULS, ProblemContext
from sightline.analysis.problems.losses import PROBABILITIES, computed_by
from sightline.analysis.problems.problem import Finding, Severity, check, names_text
from sightline.data.index import Index
from sightline.data.training_steps import is_of_a_scaler
from sightline.notation import number_text

_LOGARITHMS: Final = frozenset("log log2 log10".split())
_ROOTS: Final = frozenset("sqrt rsqrt".split())
_DIVISIONS: Final = frozenset("div reciprocal rsqrt".split())
_EXPONENTIALS: Final = frozenset("exp expm1 exp2 sinh cosh".split())
_SOFTMAXES: Final = frozenset("_softmax _log_softmax softmax log_softmax".split())
_CLASS_LOSSES: Final = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
#: Ops whose gradient at zero is infinite, or NaN.
_STEEP: Final = frozenset("sqrt norm linalg_vector_norm pow std var _euclidean_dist _cdist_forward".split())
#: Ops, apart from multiplications of matrices, whose result overflows where their inputs are too large.
_GROWING: Final = frozenset("mul pow sum square mse_loss".split())
_EPSILON: Final = "1e-6"
_HUGE: Final = 1e18  #: the product of two such numbers overflows float32


@check(
    "non-finite",
    Severity.ERROR,
    "What is computed from it may be lost; an update with a gradient that holds it destroys the weights.",
)
def first_non_finite(context: ProblemContext) -> Iterator[Finding]:
    """NaN that came with the inputs, and the ops that made one; `analysis.nonfinite` decides which."""
    index = context.index
    if not len(context.data.stats):
        return
    for source in nonfinite_sources(index):
        reader = next(iter(index.consumers(source.value.id)), -1)
        if reader >= 0:
            yield context.finding(str(source), reader, source.value.id)
    any_op, serious = serious_findings(index)
    hidden = first_call(index) if not any_op else None
    if hidden is not None:
        call, value = hidden
        calls = context.data.calls
        module, frame = int(calls.module[call.id]), int(calls.frame[call.id])
        yield Finding(call_text(call, value), module, frame, -1, value.id)
    spreads: list[tuple[str, Spread]] = []
    for finding in serious:
        line, spread = context.line(finding.op.id), Spread(index, finding)
        # The NaN that became of an infinity, on its line.
        if line and any(other == line and earlier.includes(finding) for other, earlier in spreads):
            continue
        spreads.append((line, spread))
        given, repair = cause(context, finding.op.id)
        inputs = []
        for value in finding.op.inputs:
            statistics = statistics_text(value)
            inputs.append(f"{value} ({statistics})" if statistics else str(value))
        title = f"{finding.sentence()} out of {', '.join(dict.fromkeys(inputs)) or 'nothing'}"
        title += f": {given}" if given else ""
        yield context.finding(
            title, finding.op.id, finding.value.id, repair or _spread_text(index, finding, spread)
        )


def _spread_text(index: Index, source: NonFiniteOp, spread: Spread) -> str:
    """How far a NaN or an infinity went, as far as that was measured."""
    kind = "NaN" if source.nans else "infinity"
    weights = [index.values[value].name for value in spread.values
               if index.values[value].kind == "parameter" and index.values[value].name]  # fmt: skip
    if weights:
        return f"The {kind} has reached {names_text(list(dict.fromkeys(weights)))}: the weights are lost."
    if spread.gradients:
        return f"The {kind} is in {spread.gradients:,} gradients: an update with them destroys the weights."
    if spread.is_loss and spread.reaches_gradients:
        return f"The {kind} is the loss itself, and gradients have it from there."
    if spread.is_loss:
        return f"The {kind} is the loss itself; no gradient that was measured has it from there."
    if spread.reaches_loss:
        return f"The {kind} has reached the loss."
    if not spread.measured_later:
        return ""
    if not spread.values:
        return f"Nothing that was measured after it holds the {kind}: it was masked, or not used."
    count = f"{len(spread.values):,} value{'s' if len(spread.values) > 1 else ''}"
    rest = "gradients among them" if spread.reaches_gradients else "and in no loss or gradient"
    return f"The {kind} is in {count} made of it, {rest}."


def cause(context: ProblemContext, op: int) -> tuple[str, str]:
    """The fault of the numbers an op was given, and the repair; empty where neither is known."""
    ops = context.data.ops
    forward = int(ops.forward[op])
    if ops.phase[op] == BACKWARD:
        name = context.name(forward) if forward >= 0 else ""
        return _steep_gradient(context, op, forward) if name in _STEEP else ("", "")
    name, inputs = context.name(op).rstrip("_"), context.inputs(op)
    if not inputs:
        return "", ""
    if name in _SOFTMAXES:
        return _masked_rows(context, op)
    if name in _CLASS_LOSSES:
        return _ignored_targets(context, op)
    low, high = _range(context, inputs[0])
    if name in _LOGARITHMS | _ROOTS and low < 0:
        repair = f".clamp(min={_EPSILON}) before the {name}, or make it positive: softplus, exp or a square."
        given = f"numbers below 0, down to {number_text(low)}, come {_origin(context, inputs[0])}"
        return given, f"Keep it positive: {repair}"
    if name in _LOGARITHMS:
        return _zero(context, inputs[0], _positive(context, name, inputs[0]))
    if name in _DIVISIONS:
        repair = f"Add an epsilon to the divisor, or .clamp(min={_EPSILON}) it where it is positive."
        return _zero(context, inputs[-1], repair)
    if name in _EXPONENTIALS and high:
        limit = f"{name} of more than 88 is no float32"
        repair = f"{limit}. Subtract the maximum first, as softmax and logsumexp do, or .clamp(max=…) it."
        return f"numbers up to {number_text(high)} come {_origin(context, inputs[0])}", repair
    if name == "mul" and is_of_a_scaler(context.data, op):
        return _scaled_loss(context, inputs)
    if name in MATMULS | _GROWING and max(_range(context, each)[1] for each in inputs) > _HUGE:
        return (
            "",
            "The numbers grew too large: lower the learning rate, clip the gradients or add a norm.",
        )
    return "", ""


def _scaled_loss(context: ProblemContext, inputs: Sequence[int]) -> tuple[str, str]:
    """A loss and a scale whose product is infinite: the larger one is to blame."""
    loss, scale = (_range(context, value)[1] for value in (inputs[0], inputs[-1]))
    given = "the loss times the scale of the gradient scaler overflows"
    if loss < scale:
        return given, "The scale did it: give GradScaler a lower init_scale. Its default is 65,536."
    return given, "The loss grew too large: lower the learning rate, clip the gradients or add a norm."


def _zero(context: ProblemContext, value: int, repair: str) -> tuple[str, str]:
    """Zeros in an argument that must not have any."""
    row = _row(context, value)
    zeros = int(context.data.stats.zeros[row]) if row >= 0 else 0
    if not zeros:
        return "", ""
    count = f"{zeros:,} zeros come" if zeros > 1 else "a zero comes"
    return f"{count} {_origin(context, value)}", repair


def _positive(context: ProblemContext, name: str, value: int) -> str:
    """How the input of a logarithm becomes positive."""
    maker = computed_by(context, value)
    source = context.name(maker).rstrip("_") if maker >= 0 else ""
    if PROBABILITIES.get(source) == "softmax":
        return f"Use F.log_softmax(scores, dim=-1) instead of the {name} of a softmax: it is never -Inf."
    if source == "sigmoid":
        return f"Use F.logsigmoid(scores) instead of the {name} of a sigmoid: it is never -Inf."
    if source in RECTIFIERS:
        return f"Use softplus, which is never 0, instead of {source}, or {name}(x.clamp(min={_EPSILON}))."
    return f"Keep 0 out of it: {name}(x.clamp(min={_EPSILON}))."


def _masked_rows(context: ProblemContext, op: int) -> tuple[str, str]:
    """Rows of a softmax that are -Inf throughout."""
    stats = context.data.stats
    row, result = _row(context, context.inputs(op)[0]), context.stat(context.outputs(op)[0])
    if min(row, result) < 0 or not 0 < stats.nans[result] <= stats.infs[row]:  # a single +Inf makes a row NaN
        return "", ""
    module = context.module_type(context.module(op))
    if module == "MultiheadAttention" or "multi_head_attention" in context.written(op):
        sense = "nn.MultiheadAttention leaves out what is True in its mask; if True means keep, pass ~mask"
    else:
        sense = "masked_fill leaves out what is True in a mask, scaled_dot_product_attention what is False"
    return "some rows are -Inf throughout", f"A mask that leaves out everything makes such rows. {sense}."


def _ignored_targets(context: ProblemContext, op: int) -> tuple[str, str]:
    """Targets that a loss leaves out one and all, so that its mean is of nothing."""
    inputs, ignored = context.inputs(op), context.index.ops[op].args.get("ignore_index", -100)
    if len(inputs) < 2 or _row(context, inputs[1]) < 0 or _range(context, inputs[1]) != (ignored, ignored):
        return "", ""
    repair = "The mean of no elements is NaN: skip such a batch, or divide the sum by max(count, 1)."
    return f"all targets are {ignored}, which the loss ignores", repair


def _steep_gradient(context: ProblemContext, op: int, forward: int) -> tuple[str, str]:
    """A root or a norm of zero, whose gradient is infinite; the backward pass may have saved the result."""
    name = context.written(forward).rpartition(".")[2]
    rows = [_row(context, value) for value in (*context.inputs(op), *context.inputs(forward))]
    if not any(context.data.stats.zeros[row] for row in rows if row >= 0):
        return "", ""
    inside = f"add {_EPSILON} inside the root, or .clamp(min={_EPSILON})"
    return (
        f"the gradient of {name} at 0 is infinite",
        f"Keep 0 out of it, also where the result is not used: {inside}.",
    )


def _origin(context: ProblemContext, value: int) -> str:
    """Where numbers come from: ``from relu at net.py:9 (act)``."""
    maker = computed_by(context, value)
    if maker < 0:
        name = context.index.name(context.data.values.name[value])
        kind = context.kind(value)
        return f"from {kind} {name}" if name else f"from a{'n' * kind.startswith(tuple('aeiou'))} {kind}"
    module = context.module(maker)
    if module < 0 or context.module_label(module) == context.module_type(module):  # the only model
        return f"from {context.at_line(maker)}"
    return f"from {context.at_line(maker)} ({context.module_label(module)})"


def _row(context: ProblemContext, value: int) -> int:
    """The row of the statistics of a value, or of the tensor it is a view of; -1 without."""
    row, base = context.stat(value), int(context.data.values.base[value])
    return row if row >= 0 or base < 0 else context.stat(base)


def _range(context: ProblemContext, value: int) -> tuple[float, float]:
    """The least and the largest number of a value; zeros where it was not measured."""
    row, stats = _row(context, value), context.data.stats
    return (float(stats.min[row]), float(stats.max[row])) if row >= 0 else (0.0, 0.0)
