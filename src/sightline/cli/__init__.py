"""The command ``sightline``: one file per verb, each imported when it is called for.

``sightline --help`` imports click and nothing heavier.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from sightline._version import __version__

#: Verb → what it does. The verb ``x`` is the command ``command`` in ``sightline.cli.x``.
VERBS: Final = {
    "demo": "Trace a small transformer, forward and backward, and print the views.",
}


class Verbs(click.Group):
    """A group that knows its verbs by name and imports one only to run it or to print its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 — click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        command = import_module(f"sightline.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sightline")
def main() -> None:
    """See straight through a PyTorch model."""
