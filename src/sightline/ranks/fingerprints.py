"""The values of a rank that are compared: weights, batches, losses, random numbers; and the modes of modules.

Values are compared by the fingerprints that ``stats=True`` takes, or by their statistics.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.index import Index
from sightline.data.trace_data import (
    EVALUATION,
    I32,
    I64,
    KINDS,
    OPTIMIZER_STEP,
    PHASES,
    TRAINING,
    U64,
    TraceData,
)
from sightline.ranks.buffers import Buffers, buffers_of
from sightline.ranks.collectives import REPLICATED, Collectives
from sightline.ranks.reduced_gradients import Reduction, reduced_gradients

_PARAMETER: Final = KINDS.index("parameter")
_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_RANDOM: Final = re.compile(r"(native_dropout|bernoulli|rand|randn|randint|normal|uniform|rrelu)(_|_like)?")
_MOST: Final = 1000  #: of a series: series that are the same so often are the same


@dataclass(frozen=True)
class Weights:
    """The measured versions of whole parameters, in order."""

    begun: int  #: the number of versions at the beginning of the run, which come first
    names: tuple[str, ...]
    prints: U64
    lines: I32  #: where each was made; -1 where that is not recorded
    updates: tuple[int, ...]  #: the step of an optimizer that made it, counted for each name; 0 for none
    varied: NDArray[np.bool_]  #: which of them are more than one number, again and again

    def by_name(self, names: set[str] | None = None) -> dict[str, list[int]]:
        """The versions of each weight, or of those of some names."""
        versions: dict[str, list[int]] = {}
        for at, name in enumerate(self.names):
            if names is None or name in names:
                versions.setdefault(name, []).append(at)
        return versions


@dataclass(frozen=True)
class Series:
    """Fingerprints of values that come again in every step, and the line of the first."""

    prints: tuple[int, ...] = ()
    place: int = -1


@dataclass(frozen=True)
class Fingerprints:
    """The values of one rank that are compared with other ranks."""

    weights: Weights | None = None
    buffers: Buffers | None = None
    #: Parameters whose gradients the program reduces by itself.
    reduced: dict[str, Reduction] = field(default_factory=dict)
    batches: Series = Series()  #: inputs of the outermost module, call by call
    losses: Series = Series()  #: values that backward passes begin from
    draws: Series = Series()  #: random numbers that modules draw
    drawn: int = 0  #: how many numbers these are
    modes: dict[tuple[str, bool], int] = field(default_factory=dict)  #: (module, it trains): the line
    replicated: bool = False  #: it has a module of DDP
    replicated_in: frozenset[str] = frozenset()  #: the groups in which that reduces gradients, as far as seen
    sharded: bool = False  #: its weights are DTensors of tensor parallelism
    fully_sharded: bool = False  #: it has a module of FSDP, which splits weights but not buffers

    @property
    def is_replica(self) -> bool:
        """Whether its buffers should be those of other ranks."""
        return self.replicated or bool(self.reduced) or self.fully_sharded

    @property
    def has_own_batch(self) -> bool:
        """Whether it trains on data of its own; ranks of one tensor-parallel model share theirs."""
        if self.sharded:
            return False
        # Where only some gradients are reduced, the other weights may be shards of a model that ranks share.
        weights = set() if self.weights is None else set(self.weights.names)
        by_hand = bool(self.reduced) and weights <= self.reduced.keys()
        return self.replicated or self.fully_sharded or by_hand


def fingerprints_of(index: Index, collectives: Collectives, op_places: I32, places: I32) -> Fingerprints:
    """The fingerprints of a trace; ``places`` has the number of the line of each frame, of no line at -1."""
    data = index.raw
    fully_sharded = any(module.type.startswith("FSDP") for module in data.modules)
    # The weights of FSDP, too, are DTensors, but their ranks have batches of their own.
    shards = np.array(
        [any(each.startswith("Shard") for each in meta.placements) for meta in data.metas] or [False]
    )
    sharded = bool(shards[data.values.meta[data.values.kind == _PARAMETER]].any())
    draws, drawn = _draws(data, op_places)
    return Fingerprints(
        weights=_weights(data, op_places),
        buffers=buffers_of(index, op_places),
        reduced=reduced_gradients(data, collectives, op_places),
        batches=_batches(index, places),
        losses=_losses(data, op_places),
        draws=draws,
        drawn=drawn,
        modes=_modes(index, places),
        replicated=any(module.type == REPLICATED for module in data.modules),
        replicated_in=frozenset(
            each.group
            for each in collectives
            if each.kind == "all_reduce" and data.ops.phase[each.op] == _BACKWARD
        ),
        sharded=sharded and not fully_sharded,
        fully_sharded=fully_sharded,
    )


def _weights(data: TraceData, op_places: I32) -> Weights | None:
    """The versions that were used: those before the first call of a module do not count, but for the last.

    Ranks may initialise weights differently and then take those of one, as DDP does.
    """
    stats, values = data.stats, data.values
    if not len(stats):
        return None
    whole = np.array([not meta.placements for meta in data.metas] or [True])
    named = np.flatnonzero((values.kind == _PARAMETER) & (values.name >= 0) & whole[values.meta])
    outermost = np.flatnonzero(data.calls.parent < 0)
    first_use = int(data.calls.first_op[outermost].min()) if len(outermost) else 0
    early = named[values.producer[named] < first_use]
    begin = {int(values.name[value]): value for value in early.tolist()}  # the last of each
    begun = np.intersect1d(list(begin.values()), stats.value).astype(np.int64)
    later = np.intersect1d(named[values.producer[named] >= first_use], stats.value)
    measured = np.concatenate([begun, later[np.argsort(values.producer[later], kind="stable")]])
    if not len(measured):
        return None
    makers = values.producer[measured]
    lines = np.full(len(makers), -1, dtype=np.int32)
    lines[makers >= 0] = op_places[makers[makers >= 0]]
    names = tuple(data.names[name] for name in values.name[measured].tolist())
    rows = np.searchsorted(stats.value, measured)
    varied: NDArray[np.bool_] = np.asarray(stats.min[rows] < stats.max[rows])
    updates = _updates(data, names, makers)
    return Weights(len(begun), names, _fingerprints(data, rows), lines, updates, varied)


def _updates(data: TraceData, names: tuple[str, ...], makers: I32) -> tuple[int, ...]:
    """The number of the update of its weight for each version: one step may write a weight several times."""
    steps = [step for step in data.steps if step.name == OPTIMIZER_STEP]
    starts = np.array([step.first_op for step in steps], dtype=np.int64)
    seen: dict[str, list[int]] = {}
    updates = []
    for name, maker in zip(names, makers.tolist(), strict=True):
        at = int(np.searchsorted(starts, maker, side="right")) - 1
        if at < 0 or maker >= steps[at].end_op:
            updates.append(0)
            continue
        own = seen.setdefault(name, [])
        if at not in own:
            own.append(at)
        updates.append(own.index(at) + 1)
    return tuple(updates)


def _batches(index: Index, places: I32) -> Series:
    """The inputs of outermost modules in training mode; empty where one of them was not measured."""
    data, calls = index.raw, index.raw.calls
    outermost = np.flatnonzero((calls.parent < 0) & ((calls.flags & TRAINING) != 0))[:_MOST]
    prints: list[int] = []
    for call in outermost.tolist():
        taken = calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]]
        given = np.unique(taken).astype(np.int64)
        measured = _measured(data, given)
        if not measured:
            return Series()
        prints.append(hash(tuple(measured)))
    return Series(tuple(prints), _call_place(index, places, outermost))


def _call_place(index: Index, places: I32, calls: I64) -> int:
    return int(places[index.user_frames[index.raw.calls.frame[calls[0]]]]) if len(calls) else -1


def _losses(data: TraceData, op_places: I32) -> Series:
    """The last forward result before each backward pass, where it was measured."""
    ops = data.ops
    rows = np.flatnonzero((ops.level == 1) & ((ops.phase == _FORWARD) | (ops.phase == _BACKWARD)))
    if not len(data.stats) or not len(rows):
        return Series()
    backward = ops.phase[rows] == _BACKWARD
    begins = rows[np.flatnonzero(backward[1:] & ~backward[:-1])][:_MOST]
    prints: list[int] = []
    for op in begins.tolist():
        prints += _measured(data, np.array(ops.outputs_of(op)[:1], dtype=np.int64)) or ()
    return Series(tuple(prints), int(op_places[begins[0]]) if len(begins) else -1)


def _draws(data: TraceData, op_places: I32) -> tuple[Series, int]:
    """The random numbers that are drawn inside modules in the forward pass, and how many they are.

    Those outside may be meant to be the same: a sampler shuffles alike on all ranks. Draws that are all the
    same number, such as those of a dropout of nothing, are left out.
    """
    ops, stats = data.ops, data.stats
    random = np.array(
        [_RANDOM.fullmatch(name.partition(".")[0]) is not None for name in data.names] or [False]
    )
    rows = np.flatnonzero((ops.level == 1) & (ops.phase == _FORWARD) & (ops.call >= 0) & random[ops.name])
    prints: list[int] = []
    drawn, first = 0, -1
    for op in rows[:_MOST].tolist():
        value = np.array(ops.outputs_of(op)[-1:], dtype=np.int64)
        measured = _measured(data, value)
        if not measured:
            continue
        at = int(np.searchsorted(stats.value, value[0]))
        if stats.min[at] != stats.max[at]:
            prints += measured
            drawn += data.metas[data.values.meta[value[0]]].numel
            first = op if first < 0 else first
    return Series(tuple(prints), int(op_places[first]) if first >= 0 else -1), drawn


def _measured(data: TraceData, values: I64) -> list[int] | None:
    """The fingerprints of some values; None where one was not measured."""
    stats = data.stats
    at = np.searchsorted(stats.value, values)
    if not len(stats) or (at >= len(stats)).any() or (stats.value[at] != values).any():
        return None
    return list(map(int, _fingerprints(data, at)))


def _fingerprints(data: TraceData, rows: NDArray[np.int64]) -> U64:
    """The fingerprints of measured values; where none were taken, of their statistics."""
    stats = data.stats
    taken = stats.fingerprint[rows]
    if taken.all():
        return taken
    mixed = np.zeros(len(rows), dtype=np.uint64)
    for column in (stats.min, stats.max, stats.mean, stats.l2):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + column[rows].view(np.uint64)
    return np.where(taken == 0, mixed, taken)


def _modes(index: Index, places: I32) -> dict[tuple[str, bool], int]:
    """The outermost modules and their modes, each with the line of its first call."""
    data, calls = index.raw, index.raw.calls
    outermost = np.flatnonzero((calls.parent < 0) & ((calls.flags & (TRAINING | EVALUATION)) != 0))
    first_calls: dict[tuple[int, bool], int] = {}
    for at in outermost.tolist():
        first_calls.setdefault((int(calls.module[at]), bool(calls.flags[at] & TRAINING)), at)
    return {
        (data.modules[module].label, training): _call_place(index, places, np.array([at]))
        for (module, training), at in first_calls.items()
    }
