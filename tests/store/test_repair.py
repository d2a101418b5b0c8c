"""Recordings of killed processes, with damage: what is whole stays, and a repair makes a bundle of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sightline.cli import main
from sightline.data.validate import validate
from sightline.errors import DamagedFile, UsageError
from sightline.store import load
from sightline.store.journal import JOURNAL, Journal
from sightline.store.repair import repair
from tests.fuzz.running import recorded_bundle, recorded_journal
from tests.store.bundles import captured, saved


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of several frames, of a small training run."""
    return recorded_journal(tmp_path_factory.mktemp("killed") / "run.sight")


@pytest.fixture
def cut_off(journal: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(journal, tmp_path / "run.sight"))


def places(path: Path) -> list[Any]:
    opened = Journal(path / JOURNAL)
    try:
        return list(opened._frames)
    finally:
        opened.close()


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_a_flipped_bit_in_a_middle_frame_loses_that_frame(cut_off: Path) -> None:
    whole = load(cut_off)
    frames = places(cut_off)
    assert len(frames) > 3
    for number in range(1, len(frames) - 1):
        start, length = frames[number]
        raw = (cut_off / JOURNAL).read_bytes()
        flip(cut_off / JOURNAL, start + length // 2)
        data = load(cut_off)
        assert 0 < len(data.ops) < len(whole.ops)
        assert number == 1 or data.names[data.ops.name[0]] == whole.names[whole.ops.name[0]]
        assert data.info["faults"][-1] == "Damaged and left out: 1 of its batches."
        (cut_off / JOURNAL).write_bytes(raw)


def test_a_frame_whose_length_was_altered_is_skipped_too(cut_off: Path) -> None:
    start, _ = places(cut_off)[1]
    flip(cut_off / JOURNAL, start - 9)  # the highest byte of the length
    assert len(load(cut_off).ops) > 0


def test_a_damaged_shard_leaves_the_rest(tmp_path: Path, journal: Path) -> None:
    bundle = recorded_bundle(tmp_path / "whole")
    killed = tmp_path / "killed.sight"
    shutil.copytree(journal, killed)
    shutil.copytree(bundle / "tensors", killed / "tensors")
    first = min((killed / "tensors").iterdir())
    flip(first, 3)  # its header cannot be read
    data = load(killed)
    assert len(data.ops) > 0
    assert data.info["faults"][-1] == f"Damaged and left out: the tensors in {first.name}."


def test_altered_numbers_of_a_tensor_are_found(tmp_path: Path) -> None:
    path = saved(captured(), tmp_path)
    data = load(path)
    assert data.store is not None
    key = data.captures[0].key
    data.store.read(key)
    shard = next((path / "tensors").iterdir())
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    again = load(path)
    assert again.store is not None
    with pytest.raises(DamagedFile, match=r"safetensors is damaged: the numbers of .* were altered"):
        [again.store.read(info.key) for info in again.captures]


def test_shards_without_checksums_still_open(tmp_path: Path) -> None:
    path = saved(captured(), tmp_path)
    shard = next((path / "tensors").iterdir())
    raw = shard.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    rows = json.loads(header["__metadata__"]["captures"])
    header["__metadata__"]["captures"] = json.dumps(
        [{k: v for k, v in row.items() if k != "crc"} for row in rows]
    )
    shard.write_bytes(raw[:8] + json.dumps(header).encode().ljust(size) + raw[8 + size :])
    data = load(path)
    assert data.store is not None
    assert all(data.store.read(info.key).size >= 0 for info in data.captures)


def test_a_killed_recording_is_finished(cut_off: Path) -> None:
    before = load(cut_off)
    (cut_off / "tensors").mkdir()
    for name in (".spool-12-ab", "tensors/.saving-12-ab"):
        (cut_off / name).mkdir()
    for name in (".rank0.journal.anew", ".rank0.db.12-ab.part", "tensors/.000003.safetensors.part"):
        (cut_off / name).write_bytes(b"x")
    finished, removed = repair(cut_off)
    assert finished.startswith(f"Finished {cut_off}: {len(before.ops)} ops, ")
    assert removed == "Removed 5 unfinished files."
    assert sorted(os.listdir(cut_off)) == ["rank0.db", "tensors"]
    data = load(cut_off)
    assert len(data.ops) == len(before.ops)
    assert data.info["unfinished"] is True
    assert list(data.sources) == list(before.sources)
    validate(data)
    assert repair(cut_off) == []


def test_a_recording_that_runs_is_left_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import sightline as sl

    tracing = sl.trace(path=tmp_path / "run.sight")
    tracing.start()
    torch.ones(2).relu()
    with pytest.raises(UsageError, match="is still being recorded: stop the run first"):
        repair(tmp_path / "run.sight")
    tracing.stop()
    assert repair(tmp_path / "run.sight") == []


def test_the_verb(cut_off: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    assert CliRunner().invoke(main, ["repair", str(cut_off)]).output.startswith("Finished ")
    assert CliRunner().invoke(main, ["repair", str(cut_off)]).output == f"{cut_off} needs no repair.\n"
    missing = CliRunner().invoke(main, ["repair", str(tmp_path / "none")])
    assert (missing.exit_code, "There is no recording" in missing.output) == (1, True)
