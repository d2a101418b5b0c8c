"""The rank of this process in a distributed job, and the name of its recording.

It is read from the environment that launchers such as torchrun set; nothing is initialised.
"""

from __future__ import annotations

import hashlib
import os
import re
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
    """The path for this process where all processes got ``path``: ``x.sight/rank1.sight`` for ``x.sight``.

    After a restart the name says so too, because the recording of the first attempt exists already. A name
    that has the rank in it stays.
    """
    rank = this_rank()
    if rank is None:
        return path
    mark = f"rank{rank.rank}" + (f".restart{rank.restart}" if rank.restart else "")
    stem = path.name.removesuffix(".sight")
    if stem == mark or stem.endswith(f".{mark}"):
        return path.with_name(f"{stem}.sight")
    return path.with_name(f"{stem}.sight") / f"{mark}.sight"


def folder_of_job(path: Path) -> Path | None:
    """The folder that ``path_of_rank`` put a rank's recording into; None for any other path."""
    return path.parent if is_rank_name(path.name) and path.parent.suffix == ".sight" else None


def is_rank_name(name: str) -> bool:
    """Whether a folder is named as `path_of_rank` names the recording of one rank.

    >>> is_rank_name("rank3.sight"), is_rank_name("rank3.restart1.sight"), is_rank_name("rank\u0663.sight")
    (True, True, False)
    """
    return re.fullmatch(r"rank[0-9]+(\.restart[0-9]+)?\.sight", name) is not None


def job_digest() -> str:
    """What the processes of one job have in common, and those of another have not; "" if that is unknown.

    It is a digest, so that the address of the job's store is not recorded.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
    given = [os.environ.get(name, "") for name in names]
    return hashlib.sha256("\0".join(given).encode()).hexdigest()[:12] if any(given) else ""


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
