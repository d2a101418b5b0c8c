"""How much work a function is, counted and not timed: a clock says another thing on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(run: Callable[[], object]) -> int:
    """How many functions are called while something runs, those written in C among them."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def assert_grows_in_line(make: Callable[[int], Callable[[], object]], size: int, times: int = 4) -> None:
    """What is made for a size calls at most a little more than in proportion functions for a larger one."""
    small, large = calls_of(make(size)), calls_of(make(times * size))
    assert large < 1.5 * times * small, f"{large:,} calls for {times * size:,}, {small:,} for {size:,}"
