"""A bar on a terminal for work that may take long; nothing anywhere else, and nothing for what is quick."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import click

_QUICK: Final = 0.5  #: seconds after which a bar is shown


def _silent(_done: int, _total: int) -> None:
    """Nobody watches."""


@contextlib.contextmanager
def bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with what is done and what there is to do."""
    if not sys.stderr.isatty():
        yield _silent
        return
    began = time.monotonic()
    with contextlib.ExitStack() as ends:
        shown: Any = None

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if shown is None and time.monotonic() - began > _QUICK and done < total:
                shown = ends.enter_context(click.progressbar(length=total, label=label, file=sys.stderr))
            if shown is not None:
                shown.update(done - shown.pos)
                if done >= total:  # what is printed next begins on a line of its own
                    ends.close()
                    shown = None

        yield progress
