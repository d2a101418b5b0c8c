"""Losses that are given what they do not expect: probabilities for logits, labels out of their range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.notation import number_text
from sightline.trace.data import KINDS

_FARTHEST: Final = 32
#: Ops that leave the numbers as they are, wherever they put them.
_MOVES: Final = frozenset(
    "view _unsafe_view reshape _reshape_alias t transpose permute expand squeeze unsqueeze select slice "
    "split unbind clone contiguous detach alias _to_copy stack cat movedim index".split()
)
_PROBABILITIES: Final = {
    "softmax": "softmax",
    "_softmax": "softmax",
    "sigmoid": "sigmoid",
    "_safe_softmax": "softmax",
}
_SCALES: Final = frozenset("mul div".split())


def _made_by(context: ProblemContext, value: int, through: frozenset[str] = _MOVES) -> int:
    """The op that made the numbers of a value, past those that only move them; -1 if none is known."""
    for _ in range(_FARTHEST):
        maker = context.producer(value)
        if maker < 0:
            before = int(context.data.values.base[value])
            if before < 0:
                return -1
            value = before
            continue
        if _adds_bias(context, maker):
            value = context.inputs(maker)[0]
            continue
        if context.name(maker) not in through or not context.inputs(maker):
            return maker
        value = context.inputs(maker)[0]
    return -1


def _adds_bias(context: ProblemContext, op: int) -> bool:
    """Whether an op is the second half of a linear layer."""
    given = context.inputs(op)
    if context.name(op) not in ("add", "add_") or len(given) != 2:
        return False
    return (
        bool(context.data.values.kind[given[1]] == KINDS.index("parameter"))
        and len(context.meta(given[1]).shape) == 1
    )


@check(
    "probabilities-as-logits",
    Severity.ERROR,
    "This loss takes the logits and does the rest itself; given probabilities it can never become small. "
    "Leave the activation out, and apply it only where predictions are made.",
)
def probabilities_as_logits(context: ProblemContext) -> Iterator[Finding]:
    """A cross entropy on logits is given what a softmax or a sigmoid has made."""
    for op in np.flatnonzero(
        context.forward & context.named(frozenset({"binary_cross_entropy_with_logits"}))
    ).tolist():
        yield from _given_probabilities(
            context, op, context.inputs(op)[0], "binary_cross_entropy_with_logits"
        )
    losses = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
    for op in np.flatnonzero(context.forward & context.named(losses)).tolist():
        logs = context.producer(context.inputs(op)[0])
        logs = (
            _made_by(context, context.inputs(op)[0])
            if logs < 0 or context.name(logs) != "_log_softmax"
            else logs
        )
        if logs >= 0 and context.name(logs) in ("_log_softmax", "log_softmax"):
            yield from _given_probabilities(context, op, context.inputs(logs)[0], "cross_entropy")


def _given_probabilities(context: ProblemContext, op: int, value: int, loss: str) -> Iterator[Finding]:
    maker = _made_by(context, value)
    activation = _PROBABILITIES.get(context.name(maker)) if maker >= 0 else None
    if activation is None:
        return
    at = int(context.frames[maker])
    title = f"{loss} is given probabilities, made by {activation} at {context.place(at) or 'an unknown line'}"
    yield Finding(title, context.module(op), int(context.frames[op]), op, value)


@check(
    "logits-as-log-probabilities",
    Severity.ERROR,
    "The loss is not one: it can fall without end, or means nothing. Give it F.log_softmax(logits, dim=-1).",
)
def no_log_probabilities(context: ProblemContext) -> Iterator[Finding]:
    """``nll_loss`` and ``kl_div`` are given logits or probabilities instead of their logarithms."""
    losses = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
    for op in np.flatnonzero(context.forward & context.named(losses)).tolist():
        yield from _not_logarithms(context, op, context.inputs(op)[0], "nll_loss")
    for op in _divergences(context):
        yield from _not_logarithms(context, op, context.inputs(op)[0], "kl_div")


def _divergences(context: ProblemContext) -> list[int]:
    """Calls of ``kl_div``, as written, or as an op where only these were recorded."""
    data = context.data
    names = [id for id, name in enumerate(data.names) if name.rpartition(".")[2] == "kl_div"]
    found = np.isin(data.ops.name, names) & (data.ops.parent < 0) & (data.ops.phase == 0)
    return [op for op in np.flatnonzero(found).tolist() if len(context.inputs(op)) >= 2]


def _not_logarithms(context: ProblemContext, op: int, value: int, loss: str) -> Iterator[Finding]:
    maker = _made_by(context, value, _MOVES | _SCALES)
    name = context.name(maker) if maker >= 0 else ""
    what = "logits" if name in MATMULS else "probabilities" if name in _PROBABILITIES else ""
    if not what:
        return
    how = f"{context.written(maker)} at {context.place(int(context.frames[maker])) or 'an unknown line'}"
    title = f"{loss} is given {what} instead of log-probabilities, made by {how}"
    yield Finding(title, context.module(op), int(context.frames[op]), op, value)


@check(
    "targets-out-of-range",
    Severity.ERROR,
    "The targets of a binary cross entropy are 0, 1 or between; others make a loss that falls without end. "
    "Scale them: divide bytes by 255, map -1 and 1 to 0 and 1.",
)
def targets_out_of_range(context: ProblemContext) -> Iterator[Finding]:
    """A binary cross entropy whose targets are measured, and not between 0 and 1."""
    losses = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
    stats = context.data.stats
    for op in np.flatnonzero(context.forward & context.named(losses)).tolist():
        given = context.inputs(op)
        row = context.stat(given[1]) if len(given) > 1 else -1
        if row >= 0 and (stats.min[row] < 0 or stats.max[row] > 1):
            low, high = number_text(float(stats.min[row])), number_text(float(stats.max[row]))
            maker = _made_by(context, given[1])
            where = f", made at {context.place(int(context.frames[maker]))}" if maker >= 0 else ""
            title = (
                f"the targets {context.meta(given[1])} of {context.name(op)} go from {low} to {high}{where}"
            )
            yield Finding(title, context.module(op), int(context.frames[op]), op, given[1])
