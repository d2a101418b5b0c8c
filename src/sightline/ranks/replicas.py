"""Ranks that should be equal and are not, or should differ and do not: weights, batches, seeds, modes.

Replicas are the ranks of a DDP model, and of weights whose gradients a program reduces by itself. Different
data is what they are for: equal batches are a problem, and so are equal random numbers in their dropout.
Ranks that share one model by tensor parallelism must be given the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.ranks.buffers import buffer_problems
from sightline.ranks.fingerprints import Series, Weights
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.record import RankRecord

_FEWEST_DRAWN = 64  #: random numbers that are not the same by chance


def replica_problems(run: Run) -> list[Problem]:
    """What differs between replicas that has to be equal, and what is equal that should differ."""
    return [
        *_weights(run),
        *buffer_problems(run),
        *_same_batches(run),
        *_other_batches(run),
        *_same_draws(run),
        *_modes(run),
    ]


def _weights(run: Run) -> Iterator[Problem]:
    """Weights that begin equal, or have to, and then differ."""
    by_names: dict[Hashable, list[tuple[RankRecord, Weights]]] = {}
    for record in run.records.values():
        weights = record.values.weights
        if weights is not None:
            key = frozenset(weights.names), record.values.replicated, frozenset(record.values.reduced)
            by_names.setdefault(key, []).append((record, weights))
    for replicas in by_names.values():
        if len(replicas) > 1:
            problem = _drift(run, replicas)
            if problem is not None:
                yield problem


def _drift(run: Run, replicas: list[tuple[RankRecord, Weights]]) -> Problem | None:
    """The first version of a weight that is not the same on all ranks."""
    record, first = replicas[0]
    by_hand = not record.values.replicated and record.values.reduced
    # Weights of their own, such as shards, are not compared; those that are reduced have to be equal.
    compared = np.array([not by_hand or name in record.values.reduced for name in first.names])
    earliest = len(first.prints)
    odd: list[int] = []
    for other, theirs in replicas[1:]:
        count = min(len(first.prints), len(theirs.prints))
        if first.begun != theirs.begun or first.names[:count] != theirs.names[:count]:
            continue
        differs = np.flatnonzero((first.prints[:count] != theirs.prints[:count]) & compared[:count])
        if len(differs):
            at = int(differs[0])
            odd = [other.rank] if at < earliest else [*odd, other.rank] if at == earliest else odd
            earliest = min(earliest, at)
    if not odd:
        return None
    name, is_replicated = first.names[earliest], bool(record.values.replicated or by_hand)
    if earliest >= first.begun:
        version = first.names[first.begun : earliest].count(name) + 1
        line = run.names.places.all[first.lines[earliest]] if first.lines[earliest] >= 0 else ""
        return _problem(
            "replicas", Severity.ERROR if is_replicated else Severity.WARNING,
            f"{name} of {ranks_text(odd)} differs from that of rank {record.rank} since its update {version}",
            "Replicas must keep equal weights: each now trains a model of its own. Was a gradient not "
            "reduced, or an update made on one rank only?",
            line, name, confidence=Confidence.CERTAIN if is_replicated else Confidence.LIKELY,
        )  # fmt: skip
    # Without a sign that they are replicas, each rank has weights of its own: a stage of a pipeline, a shard.
    return _unequal_start(run, record, name, odd, int(first.lines[earliest])) if is_replicated else None


def _unequal_start(run: Run, record: RankRecord, name: str, odd: list[int], line: int) -> Problem:
    """Weights that were not the same to begin with; where seeds differ, because of these."""
    seeds = {rank: run.records[rank].info.get("seed") for rank in (record.rank, odd[0])}
    detail = ""
    if len(set(seeds.values())) > 1:
        detail = ", ".join(f"rank {rank} has the seed {seed}" for rank, seed in seeds.items())
    reduced = record.values.reduced.get(name, -1)
    place = run.names.places.all[line if line >= 0 else reduced] if max(line, reduced) >= 0 else ""
    return _problem(
        "seeds" if detail else "replicas", Severity.ERROR,
        f"{name} is not the same on {ranks_text(odd)} as on rank {record.rank} when the recording begins",
        "Replicas must begin with equal weights: seed all ranks alike before the model is built, or "
        "broadcast the weights of one.",
        place, name, detail=detail,
    )  # fmt: skip


def _same_batches(run: Run) -> Iterator[Problem]:
    """Every replica was given the same batch, or, where batches were not measured, computed the same loss."""
    measured = all(_batches(record).prints for record in _replicas(run))
    what, of = ("given the same batch", _batches) if measured else ("computing the same loss", _losses)
    found = _all_equal(run, of)
    if found is not None:
        count, steps, place = found
        when = f"in each of {steps:,} steps" if steps > 1 else "in the one step recorded"
        yield _problem(
            "same-batch", Severity.WARNING, f"All {count:,} replicas are {what} {when}",
            "More ranks then train on no more data; give each its own part, as DistributedSampler does.",
            place, confidence=Confidence.CERTAIN if measured else Confidence.LIKELY,
        )  # fmt: skip


def _same_draws(run: Run) -> Iterator[Problem]:
    """Every replica draws the same random numbers in its modules."""
    found = _all_equal(run, _draws)
    if found is not None and min(record.values.drawn for record in _replicas(run)) >= _FEWEST_DRAWN:
        count, steps, place = found
        times = f", {steps:,} times" if steps > 1 else ""
        yield _problem(
            "seeds", Severity.NOTE, f"All {count:,} replicas draw the same random numbers{times}",
            "Dropout then leaves out the same places on every rank, so that its noise does not average out; "
            "once the model is built, seed each rank differently.",
            place, confidence=Confidence.LIKELY,
        )  # fmt: skip


def _batches(record: RankRecord) -> Series:
    return record.values.batches


def _losses(record: RankRecord) -> Series:
    return record.values.losses


def _draws(record: RankRecord) -> Series:
    return record.values.draws


def _replicas(run: Run) -> list[RankRecord]:
    return [record for record in run.records.values() if record.values.replicated or record.values.reduced]


def _all_equal(run: Run, of: Callable[[RankRecord], Series]) -> tuple[int, int, str] | None:
    """How many replicas have an equal series, how long it is, and its line; None if one differs."""
    records = _replicas(run)
    steps = min((len(of(record).prints) for record in records), default=0)
    if len(records) < 2 or not steps or len({of(record).prints[:steps] for record in records}) > 1:
        return None
    place = of(records[0]).place
    return len(records), steps, run.names.places.all[place] if place >= 0 else ""


def _other_batches(run: Run) -> Iterator[Problem]:
    """Ranks that share one model by tensor parallelism are given different batches."""
    sharded = {rank: record for rank, record in run.records.items() if record.values.sharded}
    meshes = {
        tuple(mesh["ranks"])
        for record in sharded.values()
        for mesh in record.info.get("meshes") or ()
        if isinstance(mesh, dict) and _is_flat(mesh.get("ranks"))
    }
    for mesh in sorted(meshes):
        records = [sharded[rank] for rank in mesh if rank in sharded]
        steps = min((len(_batches(record).prints) for record in records), default=0)
        for step in range(steps):
            odd = [
                each for each in records if _batches(each).prints[step] != _batches(records[0]).prints[step]
            ]
            if odd:
                here, there = (run.names.places.all[_batches(each).place] for each in (records[0], odd[0]))
                yield _problem(
                    "other-batch", Severity.ERROR,
                    f"{ranks_text([each.rank for each in odd]).capitalize()} of one tensor-parallel model "
                    f"{'is' if len(odd) == 1 else 'are'} given another batch than rank {records[0].rank} "
                    f"in call {step}",
                    "Each rank computes a part of one result, and so mixes two batches: load the same one on "
                    "every rank of the mesh.",
                    here, detail=f"rank {odd[0].rank}: {there}",
                )  # fmt: skip
                break


def _is_flat(ranks: object) -> bool:
    """Whether these are the ranks of a mesh of one dimension."""
    return isinstance(ranks, list | tuple) and all(type(each) is int for each in ranks)


def _modes(run: Run) -> Iterator[Problem]:
    """A module is in training mode on some ranks and in evaluation mode on others."""
    modes: dict[str, dict[frozenset[bool], list[int]]] = {}
    for record in run.records.values():
        by_label: dict[str, set[bool]] = {}
        for label, is_training in record.values.modes:
            by_label.setdefault(label, set()).add(is_training)
        for label, found in by_label.items():
            modes.setdefault(label, {}).setdefault(frozenset(found), []).append(record.rank)
    for label, by_mode in modes.items():
        training = by_mode.get(frozenset({True}), [])
        evaluation = by_mode.get(frozenset({False}), [])
        if training and evaluation:
            here, there = (
                run.names.places.all[run.records[ranks[0]].values.modes[label, is_training]]
                for ranks, is_training in ((training, True), (evaluation, False))
            )
            yield _problem(
                "modes", Severity.WARNING,
                f"{label} is in training mode on {ranks_text(training)} and in evaluation mode on "
                f"{ranks_text(evaluation)}",
                "Dropout and batch normalisation then differ between ranks: call model.train() or "
                "model.eval() on all of them.",
                here, module=label, detail=f"{ranks_text(evaluation)}: {there}" if there else "",
            )  # fmt: skip


def _problem(
    kind: str, severity: Severity, title: str, why: str, place: str, parameter: str | None = None, *,
    module: str = "", detail: str = "", confidence: Confidence = Confidence.CERTAIN,
) -> Problem:  # fmt: skip
    return Problem(
        kind=kind, severity=severity, title=title, why=why, place=place, parameter=parameter, modules=(),
        module=parameter.rpartition(".")[0] if parameter else module, detail=detail, confidence=confidence,
    )  # fmt: skip
