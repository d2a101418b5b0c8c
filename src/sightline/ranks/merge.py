"""`Run`: all ranks of a job, read one after the other; of each only a `RankRecord` is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from sightline.errors import SightlineError
from sightline.ranks.collectives import messages_of
from sightline.ranks.folder import RankFolder, ranks_text
from sightline.ranks.record import RankRecord, SharedNames, read_record


@dataclass(frozen=True)
class Run:
    """The ranks of one run."""

    records: dict[int, RankRecord]
    names: SharedNames
    world_size: int
    notes: list[str] = field(default_factory=list)  #: a sentence on each rank that is left out or missing

    @property
    def ranks(self) -> list[int]:
        return list(self.records)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Ranks that ran the same ops at the same lines, the class of the lowest rank first."""
        groups: dict[int, list[int]] = {}
        for rank, record in self.records.items():
            groups.setdefault(id(record.steps), []).append(rank)
        return sorted(groups.values())

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """The ranks of each process group; those of a group that says none are the ranks that used it."""
        members: dict[str, set[int]] = {}
        for rank, record in self.records.items():
            described = record.info.get("groups") or {}
            for name in record.groups:
                if messages_of(name) is not None:
                    continue
                ranks = (described.get(name) or {}).get("ranks") or [rank]
                members.setdefault(name, set()).update(each for each in ranks if type(each) is int)
        return {name: sorted(ranks) for name, ranks in members.items()}


def merge(folder: RankFolder) -> Run:
    """Read all ranks of a folder; one that cannot be read is a note."""
    names, notes = SharedNames(), list(folder.notes)
    records: dict[int, RankRecord] = {}
    for rank, path in folder.paths.items():
        try:
            records[rank] = read_record(path, rank, names)
        except SightlineError as error:
            notes.append(f"Rank {rank} is left out: {error}")
    return run_of(records, names, notes)


def run_of(records: dict[int, RankRecord], names: SharedNames, notes: Iterable[str] = ()) -> Run:
    """The run of the job that most records are of: others are left out, and notes say so."""
    all_notes = list(notes)
    jobs: dict[tuple[object, object], list[int]] = {}
    for rank, record in records.items():
        jobs.setdefault((record.info.get("job"), record.info.get("world_size")), []).append(rank)
    if len(jobs) > 1:
        largest = max(jobs.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        others = [rank for rank in records if rank not in largest]
        verb = "is" if len(others) == 1 else "are"
        all_notes.append(
            f"{ranks_text(others).capitalize()} {verb} of another run than {ranks_text(largest)}, "
            f"and left out of the comparison."
        )
        records = {rank: records[rank] for rank in largest}
    sizes = [int(record.info.get("world_size") or 0) for record in records.values()]
    world = max([*sizes, max(records, default=-1) + 1])
    missing = [rank for rank in range(world) if rank not in records]
    if missing and records:
        verb = "is" if len(missing) == 1 else "are"
        all_notes.append(f"{ranks_text(missing).capitalize()} of {world} {verb} missing.")
    return Run(records, names, world, all_notes)
