"""Buffers of replicas: the versions that each call of a module was given, and where ranks differ in these.

Only versions that a call is given count: DDP lets buffers differ until its next forward pass copies those of
rank 0 to all. A batch norm writes its running statistics without a sign from torch; it is followed by the
statistics of its batch. A buffer that was not measured, such as a counter, is followed by the ops that write
to it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.data.forms import SLOT
from sightline.data.index import Index
from sightline.data.op_groups import BATCH_NORMS
from sightline.data.trace_data import EVALUATION, I32, I64, KINDS, TRAINING, TraceData
from sightline.data.training_steps import innermost_steps
from sightline.ranks.collectives import kind_of
from sightline.ranks.folder import ranks_text

if TYPE_CHECKING:
    from sightline.ranks.merge import Run

_BUFFER: Final = KINDS.index("buffer")
#: Ops that write running statistics, though their schemas do not say so.
_NORMS: Final = BATCH_NORMS | {"batch_norm_gather_stats_with_counts"}
_RUNNING: Final = frozenset(("running_mean", "running_var", "num_batches_tracked"))
#: Ops whose result does not depend on the old contents.
_OVERWRITES: Final = frozenset(("copy_", "fill_", "zero_"))
_MOST: Final = 1000  #: versions of a buffer that are kept
_MOST_RUNNING: Final = 8  #: of running statistics, of which there are many and which differ at once


@dataclass(frozen=True)
class Versions:
    """The versions of a buffer that calls of a module were given, an entry for each change."""

    calls: tuple[int, ...]  #: from which call on
    prints: tuple[int, ...]
    lines: tuple[int, ...]  #: where it was written; -1 before the recording
    steps: tuple[str, ...]  #: the step of that call; empty outside of all
    end: int  #: the first call of which it is not known
    count: int  #: of all calls


@dataclass(frozen=True)
class Buffers:
    """The buffers of one rank."""

    given: dict[tuple[str, bool], Versions]  #: by name, and whether the calls are in evaluation mode
    running: frozenset[str]  #: names of running statistics of norms


# -- of one rank -----------------------------------------------------------------------------------------


def buffers_of(index: Index, op_places: I32) -> Buffers | None:
    """The buffers of a trace; None without fingerprints or buffers.

    None, too, where only the last ops were kept: their calls on one rank are not those on another.
    """
    data = index.raw
    values = data.values
    named = np.flatnonzero((values.kind == _BUFFER) & (values.name >= 0))
    if not data.stats.fingerprint.any() or not len(named) or data.info.get("dropped"):
        return None
    writes = _Writes(data, named)
    # The first op of each call of a module, by its path and whether it evaluates.
    calls: dict[tuple[str, bool], list[int]] = {}
    columns = (data.calls.module, data.calls.flags, data.calls.first_op)
    for module, flags, first_op in zip(*(each.tolist() for each in columns), strict=True):
        if flags & (TRAINING | EVALUATION):
            key = (data.modules[module].path, not flags & TRAINING)
            calls.setdefault(key, []).append(first_op)
    steps = innermost_steps(index.step_infos)
    starts = [step.first_op for step in steps]
    given: dict[tuple[str, bool], Versions] = {}
    for name, evaluates in product(writes.names, (False, True)):
        firsts = calls.get((_owner(name), evaluates), [])
        most = _MOST_RUNNING if name in writes.running else _MOST
        rows = list(islice(writes.given(name, firsts), most + 1))
        end = rows.pop()[0] if len(rows) > most else len(firsts)
        when = []
        for _, first_op, _, _ in rows:
            at = bisect_right(starts, first_op) - 1
            when.append(steps[at].name if at >= 0 and first_op < steps[at].end_op else "")
        if rows:
            lines = tuple(int(op_places[op]) if op >= 0 else -1 for _, _, op, _ in rows)
            numbers, prints = tuple(row[0] for row in rows), tuple(row[3] for row in rows)
            given[name, evaluates] = Versions(numbers, prints, lines, tuple(when), end, len(firsts))
    return Buffers(given, frozenset(writes.running))


def _owner(name: str) -> str:
    """The path of the module that has a buffer."""
    return name.rpartition(".")[0]


class _Writes:
    """The states of each buffer of a trace, as numbers that are equal for equal contents."""

    def __init__(self, data: TraceData, named: I64) -> None:
        self._data = data
        self.running: set[str] = set()
        self._states: dict[str, list[tuple[int, int]]] = {}  # (op that wrote it, state)
        names, values = data.names, data.values
        events = [(int(values.producer[value]), names[values.name[value]], value, ())
                  for value in named.tolist()]  # fmt: skip
        for op, name, value, results in sorted([*events, *self._norms(named)], key=lambda event: event[0]):
            states = self._states.setdefault(name, [])
            before = states[-1][1] if states else 0
            state = _mixed("batch norm", before, *results) if results else self._version(before, op, value)
            states.append((op, state))
        # Other norms than those of batches run them on copies, which torch then copies back.
        self.running |= {name for name in self._states if name.rpartition(".")[2] in _RUNNING}

    @property
    def names(self) -> list[str]:
        return list(self._states)

    def given(self, name: str, calls: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """Each call that is given a new state: its number and first op, the op that wrote it, the state."""
        states = self._states[name]
        ops = [op for op, _ in states]
        last = -1
        for number, first_op in enumerate(calls):
            at = max(bisect_left(ops, first_op) - 1, 0)
            if at != last:
                last = at
                yield number, first_op, *states[at]

    def _norms(self, named: I64) -> Iterator[tuple[int, str, int, tuple[int, ...]]]:
        """The batch norms that were trained, and the running statistics they wrote."""
        data, ops = self._data, self._data.ops
        wanted = np.array([name.partition(".")[0] in _NORMS for name in data.names] or [False])
        buffers = set(named.tolist())
        for op in np.flatnonzero((ops.level == 1) & wanted[ops.name]).tolist() if len(ops) else ():
            outputs = ops.outputs_of(op)
            of_batch = outputs if "gather" in data.names[ops.name[op]] else outputs[1:3]
            results = tuple(filter(None, map(self._print, of_batch)))
            if not results:  # in evaluation mode it has none
                continue
            for value in ops.inputs_of(op):
                if int(value) in buffers:
                    name = data.names[data.values.name[value]]
                    owner = _owner(name)
                    self.running.update(f"{owner}.{each}".lstrip(".") for each in _RUNNING)
                    yield op, name, int(value), results

    def _version(self, before: int, op: int, value: int) -> int:
        """A version by its fingerprint, or by the op that wrote it."""
        measured = self._print(value)
        if measured or op < 0:
            return measured
        ops = self._data.ops
        name = self._data.names[ops.name[op]]
        if kind_of(name):  # a collective has the same result on every rank
            return _mixed(kind_of(name))
        form = self._data.forms[ops.form[op]]
        constants = [repr(leaf) for _, leaf in form.leaves() if leaf is not SLOT]
        replaced = int(self._data.values.previous[value])
        others = [self._print(each) for each in ops.inputs_of(op) if int(each) != replaced]
        plain = name.partition(".")[0]
        return _mixed(name, 0 if plain in _OVERWRITES else before, *constants, *others)

    def _print(self, value: int) -> int:
        """The fingerprint of a value; 0 where none was taken."""
        stats = self._data.stats
        at = int(np.searchsorted(stats.value, value))
        is_there = at < len(stats) and int(stats.value[at]) == int(value)
        return int(stats.fingerprint[at]) if is_there else 0


def _mixed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


# -- between ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Difference:
    """The first call that is given another buffer on some ranks than on the first one."""

    call: int
    name: str
    evaluates: bool
    ranks: list[int]
    lines: tuple[int, int]  #: where it was written on the first rank, and on the first of the others
    step: str


def buffer_problems(run: Run) -> Iterator[Problem]:
    """Buffers that calls of replicas were given differently: running statistics by themselves."""
    groups: dict[Hashable, list[tuple[int, Buffers]]] = {}
    for rank, record in run.records.items():
        buffers = record.values.buffers
        if buffers is not None and record.values.is_replica:
            names = frozenset(name for name, _ in buffers.given)
            groups.setdefault(names, []).append((rank, buffers))
    for (rank, ours), *others in groups.values():
        differences = [each for key, mine in ours.given.items()
                       if (each := _difference(key, mine, others)) is not None]  # fmt: skip
        differences.sort(key=lambda each: (each.call, each.evaluates, each.name))
        rest = [each for each in differences if each.name not in ours.running]
        if rest:
            yield _drift(run, rank, rest)
        running = [each for each in differences if each.name in ours.running]
        if running:
            yield _running_statistics(run, rank, running)


def _difference(
    key: tuple[str, bool], mine: Versions, others: list[tuple[int, Buffers]]
) -> _Difference | None:
    """The first difference in a buffer between one rank and the others."""
    first: _Difference | None = None
    for rank, buffers in others:
        yours = buffers.given.get(key)
        call = None if yours is None else _first_difference(mine, yours)
        if yours is None or call is None:
            continue
        if first is not None and call == first.call:
            first.ranks.append(rank)
        elif first is None or call < first.call:
            here, there = _at(mine, call), _at(yours, call)
            step = mine.steps[here] if mine.calls[here] == call else yours.steps[there]
            first = _Difference(call, *key, [rank], (mine.lines[here], yours.lines[there]), step)
    return first


def _first_difference(mine: Versions, yours: Versions) -> int | None:
    """The first call that is given another version on each side; None while all are equal.

    Ranks that call a module another number of times, such as for batches left over or for a log, are given
    the same versions by other calls. Then only one that the other rank never had is a difference.
    """
    if mine.calls == yours.calls and mine.prints == yours.prints:
        return None
    if mine.count != yours.count:
        fewer, more = sorted((mine, yours), key=lambda each: len(each.prints))
        if more.end < more.count:
            return None
        known = {*more.prints, 0}
        return next(
            (call for call, state in zip(fewer.calls, fewer.prints, strict=True) if state not in known), None
        )
    for call in sorted({*mine.calls, *yours.calls}):
        if call < min(mine.end, yours.end) and mine.prints[_at(mine, call)] != yours.prints[_at(yours, call)]:
            return call
    return None


def _at(versions: Versions, call: int) -> int:
    """The entry for a call."""
    return bisect_right(versions.calls, call) - 1


def _drift(run: Run, rank: int, differences: list[_Difference]) -> Problem:
    """Buffers that differ, other than running statistics."""
    first, others = differences[0], len(differences) - 1
    more = f", and {others} more buffers," if others > 1 else ", and another one," * others
    title = (
        f"{first.name}{more} of {ranks_text(first.ranks)} differs from that of rank {rank} {_since(first)}"
    )
    if len(set(first.lines)) == 1:
        why = (
            "All ranks write it at the same line. That is as it should be if it depends on the batch, as a "
            "cache or a count does; a checkpoint then has that of one rank."
        )
        return _problem(run, rank, first, Severity.NOTE, title, Confidence.GUESS, why)
    return _problem(
        run, rank, first, Severity.WARNING, title, Confidence.LIKELY,
        "Replicas then compute with different models. Was it changed on one rank only? DDP copies the "
        "buffers of rank 0 to all before each forward pass, unless broadcast_buffers is off.",
    )  # fmt: skip


def _running_statistics(run: Run, rank: int, differences: list[_Difference]) -> Problem:
    """Running statistics that differ: a warning where a module evaluates with them."""
    evaluated = next((each for each in differences if each.evaluates), None)
    first = evaluated or differences[0]
    owners = list(dict.fromkeys(_owner(each.name) for each in differences))
    of = f"{len(owners):,} batch norms" if len(owners) > 1 else owners[0] or "the batch norm"
    title = (
        f"Running statistics of {of} on {ranks_text(first.ranks)} differ from those on rank {rank} "
        f"{_since(first)}"
    )
    if evaluated is None:
        why = (
            "That is how batch norms work where nothing copies their statistics between ranks, as DDP does "
            "unless broadcast_buffers is off; a checkpoint then has those of one rank. SyncBatchNorm keeps "
            "them equal."
        )
        return _problem(run, rank, first, Severity.NOTE, title, Confidence.GUESS, why)
    why = (
        "Each rank then evaluates a model of its own: call the DDP module, which first copies those of rank "
        "0 to all, or evaluate on one rank."
    )
    return _problem(run, rank, first, Severity.WARNING, title, Confidence.LIKELY, why)


def _since(difference: _Difference) -> str:
    mode = " in evaluation mode" if difference.evaluates else ""
    module = _owner(difference.name)
    of = f" of {module}" if module else ""
    step = f", in {difference.step}" if difference.step else ""
    return f"since call {difference.call}{of}{mode}{step}"


def _problem(
    run: Run, rank: int, difference: _Difference, severity: Severity, title: str, confidence: Confidence,
    why: str,
) -> Problem:  # fmt: skip
    here, there = (run.names.places.all[line] if line >= 0 else "" for line in difference.lines)
    sides = ((rank, here), (difference.ranks[0], there))
    detail = [
        f"rank {each}: {f'written at {place}' if place else 'as it was when the recording began'}"
        for each, place in sides
    ]
    return Problem(
        kind="replicas", severity=severity, title=title, why=why, module=_owner(difference.name), modules=(),
        place=there or here, parameter=difference.name, detail="\n".join(detail) if here != there else "",
        confidence=confidence,
    )  # fmt: skip
