"""The output of a command: a pager on a terminal, plain lines elsewhere; and its progress bar."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain, islice
from typing import Any, Final, TypeVar, cast

import click

from sightline.text_encoding import encoding_of
from sightline.views.rendering import Block, Printer

F = TypeVar("F", bound=Callable[..., Any])

#: Blocks given to a pager at once: few, so that the first screen comes at once; enough to keep calls cheap.
_BATCH: Final = 64
_MESSAGE_DELAY: Final = 1.0  #: seconds before a message is printed
#: Options of ``less`` where the user has set none: colours, and no pager if all fits a screen.
_LESS: Final = "-FRX"


@dataclass(frozen=True)
class Screen:
    """The output of this process: whether it is a terminal, in colour, through a pager."""

    terminal: bool
    color: bool
    pager: bool

    @classmethod
    def of(cls, color: str, pager: bool) -> Screen:
        """The screen of this process; ``color`` is "auto", "always" or "never"."""
        terminal = sys.stdout.isatty()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        colored = color == "always" or (color == "auto" and terminal and not plain)
        return cls(terminal, colored, pager and terminal)

    @property
    def room(self) -> int | None:
        """The width in columns; None on a pipe, where nothing is cut."""
        return shutil.get_terminal_size().columns if self.terminal else None

    def show(self, blocks: Iterable[Block]) -> None:
        """Write blocks as they come."""
        rest = iter(blocks)
        with wait_message():  # an error about the recording comes before a pager opens
            first = list(islice(rest, 1))
        if self.pager:
            os.environ["LESS"] = _less_options(os.environ.get("LESS", ""), self.color)
            click.echo_via_pager(self._texts(chain(first, rest)), color=self.color)
            return
        printer = Printer(sys.stdout, self.color)
        for block in chain(first, rest):
            printer.write(block)

    def _texts(self, blocks: Iterator[Block]) -> Iterator[str]:
        """The text in pieces of some lines, the newline before a line: the pager adds the last one."""
        end = ""
        while batch := list(islice(blocks, _BATCH)):
            out = io.StringIO()
            printer = Printer(out, self.color, encoding_of(sys.stdout))
            for block in batch:
                printer.write(block)
            yield end + out.getvalue().removesuffix("\n")
            end = "\n"


def _less_options(wanted: str, color: bool) -> str:
    """The options of ``less``: the user's, with the one for colours added if it is missing.

    >>> [_less_options(text, True) for text in ("", "-M", "-SR")], _less_options("-M", False)
    (['-FRX', '-R -M', '-SR'], '-M')
    """
    if not wanted:
        return _LESS
    return f"-R {wanted}" if color and "r" not in wanted.lower() else wanted


@contextmanager
def wait_message(text: str = "reading …") -> Iterator[None]:
    """Print a message if the block takes more than a second, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    printed = threading.Event()

    def write() -> None:
        printed.set()
        sys.stderr.write(text)
        sys.stderr.flush()

    timer = threading.Timer(_MESSAGE_DELAY, write)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if printed.is_set():
            sys.stderr.write(f"\r{' ' * len(text)}\r")
            sys.stderr.flush()


def screen_options(function: F) -> F:
    """``--color`` and ``--no-pager``, passed on as the argument ``screen``."""

    @wraps(function)
    def with_screen(*args: Any, color: str, pager: bool, **kwargs: Any) -> Any:
        return function(*args, screen=Screen.of(color, pager), **kwargs)

    pager = click.option(
        "--pager/--no-pager", default=True, help="Use a pager on a terminal.  [default: pager]"
    )
    color = click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Colour; auto: on a terminal, unless NO_COLOR is set.",
    )
    return cast(F, color(pager(with_screen)))


_BAR_DELAY: Final = 0.5  #: seconds after which a bar is shown


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal: a function to call with the work done and the total."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    began = time.monotonic()
    with contextlib.ExitStack() as ends:
        shown: Any = None

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if shown is None and time.monotonic() - began > _BAR_DELAY and done < total:
                shown = ends.enter_context(click.progressbar(length=total, label=label, file=sys.stderr))
            if shown is not None:
                shown.update(done - shown.pos)
                if done >= total:  # the next text begins on a line of its own
                    ends.close()
                    shown = None

        yield progress
