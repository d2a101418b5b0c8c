"""The command ``sightline``: one file per verb, each imported on use.

``sightline --help`` imports click and nothing heavier.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from sightline._version import __version__

#: Each verb and its one-line help. The verb ``a-b`` is `command` in the module ``sightline.cli.a_b``.
VERBS: Final = {
    "run": "Run a script unchanged, and record its model.",
    "show": "Show a recording: its code, log, call order, summary, memory, source or problems.",
    "ops": "List the operations, as a table, JSON or CSV.",
    "tensors": "List the kept tensors, or draw one of them.",
    "lineage": "Show where a value came from.",
    "diff": "Show where two recordings diverge, and why.",
    "graph": "Draw the data-flow graph.",
    "validate": "Check that a recording is sound.",
    "repair": "Finish the recording of a killed process, and remove its temporary files.",
    "sql": "Query a recording in SQL, read-only.",
    "html": "Write a recording as a web page: one file that opens offline.",
    "convert": "Write a recording for another tool: Perfetto, CSV, JSON, Parquet.",
    "trace-graph": "Draw a graph, top down, from the trace file of torchspy's CallTracer.",
    "engine": "Show which engine records here and why, or build the native one.",
    "demo": "Trace a small transformer, forward and backward, and print the views.",
}


class Verbs(click.Group):
    """A group that knows its verbs by name and imports one only to run it or to print its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 — click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        home = f"sightline.cli.{cmd_name.replace('-', '_')}"
        try:
            command = import_module(home).command
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            return None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a verb; the error for a misspelt one names the nearest."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from sightline.patterns import did_you_mean

            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n  sightline run train.py\n  sightline show run.sight\n  sightline VERB --help",
)
@click.version_option(__version__, prog_name="sightline")
def main() -> None:
    """See straight through a PyTorch model."""
