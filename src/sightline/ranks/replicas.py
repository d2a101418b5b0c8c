"""Ranks that should be equal and are not, or should differ and do not: weights, batches, seeds, modes.

Replicas are the ranks of a DDP model, and of weights whose gradients a program reduces by itself. They exist
to train on different data: equal batches are a problem, and so are equal random numbers in their dropout.
Ranks that share one model by tensor parallelism must be given the same batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.ranks.buffers import buffer_problems
from sightline.ranks.fingerprints import Series, Weights
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.record import RankRecord

_FEWEST_DRAWN = 64  #: random numbers that are not the same by chance


def replica_problems(run: Run) -> list[Problem]:
    """Weights, buffers and modes of replicas that differ, and batches or random numbers that do not."""
    return [
        *_weights(run),
        *buffer_problems(run),
        *_equal_series(run),
        *_other_batches(run),
        *_modes(run),
    ]


def _weights(run: Run) -> Iterator[Problem]:
    """Weights that begin equal, or have to, and then differ: at most one problem for each set of replicas."""
    by_names: dict[Hashable, list[tuple[RankRecord, Weights]]] = {}
    for record in run.records.values():
        weights = record.values.weights
        if weights is not None:
            groups = frozenset(_members(run, group) for group in record.values.replicated_in)
            key = frozenset(weights.names), record.values.replicated and groups, bool(record.values.reduced)
            by_names.setdefault(key, []).append((record, weights))
    for holders in by_names.values():
        first = holders[0][0].values
        #: Sets of ranks that hold replicas, each with the names of these weights; None for all.
        compared: list[tuple[tuple[int, ...], set[str] | None]] = [(tuple(run.records), None)]
        if first.replicated:
            sets = dict.fromkeys(_members(run, group) for group in first.replicated_in)
            compared = [(ranks, None) for ranks in sets] or compared
        elif first.reduced:
            reduced: dict[tuple[int, ...], set[str]] = {}
            for record, _ in holders:
                for name, reduction in record.values.reduced.items():
                    reduced.setdefault(_members(run, reduction.group), set()).add(name)
            compared = [*reduced.items()]
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
    names = {name for name, _ in set.intersection(*begins)} - elsewhere
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


def _drift(run: Run, replicas: list[tuple[RankRecord, Weights]], names: set[str] | None) -> Problem | None:
    """The first version of a weight that is not the same on all ranks.

    Only weights of these names are compared: others, such as shards, may be those of one rank.
    """
    record, first = replicas[0]
    is_replicated = record.values.replicated or names is not None
    by_name = first.by_name(names)
    #: When on the first rank, the weight, the other rank, and again when on both.
    differences: list[tuple[int, str, int, int, int]] = []
    for other, theirs in replicas[1:]:
        for name, versions in theirs.by_name(names).items():
            at = _first_difference(first, by_name.get(name, []), theirs, versions)
            if at is not None and (first.begun == theirs.begun or at[0] >= first.begun):
                differences.append((at[0], name, other.rank, *at))
    if not differences:
        return None
    earliest, name, _, _, there = min(differences)
    odd = sorted(rank for at, other, rank, *_ in differences if (at, other) == (earliest, name))
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
    """Weights that differ from the start; where seeds differ, because of these."""
    seeds = {rank: run.records[rank].info.get("seed") for rank in (record.rank, odd[0])}
    has_other_seed = len(set(seeds.values())) > 1
    texts = ", ".join(f"{seed} on rank {rank}" for rank, seed in seeds.items())
    detail = [f"seeds as the recording began: {texts}"] * has_other_seed
    reduction = record.values.reduced.get(name)
    if line < 0 and reduction is not None:
        line = reduction.place
        detail.append("that line reduces its gradient; the line that made it is not recorded")
    place = run.names.places.all[line] if line >= 0 else ""
    return _problem(
        "seeds" if has_other_seed else "replicas", Severity.ERROR,
        f"{name} is not the same on {ranks_text(odd)} as on rank {record.rank} before the first forward pass",
        "Replicas must begin with equal weights: seed all ranks alike before the model is built, or "
        "broadcast the weights of one.",
        place, name, detail="\n".join(detail),
    )  # fmt: skip


def _equal_series(run: Run) -> Iterator[Problem]:
    """Replicas that are given the same batches, and replicas whose modules draw the same random numbers.

    Where batches were not measured, the losses are compared instead.
    """
    records = [record for record in run.records.values() if record.values.has_own_batch]

    def equal(series: list[Series]) -> tuple[int, str] | None:
        """The length and the line of the series, if all are equal."""
        steps = min((len(each.prints) for each in series), default=0)
        if len(series) < 2 or not steps or len({each.prints[:steps] for each in series}) > 1:
            return None
        return steps, run.names.places.all[series[0].place] if series[0].place >= 0 else ""

    everyone = "Both" if len(records) == 2 else f"All {len(records):,}"
    measured = all(record.values.batches.prints for record in records)
    same = equal([record.values.batches if measured else record.values.losses for record in records])
    if same is not None:
        steps, place = same
        when = f"in each of {steps:,} steps" if steps > 1 else "in the one step recorded"
        how = "given the same batch" if measured else "computing the same loss"
        yield _problem(
            "same-batch", Severity.WARNING, f"{everyone} replicas are {how} {when}",
            "More ranks then train on no more data; give each its own part, as DistributedSampler does.",
            place, confidence=Confidence.CERTAIN if measured else Confidence.LIKELY,
        )  # fmt: skip
    same = equal([record.values.draws for record in records])
    if same is not None and min(record.values.drawn for record in records) >= _FEWEST_DRAWN:
        steps, place = same
        times = f", {steps:,} times" if steps > 1 else ""
        yield _problem(
            "seeds", Severity.NOTE, f"{everyone} replicas draw the same random numbers{times}",
            "Dropout then leaves out the same places on every rank, so that its noise does not average out; "
            "once the model is built, seed each rank differently.",
            place, confidence=Confidence.GUESS,
        )  # fmt: skip


def _other_batches(run: Run) -> Iterator[Problem]:
    """Ranks that share one model by tensor parallelism are given different batches."""
    sharded = {rank: record for rank, record in run.records.items() if record.values.sharded}
    meshes = {
        tuple(mesh["ranks"])
        for record in sharded.values()
        for mesh in record.info.get("meshes") or ()
        if isinstance(mesh, dict)
        and isinstance(mesh.get("ranks"), list | tuple)
        and all(type(rank) is int for rank in mesh["ranks"])  # of one dimension
    }
    for mesh in sorted(meshes):
        records = [sharded[rank] for rank in mesh if rank in sharded]
        batches = [record.values.batches for record in records]
        for step in range(min((len(each.prints) for each in batches), default=0)):
            odd = [record for record, each in zip(records, batches, strict=True)
                   if each.prints[step] != batches[0].prints[step]]  # fmt: skip
            if odd:
                here, there = (
                    run.names.places.all[each.values.batches.place] for each in (records[0], odd[0])
                )
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


def _modes(run: Run) -> Iterator[Problem]:
    """A module is in training mode on some ranks and in evaluation mode on others."""
    modes: dict[str, dict[frozenset[bool], list[int]]] = {}
    for record in run.records.values():
        by_label: dict[str, set[bool]] = {}
        for label, is_training in record.values.modes:
            by_label.setdefault(label, set()).add(is_training)
        for label, its_modes in by_label.items():
            modes.setdefault(label, {}).setdefault(frozenset(its_modes), []).append(record.rank)
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
