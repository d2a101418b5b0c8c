"""Shared by the commands: their class and options, opening a recording, reporting errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sightline.errors import SightlineError
from sightline.hints import for_command_line
from sightline.text_encoding import for_errors, readable_output
from sightline.views.rendering import printable

if TYPE_CHECKING:
    from sightline.api import Trace


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
            if self.name == "run":  # the script gets its streams unchanged, and hints as Python spells them
                return super().invoke(ctx)
            with readable_output(), for_command_line():
                return super().invoke(ctx)
        except SightlineError as error:
            raise click.ClickException(printable_text(str(error))) from error
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
    return click.argument("recording", metavar="FILE", type=click.Path())(rank(function))


def open_recording(path: str, step: str | None = None) -> Trace:
    """The recording at a path, or a rank or a step of it, read on demand."""
    from sightline.api import load

    trace = load(path)
    context = click.get_current_context(silent=True)
    return trace._at(step, None if context is None else context.meta.get(_RANK))


def examples(*lines: str) -> str:
    """Example commands, line by line, for the end of a help text."""
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
        help="Only this training step, as a recording of its own: 3, 3:5, last, or a name.",
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


def renamed_option(old: str, name: str) -> Callable[[F], F]:
    """The former flag of the option ``name``: it works for one more version, with a warning."""

    def store(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            click.echo(
                f"sightline: {old} is called --{name} now; the old name ends with the next version.", err=True
            )
            context.params[name] = value

    return click.option(old, f"former_{name}", hidden=True, expose_value=False, callback=store)


def has_torch() -> bool:
    """Whether a model can be run here."""
    from importlib.util import find_spec

    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # an entry of ``sys.modules`` that is None
        return False
