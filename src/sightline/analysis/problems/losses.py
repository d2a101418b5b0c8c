"""Losses with the wrong input: probabilities for logits, labels out of their range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import FORWARD, MATMULS, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.data.op_groups import VIEWS
from sightline.notation import number_text

_MAX_OPS: Final = 32  #: how many ops a value is followed back for
_NLL_LOSSES: Final = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
#: Ops that move elements and leave them as they are.
_MOVES: Final = VIEWS | frozenset("clone contiguous _to_copy stack cat index".split())
PROBABILITIES: Final = {
    "softmax": "softmax",
    "_softmax": "softmax",
    "sigmoid": "sigmoid",
    "_safe_softmax": "softmax",
}
_LOG_SOFTMAX: Final = frozenset({"_log_softmax", "log_softmax"})
_CLAMPS: Final = frozenset("clamp clamp_ clamp_min clamp_max relu relu_ hardtanh".split())
_SCALES: Final = frozenset("mul div".split())


def computed_by(context: ProblemContext, value: int, skipped: frozenset[str] = _MOVES) -> int:
    """The op that computed the numbers of a value, behind those that only move them; -1 if unknown."""
    path = list(moved_from(context, value, skipped))
    return context.producer(path[-1]) if len(path) <= _MAX_OPS else -1


def moved_from(context: ProblemContext, value: int, skipped: frozenset[str] = _MOVES) -> Iterator[int]:
    """A value and those its numbers were moved from, back to the one that was computed or is an input."""
    for _ in range(_MAX_OPS):
        yield value
        producer = context.producer(value)
        if producer < 0:
            value = int(context.data.values.base[value])
            if value < 0:
                return
            continue
        inputs, name = context.inputs(producer), context.name(producer)
        adds_bias = (  # the second half of a linear layer
            name in ("add", "add_") and len(inputs) == 2 and context.kind(inputs[1]) == "parameter"
            and len(context.meta(inputs[1]).shape) == 1
        )  # fmt: skip
        if not adds_bias and not (name in skipped and inputs):
            return
        value = inputs[0]
    yield value


@check(
    "probabilities-as-logits",
    Severity.ERROR,
    "This loss takes the logits and does the rest itself; given probabilities it can never become small. "
    "Leave the activation out, and apply it only where predictions are made.",
)
def probabilities_as_logits(context: ProblemContext) -> Iterator[Finding]:
    """A cross entropy on logits gets the result of a softmax or a sigmoid."""
    binary = "binary_cross_entropy_with_logits"
    for op in np.flatnonzero(context.forward & context.named({binary})).tolist():
        yield from _probability_findings(context, op, context.inputs(op)[0], binary)
    for op in np.flatnonzero(context.forward & context.named(_NLL_LOSSES)).tolist():
        logs = computed_by(context, context.inputs(op)[0])
        if logs >= 0 and context.name(logs) in _LOG_SOFTMAX:
            yield from _probability_findings(context, op, context.inputs(logs)[0], "cross_entropy")


def _probability_findings(context: ProblemContext, op: int, value: int, loss: str) -> Iterator[Finding]:
    """A finding where a value that a loss takes as logits is probabilities."""
    producer = computed_by(context, value)
    activation = _activation(context, producer)
    if activation:
        line = context.line(producer) or "an unknown line"
        title = f"{loss} is given probabilities, made by {activation} at {line}"
        yield context.finding(title, op, value)


def _activation(context: ProblemContext, op: int) -> str:
    """The function by which an op made probabilities; empty if it made something else."""
    name = context.name(op) if op >= 0 else ""
    source = computed_by(context, context.inputs(op)[0]) if name in ("exp", "div") else -1
    if source >= 0 and name == "exp" and context.name(source) in _LOG_SOFTMAX:
        return "exp of log_softmax"
    if source >= 0 and name == "div" and context.name(source) == "exp":
        total = computed_by(context, context.inputs(op)[-1])
        summed = total >= 0 and context.name(total) == "sum" and context.inputs(total)
        if summed and computed_by(context, context.inputs(total)[0]) == source:
            return "exp / sum"
    return PROBABILITIES.get(name, "")


@check(
    "logits-as-log-probabilities",
    Severity.ERROR,
    "The loss is not one: it can fall without end, or means nothing. Give it F.log_softmax(logits, dim=-1).",
)
def no_log_probabilities(context: ProblemContext) -> Iterator[Finding]:
    """``nll_loss`` and ``kl_div`` get logits or probabilities instead of their logarithms."""
    for op in np.flatnonzero(context.forward & context.named(_NLL_LOSSES)).tolist():
        yield from _no_log_findings(context, op, "nll_loss")
    data = context.data  # the API calls of ``kl_div``, or its ops where no API calls were recorded
    names = [id for id, name in enumerate(data.names) if name.rpartition(".")[2] == "kl_div"]
    divergences = np.isin(data.ops.name, names) & (data.ops.parent < 0) & (data.ops.phase == FORWARD)
    for op in np.flatnonzero(divergences).tolist():
        if len(context.inputs(op)) >= 2:
            yield from _no_log_findings(context, op, "kl_div")


def _no_log_findings(context: ProblemContext, op: int, loss: str) -> Iterator[Finding]:
    """A finding where the first input of a loss is known not to be log-probabilities."""
    value = context.inputs(op)[0]
    producer = computed_by(context, value, _MOVES | _SCALES)
    name = context.name(producer) if producer >= 0 else ""
    given = "logits" if name in MATMULS else "probabilities" if _activation(context, producer) else ""
    if given:
        source = f"{context.written(producer)} at {context.line(producer) or 'an unknown line'}"
        title = f"{loss} is given {given} instead of log-probabilities, made by {source}"
        yield context.finding(title, op, value)


@check(
    "logits-as-probabilities",
    Severity.ERROR,
    "A binary cross entropy takes the logarithm of a probability. Give the logits themselves to "
    "F.binary_cross_entropy_with_logits, or apply a sigmoid.",
)
def logits_as_probabilities(context: ProblemContext) -> Iterator[Finding]:
    """``binary_cross_entropy`` gets the output of a layer, as it is or clamped to 0 and 1."""
    for op in np.flatnonzero(context.forward & context.named({"binary_cross_entropy"})).tolist():
        value = context.inputs(op)[0]
        producer = computed_by(context, value, _MOVES | _CLAMPS)
        if producer >= 0 and context.name(producer) in MATMULS:
            line = context.line(producer) or "an unknown line"
            title = f"binary_cross_entropy is given logits, made by {context.written(producer)} at {line}"
            yield context.finding(title, op, value)


@check(
    "targets-out-of-range",
    Severity.ERROR,
    "The targets of a binary cross entropy are 0, 1 or between; others make a loss that falls without end. "
    "Scale them: divide bytes by 255, map -1 and 1 to 0 and 1.",
)
def targets_out_of_range(context: ProblemContext) -> Iterator[Finding]:
    """A binary cross entropy whose targets were measured, and are not between 0 and 1."""
    losses = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
    stats = context.data.stats
    for op in np.flatnonzero(context.forward & context.named(losses)).tolist():
        inputs = context.inputs(op)
        targets = inputs[1] if len(inputs) > 1 else -1
        row = context.stat(targets)
        if row >= 0 and (stats.min[row] < 0 or stats.max[row] > 1):
            low, high = number_text(float(stats.min[row])), number_text(float(stats.max[row]))
            producer = computed_by(context, targets)
            where = f", made at {context.line(producer)}" if producer >= 0 else ""
            name = context.name(op)
            title = f"the targets {context.meta(targets)} of {name} go from {low} to {high}{where}"
            yield context.finding(title, op, targets)
