"""An interrupt at any place of start, stop or a recorded op breaks nothing and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.interrupting import PHASES, at_places, at_random
from tests.recording.engines import BOTH_ENGINES, EVERY_WAY

#: Of the places of each phase, every so-many-th: `make fuzz` takes them all.
EVERY = {"start": 41, "stop": 31, "leave": 37, "run": 67}


@EVERY_WAY
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_at_a_place(engine: str, kept: str, phase: str, tmp_path: Path) -> None:
    count, failed = at_places(engine, kept, phase, tmp_path, EVERY[phase])
    assert count > 0
    assert [str(one) for one in failed] == []


@BOTH_ENGINES
def test_an_interrupt_at_random(engine: str, tmp_path: Path) -> None:
    assert [str(one) for one in at_random(engine, "path", range(20), tmp_path)] == []
