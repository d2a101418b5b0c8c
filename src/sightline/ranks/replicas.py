"""Ranks that should be equal and are not, or should differ and do not: weights, batches, modes.

Weights and losses are compared by their fingerprints, which ``stats=True`` takes, or by their statistics.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.record import RankRecord


def replica_problems(run: Run) -> list[Problem]:
    """What differs between replicas that has to be equal, and what is equal that should differ."""
    return [*_weights(run), *_batches(run), *_modes(run)]


def _weights(run: Run) -> Iterator[Problem]:
    """Weights that begin equal, or have to, and then differ."""
    by_names: dict[Hashable, list[RankRecord]] = {}
    for record in run.records.values():
        if record.weights is not None:
            by_names.setdefault((frozenset(record.weights[0]), record.replicated), []).append(record)
    for records in by_names.values():
        if len(records) > 1:
            problem = _drift(run, records)
            if problem is not None:
                yield problem


def _drift(run: Run, records: list[RankRecord]) -> Problem | None:
    first = records[0]
    assert first.weights is not None
    names, prints, _, lines = first.weights
    begin = len(set(names))  # the first version of each
    earliest = len(prints)
    odd: list[int] = []
    for record in records[1:]:
        assert record.weights is not None
        theirs = record.weights[1]
        count = min(len(prints), len(theirs), len(names))
        if names[:count] != record.weights[0][:count]:
            continue
        differs = np.flatnonzero(prints[:count] != theirs[:count])
        if len(differs):
            at = int(differs[0])
            odd = [record.rank] if at < earliest else [*odd, record.rank] if at == earliest else odd
            earliest = min(earliest, at)
    if not odd:
        return None
    started_equal = earliest >= begin
    if not started_equal and not first.replicated:
        return None  # each rank has weights of its own: a stage of a pipeline, a shard
    name = names[earliest]
    line = run.names.places.all[lines[earliest]] if lines[earliest] >= 0 else ""
    who = ranks_text(odd)
    if not started_equal:
        title = f"{name} is not the same on {who} as on rank {first.rank} when the recording begins"
    else:
        version = names[:earliest].count(name)
        title = f"{name} of {who} differs from that of rank {first.rank} since its update {version}"
    return Problem(
        kind="replicas", severity=Severity.ERROR if first.replicated else Severity.WARNING, title=title,
        why="Replicas must keep equal weights: each now trains a model of its own. Was a gradient not "
        "reduced, or an update made on one rank only?",
        module=name.rpartition(".")[0], modules=(), place=line, parameter=name,
        confidence=Confidence.CERTAIN if first.replicated else Confidence.LIKELY,
    )  # fmt: skip


def _batches(run: Run) -> Iterator[Problem]:
    """Every replica computed the same loss: they were given the same batch."""
    records = [record for record in run.records.values() if record.replicated and record.losses]
    if len(records) < 2 or len(records) != len([r for r in run.records.values() if r.replicated]):
        return
    steps = min(len(record.losses) for record in records)
    equal = [len({record.losses[step] for record in records}) == 1 for step in range(steps)]
    if not all(equal):
        return
    yield Problem(
        kind="same-batch", severity=Severity.WARNING, module="", modules=(), place="",
        title=f"All {len(records)} replicas compute the same loss in "
        + (f"each of {steps} steps" if steps > 1 else "the one step recorded"),
        why="They are given the same batches, so that more ranks train on no more data; give each its own "
        "part, as DistributedSampler does.",
        confidence=Confidence.LIKELY,
    )  # fmt: skip


def _modes(run: Run) -> Iterator[Problem]:
    """A module is in training mode on some ranks and in evaluation mode on others."""
    modes: dict[str, dict[frozenset[bool], list[int]]] = {}
    for record in run.records.values():
        by_label: dict[str, set[bool]] = {}
        for label, is_training in record.modes:
            by_label.setdefault(label, set()).add(is_training)
        for label, found in by_label.items():
            modes.setdefault(label, {}).setdefault(frozenset(found), []).append(record.rank)
    for label, by_mode in modes.items():
        training = by_mode.get(frozenset({True}), [])
        evaluation = by_mode.get(frozenset({False}), [])
        if training and evaluation:
            yield Problem(
                kind="modes", severity=Severity.WARNING, module=label, modules=(), place="",
                title=f"{label} is in training mode on {ranks_text(training)} and in evaluation mode on "
                f"{ranks_text(evaluation)}",
                why="Dropout and batch normalisation then differ between ranks.",
            )  # fmt: skip
