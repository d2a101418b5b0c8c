"""``sightline graph``: the data-flow graph of a recording, as a picture or as text."""

from __future__ import annotations

import sys
from typing import Final

import click

from sightline.cli.command import (
    Command,
    examples,
    filter_options,
    open_recording,
    printable_text,
    recording_argument,
)
from sightline.cli.screen import wait_message

_TEXTS: Final = ("mermaid", "dot", "json", "list")


@click.command(
    "graph",
    cls=Command,
    epilog=examples(
        "sightline graph run.sight -o run.svg --depth 2",
        "sightline graph run.sight -o layers.pdf --level module",
        "sightline graph run.sight --module 'blocks.0' --prune views --to list",
        "sightline graph run.sight --to dot | dot -Tpng > run.png",
    ),
)
@recording_argument
@click.option("-o", "--output", metavar="PATH", type=click.Path(),
              help="Write .svg, .png, .pdf, .dot, .mmd or .json; pictures need graphviz.")  # fmt: skip
@click.option(
    "--to", "form", type=click.Choice(_TEXTS), help="Without -o: what to print.  [default: mermaid]"
)
@click.option("--level", type=click.Choice(["api", "aten", "module"]),
              help="Calls as written, aten ops, or modules.")  # fmt: skip
@filter_options("step")
@click.option("--module", metavar="GLOB", help="Only what ran in these modules: 'blocks.0'.")
@click.option("--phase", type=click.Choice(["forward", "backward", "both"]), default="forward",
              show_default=True, help="Which pass.")  # fmt: skip
@click.option("--prune", multiple=True, type=click.Choice(["views", "parameters", "constants", "leaves"]),
              help="Leave these out; may be given several times.")  # fmt: skip
@click.option("--all", is_flag=True,
              help="Also what builds the model, and what a trainer does around it.")  # fmt: skip
@click.option("--fold/--no-fold", default=True, show_default=True,
              help="Equal layers once, with ×N, and a recurrence as a loop.")  # fmt: skip
@click.option("--depth", metavar="N", type=click.IntRange(0), help="Collapse modules below this depth.")
def command(recording: str, output: str | None, form: str | None, level: str | None, step: str | None,
            module: str | None, phase: str, prune: tuple[str, ...], all: bool, fold: bool,
            depth: int | None) -> None:  # fmt: skip
    """Draw the data-flow graph.

    With -o the end of the file name says what is written. Without it, a text is printed: Mermaid, which
    Markdown shows, or what --to says.
    """
    if output is not None and form is not None:
        raise click.UsageError("--to is for printing; with -o the end of the file name says the format.")
    trace = open_recording(recording, step)
    with wait_message():
        made = trace.graph(level=level, depth=depth, fold=fold, prune=prune, phase=phase, module=module,
                           all=all)  # fmt: skip
    if "left_out" in made.info:
        click.echo(made.info["left_out"], err=True)
    if output is not None:
        with wait_message("drawing …"):
            made.save(output)
        click.echo(
            printable_text(f"{output}: {len(made.nodes):,} nodes, {len(made.edges):,} edges"), err=True
        )
        return
    if form == "json":
        text = _ascii(made.to_json())
    else:
        text = printable_text({"dot": made.to_dot, "list": made.__str__}.get(form or "", made.to_mermaid)())
    sys.stdout.write(text.removesuffix("\n") + "\n")


def _ascii(text: str) -> str:
    """JSON with everything escaped that a terminal could take for more than text."""
    import json

    return json.dumps(json.loads(text))
