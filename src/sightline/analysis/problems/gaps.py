"""Gaps: the problems that a recording cannot check, each with the option that would record it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sightline.analysis.problems.context import BACKWARD, ProblemContext
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.data.trace_data import FLAVOURS, KINDS
from sightline.hints import Hint

#: Shown for a recording whose process was killed.
CUT_SHORT: Final = "the process ended before the recording did: what it did last may be missing"


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
    external = int((data.values.kind == KINDS.index("external")).sum())
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
