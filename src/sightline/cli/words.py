"""What the views say to somebody who writes Python, in the words of the command line.

Views and errors are written once, and name calls and arguments. Here, and nowhere else, such a phrase becomes
the option that does the same. Only texts of sightline's own are looked at, and only whole phrases in them:
what comes out of a recording stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sightline.views.outline import Line

if TYPE_CHECKING:
    from sightline.views.outline import Block, Span, View

#: Phrase → the same on the command line.
_PHRASES: Final = {
    "sl.trace(…, stats=True)": "sightline run --stats",
    "sl.trace(…, capture=True)": "sightline run --capture '**'",
    'stats=True or check="nonfinite"': "sightline run --stats or --check",
    "stats=True: this trace": "--stats: this recording",
    "stats=True finds": "sightline run --stats finds",
    'ops="both" finds': "sightline run --ops both finds",
    'ops="both" records': "sightline run --ops both records",
    ": t.nonfinite()": ": --view nonfinite",
    ": t.problems()": ": --view problems",
    "give path= a": "give -o a",
    "; step=": "; --step ",
    "width=None shows all": "a larger --width shows all",
}
_PHRASE: Final = re.compile("|".join(map(re.escape, _PHRASES)))
#: An argument at the beginning of an error: ``module='blocks.9' matches …``.
_ARGUMENT: Final = re.compile(r"^([a-z_]+)=(?=['\"])")
_FLAGS: Final = {"ops": "level", "file": "only"}  #: where the option has another name
#: A glob that was given to ``sightline run``, as `sightline.analysis.asked` writes it.
_ASKED: Final = re.compile(r"^(Capture|Stats)\(modules=(.*?)\) matched")
_OPTIONS: Final = {"Capture": "--capture", "Stats": "--module"}
#: Styles of what views say themselves; the others are names, code and messages of the recording.
_OWN: Final = frozenset({"", "dim", "warn"})


def spoken(text: str) -> str:
    """A text of ours in the words of the command line.

    >>> spoken("statistics were not taken: stats=True finds NaN and dead layers")
    'statistics were not taken: sightline run --stats finds NaN and dead layers'
    """
    return _PHRASE.sub(lambda found: _PHRASES[found[0]], text)


def spoken_error(text: str) -> str:
    """The sentence of an error: also what it was about is an option here.

    >>> spoken_error("module='blocks.9' matches no module of this trace.")
    "--module 'blocks.9' matches no module of this trace."
    """

    def flag(found: re.Match[str]) -> str:
        return f"--{_FLAGS.get(found[1], found[1]).replace('_', '-')} "

    return _ARGUMENT.sub(flag, spoken(text))


def spoken_asked(text: str) -> str:
    """What was asked of ``sightline run`` and did not come about.

    >>> spoken_asked("Capture(modules='atn') matched nothing; near: attn")
    "--capture 'atn' matched nothing; near: attn"
    """
    return _ASKED.sub(lambda found: f"{_OPTIONS[found[1]]} {found[2]} matched", text)


def spoken_view(view: View, after_run: bool = False) -> View:
    """A view that says what to do next; ``after_run`` is at the end of ``sightline run``."""

    def said(span: Span) -> Span:
        if span.style not in _OWN:
            return span
        text = spoken(span.text)
        return replace(span, text=spoken_asked(text) if after_run else text)

    def all_said(blocks: Iterable[Block]) -> tuple[Block, ...]:
        return tuple(
            replace(block, spans=tuple(map(said, block.spans))) if isinstance(block, Line) else block
            for block in blocks
        )

    fit = view.fit
    fitting = None if fit is None else lambda room: all_said(fit(room))
    return replace(view, blocks=all_said(view.blocks), fit=fitting)
