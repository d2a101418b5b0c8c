"""``sightline lineage``: the chain of ops, lines and modules a value came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sightline.cli.command import Command, examples, filter_options, open_recording, recording_argument
from sightline.cli.screen import Screen, screen_options
from sightline.errors import NothingMatched

if TYPE_CHECKING:
    from sightline.api import Trace


@click.command(
    "lineage",
    cls=Command,
    epilog=examples(
        "sightline lineage run.sight '$12'             # a value: quote it, or the shell takes it",
        "sightline lineage run.sight 1041              # what op 1041 of `sightline ops` made",
        "sightline lineage run.sight blocks.0.attn     # what a module returned last",
        "sightline lineage run.sight blocks.0.attn.q   # a variable of its code",
        "sightline lineage run.sight fc.weight --depth 5",
    ),
)
@recording_argument
@click.argument("key", metavar="KEY")
@filter_options("step")
@click.option("--depth", metavar="N", type=click.IntRange(1), help="How many ops to go back.")
@click.option("--level", type=click.Choice(["api", "aten"]), help="Calls as written, or aten ops.")
@click.option("--all", is_flag=True, help="Also how the model was built, and a trainer's ops.")
@screen_options
def command(recording: str, key: str, step: str | None, depth: int | None, level: str | None, all: bool,
            screen: Screen) -> None:  # fmt: skip
    """Tell where a value came from.

    KEY is a value ('$12'), the number of an op, the name of a parameter, a module, a variable in a module or
    of the script, or the key of a kept tensor. The most recent op comes first.
    """
    from sightline.views.lineage import lineage

    trace = open_recording(recording, step)
    view = lineage(trace, _meant(trace, key), depth=depth, level=level, everything=all)  # fmt: skip
    screen.show(view.within(screen.room))


def _meant(trace: Trace, key: str) -> Any:
    """A number is an op, as `sightline ops` counts them; everything else is for the trace to understand."""
    if not (key.isascii() and key.isdecimal() and len(key) < 19):
        return key
    count = len(trace.ops)
    if int(key) >= count:
        there = f"its ops are 0 … {count - 1}" if count else "it has no ops"
        raise NothingMatched(f"There is no op {key} in this trace; {there}.")
    return trace.ops[int(key)]
