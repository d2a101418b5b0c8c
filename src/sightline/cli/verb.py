"""What the verbs have in common: how one is declared, how it opens a recording, how it says an error.

A verb is ``@click.command("ops", cls=Verb, epilog=examples(…))`` with ``@recording``. Whatever sightline
raises on purpose then ends it as ``Error: <one sentence>`` with exit code 1; a wrong option is exit code 2.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sightline.cli.words import spoken_error
from sightline.errors import SightlineError
from sightline.views.outline import printable

if TYPE_CHECKING:
    from sightline.api import Trace

F = TypeVar("F", bound=Callable[..., Any])


class Verb(click.Command):
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
