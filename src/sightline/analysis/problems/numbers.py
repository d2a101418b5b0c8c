"""Problems in the numbers, where statistics were taken: NaN and infinities, layers with a constant output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.nonfinite import (
    NonFiniteOp,
    call_text,
    first_call,
    nonfinite_sources,
    serious_findings,
)
from sightline.analysis.problems.activations import RECTIFIERS, is_masked
from sightline.analysis.problems.context import FORWARD, RANDOM, Mask, ProblemContext
from sightline.analysis.problems.nonfinite_causes import cause
from sightline.analysis.problems.problem import Finding, Severity, check, op_finding, op_line
from sightline.analysis.problems.weights import has_parameters
from sightline.notation import number_text
from sightline.trace.data import KINDS
from sightline.trace.user_frames import statistics_text

_MIN_ELEMENTS: Final = 32  #: fewer may be equal by chance
_ACTIVATION_OPS: Final = 2  #: of an activation alone


@check(
    "non-finite",
    Severity.ERROR,
    "Whatever is computed from it is lost, and one update with it destroys the weights.",
)
def first_non_finite(context: ProblemContext) -> Iterator[Finding]:
    """NaN that came with the inputs, and the ops that made one; `analysis.nonfinite` decides which."""
    index = context.index
    if not len(context.data.stats):
        return
    for source in nonfinite_sources(index):
        reader = next(iter(index.consumers(source.value.id)), -1)
        if reader >= 0:
            yield op_finding(context, str(source), reader, source.value.id)
    any_op, serious = serious_findings(index)
    hidden = first_call(index) if not any_op else None
    if hidden is not None:
        call, value = hidden
        calls = context.data.calls
        module, frame = int(calls.module[call.id]), int(calls.frame[call.id])
        yield Finding(call_text(call, value), module, frame, -1, value.id)
    lines: set[str] = set()
    for finding in serious:
        line = op_line(context, finding.op.id)
        if line and line in lines:  # the NaN that became of an infinity, on its line
            continue
        lines.add(line)
        given, repair = cause(context, finding.op.id)
        title = f"{_title(finding)}{f': {given}' if given else ''}"
        yield op_finding(context, title, finding.op.id, finding.value.id, repair)


def _title(finding: NonFiniteOp) -> str:
    """``log made 3 NaN of 8 in f32[2, 4] out of f32[2, 4] (all Inf)``."""
    inputs = []
    for value in finding.op.inputs:
        statistics = statistics_text(value)
        inputs.append(f"{value} ({statistics})" if statistics else str(value))
    return f"{finding.sentence()} out of {', '.join(dict.fromkeys(inputs)) or 'nothing'}"


@check(
    "dead-layer",
    Severity.WARNING,
    "A layer that gives one number whatever it is given passes nothing on, and where it is flat there is no "
    "gradient to bring it back.",
)
def dead_layer(context: ProblemContext) -> Iterator[Finding]:
    """A module whose input varies and whose output does not.

    Layers with weights of zero begin so on purpose, dropout may drop everything, and a few elements may be
    equal by chance.
    """
    if not len(context.data.stats):
        return
    constant, varying = _constant_and_varying(context)
    calls = context.data.calls
    on_purpose: set[int] = set()  # modules whose weights were constant at their first call
    for call in _flat_calls(context, constant):
        value = int(calls.outputs[calls.output_offsets[call]])
        inputs = calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]]
        module = int(calls.module[call])
        if _may_be_flat(context, call, varying):
            on_purpose.add(module)
        elif varying[inputs].any() and module not in on_purpose and not _is_activation(context, value):
            stats = context.index.numbers(value)
            level = number_text(stats.max) if stats is not None and stats.max else "zero"
            title = f"the output {context.meta(value)} is {level} everywhere, though its input varies"
            yield op_finding(context, title, context.producer(value), value)


def _is_activation(context: ProblemContext, value: int) -> bool:
    """Whether the checks of `activations` cover it."""
    producer = context.producer(value)
    return context.name(producer) in RECTIFIERS or is_masked(context, producer)


def _flat_calls(context: ProblemContext, constant: Mask) -> list[int]:
    """The calls whose first output is large and constant, and was computed by them: not by a submodule."""
    calls, values = context.data.calls, context.data.values
    chosen = np.flatnonzero((calls.phase == FORWARD) & (np.diff(calls.output_offsets) > 0))
    outputs = calls.outputs[calls.output_offsets[chosen]]
    producers = values.producer[outputs]
    op_call = np.append(context.data.ops.call, -1)  # producer -1 reads the appended entry
    own = (producers >= 0) & (op_call[producers] == chosen)
    large = context.of_meta(lambda meta: meta.numel >= _MIN_ELEMENTS)
    flat: list[int] = chosen[own & constant[outputs] & large[outputs]].tolist()
    return flat


def _constant_and_varying(context: ProblemContext) -> tuple[Mask, Mask]:
    """Which values were measured to be one number throughout, and which to be several."""
    stats = context.data.stats
    constant = np.zeros(len(context.data.values), dtype=np.bool_)
    varying = constant.copy()
    finite = (stats.nans == 0) & (stats.infs == 0)
    constant[stats.value] = finite & (stats.min == stats.max)
    varying[stats.value] = finite & (stats.min < stats.max)
    return constant, varying


def _may_be_flat(context: ProblemContext, call: int, varying: Mask) -> bool:
    """Whether a call drops elements by chance, or uses a parameter not known to hold several numbers.

    Neither is a module without parameters a layer, if it does more than one thing: it may measure something.
    """
    calls, ops = context.data.calls, context.data.ops
    first, end = int(calls.first_op[call]), int(calls.end_op[call])
    works = int(context.forward[first:end].sum())
    if works > _ACTIVATION_OPS and not has_parameters(context, int(calls.module[call])):
        return True
    dropout = "drop" in context.module_type(int(calls.module[call])).lower()
    if dropout or context.named(RANDOM)[first:end].any():
        return True
    inputs = ops.inputs[ops.input_offsets[first] : ops.input_offsets[end]]
    weights = inputs[context.data.values.kind[inputs] == KINDS.index("parameter")]
    return not varying[weights].all()
