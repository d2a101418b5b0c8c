"""Advice that names an option or a view: Python spells it one way, the command line another.

A text is built with the spelling of whoever reads it: the command line sets it once, around its own work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from sightline.argument_checks import argument_text

#: On the command line the command that shows a view, if that is another than the one at hand; else None.
_COMMAND: Final[ContextVar[str | None]] = ContextVar("_COMMAND", default=None)

#: Views whose name on the command line is not that of the method.
_VIEW_NAMES: Final = {"call_order": "order", "rank_times": "ranks"}


@dataclass(frozen=True, slots=True)
class Hint:
    """An option or a view that helps, in both spellings; as text it is the one that is read here.

    >>> f"record with {Hint.recording('stats')}", f"{Hint.option('all')} shows them"
    ('record with stats=True', 'all=True shows them')
    >>> with for_command_line():
    ...     f"record with {Hint.recording('stats')}", f"{Hint.option('all')} shows them"
    ('record with sightline run --stats', '--all shows them')
    """

    python: str
    command: str
    of_view: bool = False  #: an option of ``sightline show``

    def __str__(self) -> str:
        command = _COMMAND.get()
        if command is None:
            return self.python
        return f"{command} {self.command}" if command and self.of_view else self.command

    @classmethod
    def option(cls, name: str, value: Any = True) -> Hint:
        """An option of the view at hand.

        >>> Hint.option("module", "blocks.9")
        Hint(python="module='blocks.9'", command="--module 'blocks.9'", of_view=True)
        """
        return cls(f"{name}={_text(value)}", _flag(name, value), of_view=True)

    @classmethod
    def recording(cls, name: str, value: Any = True) -> Hint:
        """An option of `sightline.trace`, and of ``sightline run``.

        >>> Hint.recording("ops", "both")
        Hint(python='ops="both"', command='sightline run --ops both', of_view=False)
        """
        written = f'"{value}"' if isinstance(value, str) else argument_text(value)
        flag = f"--{name}" if value is True else f"--{name} {value}"
        return cls(f"{name}={written}", f"sightline run {flag}")

    @classmethod
    def view(cls, name: str) -> Hint:
        """A view of the recording at hand.

        >>> Hint.view("call_order")
        Hint(python='t.call_order()', command='--view order', of_view=True)
        """
        return cls(f"t.{name}()", f"--view {_VIEW_NAMES.get(name, name)}", of_view=True)


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, str) else argument_text(value)


def _flag(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{dashed}"
    return f"--{dashed} {_text(value)}"


@contextmanager
def for_command_line(show: str = "") -> Iterator[None]:
    """A block in which texts spell options as the command line does.

    ``show`` is the command that takes the options of views, where the command at hand does not.
    """
    token = _COMMAND.set(show)
    try:
        yield
    finally:
        _COMMAND.reset(token)
