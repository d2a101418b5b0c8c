"""What looks wrong in a run: `find` looks for every kind of problem that `CHECKS` lists.

A check is silent where it cannot be sure: it is better to miss a problem than to cry over a healthy model.
"""

from __future__ import annotations

from typing import Final

from sightline.analysis.problems.again import computed_again
from sightline.analysis.problems.asked import matched_nothing
from sightline.analysis.problems.devices import copied_to_device, mixed_devices, waits_for_device
from sightline.analysis.problems.facts import BACKWARD, Facts
from sightline.analysis.problems.gradients import cut_gradient, no_gradient, unused_parameter
from sightline.analysis.problems.numbers import dead_layer, first_non_finite
from sightline.analysis.problems.problem import Check, Problem, Severity, merged
from sightline.analysis.problems.tensors import accidental_upcast, broadcast_in_a_loss
from sightline.trace.tables import Index

CHECKS: Final[tuple[Check, ...]] = (
    first_non_finite,
    broadcast_in_a_loss,
    mixed_devices,
    no_gradient,
    cut_gradient,
    unused_parameter,
    dead_layer,
    accidental_upcast,
    waits_for_device,
    copied_to_device,
    computed_again,
    matched_nothing,
)
KINDS: Final = tuple(check.kind for check in CHECKS)
#: What is said of a recording whose process ended before it did.
CUT_SHORT: Final = "the process ended before the recording did: what it did last may be missing"


def find(index: Index) -> list[Problem]:
    """Everything that looks wrong, the most serious first, then in the order of the run."""
    facts = Facts(index)
    return merged(facts, ((check, finding) for check in CHECKS for finding in check.find(facts)))


def not_looked_at(index: Index) -> list[str]:
    """What a recording has too little in it to tell, each with what would tell it."""
    facts = Facts(index)
    told = [CUT_SHORT] if facts.data.info.get("unfinished") else []
    if not len(facts.data.ops) and not len(facts.data.calls):
        return [*told, "nothing was recorded, so nothing was looked at"]
    if not facts.aten.any():
        told.append('aten ops were not recorded: ops="both" finds most of what there is to find')
    elif not (facts.data.ops.phase == BACKWARD).any():
        told.append("no backward pass ran: with one, parameters without a gradient are found")
    elif not facts.complete:
        told.append("parts of the run are not known: parameters without a gradient were not looked for")
    if not len(facts.data.stats) and "stats" not in (facts.data.info.get("asked") or ()):
        told.append("statistics were not taken: stats=True finds NaN and dead layers")
    return told


__all__ = ["CHECKS", "CUT_SHORT", "KINDS", "Check", "Problem", "Severity", "find", "not_looked_at"]
