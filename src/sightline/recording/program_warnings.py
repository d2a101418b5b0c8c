"""Warnings that Python and torch show while something records: facts about the run.

They are noted where Python shows one: after the user's filters and registries have decided that it is shown,
so that none of these change; a warning that is an error, or ignored, never comes here. Those of torch's C++
go the same way. Left out is one that code inside the recording only collects, with
``catch_warnings(record=True)``, and one that a filter of torch drops; a test runner collects all warnings
around the recording: those are noted. Nothing runs for an op that does not warn.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from sightline.data.file_owners import cell_name, torch_file
from sightline.data.trace_data import FROM_CPP, FROM_PYTHON, FROM_TORCH
from sightline.recording.stacks import frames_from
from sightline.recording.training_log import caller_location

_MAX_WARNINGS: Final = 100  #: different ones
_MAX_TEXT: Final = 600
#: torch's own warning about the hooks that a recording has on modules.
_OURS: Final = "when there are global hooks on modules"

#: The end of a C++ warning.
_INTERNALLY: Final = " (Triggered internally at "

#: A warning as the trace stores it: category, text, location, nanoseconds since the start, where it came from
#: (see `trace.data`), how often.
Row = list[Any]


class WarningLog:
    """The warnings of one recording; equal ones at one line are counted."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str, int], Row] = {}

    def note(self, message: Any, frame: FrameType | None, time: int) -> None:
        """A warning is about to be shown; ``frame`` is the innermost one of Python."""
        text = " ".join(str(message.message).split())[:_MAX_TEXT]
        if _OURS in text:
            return
        key = (message.category.__name__, text, str(message.filename), int(message.lineno))
        if key in self._rows:
            self._rows[key][-1] += 1
        elif len(self._rows) < _MAX_WARNINGS:
            origin = FROM_PYTHON
            if _INTERNALLY in text:
                origin, text = FROM_CPP, text.partition(_INTERNALLY)[0]
            elif frame is not None and torch_file(frame.f_code.co_filename):
                origin = FROM_TORCH
            else:  # the line that the warning is about, which its ``stacklevel`` chose
                line = (key[2], key[3])
                at_line = (
                    one for one in frames_from(frame) if (one.f_code.co_filename, one.f_lineno) == line
                )
                frame = next(at_line, frame)
            location = caller_location(frame) or [cell_name(key[2]), key[3], ""]
            self._rows[key] = [key[0], text, location, time, origin, 1]

    def rows(self) -> list[Row]:
        """All of them as plain data, in order."""
        return [list(row) for row in self._rows.values()]


def _collecting_list() -> list[Any] | None:
    """The list in which ``catch_warnings(record=True)`` collects warnings, so that none is shown; or None."""
    if warnings.showwarning is not getattr(warnings, "_showwarning_orig", None) and not _torch_filters():
        return None  # a function that was installed later gets them
    target = getattr(getattr(warnings, "_showwarnmsg_impl", None), "__self__", None)
    return target if isinstance(target, list) else None


def _torch_filters() -> bool:
    """Whether a function of torch decides which warnings are shown, as while it compiles."""
    return torch_file(getattr(getattr(warnings.showwarning, "__code__", None), "co_filename", ""))


def _show_filtered(real: Callable[[Any], None], message: Any) -> bool:
    """Have a warning shown; whether the function that decides about it has passed it on to Python's."""
    own, passed = warnings._showwarnmsg_impl, []  # type: ignore[attr-defined]  # where all end that are shown

    def print_warning(message: Any) -> None:
        passed.append(message)
        own(message)

    warnings._showwarnmsg_impl = print_warning  # type: ignore[attr-defined]
    try:
        real(message)
    finally:
        warnings._showwarnmsg_impl = own  # type: ignore[attr-defined]
    return bool(passed)


class WarningPatch:
    """Notices when Python shows a warning, by the function that it calls for it."""

    def __init__(self) -> None:
        self._patched: Any = None
        self._collected: list[Any] | None = None  #: where warnings were collected before the recording began

    def install(self, notify: Callable[[Any, FrameType], None]) -> None:
        """Have ``notify(message, frame)`` called before a warning is shown. Safe to call again."""
        real = getattr(warnings, "_showwarnmsg", None)
        if self._patched is not None or real is None:  # without it another Python: they are not recorded
            return

        def show(message: Any) -> None:
            frame, collected = sys._getframe(1), _collecting_list()
            elsewhere = collected is not None and collected is not self._collected
            if _torch_filters():
                if _show_filtered(real, message) and not elsewhere:
                    notify(message, frame)
                return
            if not elsewhere:
                notify(message, frame)
            real(message)

        self._patched, self._collected = (real, show), _collecting_list()
        warnings._showwarnmsg = show  # type: ignore[attr-defined]  # C looks it up here, too

    def remove(self) -> None:
        """Put Python's function back, unless it was replaced by another since."""
        if self._patched is not None:
            real, show = self._patched
            if getattr(warnings, "_showwarnmsg", None) is show:
                warnings._showwarnmsg = real  # type: ignore[attr-defined]
            self._patched = self._collected = None
