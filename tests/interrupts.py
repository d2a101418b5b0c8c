"""Interrupts at every place where Python lets one in, one after the other: the same places in every run.

CPython looks for signals and asynchronous exceptions when a function begins, after a call, and when a loop
jumps back. `places` lists these places, as far as a piece of work passes them; `interrupted` runs the work
and raises at one of them. Python's own ``threading`` is left out: what an interrupt does to its locks is not
ours to mend, and start and stop wait with what is written in C.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import sightline

_CALLS: Final = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "PRECALL"})
#: Code of these is looked at: ours, and what of Python's own stands between ours and the system.
_OURS: Final = str(Path(str(sightline.__file__)).parent) + os.sep
_PYTHONS: Final = tuple(
    str(Path(os.__file__).parent / name) for name in ("contextlib.py", "_weakrefset.py", "functools.py")
)


class Place(NamedTuple):
    """A place in a function, and how often it was passed before."""

    code: CodeType
    offset: int
    before: int = 0

    def __str__(self) -> str:
        line = list(self.code.co_positions())[self.offset // 2][0]
        return f"{Path(self.code.co_filename).name}:{line} {self.code.co_qualname}+{self.offset}"


class Interrupt(KeyboardInterrupt):
    """What is raised."""


_openings: dict[CodeType, frozenset[int]] = {}


def openings(code: CodeType) -> frozenset[int]:
    """The instructions of a function before which an interrupt may come."""
    found = _openings.get(code)
    if found is None:
        found = _openings[code] = frozenset(_openings_of(code))
    return found


def _openings_of(code: CodeType) -> Iterator[int]:
    ranges = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # there is no other way to it

    def handler(offset: int) -> int:
        return max((one.target for one in ranges if one.start <= offset < one.end), default=-1)

    before = None
    for at in dis.get_instructions(code):
        if at.opname == "RESUME" or ("JUMP_BACKWARD" in at.opname and "NO_INTERRUPT" not in at.opname):
            yield at.offset
        # An exception of a call is handled where the call is: only then is it the same one instruction later.
        elif before is not None and before.opname in _CALLS and at.opname not in _CALLS:
            if handler(before.offset) == handler(at.offset):
                yield at.offset
        before = at


@contextmanager
def _watched(passed: Callable[[CodeType, int], None]) -> Iterator[None]:
    """Have a function called at each opening this thread passes in the block."""
    here = sys._getframe().f_code, sys._getframe(1).f_code

    def each(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "call":
            name = code.co_filename
            if not name.startswith(_OURS) and name not in _PYTHONS:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in openings(code) and code not in here:
            passed(code, frame.f_lasti)
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        yield
    finally:
        sys.settrace(before)


def places(work: Callable[[], Any], most: int = 2) -> list[Place]:
    """Where a piece of work can be interrupted: each place at most so often, at its first and last times."""
    passed: dict[tuple[CodeType, int], int] = {}

    def note(code: CodeType, offset: int) -> None:
        passed[code, offset] = passed.get((code, offset), 0) + 1

    with _watched(note):
        work()
    return [
        Place(code, offset, time)
        for (code, offset), times in passed.items()
        for time in sorted({0, *range(max(0, times - most + 1), times)})
    ]


def interrupted(work: Callable[[], Any], place: Place, kind: type[BaseException] = Interrupt) -> bool:
    """Do a piece of work and interrupt it at a place; whether it came there and raised."""
    left = place.before

    def strike(code: CodeType, offset: int) -> None:
        nonlocal left
        if code is place.code and offset == place.offset:
            left -= 1
            if left == -1:
                raise kind

    try:
        with _watched(strike):
            work()
    except (kind, KeyboardInterrupt):  # inside C++ it becomes a signal, and so another object
        return True
    return False
