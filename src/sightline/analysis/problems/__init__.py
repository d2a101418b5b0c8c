"""What looks wrong in a run: `find` runs every check of `CHECKS`.

A check stays silent where it cannot be sure: missing a problem is better than a false alarm.
"""

from __future__ import annotations

from typing import Final

from sightline.analysis.problems.activations import (
    dead_activation,
    dead_layer,
    masks_everything,
    saturated_activation,
)
from sightline.analysis.problems.broadcasts import broadcast_in_a_loss, rows_against_columns
from sightline.analysis.problems.context import BACKWARD, ProblemContext
from sightline.analysis.problems.determinism import not_deterministic
from sightline.analysis.problems.devices import (
    copied_in_loop,
    copied_to_device,
    mixed_devices,
    waits_for_device,
)
from sightline.analysis.problems.failed_runs import matched_nothing, run_failed
from sightline.analysis.problems.gradients import (
    cut_gradient,
    exploding_gradients,
    no_gradient,
    unused_parameter,
    vanishing_gradients,
)
from sightline.analysis.problems.inplace_changes import changed_before_skip
from sightline.analysis.problems.loop_record import LoopRecord
from sightline.analysis.problems.losses import (
    logits_as_probabilities,
    no_log_probabilities,
    probabilities_as_logits,
    targets_out_of_range,
)
from sightline.analysis.problems.nonfinite import first_non_finite
from sightline.analysis.problems.precision import accidental_upcast
from sightline.analysis.problems.problem import FIRST, Check, Confidence, Problem, Severity, merge_findings
from sightline.analysis.problems.recomputation import computed_again
from sightline.analysis.problems.run_modes import (
    batch_of_one,
    dropout_in_evaluation,
    evaluation_mode_in_training,
    training_mode_in_evaluation,
)
from sightline.analysis.problems.training_loop import (
    clipped_after_step,
    gradients_not_cleared,
    graph_grows,
    graph_kept,
    learning_rate_of_zero,
    learning_rate_unchanged,
    parameters_without_optimizer,
    scheduler_out_of_order,
    step_without_gradients,
)
from sightline.analysis.problems.weights import (
    shared_layers,
    uninitialised,
    unregistered_module,
    untied_weights,
)
from sightline.trace.index import Index

CHECKS: Final[tuple[Check, ...]] = (
    run_failed,
    first_non_finite,
    step_without_gradients,
    gradients_not_cleared,
    learning_rate_of_zero,
    probabilities_as_logits,
    no_log_probabilities,
    logits_as_probabilities,
    targets_out_of_range,
    unregistered_module,
    uninitialised,
    clipped_after_step,
    broadcast_in_a_loss,
    rows_against_columns,
    mixed_devices,
    no_gradient,
    cut_gradient,
    unused_parameter,
    parameters_without_optimizer,
    training_mode_in_evaluation,
    evaluation_mode_in_training,
    dropout_in_evaluation,
    scheduler_out_of_order,
    learning_rate_unchanged,
    not_deterministic,
    graph_grows,
    graph_kept,
    changed_before_skip,
    shared_layers,
    untied_weights,
    vanishing_gradients,
    exploding_gradients,
    dead_activation,
    saturated_activation,
    masks_everything,
    dead_layer,
    batch_of_one,
    accidental_upcast,
    waits_for_device,
    copied_to_device,
    copied_in_loop,
    computed_again,
    matched_nothing,
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
