"""What the commands share: how one is declared, opens a recording, reports an error and names its options."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sightline.errors import SightlineError
from sightline.text_encoding import for_errors, readable_output
from sightline.views.rendering import Line, printable

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.views.rendering import Block, Span, View


F = TypeVar("F", bound=Callable[..., Any])
_RANK: Final = "sightline.rank"  #: where ``--rank`` is kept


class Command(click.Command):
    """A command that never ends in a traceback about its input."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and refuse two options that set the same parameter, such as ``--json`` and ``--csv``."""
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
            # The streams of a script stay as it finds them.
            with nullcontext() if self.name == "run" else readable_output():
                return super().invoke(ctx)
        except SightlineError as error:
            raise click.ClickException(printable_text(error_in_cli_words(str(error)))) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # `| head` has seen enough: click ends quietly
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(printable_text(f"{where}{error.strerror or error}.")) from error


def printable_text(text: str) -> str:
    """A text of several lines with control characters escaped, so that none moves a cursor.

    >>> printable_text("no \\x1b[31mred\\nhere")
    'no \\\\x1b[31mred\\nhere'
    """
    return for_errors("\n".join(map(printable, text.split("\n"))))


def recording_argument(function: F) -> F:
    """The argument ``FILE``: the path of a recording; and ``--rank``, which `open_recording` reads."""
    rank = click.option(
        "--rank",
        metavar="N",
        type=click.IntRange(0),
        expose_value=False,
        callback=lambda context, _, value: context.meta.update({_RANK: value}),
        help="Only this rank of a distributed job.",
    )
    return click.argument("file", metavar="FILE", type=click.Path())(rank(function))


def open_recording(file: str, step: str | None = None) -> Trace:
    """The recording at a path, or a rank or a step of it, read on demand."""
    from sightline.api import load

    trace = load(file)
    context = click.get_current_context(silent=True)
    return trace._at(step, None if context is None else context.meta.get(_RANK))


def examples(*lines: str) -> str:
    """The end of a help text: example commands, line by line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def filter_options(*names: str) -> Callable[[F], F]:
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


#: Phrases of views and errors → the same on the command line.
_PHRASES: Final = {
    "sl.trace(…, stats=True)": "sightline run --stats",
    "sl.trace(…, capture=True)": "sightline run --capture '**'",
    'stats=True or check="nonfinite"': "sightline run --stats or --check",
    "stats=True: this trace": "--stats: this recording",
    "stats=True finds": "sightline run --stats finds",
    "stats=True names": "sightline run --stats names",
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
OPTION_NAMES: Final = {"ops": "level", "file": "only"}  #: arguments whose option has another name
#: A glob of ``sightline run``, as `sightline.analysis.unmatched_globs` writes it.
_UNMATCHED: Final = re.compile(r"^(Capture|Stats)\(modules=(.*?)\) matched")
_OPTIONS: Final = {"Capture": "--capture", "Stats": "--module"}
#: Styles of a view's own sentences; the others mark names, code and messages of the recording.
_OWN_STYLES: Final = frozenset({"", "dim", "warn"})


def in_cli_words(text: str) -> str:
    """A text of a view with Python arguments replaced by the options of the command line.

    >>> in_cli_words("statistics were not taken: stats=True finds NaN and dead layers")
    'statistics were not taken: sightline run --stats finds NaN and dead layers'
    """
    return _PHRASE.sub(lambda match: _PHRASES[match[0]], text)


def error_in_cli_words(text: str) -> str:
    """An error message with the argument it begins with written as an option.

    >>> error_in_cli_words("module='blocks.9' matches no module of this trace.")
    "--module 'blocks.9' matches no module of this trace."
    """

    def flag(match: re.Match[str]) -> str:
        return f"--{OPTION_NAMES.get(match[1], match[1]).replace('_', '-')} "

    return _ARGUMENT.sub(flag, in_cli_words(text))


def option_in_cli_words(text: str) -> str:
    """A glob that matched nothing, written as the option of ``sightline run`` it came from.

    >>> option_in_cli_words("Capture(modules='atn') matched nothing; near: attn")
    "--capture 'atn' matched nothing; near: attn"
    """
    return _UNMATCHED.sub(lambda match: f"{_OPTIONS[match[1]]} {match[2]} matched", text)


def view_in_cli_words(view: View, after_run: bool = False) -> View:
    """A view with its advice in the options of the command line; ``after_run``: as ``sightline run`` ends."""

    def translate(span: Span) -> Span:
        if span.style not in _OWN_STYLES:
            return span
        text = in_cli_words(span.text)
        return replace(span, text=option_in_cli_words(text) if after_run else text)

    def translate_all(blocks: Iterable[Block]) -> tuple[Block, ...]:
        return tuple(
            replace(block, spans=tuple(map(translate, block.spans))) if isinstance(block, Line) else block
            for block in blocks
        )

    fit = view.fit
    fitting = None if fit is None else lambda room: translate_all(fit(room))
    return replace(view, blocks=translate_all(view.blocks), fit=fitting)
