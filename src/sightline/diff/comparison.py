"""`compare`: two recordings in, everything that is known about their difference out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from sightline.diff.alignment import Alignment
from sightline.diff.divergence import Divergence, Divergences, number
from sightline.diff.module_errors import ModuleRow, module_rows
from sightline.diff.op_labels import OpLabel
from sightline.diff.parameters import ParameterDiff, compare_parameters
from sightline.diff.side import Side, span_of
from sightline.diff.values import UNKNOWN, State, Values, Verdict
from sightline.trace.data import LEVELS, REQUIRES_GRAD, TensorMeta, TraceData
from sightline.trace.index import Index

VALUES: Final = ("auto", "tensors", "statistics", "fingerprints", "none")
_ATEN: Final = LEVELS.index("aten")
_STRANGERS: Final = 0.2  #: of the ops that have a partner, below which two recordings are of different models

Steps = str | int | tuple[str | int | None, str | int | None] | None


@dataclass(frozen=True)
class OpPair:
    """An op on both sides, and how far apart what they make is."""

    a: int
    b: int
    verdict: Verdict


@dataclass(frozen=True)
class Parting:
    """The first place where the two runs do other ops: what each side runs there, if anything."""

    a: OpLabel | None
    b: OpLabel | None

    @property
    def text(self) -> str:
        """``mm at net.py:9 (fc) against relu at net.py:11``."""
        if self.a and self.b:
            return f"{self.a} against {self.b}"
        return f"{self.a or self.b} only on the {'first' if self.a else 'second'} side"

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, "a": self.a.to_dict() if self.a else None,
                "b": self.b.to_dict() if self.b else None}  # fmt: skip


class Comparison:
    """What two recordings have in common, and where they part. Plain data; views of it are elsewhere."""

    def __init__(self, alignment: Alignment, level: str, divergences: Divergences, notes: list[str]) -> None:
        self.alignment = alignment
        self.level = level
        self.a, self.b = alignment.a, alignment.b
        self._looking = divergences
        self.divergences, self.more = divergences.find()
        self.notes = notes + self._strangers()

    @property
    def divergence(self) -> Divergence | None:
        """The first true divergence."""
        return self.divergences[0] if self.divergences else None

    @cached_property
    def verdict(self) -> str:
        """Whether they are "same", "close" (up to rounding), "different", or "unknown" without values."""
        if self.divergences:
            return "different"
        states = Counter(self.alignment.compare(one, other).state for one, other in self.alignment.checked())
        if not states[State.SAME] and not states[State.CLOSE]:
            return "unknown"
        return "close" if states[State.CLOSE] or states[State.DIFFERENT] else "same"

    @cached_property
    def pairs(self) -> list[OpPair]:
        """Every op with a partner, in the order of the first run."""
        made, spare = self.alignment, self.alignment.spare
        found = []
        for x in np.flatnonzero(self.a.compared).tolist():
            y = made.ops_a[x]
            if y >= 0:
                outputs = zip(self.a.outputs(x), self.b.outputs(y), strict=False)
                verdicts = [made.compare(*pair) for pair in outputs if pair[0] not in spare] or [UNKNOWN]
                worst = verdicts[0] if len(verdicts) == 1 else max(verdicts, key=lambda each: each.state)
                found.append(OpPair(x, y, worst))
        return found

    @property
    def compared_by(self) -> list[str]:
        """What values are compared by, the best first."""
        sides = (self.a.data, self.b.data)
        if not self.alignment.compare.measured:
            return []
        kept = ["kept tensors"] if all(data.captures for data in sides) else []
        return [*kept, "statistics and fingerprints"] if all(len(data.stats) for data in sides) else kept

    @cached_property
    def differing(self) -> list[OpPair]:
        """The pairs that make different values."""
        return [pair for pair in self.pairs if pair.verdict.state is State.DIFFERENT]

    @cached_property
    def removed(self) -> list[int]:
        """Ops of the first recording without a partner."""
        return [op for op in np.flatnonzero(self.a.compared).tolist() if self.alignment.ops_a[op] < 0]

    @cached_property
    def added(self) -> list[int]:
        """Ops of the second recording without a partner."""
        return [op for op in np.flatnonzero(self.b.compared).tolist() if self.alignment.ops_b[op] < 0]

    @cached_property
    def modules(self) -> list[ModuleRow]:
        """The pairs of module calls, with how far apart their results are."""
        return module_rows(self.alignment)

    @cached_property
    def parameters(self) -> ParameterDiff:
        """The weights and buffers of both."""
        return compare_parameters(self.alignment)

    @cached_property
    def parting(self) -> Parting | None:
        """The first place where the two runs do other ops, layout aside."""
        return _parting(self)

    @cached_property
    def harmless(self) -> list[str]:
        """What differs and does not matter, or follows from the divergence, counted."""
        told = [_names_text(self.a, self.removed, "a"), _names_text(self.b, self.added, "b")]
        return [text for text in (*told, *_metadata(self)) if text]

    def _strangers(self) -> list[str]:
        computed = [int((side.compared & ~side.layout).sum()) for side in (self.a, self.b)]
        made = self.alignment
        paired = sum(
            1 for op in np.flatnonzero(self.a.compared & ~self.a.layout).tolist() if made.ops_a[op] >= 0
        )
        few = paired < _STRANGERS * min(computed)
        other_root = _roots(self.a.data).isdisjoint(_roots(self.b.data))
        if min(computed) and (few or (other_root and paired < _STRANGERS * max(computed))):
            return [f"these look like different models: {paired} of {computed[0]} ops have a partner"]
        return []

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        return {
            "verdict": self.verdict,
            "divergence": self.divergence.to_dict() if self.divergence else None,
            "divergences": [each.to_dict() for each in self.divergences],
            "parting": self.parting.to_dict() if self.parting else None,
            "parameters": self.parameters.to_dict(),
            "modules": [row.to_dict() for row in self.modules],
            "pairs": [[pair.a, pair.b, pair.verdict.state.name.lower(), _plain(pair.verdict.error)]
                      for pair in self.pairs],
            "added": self.added,
            "removed": self.removed,
            "harmless": self.harmless,
            "notes": self.notes,
            "level": self.level,
        }  # fmt: skip


def compare(
    a: Index,
    b: Index,
    *,
    rename: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    values: str = "auto",
    step: Steps = None,
) -> Comparison:
    """Two recordings compared."""
    level, notes = _level(a.raw, b.raw)
    notes += _about(a.raw, "a") + _about(b.raw, "b") + _measured(a.raw, b.raw, values)
    first, second = step if isinstance(step, tuple) else (step, step)
    words: dict[Any, int] = {}
    one = Side(a, level, words, span_of(a.raw, first))
    other = Side(b, level, words, span_of(b.raw, second))
    alignment = Alignment(one, other, Values(one, other, rtol, atol, values), rename)
    return Comparison(alignment, level, Divergences(alignment), notes)


def _level(a: TraceData, b: TraceData) -> tuple[str, list[str]]:
    """The finest level that both have, and what is to be said of it."""
    levels = [{int(level) for level in np.unique(data.ops.level)} for data in (a, b)]
    if all(_ATEN in there for there in levels):
        return "aten", []
    if all(there - {_ATEN} for there in levels):
        return "api", ["ops are compared as API calls: not both recordings have aten ops"]
    lacking = " and ".join(name for name, there in zip("ab", levels, strict=True) if not there)
    if lacking:
        return "none", [f'only module calls are compared: {lacking} has no ops (ops="none")']
    return "none", [
        "only module calls are compared: one recording has API calls alone, the other aten ops alone"
    ]


def _about(data: TraceData, name: str) -> list[str]:
    info = data.info
    told = []
    if info.get("exception"):
        told.append(f"{name} ended with an exception: what ran before it is compared")
    elif info.get("unfinished"):
        told.append(f"{name} is cut off: what was written before its process ended is compared")
    if info.get("last") and info.get("dropped"):
        told.append(f"{name} keeps its last {info['last']} ops only: what ran before is not compared")
    return told


def _measured(a: TraceData, b: TraceData, values: str) -> list[str]:
    if values == "none":
        return ["values are not compared, as asked"]
    lacking = [name for name, data in (("a", a), ("b", b)) if not len(data.stats) and not data.captures]
    if not lacking:
        return []
    which = "neither recording has" if len(lacking) == 2 else f"{lacking[0]} has no"
    what = f"{which} statistics or kept tensors" if len(lacking) == 1 else f"{which} statistics"
    return [f"{what}: ops, constants and shapes are compared, values are not; record both with stats=True"]


def _parting(found: Comparison) -> Parting | None:
    a, b, made = found.a, found.b, found.alignment
    ours: list[int] = np.flatnonzero(a.compared & ~a.layout).tolist()
    theirs: list[int] = np.flatnonzero(b.compared & ~b.layout).tolist()
    lone_a = next((op for op in ours if made.ops_a[op] < 0), -1)
    lone_b = next((op for op in theirs if made.ops_b[op] < 0), -1)
    if lone_a < 0 and lone_b < 0:
        return None
    # where on the first side the lone op of the second stands: after the partner of the one before it
    before = [made.ops_b[op] for op in theirs if op < lone_b and made.ops_b[op] >= 0] if lone_b >= 0 else []
    stands = max(before, default=-1) if lone_b >= 0 else len(made.ops_a)
    places = found._looking.reasons.places
    if lone_a >= 0 and lone_a <= stands:
        later = [made.ops_a[op] for op in ours if op < lone_a and made.ops_a[op] >= 0]
        after = max(later, default=-1)
        opposite = (
            lone_b if lone_b >= 0 and all(made.ops_b[op] < 0 for op in theirs if after < op <= lone_b) else -1
        )
        return Parting(places[0].of(lone_a), places[1].of(opposite) if opposite >= 0 else None)
    between = [op for op in ours if op > stands and made.ops_a[op] < 0]
    opposite = between[0] if between and not any(stands < op < between[0] for op in ours) else -1
    return Parting(places[0].of(opposite) if opposite >= 0 else None, places[1].of(lone_b))


def _names_text(side: Side, ops: list[int], name: str) -> str:
    if not ops:
        return ""
    counts = Counter(side.op_name(op) for op in ops)
    shown = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in counts.most_common(5))
    more = f" and {len(counts) - 5} more kinds" if len(counts) > 5 else ""
    return f"{len(ops)} op{'s' if len(ops) > 1 else ''} only in {name}: {shown}{more}"


def _metadata(found: Comparison) -> list[str]:
    """Differences of shape, dtype, device, stride, training and grad mode, counted."""
    counts: Counter[str] = Counter()
    a, b = found.a.data, found.b.data
    theirs = np.array(found.alignment.values_a, dtype=np.int64)
    ours = np.flatnonzero(theirs >= 0)
    theirs = theirs[ours]
    looks = a.values.meta[ours].astype(np.int64) * max(1, len(b.metas)) + b.values.meta[theirs]
    for look, count in zip(*(each.tolist() for each in np.unique(looks, return_counts=True)), strict=True):
        one, other = divmod(look, max(1, len(b.metas)))
        for what in _look_differences(a.metas[one], b.metas[other]):
            counts[what] += count
    grads = int(((a.values.flags[ours] ^ b.values.flags[theirs]) & REQUIRES_GRAD).sum())
    if grads:
        counts["requires_grad"] = grads
    modes = {(x.module, y.module) for x, y in _modes(found)}
    told = [f"{what} of {count} value{'s' if count > 1 else ''}" for what, count in counts.most_common()]
    return told + ([f"training mode of {len(modes)} module{'s' if len(modes) > 1 else ''}"] if modes else [])


def _look_differences(one: TensorMeta, other: TensorMeta) -> list[str]:
    told = [
        f"{what} {left} | {right}"
        for what, left, right in (("dtype", one.dtype, other.dtype), ("device", one.device, other.device))
        if left != right
    ]
    if one.shape != other.shape:
        return [*told, "shapes"]
    return [*told, "strides"] if one.stride != other.stride else told


def _roots(data: TraceData) -> set[str]:
    return {info.type for id, info in enumerate(data.modules) if info.root == id}


@dataclass(frozen=True, slots=True)
class _Mode:
    module: int
    training: bool


def _modes(found: Comparison) -> list[tuple[_Mode, _Mode]]:
    """Pairs of modules of which one trains."""
    pairs = []
    calls_a, calls_b = found.a.data.calls.module.tolist(), found.b.data.calls.module.tolist()
    for x, y in enumerate(found.alignment.calls.of_a.tolist()):
        if y >= 0:
            one, other = found.a.data.modules[calls_a[x]], found.b.data.modules[calls_b[y]]
            if one.training != other.training:
                pairs.append((_Mode(calls_a[x], one.training), _Mode(calls_b[y], other.training)))
    return pairs


def _plain(error: float) -> float | str | None:
    return None if math.isnan(error) else number(error)
