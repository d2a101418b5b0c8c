"""Gradients that vanish or explode along the depth of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from sightline.analysis.problems.facts import Facts
from sightline.analysis.problems.loop_record import LoopRecord
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.notation import number_text

_LEAST: Final = 4  #: layers of a stack
_RATIO: Final = 1e-4  #: between the two ends of a stack
_NUMBER: Final = re.compile(r"\b\d+\b")
_TOO_LARGE: Final = 1e4
_ROUGH: Final = 5.0  #: how much a layer may differ from the trend


def _stacks(facts: Facts, norms: dict[str, float]) -> Iterator[list[tuple[str, float, int]]]:
    """The matrices of layers that differ only in a number, in the order in which these are called."""
    order: dict[str, tuple[int, int]] = {}
    for id, info in enumerate(facts.data.modules):
        calls = facts.index.calls_of_module.get(id)
        for parameter in info.parameters:
            if calls and not parameter.buffer and len(parameter.shape) > 1:
                order[parameter.path] = (calls[0], id)
    groups: dict[str, list[tuple[str, float, int]]] = {}
    for name, norm in norms.items():
        if name in order:
            groups.setdefault(_NUMBER.sub("*", name), []).append((name, norm, order[name][1]))
    for members in groups.values():
        if len(members) >= _LEAST:
            yield sorted(members, key=lambda one: order[one[0]][0])


def _trend(members: list[tuple[str, float, int]]) -> float:
    """The first norm over the last, if it goes that way along the whole stack; else 1."""
    norms = [norm for _, norm, _ in members]
    if min(norms) <= 0 or not all(norm < float("inf") for norm in norms):
        return 1.0
    ratio = norms[0] / norms[-1]
    half = norms[len(norms) // 2]
    goes = norms[0] / half * _ROUGH < 1 < norms[-1] / half / _ROUGH * 1.0 or (
        norms[0] / half > _ROUGH and half / norms[-1] > _ROUGH
    )
    return ratio if goes else 1.0


@check(
    "vanishing-gradients",
    Severity.WARNING,
    "The first layers hardly learn. Add skip connections or a norm, or use an activation that is not flat, "
    "such as ReLU or GELU.",
)
def vanishing_gradients(facts: Facts) -> Iterator[Finding]:
    """A stack of layers along which the gradients become far smaller towards the input."""
    measured = facts.derived(LoopRecord).norms()
    for members in _stacks(facts, measured[0]) if measured else ():
        if all(_ratio_of(members, norms) < _RATIO for norms in measured):
            yield _finding(facts, members, "shrink")
            return


@check(
    "exploding-gradients",
    Severity.WARNING,
    "One step with them throws the weights away. Draw the weights smaller (by their fan-in), add a norm, and "
    "clip the gradients before the step.",
)
def exploding_gradients(facts: Facts) -> Iterator[Finding]:
    """A stack of layers whose gradients are huge, or grow towards the input without end."""
    measured = facts.derived(LoopRecord).norms()
    for members in _stacks(facts, measured[0]) if measured else ():
        first = {name for name, _, _ in members}
        huge = all(min(norms.get(name, 0.0) for name in first) > _TOO_LARGE for norms in measured)
        if huge or all(_ratio_of(members, norms) > 1 / _RATIO for norms in measured):
            yield _finding(facts, members, "grow" if not huge else "are huge")
            return


def _ratio_of(members: list[tuple[str, float, int]], norms: dict[str, float]) -> float:
    return _trend([(name, norms.get(name, 0.0), id) for name, _, id in members])


def _finding(facts: Facts, members: list[tuple[str, float, int]], how: str) -> Finding:
    (first, low, module), (last, high, _) = members[0], members[-1]
    calls = facts.index.calls_of_module.get(module, ())
    frame = int(facts.data.calls.frame[calls[0]]) if calls else -1
    towards = "" if how == "are huge" else " towards the input"
    title = (
        f"gradients {how}{towards} over {len(members)} layers: norm {number_text(low)} in {first}, "
        f"{number_text(high)} in {last}"
    )
    return Finding(title, module, frame, parameter=first)
