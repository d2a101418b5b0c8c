"""A short run of what ``make fuzz`` does for minutes: always the same files, so that a failure stays one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.endings import check_endings
from tests.fuzz.mutations import flipped, somewhere
from tests.fuzz.running import fuzz


@pytest.mark.parametrize("kind", ["bundle", "journal"])
def test_damaged_files_end_in_a_sentence(kind: str, tmp_path: Path) -> None:
    done, failed = fuzz(kind, range(50), tmp_path)
    assert (done, [str(one) for one in failed]) == (50, [])


def test_the_same_seed_makes_the_same_file() -> None:
    for change in (lambda chance: flipped(bytes(1000), chance), lambda chance: somewhere([1, ["a"]], chance)):
        assert change(random.Random(3)) == change(random.Random(3))


@pytest.mark.parametrize("seed", [20797, 22256])
def test_what_once_failed(seed: int, tmp_path: Path) -> None:
    assert fuzz("journal", [seed], tmp_path, everything=True) == (1, [])


def test_odd_endings_leave_what_is_promised(tmp_path: Path) -> None:
    assert [str(one) for one in check_endings(3, 7, tmp_path)] == []
