"""Problems of a run: `find` runs every check of `CHECKS`.

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
    gradient_clipping,
    gradients,
    losses,
    nonfinite,
    precision,
    program_warnings,
    recomputation,
    run_modes,
    training_curves,
    training_loop,
    weights,
)
from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.gaps import CUT_SHORT, gap_texts, gaps
from sightline.analysis.problems.problem import FIRST, Check, Confidence, Problem, Severity, merge_findings
from sightline.data.index import Index

#: Every check; of two problems that are equally serious, the one of the earlier check is listed first.
CHECKS: Final[tuple[Check, ...]] = (
    failed_runs.run_failed,
    nonfinite.first_non_finite,
    training_loop.step_without_gradients,
    training_loop.gradients_not_cleared,
    training_curves.learning_rate_wrong,
    losses.probabilities_as_logits,
    losses.no_log_probabilities,
    losses.logits_as_probabilities,
    losses.targets_out_of_range,
    weights.unregistered_module,
    weights.uninitialised,
    gradient_clipping.clipped_after_step,
    gradient_clipping.clipped_while_scaled,
    gradient_clipping.steps_all_skipped,
    training_curves.loss_not_finite,
    training_curves.loss_grows,
    training_curves.loss_jumps,
    training_curves.gradients_of_zero,
    training_curves.norm_grows,
    training_curves.learning_rate_vanishes,
    broadcasts.broadcast_in_a_loss,
    broadcasts.rows_against_columns,
    devices.mixed_devices,
    gradients.no_gradient,
    gradients.cut_gradient,
    gradients.unused_parameter,
    gradients.optimizer_without_gradients,
    training_loop.parameters_without_optimizer,
    run_modes.training_mode_in_evaluation,
    run_modes.training_mode_of_untrained_model,
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
    program_warnings.warned,
    program_warnings.deprecated,
)
KINDS: Final = tuple(dict.fromkeys(check.kind for check in CHECKS))


def find(index: Index) -> list[Problem]:
    """Everything that looks wrong, the most serious first, then in the order of the run."""
    context = ProblemContext(index)
    findings = ((check, finding) for check in CHECKS for finding in check.find(context))
    return program_warnings.unexplained(context, merge_findings(context, findings))


def kinds_text() -> str:
    """The kinds of problems that the checks look for, in one sentence."""
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
    "gap_texts",
    "gaps",
    "kinds_text",
]
