"""The rank of this process in a distributed job, and the name of its recording.

It is read from the environment that launchers such as torchrun set; nothing is initialised.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a distributed job."""

    rank: int
    local_rank: int
    world_size: int
    restart: int = 0  #: how often the launcher has started the job again


def this_rank() -> Rank | None:
    """The rank of this process; None if it is the only one."""
    world, rank = _number("WORLD_SIZE"), _number("RANK")
    if world is None or rank is None or world < 2 or rank >= world:
        return None
    local = _number("LOCAL_RANK")
    return Rank(rank, rank if local is None else local, world, _number("TORCHELASTIC_RESTART_COUNT") or 0)


def path_of_rank(path: Path) -> Path:
    """The path for this process where all processes got ``path``: ``x.rank1.sight`` for ``x.sight``.

    After a restart the name says so too, because the recording of the first attempt exists already. A name
    that has the rank in it stays.
    """
    rank = this_rank()
    if rank is None:
        return path
    mark = f".rank{rank.rank}" + (f".restart{rank.restart}" if rank.restart else "")
    stem = path.name.removesuffix(".sight")
    return path if stem.endswith(mark) else path.with_name(f"{stem}{mark}.sight")


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
