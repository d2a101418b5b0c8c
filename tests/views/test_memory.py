from __future__ import annotations

import json
import sqlite3
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sightline as sl
from sightline.api import Trace
from sightline.data.trace_data import AllocationColumns
from sightline.errors import DamagedFile
from sightline.store import json_codec as plain
from sightline.views.rendering import View, width
from tests.builders import make_trace
from tests.conftest import Golden


def test_a_recording_that_knows_no_frees(golden: Golden) -> None:
    """The bundle of an earlier version: each storage counts until its last use, and it says so."""
    text = str(make_trace().memory())
    golden("memory_last_uses", text)
    assert "does not say when storages were freed" in text
    assert max(map(width, text.splitlines())) <= 100


def test_nothing_was_recorded() -> None:
    with sl.trace() as t:
        pass
    assert str(t.memory()) == "memory  no tensor was recorded that holds memory"


def saved(folder: Path) -> Path:
    with sl.trace() as t:
        x = torch.ones(100) + 1
        x = x * 2
    assert len(t.data.allocations)
    t.save(folder / "run.sight")
    assert str(sl.load(folder / "run.sight").memory()) == str(t.memory())
    return folder / "run.sight"


def edit_facts(bundle: Path, **changed: str) -> None:
    """Change facts of a bundle, and their checksums."""
    with sqlite3.connect(bundle / "rank0.db") as database:
        facts = dict(database.execute("SELECT name, data FROM facts").fetchall())
        sums = json.loads(facts["sums"])
        for name, text in changed.items():
            sums[f"facts.{name}"] = zlib.crc32(text.encode())
            database.execute("UPDATE facts SET data = ? WHERE name = ?", (text, name))
        database.execute("UPDATE facts SET data = ? WHERE name = 'sums'", (json.dumps(sums),))


def counts_of(bundle: Path) -> dict[str, int]:
    with sqlite3.connect(bundle / "rank0.db") as database:
        row = database.execute("SELECT data FROM facts WHERE name = 'counts'").fetchone()
    found: dict[str, int] = json.loads(row[0])
    return found


def test_a_bundle_of_an_earlier_version_opens(tmp_path: Path) -> None:
    bundle = saved(tmp_path)
    counts = counts_of(bundle)
    del counts["allocations"]
    with sqlite3.connect(bundle / "rank0.db") as database:
        database.execute("DELETE FROM chunks WHERE kind = 'allocations'")
    edit_facts(bundle, counts=json.dumps(counts))
    t = sl.load(bundle)
    assert len(t.data.allocations) == 0
    assert "does not say when storages were freed" in str(t.memory())


@pytest.mark.parametrize("invalid", [3, {"cuda:0": {"allocated": [1]}}, {"cuda:0": "much"}])
def test_invalid_allocators_of_a_damaged_file(tmp_path: Path, invalid: object) -> None:
    bundle = saved(tmp_path)
    edit_facts(bundle, info=plain.dumps(dict(sl.load(bundle).info) | {"allocator": invalid}))
    with pytest.raises(DamagedFile, match=r"invalid '?allocator"):
        sl.load(bundle).memory()


def test_what_an_allocator_says_stands_beside() -> None:
    with sl.trace() as t:
        x = torch.ones(1 << 18)
    t.info["allocator"] = {"cpu": {"allocated": [1 << 20, 1 << 21], "reserved": [0, 1 << 22],
                                   "most": [1 << 20, (1 << 21) + 4096]}}  # fmt: skip
    text = " ".join(str(t.memory()).split())
    assert "allocator cpu allocated 1.00 MiB before, 2.00 MiB after · reserved 4.00 MiB" in text
    assert "seen here 2.00 MiB with 1.00 MiB of others, -0.2%" in text
    assert x.numel() == 1 << 18


def test_numbers_that_cannot_be() -> None:
    """A damaged file may hold any number: the view draws something and never overflows."""
    data = make_trace().data
    big = np.array([1 << 62, -5, 7, 1 << 62], dtype=np.int64)
    rows = AllocationColumns(np.array([0, 1, -1, 2], dtype=np.int32), big, big[::-1].copy(), big)
    assert "peak" in str(Trace(replace(data, allocations=rows)).memory())


def test_all_of_it_fits_a_terminal() -> None:
    for room in (60, 80, 100):
        text = str(View(tuple(make_trace().memory().within(room))))
        assert max(map(width, text.splitlines())) <= room
