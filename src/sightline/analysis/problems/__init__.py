"""What looks wrong in a run: `find` runs every check of `CHECKS`.

A check stays silent where it cannot be sure: missing a problem is better than a false alarm.
"""

from __future__ import annotations

from typing import Final

from sightline.analysis.problems import (
    activations,
    broadcasts,
    determinism,
    devices,
    failed_runs,
    gradients,
    losses,
    nonfinite,
    precision,
    recomputation,
    run_modes,
    training_loop,
    weights,
)
from sightline.analysis.problems.context import BACKWARD, ProblemContext
from sightline.analysis.problems.problem import FIRST, Check, Confidence, Problem, Severity, merge_findings
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.trace.index import Index

#: Every check; of two problems that are equally serious, the one of the earlier check is listed first.
CHECKS: Final[tuple[Check, ...]] = (
    failed_runs.run_failed,
    nonfinite.first_non_finite,
    training_loop.step_without_gradients,
    training_loop.gradients_not_cleared,
    training_loop.learning_rate_of_zero,
    losses.probabilities_as_logits,
    losses.no_log_probabilities,
    losses.logits_as_probabilities,
    losses.targets_out_of_range,
    weights.unregistered_module,
    weights.uninitialised,
    training_loop.clipped_after_step,
    broadcasts.broadcast_in_a_loss,
    broadcasts.rows_against_columns,
    devices.mixed_devices,
    gradients.no_gradient,
    gradients.cut_gradient,
    gradients.unused_parameter,
    training_loop.parameters_without_optimizer,
    run_modes.training_mode_in_evaluation,
    run_modes.evaluation_mode_in_training,
    run_modes.dropout_in_evaluation,
    training_loop.scheduler_out_of_order,
    training_loop.learning_rate_unchanged,
    determinism.not_deterministic,
    training_loop.graph_grows,
    training_loop.graph_kept,
    activations.changed_before_skip,
    weights.shared_layers,
    weights.untied_weights,
    gradients.vanishing_gradients,
    gradients.exploding_gradients,
    activations.dead_activation,
    activations.saturated_activation,
    activations.masks_everything,
    activations.dead_layer,
    run_modes.batch_of_one,
    precision.accidental_upcast,
    devices.waits_for_device,
    devices.copied_to_device,
    devices.copied_in_loop,
    recomputation.computed_again,
    failed_runs.matched_nothing,
)
KINDS: Final = tuple(dict.fromkeys(check.kind for check in CHECKS))
#: Shown for a recording whose process was killed.
CUT_SHORT: Final = "the process ended before the recording did: what it did last may be missing"


def find(index: Index) -> list[Problem]:
    """Everything that looks wrong, the most serious first, then in the order of the run."""
    context = ProblemContext(index)
    return merge_findings(context, ((check, finding) for check in CHECKS for finding in check.find(context)))


def not_looked_at(index: Index) -> list[str]:
    """What this recording holds too little to check, each with the option that would record it."""
    context = ProblemContext(index)
    notes = [CUT_SHORT] if context.data.info.get("unfinished") else []
    if not len(context.data.ops) and not len(context.data.calls):
        return [*notes, "nothing was recorded, so nothing was looked at"]
    if not context.aten.any():
        notes.append('aten ops were not recorded: ops="both" finds most of what there is to find')
    elif not (context.data.ops.phase == BACKWARD).any():
        notes.append("no backward pass ran: with one, parameters without a gradient are found")
    elif not context.complete:
        notes.append("parts of the run are not known: parameters without a gradient were not looked for")
    if not len(context.data.stats) and "stats" not in (context.data.info.get("asked") or ()):
        notes.append(
            "statistics were not taken: stats=True finds NaN, dead or saturated activations, masks that "
            "leave out everything, targets out of range, results that differ"
        )
    if context.aten.any() and not context.derived(LoopRecord).steps:
        notes.append("no optimizer stepped: with steps, mistakes of the training loop are found")
    return notes


def looked_for() -> str:
    """What the checks look for, in one sentence."""
    return (
        f"{len(KINDS)} kinds: numbers that are not finite, gradients, losses and their targets, the training "
        "loop, modes, shapes, precision, activations, weights, kept graphs, repeated work, reads by the host"
    )


__all__ = [
    "CHECKS",
    "CUT_SHORT",
    "FIRST",
    "KINDS",
    "Check",
    "Confidence",
    "Problem",
    "Severity",
    "find",
    "looked_for",
    "not_looked_at",
]
