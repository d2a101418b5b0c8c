"""How far two recordings can be compared: the finest level that both have, and notes on the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.cost import is_opaque
from sightline.compare.op_pairs import Alignment
from sightline.compare.side import Side
from sightline.compare.values import State
from sightline.data.trace_data import LEVELS, TraceData
from sightline.hints import Hint

_ATEN: Final = LEVELS.index("aten")


def compared_level(a: TraceData, b: TraceData) -> tuple[str, list[str]]:
    """The finest level that both have, and notes about it."""
    levels = [{int(level) for level in np.unique(data.ops.level[~is_opaque(data)])} for data in (a, b)]
    opaque = [len(data.ops) > 0 and not levels[at] for at, data in enumerate((a, b))]
    levels = [levels[1 - at] if opaque[at] else levels[at] for at in (0, 1)]  # compiled code has no level
    if all(_ATEN in recorded for recorded in levels):
        return "aten", []
    if all(recorded - {_ATEN} for recorded in levels):
        return "api", ["ops are compared as API calls: not both recordings have aten ops"]
    if all(opaque):
        return "api", ["the ops of both ran in compiled code, whose inside is not compared"]
    lacking = [(name, data) for name, data, has in zip("ab", (a, b), levels, strict=True) if not has]
    if not lacking:
        why = "one recording has API calls alone, the other aten ops alone"
        return "none", [f"only module calls are compared: {why}"]
    compared = "module calls" if all(len(data.calls) for data in (a, b)) else "parameters"
    reasons = []
    for name, data in lacking:
        if data.info.get("ops") == "none":
            option = Hint('ops="none"', "--ops none")
            reasons.append(f"{name} has no ops ({option})")
        elif data.info.get("unfinished"):
            reasons.append(f"{name} was cut off before its first ops were written")
        else:
            reasons.append(
                f"the ops of {name} ran in compiled code" if len(data.ops) else f"{name} has no ops"
            )
    return "none", [f"only {compared} are compared: {' and '.join(reasons)}"]


def recording_notes(side: Side, name: str) -> Iterator[str]:
    """Sentences about the parts that a recording lacks: its end, its beginning, or unreadable numbers."""
    info = side.data.info
    if info.get("exception"):
        yield f"{name} ended with an exception: the ops before it are compared"
    elif info.get("unfinished") and len(side.data.ops):
        yield f"{name} is cut off: the part written before its process ended is compared"
    if info.get("last") and info.get("dropped"):
        yield f"{name} keeps its last {info['last']} ops only: earlier ones are not compared"
    if side.stats_fault:
        yield f"the statistics of {name} are left out, as they cannot be read: {side.stats_fault}"


def value_notes(a: Side, b: Side, values: str) -> list[str]:
    """Why values are not compared, if they are not."""
    if values == "none":
        return ["values are not compared, as requested"]
    lacking = [name for name, side in (("a", a), ("b", b)) if not len(side.stats) and not side.data.captures]
    if not lacking or any(side.data.info.get("unfinished") and not len(side.data.ops) for side in (a, b)):
        return []
    compared = "ops, constants" if a.compared.any() and b.compared.any() else "module calls"
    rest = f"{compared} and shapes are compared, values are not"
    fix = f"; record both with {Hint.recording('stats')}"
    if len(lacking) == 2:
        return [f"neither recording has statistics: {rest}{fix}"]
    fix = "" if a.stats_fault or b.stats_fault else fix
    return [f"{lacking[0]} has no statistics or kept tensors: {rest}{fix}"]


def precision_notes(a: Side, b: Side) -> Iterator[str]:
    """Whether one side computes float32 products in a coarser precision than the other."""
    if a.precision != b.precision:
        kinds = [[f"{kind} in {name}s" for name, kind in side.precision.items()] for side in (a, b)]
        texts = [" and ".join(each) or "full precision" for each in kinds]
        yield f"float32 products: {texts[0]} in a, {texts[1]} in b; the tolerance is by the coarser one"


def integer_notes(alignment: Alignment) -> Iterator[str]:
    """Whether inputs of integers, which have no statistics, could not be compared."""
    a = alignment.a
    if not alignment.compare.measured:
        return
    lacking = [value for value, other in enumerate(alignment.values_a)
               if other >= 0 and not a.rounding[value] and a.kind(value) == "input"
               and alignment.compare(value, other).state is State.UNKNOWN]  # fmt: skip
    names = list(dict.fromkeys(a.index.values[value].name or "an input" for value in lacking))
    if names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        verb = "were" if len(names) > 1 else "was"
        yield f"integers are not measured: {listed} {verb} not compared"
