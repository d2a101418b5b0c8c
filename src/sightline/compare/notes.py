"""How far two recordings can be compared: the finest level that both have, and notes on what they lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.cost import is_opaque
from sightline.compare.side import Side
from sightline.data.trace_data import LEVELS, TraceData

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
    lacking = [(name, data) for name, data, has in zip("ab", (a, b), levels, strict=True) if not has]
    if not lacking:
        why = "one recording has API calls alone, the other aten ops alone"
        return "none", [f"only module calls are compared: {why}"]
    if not all(len(data.calls) for data in (a, b)):
        what = "only parameters are compared"
    else:
        what = "only module calls are compared"
    return "none", [f"{what}: {' and '.join(_lack_of_ops(name, data) for name, data in lacking)}"]


def _lack_of_ops(name: str, data: TraceData) -> str:
    """Why a recording has no ops."""
    if data.info.get("ops") == "none":
        return f'{name} has no ops (ops="none")'
    if data.info.get("unfinished"):
        return f"{name} was cut off before its first ops were written"
    if len(data.ops):
        return f"the ops of {name} ran in compiled code"
    return f"{name} has no ops"


def recording_notes(side: Side, name: str) -> Iterator[str]:
    """What one recording lacks: its end, its beginning, or numbers that cannot be read."""
    info = side.data.info
    if info.get("exception"):
        yield f"{name} ended with an exception: what ran before it is compared"
    elif info.get("unfinished") and len(side.data.ops):
        yield f"{name} is cut off: what was written before its process ended is compared"
    if info.get("last") and info.get("dropped"):
        yield f"{name} keeps its last {info['last']} ops only: what ran before is not compared"
    if side.stats_fault:
        yield f"the statistics of {name} are left out, as they cannot be read: {side.stats_fault}"


def value_notes(a: Side, b: Side, values: str) -> list[str]:
    """Why values are not compared, if they are not."""
    if values == "none":
        return ["values are not compared, as asked"]
    lacking = [name for name, side in (("a", a), ("b", b)) if not len(side.stats) and not side.data.captures]
    if not lacking or any(side.data.info.get("unfinished") and not len(side.data.ops) for side in (a, b)):
        return []
    what = "ops, constants and shapes" if a.compared.any() and b.compared.any() else "module calls and shapes"
    rest = f"{what} are compared, values are not"
    if len(lacking) == 2:
        return [f"neither recording has statistics: {rest}; record both with stats=True"]
    fix = "" if a.stats_fault or b.stats_fault else "; record both with stats=True"
    return [f"{lacking[0]} has no statistics or kept tensors: {rest}{fix}"]
