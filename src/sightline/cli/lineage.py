"""``sightline lineage``: the chain of ops, lines and modules a value came from."""

from __future__ import annotations

from typing import Any

import click

from sightline.cli.command import Command, examples, filter_options, open_recording, recording_argument
from sightline.cli.screen import Screen, screen_options
from sightline.errors import NothingMatched


@click.command(
    "lineage",
    cls=Command,
    epilog=examples(
        "sightline lineage run.sight '$12'             # a value; the quotes are for the shell",
        "sightline lineage run.sight 1041              # the result of op 1041 of `sightline ops`",
        "sightline lineage run.sight blocks.0.attn     # the last output of a module",
        "sightline lineage run.sight blocks.0.attn.q   # a variable in its code",
        "sightline lineage run.sight fc.weight --depth 5",
    ),
)
@recording_argument
@click.argument("key", metavar="KEY")
@filter_options("step")
@click.option("--depth", metavar="N", type=click.IntRange(1), help="How many ops to go back.")
@click.option("--level", type=click.Choice(["api", "aten"]), help="Calls as written, or aten ops.")
@click.option("--all", is_flag=True, help="Also ops that build the model, and a trainer's ops around it.")
@screen_options
def command(recording: str, key: str, step: str | None, depth: int | None, level: str | None, all: bool,
            screen: Screen) -> None:  # fmt: skip
    """Show where a value came from.

    KEY is a value ('$12'), the number of an op, the name of a parameter, a module, a variable in a module or
    of the script, or the key of a kept tensor. The most recent op comes first.
    """
    from sightline.views.lineage import lineage

    index = open_recording(recording, step).index
    value: Any = key
    if key.isascii() and key.isdecimal() and len(key) < 19:  # the number of an op, as in `sightline ops`
        if int(key) >= len(index.ops):
            ops = f"its ops are 0 … {len(index.ops) - 1}" if len(index.ops) else "it has no ops"
            raise NothingMatched(f"There is no op {key} in this trace; {ops}.")
        value = index.ops[int(key)]
    view = lineage(index, value, depth=depth, level=level, everything=all)
    screen.show(view.within(screen.room))
