"""What the commands share: how one is declared, opens a recording, reports an error and names its options."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sightline.errors import SightlineError
from sightline.views.outline import Line, printable

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.views.outline import Block, Span, View


F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A command that never ends in a traceback about its input."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options that are said to choose one thing, such as a form, exclude each other."""
        ctx.meta["arguments"] = list(args)
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        chosen: dict[str | None, click.Parameter] = {}
        for option in order:
            other = chosen.setdefault(option.name, option)
            if other is not option:
                flags = " and ".join(each.opts[0] for each in (other, option))
                raise click.UsageError(f"{flags} do not go together; give one of them.", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SightlineError as error:
            raise click.ClickException(safe(spoken_error(str(error)))) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # `| head` has seen enough: click ends quietly
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(safe(f"{where}{error.strerror or error}.")) from error


def safe(text: str) -> str:
    """A text of several lines with nothing in it that would move a cursor.

    >>> safe("no \\x1b[31mred\\nhere")
    'no \\\\x1b[31mred\\nhere'
    """
    return "\n".join(map(printable, text.split("\n")))


def recording(function: F) -> F:
    """The argument ``FILE``: the path of a recording."""
    return click.argument("file", metavar="FILE", type=click.Path())(function)


def opened(file: str, step: str | None = None) -> Trace:
    """The recording at a path, read as it is asked for, or a step of it; what is wrong is one sentence."""
    from sightline.api import load

    trace = load(file)
    return trace if step is None else trace.step(step)


def examples(*lines: str) -> str:
    """The end of a help text: commands to try, line by line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def filters(*names: str) -> Callable[[F], F]:
    """The filters that views take, as options: those of these names."""

    def declare(function: F) -> F:
        for name in reversed(names):
            function = _FILTERS[name](function)
        return function

    return declare


_FILTERS: dict[str, Callable[[Any], Any]] = {
    "step": click.option(
        "--step",
        metavar="N",
        help="Only this training step, with numbers of its own: 3, 3:5, last, or a name.",
    ),
    "module": click.option(
        "--module", metavar="GLOB", help="Only in these modules: 'blocks.*.attn', '**.mlp'."
    ),
    "op": click.option("--op", metavar="GLOB", help="Only these ops: '*matmul*', 'add'."),
    "phase": click.option(
        "--phase",
        type=click.Choice(["forward", "backward", "recompute", "optimizer"]),
        help="Only this phase.",
    ),
    "depth": click.option(
        "--depth", metavar="N", type=click.IntRange(0), help="Modules at most this deep; the model is 0."
    ),
    "tail": click.option("--tail", metavar="N", type=click.IntRange(1), help="Only the last N."),
    "head": click.option("--head", metavar="N", type=click.IntRange(1), help="Only the first N."),
}


def has_torch() -> bool:
    """Whether a model can be run here."""
    from importlib.util import find_spec

    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # an entry of ``sys.modules`` that is None
        return False


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
#: A glob that was given to ``sightline run``, as `sightline.analysis.unmatched` writes it.
_ASKED: Final = re.compile(r"^(Capture|Stats)\(modules=(.*?)\) matched")
_OPTIONS: Final = {"Capture": "--capture", "Stats": "--module"}
#: Styles of what views say themselves; the others are names, code and messages of the recording.
_OWN: Final = frozenset({"", "dim", "warn"})


def in_cli_words(text: str) -> str:
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

    return _ARGUMENT.sub(flag, in_cli_words(text))


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
        text = in_cli_words(span.text)
        return replace(span, text=spoken_asked(text) if after_run else text)

    def all_said(blocks: Iterable[Block]) -> tuple[Block, ...]:
        return tuple(
            replace(block, spans=tuple(map(said, block.spans))) if isinstance(block, Line) else block
            for block in blocks
        )

    fit = view.fit
    fitting = None if fit is None else lambda room: all_said(fit(room))
    return replace(view, blocks=all_said(view.blocks), fit=fitting)
