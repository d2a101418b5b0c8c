"""Ranks that are damaged, or are no recordings at all: no folder with one of them passes for sound."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

import sightline as sl
from sightline.cli import main
from sightline.errors import DamagedFile, InvalidTrace, SightlineError, UsageError
from sightline.options import step_range
from sightline.store.shards.shard_file import is_shard
from tests.ranks.fake_ranks import record_ranks


def work(rank: int) -> None:
    dist.all_reduce(torch.full((4,), float(rank)).exp())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sound ranks, which no test may change."""
    path = tmp_path_factory.mktemp("job") / "run.sight"
    record_ranks(path, work, 3)
    return path


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(job, tmp_path / "run.sight"))


def validated(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["validate", str(path), *options])


def cut_short(rank: Path) -> None:
    database = rank / "rank0.db"
    database.write_bytes(database.read_bytes()[:-4096])


def altered(rank: Path) -> None:
    """Damage that is seen when the rank is read, and not when it is opened."""
    with closing(sqlite3.connect(rank / "rank0.db")) as database, database:
        database.execute(
            "UPDATE chunks SET data = zeroblob(length(data)) WHERE kind = 'ops' AND name = 'inputs'"
        )


def pipe(rank: Path) -> None:
    shutil.rmtree(rank)
    os.mkfifo(rank)


def pipe_inside(rank: Path) -> None:
    (rank / "rank0.db").unlink()
    os.mkfifo(rank / "rank0.db")


def link_elsewhere(rank: Path) -> None:
    shutil.rmtree(rank)
    rank.symlink_to("/etc")


def dangling_link(rank: Path) -> None:
    shutil.rmtree(rank)
    rank.symlink_to(rank / "nowhere")


def file(rank: Path) -> None:
    shutil.rmtree(rank)
    rank.write_text("rank 1")


def empty(rank: Path) -> None:
    (rank / "rank0.db").unlink()


DAMAGES = [cut_short, altered, pipe, pipe_inside, link_elsewhere, dangling_link, file, empty]


def test_a_sound_job(job: Path) -> None:
    done = validated(job)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == f"{job} is sound: ranks 0–2."
    ops = len(sl.load(job).ranks[0].ops)
    for rank in range(3):
        assert lines[rank].startswith(f"rank {rank} is sound: {ops} ops, ")
    assert sl.load(job).validate().ops == 3 * ops


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_rank_is_named_and_the_others_are_checked(
    damage: Callable[[Path], None], rank: int, copy: Path
) -> None:
    damage(copy / f"rank{rank}.sight")
    done = validated(copy)
    assert done.exit_code == 1
    states = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert states == [f"rank {each} is {'not sound' if each == rank else 'sound'}" for each in range(3)]
    assert done.stderr == f"Error: {copy} is not sound: 1 of its 3 ranks is not, rank {rank}.\n"
    with pytest.raises(SightlineError, match=rf"^Rank {rank}: .*rank{rank}\.sight"):
        sl.load(copy).validate()
    assert validated(copy, "--rank", "2").exit_code == 0
    assert validated(copy, "--rank", str(rank)).exit_code == 1


@pytest.mark.parametrize("damage", [one for one in DAMAGES if one is not altered])
def test_the_first_screen_and_a_copy_say_which_rank_is_missing(
    damage: Callable[[Path], None], copy: Path, tmp_path: Path
) -> None:
    damage(copy / "rank1.sight")
    t = sl.load(copy)
    assert "Rank 1 is left out: " in " ".join(str(t).split())
    assert "rank 1 cannot be read and is not in it" in t.save(tmp_path / "saved.sight")
    assert list(sl.load(tmp_path / "saved.sight").ranks) == [0, 2]


def test_a_job_is_not_whole_without_one_of_its_ranks(copy: Path) -> None:
    shutil.rmtree(copy / "rank1.sight")
    done = validated(copy)
    assert done.exit_code == 1
    assert done.stderr.endswith("is not whole: rank 1 of 3 is missing; ranks 0 and 2 are sound.\n")


def test_a_rank_in_the_place_of_another_is_named(copy: Path) -> None:
    shutil.rmtree(copy / "rank1.sight")
    shutil.copytree(copy / "rank0.sight", copy / "rank1.sight")
    done = validated(copy)
    assert done.exit_code == 1
    assert "rank 1 is not sound: it is the recording of rank 0." in done.stdout.splitlines()


FAR = "rank" + "9" * 20 + ".sight"  #: a number that is no rank


@pytest.mark.parametrize("name", ["rank01.sight", FAR, "other"])
@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_a_recording_that_is_not_read_is_named(
    name: str, damage: Callable[[Path], None] | None, copy: Path
) -> None:
    extra = copy / name
    shutil.copytree(copy / "rank1.sight", extra)
    if damage is not None:
        damage(extra)
    done = validated(copy)
    if name == "other" and not (extra.is_dir() and (extra / "rank0.db").exists()):
        assert done.exit_code == 0  # it has neither the name nor the content of a recording
        return
    assert done.exit_code == 1
    assert [line[: line.index(":")] for line in done.stdout.splitlines()[:3]] == [
        f"rank {rank} is sound" for rank in range(3)
    ]
    assert any(name in line for line in done.stdout.splitlines()[3:])
    assert done.stderr == (
        f"Error: {copy} is not sound: {name} is beside the ranks, and was not read; ranks 0–2 are sound.\n"
    )
    with pytest.raises(InvalidTrace, match=f"^{name} is beside the ranks"):
        sl.load(copy).validate()


@pytest.mark.parametrize("name", ["rank01.sight", FAR])
def test_a_rank_of_another_name_is_known_by_its_content(name: str, copy: Path) -> None:
    (copy / "rank1.sight").rename(copy / name)
    assert list(sl.load(copy).ranks) == [0, 1, 2]
    assert validated(copy).exit_code == 0


def test_an_error_keeps_its_type(copy: Path) -> None:
    cut_short(copy / "rank1.sight")
    with pytest.raises(DamagedFile, match=r"^Rank 1: "):
        sl.load(copy).validate()


def test_only_ascii_digits_are_numbers(copy: Path) -> None:
    for name in ("rank\u0661.sight", "rank\u0969.sight", "rank1.restart\u0662.sight"):
        (copy / name).mkdir()
    assert list(sl.load(copy).ranks) == [0, 1, 2]
    assert validated(copy).exit_code == 0
    assert not is_shard("\u0661.safetensors")
    assert not is_shard("\u00b2.safetensors")
    for text in ("\u0661", "0:\u0663"):
        with pytest.raises(UsageError, match="must be a step or a range"):
            step_range(text, "steps=")
