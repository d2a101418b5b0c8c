"""``sightline graph``: the data-flow graph of a recording, as a picture or as text."""

from __future__ import annotations

import json
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
    "--to", "form", type=click.Choice(_TEXTS), help="Without -o: the format to print.  [default: mermaid]"
)
@click.option("--level", type=click.Choice(["api", "aten", "module"]),
              help="Calls as written, aten ops, or modules.")  # fmt: skip
@filter_options("step")
@click.option("--module", metavar="GLOB", help="Only in these modules: 'blocks.0'.")
@click.option("--phase", type=click.Choice(["forward", "backward", "both"]), default="forward",
              show_default=True, help="The pass to draw.")  # fmt: skip
@click.option("--prune", multiple=True, type=click.Choice(["views", "parameters", "constants", "leaves"]),
              help="Leave these out; can be repeated.")  # fmt: skip
@click.option("--all", is_flag=True,
              help="Also ops that build the model, and a trainer's ops around it.")  # fmt: skip
@click.option("--fold/--no-fold", default=True, show_default=True,
              help="Draw equal layers once, with ×N, and a recurrence as a loop.")  # fmt: skip
@click.option("--depth", metavar="N", type=click.IntRange(0), help="Collapse modules below this depth.")
def command(recording: str, output: str | None, form: str | None, level: str | None, step: str | None,
            module: str | None, phase: str, prune: tuple[str, ...], all: bool, fold: bool,
            depth: int | None) -> None:  # fmt: skip
    """Draw the data-flow graph.

    With -o the suffix of the file decides the format. Without it the graph is printed as text: as Mermaid,
    which Markdown renders, or in the format of --to.
    """
    if output is not None and form is not None:
        raise click.UsageError("--to is for printing; with -o the suffix of the file decides the format.")
    trace = open_recording(recording, step)
    with wait_message():
        graph = trace.graph(level=level, depth=depth, fold=fold, prune=prune, phase=phase, module=module,
                           all=all)  # fmt: skip
    if "left_out" in graph.info:
        click.echo(graph.info["left_out"], err=True)
    if output is not None:
        with wait_message("drawing …"):
            graph.save(output)
        click.echo(
            printable_text(f"{output}: {len(graph.nodes):,} nodes, {len(graph.edges):,} edges"), err=True
        )
        return
    if form == "json":
        text = json.dumps(json.loads(graph.to_json()))  # ASCII: nothing that a terminal would interpret
    else:
        text = printable_text(
            {"dot": graph.to_dot, "list": graph.__str__}.get(form or "", graph.to_mermaid)()
        )
    sys.stdout.write(text.removesuffix("\n") + "\n")
