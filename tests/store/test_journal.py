"""Journals that nobody wrote: each is one sentence, or what is whole in it."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from sightline.assemble.batch import Batch, Streams
from sightline.errors import DamagedFile
from sightline.store import journal, load
from sightline.store.journal import HEAD, JOURNAL, VERSION, Journal, encode
from tests.store.journals import frame, written

INFO = {"name": "run", "ops": "both", "duration_ns": 5}


def test_a_frame_is_read_as_it_was_written() -> None:
    batch = Batch(Streams(ops=np.arange(5), fresh=np.array([3, 0, -1])), alive=np.array([1, 2]), end=7)
    read = Journal(None, [encode(batch, {}, INFO)]).batch(0)
    assert read.rows.ops.tolist() == [0, 1, 2, 3, 4]
    assert read.rows.fresh.tolist() == [3, 0, -1]
    assert read.alive is not None
    assert (read.alive.tolist(), read.end, len(read.late.ops)) == ([1, 2], 7, 0)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / JOURNAL)
    with pytest.raises(DamagedFile, match="it is not a regular file"):
        load(tmp_path)
    with pytest.raises(DamagedFile, match="it is not a regular file"):
        load(tmp_path / JOURNAL)


def test_an_empty_recording_opens(tmp_path: Path) -> None:
    data = load(written(tmp_path, encode(Batch(), {}, INFO)))
    assert (len(data.ops), data.info["name"], data.info["unfinished"]) == (0, "run", True)


def test_what_was_being_written_is_left_out(tmp_path: Path) -> None:
    whole = encode(Batch(), {}, INFO)
    for end in (1, 15, 16, len(whole) - 1):
        assert len(load(written(tmp_path, whole, whole[:end])).ops) == 0


BOMB = zlib.compress(bytes(1 << 28), 9)
HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "nothing": ([], "its process ended before anything was written"),
    "a count beyond the file": ([frame({"streams": [["ops", 1 << 50, 0]]})], "would take more memory"),
    "a negative count": ([frame({"streams": [["ops", -1, 0]]})], "a frame claims a stream of -1 numbers"),
    "a stream that grows": ([frame({"streams": [["ops", 4, len(BOMB)]]}, BOMB)], "does not have the 4"),
    "a row without length": (
        [frame({"streams": [["ops", 2, 18]]}, zlib.compress(bytes(16))[:18].ljust(18, b"\0"))], ""
    ),
    "a row of length zero": (
        [encode(Batch(Streams(ops=np.zeros(20, dtype=np.int64))), {}, INFO)], "shorter than its columns"
    ),
    "a row that goes on": (
        [encode(Batch(Streams(calls=np.full(12, 99, dtype=np.int64))), {}, INFO)], "goes on after the end"
    ),
    "no head": ([struct.pack("<4sIII", b"SGJB", 4, zlib.crc32(b"\0\0\0\0"), 0) + b"\0\0\0\0"], ""),
    "an unknown first fact": ([frame({"first": {"flops": 3}})], "invalid 'flops': 3"),
    "an op of no operation": (
        [encode(Batch(Streams(ops=np.array([14, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]))), {}, INFO)], ""
    ),
    "a value of no metadata": (
        [encode(Batch(Streams(fresh=np.array([0, 12, -1]))), {}, INFO)], ""
    ),
    "a value made of itself": (
        [encode(Batch(Streams(values=np.array([10, 0, 0, 0, 0, 5, -1, 0, 0, 0]))), {}, INFO)],
        "comes before its base or previous version",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_journals(tmp_path: Path, what: str) -> None:
    frames, sentence = HOSTILE[what]
    with pytest.raises(DamagedFile) as caught:
        load(written(tmp_path, *frames))
    assert str(caught.value).startswith(f"{tmp_path / JOURNAL} is damaged: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (b"", "it is no journal of a recording"),
        (b"SQLite format 3\0", "it is no journal of a recording"),
        (
            HEAD[:8] + struct.pack("<I", VERSION + 1),
            f"it is a journal of format {VERSION + 1}, and this sightline reads up to {VERSION}: update",
        ),
    ],
)
def test_other_files(tmp_path: Path, head: bytes, sentence: str) -> None:
    with pytest.raises(DamagedFile, match=sentence):
        load(written(tmp_path, head=head))


def test_a_journal_of_another_layout_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, encode(Batch(), {}, INFO))
    monkeypatch.setattr(journal, "VERSION", journal.VERSION + 1)
    with pytest.raises(DamagedFile, match="open it once with the sightline that recorded it"):
        load(tmp_path)
