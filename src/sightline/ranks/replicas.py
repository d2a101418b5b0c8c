"""Ranks that should be equal and are not, or should differ and do not: weights, batches, seeds, modes.

Replicas are the ranks of a DDP model, and of weights whose gradients a program reduces by itself. Different
data is what they are for: equal batches are a problem, and so are equal random numbers in their dropout.
Ranks that share one model by tensor parallelism must be given the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial

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
    """Weights that begin equal, or have to, and then differ: at most one problem for each set of replicas."""
    by_names: dict[Hashable, list[tuple[RankRecord, Weights]]] = {}
    for record in run.records.values():
        weights = record.values.weights
        if weights is not None:
            groups = frozenset(map(partial(_members, run), record.values.replicated_in))
            key = frozenset(weights.names), record.values.replicated and groups, bool(record.values.reduced)
            by_names.setdefault(key, []).append((record, weights))
    for holders in by_names.values():
        first = holders[0][0].values
        compared: list[tuple[tuple[int, ...], set[str] | None]] = [(tuple(run.records), None)]
        if first.replicated:
            sets = dict.fromkeys(_members(run, group) for group in first.replicated_in)
            compared = [(ranks, None) for ranks in sets] or compared
        elif first.reduced:
            compared = [*_reduced_sets(run, [record for record, _ in holders]).items()]
        for ranks, names in compared:
            replicas = [each for each in holders if each[0].rank in ranks]
            problem = _drift(run, replicas, names) if len(replicas) > 1 else None
            if problem is None and names is not None and len(replicas) > 1:
                problem = _forgotten(run, replicas, names)
            if problem is not None:
                yield problem


def _forgotten(
    run: Run, replicas: list[tuple[RankRecord, Weights]], reduced: set[str]
) -> Problem | None:  # fmt: skip
    """A weight that begins equal like those whose gradients are reduced, and drifts apart as its own is not.

    Weights that begin as a constant, such as zeros, are equal by that alone: they may be shards.
    """
    begins = [
        {
            (name, int(weights.prints[at]))
            for name, (at, *_) in weights.by_name().items()
            if weights.varied[at]
        }
        for _, weights in replicas
    ]
    elsewhere = {name for record, _ in replicas for name in record.values.reduced}
    names = {name for name, _ in frozenset.intersection(*map(frozenset, begins))} - elsewhere
    problem = _drift(run, replicas, names) if names else None
    if problem is None:
        return None
    line = run.names.places.all[next(iter(replicas[0][0].values.reduced.values())).place]
    others = f"those of {len(reduced):,} others are" if len(reduced) > 1 else "that of another one is"
    return replace(
        problem, severity=Severity.WARNING, confidence=Confidence.LIKELY,
        detail=f"its gradient is not reduced; {others}, at {line}",
        why="It begins the same on all ranks, like those whose gradients are reduced: was it forgotten?",
    )  # fmt: skip


def _members(run: Run, group: str) -> tuple[int, ...]:
    """The ranks of a group."""
    return tuple(run.groups.get(group, run.records))


def _reduced_sets(run: Run, records: list[RankRecord]) -> dict[tuple[int, ...], set[str]]:
    """The ranks over which gradients are reduced by hand, and the parameters of each such set."""
    sets: dict[tuple[int, ...], set[str]] = {}
    for record in records:
        for name, reduction in record.values.reduced.items():
            sets.setdefault(_members(run, reduction.group), set()).add(name)
    return sets


def _drift(run: Run, replicas: list[tuple[RankRecord, Weights]], names: set[str] | None) -> Problem | None:
    """The first version of a weight that is not the same on all ranks.

    Only weights of these names are compared: others, such as shards, may be those of one rank.
    """
    record, first = replicas[0]
    is_replicated = record.values.replicated or names is not None
    by_name = first.by_name(names)
    #: When on the first rank, the weight, the other rank, and again when on both.
    found: list[tuple[int, str, int, int, int]] = []
    for other, theirs in replicas[1:]:
        for name, versions in theirs.by_name(names).items():
            at = _first_difference(first, by_name.get(name, []), theirs, versions)
            if at is not None and (first.begun == theirs.begun or at[0] >= first.begun):
                found.append((at[0], name, other.rank, *at))
    if not found:
        return None
    earliest, name, _, _, there = min(found)
    odd = sorted(rank for at, other, rank, *_ in found if (at, other) == (earliest, name))
    if earliest < first.begun:
        # Without a sign that they are replicas, each rank has weights of its own: a stage of a pipeline.
        return _unequal_start(run, record, name, odd, int(first.lines[earliest])) if is_replicated else None
    theirs = next(weights for other, weights in replicas if other.rank == odd[0])
    lines = [
        run.names.places.all[each.lines[at]] if at < len(each.lines) and each.lines[at] >= 0 else ""
        for each, at in ((first, earliest), (theirs, there))
    ]
    since = f"its update {first.updates[earliest]}" if first.updates[earliest] else "a change of it"
    sides = f"rank {record.rank}: written at {lines[0]}\nrank {odd[0]}: written at {lines[1]}"
    return _problem(
        "replicas", Severity.ERROR if is_replicated else Severity.WARNING,
        f"{name} of {ranks_text(odd)} differs from that of rank {record.rank} since {since}",
        "Replicas must keep equal weights: each now trains a model of its own. Was a gradient not "
        "reduced, or an update made on one rank only?",
        lines[1] or lines[0], name, detail=sides if all(lines) and lines[0] != lines[1] else "",
        confidence=Confidence.CERTAIN if is_replicated else Confidence.LIKELY,
    )  # fmt: skip


def _first_difference(
    ours: Weights, mine: list[int], theirs: Weights, yours: list[int]
) -> tuple[int, int] | None:  # fmt: skip
    """The first versions of one weight, one on each side, that are not the same; None if there are none.

    A rank that writes a weight more often may put it back, as for an evaluation with averaged weights: only a
    version that the rank which writes it less often has alone is a difference.
    """
    a, b = ours.prints[mine].tolist(), theirs.prints[yours].tolist()
    if len(a) == len(b):
        at = next((at for at, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        return None if at is None else (mine[at], yours[at])
    fewer, more = (a, b) if len(a) < len(b) else (b, a)
    if set(fewer) <= set(more):
        return None
    alone = [[print not in others for print in prints] for prints, others in ((a, set(b)), (b, set(a)))]
    here, there = (each.index(True) if True in each else len(each) - 1 for each in alone)
    return mine[here], yours[there]


def _unequal_start(run: Run, record: RankRecord, name: str, odd: list[int], line: int) -> Problem:
    """Weights that were not the same to begin with; where seeds differ, because of these."""
    seeds = {rank: run.records[rank].info.get("seed") for rank in (record.rank, odd[0])}
    has_other_seed = len(set(seeds.values())) > 1
    texts = ", ".join(f"{seed} on rank {rank}" for rank, seed in seeds.items())
    detail = [f"seeds as the recording began: {texts}"] * has_other_seed
    reduction = record.values.reduced.get(name)
    if line < 0 and reduction is not None:
        line = reduction.place
        detail.append("that line reduces its gradient; where it was made is not recorded")
    place = run.names.places.all[line] if line >= 0 else ""
    return _problem(
        "seeds" if has_other_seed else "replicas", Severity.ERROR,
        f"{name} is not the same on {ranks_text(odd)} as on rank {record.rank} before the first forward pass",
        "Replicas must begin with equal weights: seed all ranks alike before the model is built, or "
        "broadcast the weights of one.",
        place, name, detail="\n".join(detail),
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
            "same-batch", Severity.WARNING, f"{_all(count)} replicas are {what} {when}",
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
            "seeds", Severity.NOTE, f"{_all(count)} replicas draw the same random numbers{times}",
            "Dropout then leaves out the same places on every rank, so that its noise does not average out; "
            "once the model is built, seed each rank differently.",
            place, confidence=Confidence.GUESS,
        )  # fmt: skip


def _all(count: int) -> str:
    return "Both" if count == 2 else f"All {count:,}"


def _batches(record: RankRecord) -> Series:
    return record.values.batches


def _losses(record: RankRecord) -> Series:
    return record.values.losses


def _draws(record: RankRecord) -> Series:
    return record.values.draws


def _replicas(run: Run) -> list[RankRecord]:
    return [record for record in run.records.values() if record.values.has_own_batch]


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
