"""Problems of a run: `find` runs every check of `CHECKS`.

A check stays silent where it cannot be sure: missing a problem is better than a false alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from sightline.analysis.problems.context import BACKWARD, ProblemContext
from sightline.analysis.problems.problem import FIRST, Check, Confidence, Problem, Severity, merge_findings
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.data.trace_data import FLAVOURS
from sightline.data.trace_data import KINDS as VALUE_KINDS
from sightline.hints import Hint

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
#: Shown for a recording whose process was killed.
CUT_SHORT: Final = "the process ended before the recording did: what it did last may be missing"


def find(index: Index) -> list[Problem]:
    """Everything that looks wrong, the most serious first, then in the order of the run."""
    context = ProblemContext(index)
    findings = ((check, finding) for check in CHECKS for finding in check.find(context))
    return program_warnings.unexplained(context, merge_findings(context, findings))


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that no check could look at."""

    subject: str  #: in a few words, to end a sentence; empty where there was nothing to look at
    text: str  #: a sentence, with the option that would record it


def gaps(index: Index) -> list[Gap]:
    """The kinds of problems that this recording holds too little to check."""
    context = ProblemContext(index)
    data = context.data
    result = [Gap("what ran last", CUT_SHORT)] if data.info.get("unfinished") else []
    threads = other_threads(data)
    if not len(data.ops) and not len(data.calls):
        elsewhere = [Gap("other threads", threads)] if threads else []
        return [*result, *elsewhere, Gap("", "nothing was recorded, so nothing was looked at")]
    if not context.aten.any() and data.info.get("ops") not in ("both", "aten"):
        result.append(
            Gap(
                "aten ops", f"aten ops were not recorded: {Hint.recording('ops', 'both')} finds most problems"
            )
        )
    elif not (data.ops.phase == BACKWARD).any():
        result.append(Gap("", "no backward pass ran: with one, parameters without a gradient are found"))
    elif not context.complete:
        text = f"{context.gap}: parameters without a gradient were not looked for"
        result.append(Gap("parameters without a gradient", text))
    opaque = int((data.ops.flavour == FLAVOURS.index("opaque")).sum())
    if opaque:
        hint = f"{Hint.recording('compiled', 'eager')} shows their ops"
        result.append(Gap("compiled code", f"{opaque:,} calls of compiled code were not looked into: {hint}"))
    if threads:
        result.append(Gap("other threads", threads))
    external = int((data.values.kind == VALUE_KINDS.index("external")).sum())
    if external and not threads:
        text = (
            f"{external:,} tensors came from code that was not recorded, such as another thread: what made "
            "them was not looked at"
        )
        result.append(Gap("other threads", text))
    if not len(data.stats) and "stats" not in (data.info.get("asked") or ()):
        text = (
            f"statistics were not taken: {Hint.recording('stats')} finds NaN, dead or saturated activations, "
            "masks that leave out everything, targets out of range, results that differ"
        )
        result.append(Gap("the numbers in tensors (no statistics)", text))
    else:
        integers = context.of_meta(lambda meta: meta.dtype.startswith(("int", "uint", "bool")))
        integers[data.stats.value] = False
        if (integers & (data.values.producer >= 0)).any():
            text = "integers and masks that ops return were not measured, only those that modules were given"
            result.append(Gap("the values of integers", text))
    if context.aten.any() and not context.derived(LoopRecord).optimizers:
        result.append(Gap("", "no optimizer stepped: with steps, mistakes of the training loop are found"))
    return result


def gap_texts(index: Index) -> list[str]:
    """A sentence for each gap of this recording, with the option that would record it."""
    return [gap.text for gap in gaps(index)]


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
