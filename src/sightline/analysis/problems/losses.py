"""Losses that are given what they do not expect: probabilities for logits, labels out of their range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.notation import number_text
from sightline.trace.data import KINDS
from sightline.trace.op_groups import VIEWS

_FARTHEST: Final = 32
#: Ops that leave the numbers as they are, wherever they put them.
_MOVES: Final = VIEWS | frozenset("clone contiguous _to_copy stack cat index".split())
_PROBABILITIES: Final = {
    "softmax": "softmax",
    "_softmax": "softmax",
    "sigmoid": "sigmoid",
    "_safe_softmax": "softmax",
}
_SCALES: Final = frozenset("mul div".split())


def _made_by(facts: ProblemContext, value: int, through: frozenset[str] = _MOVES) -> int:
    """The op that made the numbers of a value, past those that only move them; -1 if none is known."""
    for _ in range(_FARTHEST):
        maker = facts.producer(value)
        if maker < 0:
            before = int(facts.data.values.base[value])
            if before < 0:
                return -1
            value = before
            continue
        if _adds_bias(facts, maker):
            value = facts.inputs(maker)[0]
            continue
        if facts.name(maker) not in through or not facts.inputs(maker):
            return maker
        value = facts.inputs(maker)[0]
    return -1


def _adds_bias(facts: ProblemContext, op: int) -> bool:
    """Whether an op is the second half of a linear layer."""
    given = facts.inputs(op)
    if facts.name(op) not in ("add", "add_") or len(given) != 2:
        return False
    return (
        bool(facts.data.values.kind[given[1]] == KINDS.index("parameter"))
        and len(facts.meta(given[1]).shape) == 1
    )


@check(
    "probabilities-as-logits",
    Severity.ERROR,
    "This loss takes the logits and does the rest itself; given probabilities it can never become small. "
    "Leave the activation out, and apply it only where predictions are made.",
)
def probabilities_as_logits(facts: ProblemContext) -> Iterator[Finding]:
    """A cross entropy on logits is given what a softmax or a sigmoid has made."""
    for op in np.flatnonzero(
        facts.forward & facts.named(frozenset({"binary_cross_entropy_with_logits"}))
    ).tolist():
        yield from _given_probabilities(facts, op, facts.inputs(op)[0], "binary_cross_entropy_with_logits")
    losses = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
    for op in np.flatnonzero(facts.forward & facts.named(losses)).tolist():
        logs = facts.producer(facts.inputs(op)[0])
        logs = (
            _made_by(facts, facts.inputs(op)[0]) if logs < 0 or facts.name(logs) != "_log_softmax" else logs
        )
        if logs >= 0 and facts.name(logs) in ("_log_softmax", "log_softmax"):
            yield from _given_probabilities(facts, op, facts.inputs(logs)[0], "cross_entropy")


def _given_probabilities(facts: ProblemContext, op: int, value: int, loss: str) -> Iterator[Finding]:
    maker = _made_by(facts, value)
    activation = _PROBABILITIES.get(facts.name(maker)) if maker >= 0 else None
    if activation is None:
        return
    at = int(facts.frames[maker])
    title = f"{loss} is given probabilities, made by {activation} at {facts.place(at) or 'an unknown line'}"
    yield Finding(title, facts.module(op), int(facts.frames[op]), op, value)


@check(
    "logits-as-log-probabilities",
    Severity.ERROR,
    "The loss is not one: it can fall without end, or means nothing. Give it F.log_softmax(logits, dim=-1).",
)
def no_log_probabilities(facts: ProblemContext) -> Iterator[Finding]:
    """``nll_loss`` and ``kl_div`` are given logits or probabilities instead of their logarithms."""
    losses = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
    for op in np.flatnonzero(facts.forward & facts.named(losses)).tolist():
        yield from _not_logarithms(facts, op, facts.inputs(op)[0], "nll_loss")
    for op in _divergences(facts):
        yield from _not_logarithms(facts, op, facts.inputs(op)[0], "kl_div")


def _divergences(facts: ProblemContext) -> list[int]:
    """Calls of ``kl_div``, as written, or as an op where only these were recorded."""
    data = facts.data
    names = [id for id, name in enumerate(data.names) if name.rpartition(".")[2] == "kl_div"]
    found = np.isin(data.ops.name, names) & (data.ops.parent < 0) & (data.ops.phase == 0)
    return [op for op in np.flatnonzero(found).tolist() if len(facts.inputs(op)) >= 2]


def _not_logarithms(facts: ProblemContext, op: int, value: int, loss: str) -> Iterator[Finding]:
    maker = _made_by(facts, value, _MOVES | _SCALES)
    name = facts.name(maker) if maker >= 0 else ""
    what = "logits" if name in MATMULS else "probabilities" if name in _PROBABILITIES else ""
    if not what:
        return
    how = f"{facts.written(maker)} at {facts.place(int(facts.frames[maker])) or 'an unknown line'}"
    title = f"{loss} is given {what} instead of log-probabilities, made by {how}"
    yield Finding(title, facts.module(op), int(facts.frames[op]), op, value)


@check(
    "targets-out-of-range",
    Severity.ERROR,
    "The targets of a binary cross entropy are 0, 1 or between; others make a loss that falls without end. "
    "Scale them: divide bytes by 255, map -1 and 1 to 0 and 1.",
)
def targets_out_of_range(facts: ProblemContext) -> Iterator[Finding]:
    """A binary cross entropy whose targets are measured, and not between 0 and 1."""
    losses = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
    stats = facts.data.stats
    for op in np.flatnonzero(facts.forward & facts.named(losses)).tolist():
        given = facts.inputs(op)
        row = facts.stat(given[1]) if len(given) > 1 else -1
        if row >= 0 and (stats.min[row] < 0 or stats.max[row] > 1):
            low, high = number_text(float(stats.min[row])), number_text(float(stats.max[row]))
            maker = _made_by(facts, given[1])
            where = f", made at {facts.place(int(facts.frames[maker]))}" if maker >= 0 else ""
            title = f"the targets {facts.meta(given[1])} of {facts.name(op)} go from {low} to {high}{where}"
            yield Finding(title, facts.module(op), int(facts.frames[op]), op, given[1])
