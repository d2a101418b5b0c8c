"""Problems in the numbers, where statistics were taken: NaN and infinities, layers that say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.nonfinite import Finding as NonFinite
from sightline.analysis.nonfinite import brought, call_text, first_call, lasting
from sightline.analysis.problems.activations import RECTIFIERS
from sightline.analysis.problems.context import FORWARD, RANDOM, Mask, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.notation import number_text
from sightline.trace.data import KINDS
from sightline.trace.user_frames import numbers_text

_LEAST_DEAD: Final = 32  #: elements; fewer may be zero together by chance


# -- not finite --------------------------------------------------------------------------------------------


@check(
    "non-finite",
    Severity.ERROR,
    "Whatever is computed from it is lost, and one update with it destroys the weights.",
)
def first_non_finite(context: ProblemContext) -> Iterator[Finding]:
    """What came with a NaN, and the op that made the first NaN or infinity, which `analysis.nonfinite` names.

    It is a problem where a check was asked for, or where something of it, or of one made later, is left at
    the end of the run: not if a softmax or a ``where`` has taken all of it away, and not in gradients that a
    loss scaler looks after.
    """
    index = context.index
    if not len(context.data.stats):
        return
    for each in brought(index):
        reader = next(iter(index.consumers(each.value.id)), -1)
        if reader >= 0:
            yield Finding(
                str(each), context.module(reader), int(context.frames[reader]), reader, each.value.id
            )
    found, left = lasting(index)
    left = (
        found if context.data.info.get("check") else [made for made in left if not _is_scaled(context, made)]
    )
    hidden = first_call(index) if not found else None
    if hidden is not None:
        call, value = hidden
        at = context.data.calls
        yield Finding(call_text(call, value), int(at.module[call.id]), int(at.frame[call.id]), -1, value.id)
    if not left:
        return
    first_nan = next((made for made in left if made.nans), left[0])
    for op, made in sorted({made.op.id: made for made in (found[0], left[0], first_nan)}.items()):
        yield Finding(_title(made), context.module(op), int(context.frames[op]), op, made.value.id)


def _is_scaled(context: ProblemContext, made: NonFinite) -> bool:
    """Whether it is a gradient, and a loss scaler looks for infinite ones."""
    return made.op.phase != "forward" and any("_amp_" in name for name in context.bare_names)


def _title(finding: NonFinite) -> str:
    """What an op made, and out of what: ``log made 3 NaN of 8 in f32[2, 4] out of f32[2, 4] (all Inf)``."""
    given = []
    for value in finding.op.inputs:
        numbers = numbers_text(value)
        given.append(f"{value} ({numbers})" if numbers else str(value))
    return f"{finding.sentence()} out of {', '.join(dict.fromkeys(given)) or 'nothing'}"


# -- dead layers -------------------------------------------------------------------------------------------


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
    constant, varied = _spread(context)
    calls = context.data.calls
    on_purpose: set[int] = set()  # modules whose weights were constant at their first call
    for call in _flat_calls(context, constant):
        value = int(calls.outputs[calls.output_offsets[call]])
        given = calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]]
        module = int(calls.module[call])
        if _may_be_flat(context, call, varied):
            on_purpose.add(module)
        elif varied[given].any() and module not in on_purpose and not _is_activation(context, value):
            numbers = context.index.numbers(value)
            level = number_text(numbers.max) if numbers is not None and numbers.max else "zero"
            title = f"the output {context.meta(value)} is {level} everywhere, though its input varies"
            frame = int(calls.frame[call])
            yield Finding(title, module, frame, context.producer(value), value)


def _is_activation(context: ProblemContext, value: int) -> bool:
    """Whether `activations` tells of it, as of every activation."""
    return context.name(context.producer(value)) in RECTIFIERS


def _flat_calls(context: ProblemContext, constant: Mask) -> list[int]:
    """The calls whose first output is large, constant and made by themselves: not by a submodule."""
    calls, values = context.data.calls, context.data.values
    some = np.flatnonzero((calls.phase == FORWARD) & (np.diff(calls.output_offsets) > 0))
    made = calls.outputs[calls.output_offsets[some]]
    maker = values.producer[made]
    home = np.append(context.data.ops.call, -1)  # what no op made has producer -1: the appended entry
    own = (maker >= 0) & (home[maker] == some)
    large = context.of_meta(lambda meta: meta.numel >= _LEAST_DEAD)
    found: list[int] = some[own & constant[made] & large[made]].tolist()
    return found


def _spread(context: ProblemContext) -> tuple[Mask, Mask]:
    """Which values were measured to be one number throughout, and which to be several."""
    stats = context.data.stats
    constant = np.zeros(len(context.data.values), dtype=np.bool_)
    varied = constant.copy()
    finite = (stats.nans == 0) & (stats.infs == 0)
    constant[stats.value] = finite & (stats.min == stats.max)
    varied[stats.value] = finite & (stats.min < stats.max)
    return constant, varied


def _may_be_flat(context: ProblemContext, call: int, varied: Mask) -> bool:
    """Whether a call drops elements by chance, or uses a parameter not known to hold several numbers."""
    calls, ops = context.data.calls, context.data.ops
    first, end = int(calls.first_op[call]), int(calls.end_op[call])
    drops = "drop" in context.module_type(int(calls.module[call])).lower()
    if drops or context.named(RANDOM)[first:end].any():
        return True
    given = ops.inputs[ops.input_offsets[first] : ops.input_offsets[end]]
    weights = given[context.data.values.kind[given] == KINDS.index("parameter")]
    return not varied[weights].all()
