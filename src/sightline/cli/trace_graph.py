"""``sightline trace-graph``: draw the trace file of torchspy's ``CallTracer``."""

from __future__ import annotations

from pathlib import Path

import click

from sightline.cli.command import Command, examples, printable_text
from sightline.errors import UsageError


@click.command(
    "trace-graph",
    cls=Command,
    epilog=examples(
        "sightline trace-graph --trace-file call_trace.txt --out calls.svg",
        "sightline trace-graph --trace-file call_trace.txt --squash-name --figwidth 8",
        "sightline trace-graph --trace-file call_trace.txt --no-prune-leaves --save-json calls.json",
    ),
)
@click.option(
    "--trace-file",
    type=click.Path(path_type=Path),
    required=True,
    help="The file that CallTracer.save_trace wrote.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("trace_graph.png"), show_default=True,
    help="The picture: .png, .svg or .pdf; it needs graphviz.",
)  # fmt: skip
@click.option(
    "--show-repetition/--no-show-repetition",
    default=True,
    show_default=True,
    help="Show how often a layer repeats.",
)
@click.option(
    "--prune-leaves/--no-prune-leaves", default=True, show_default=True, help="Leave out the last names."
)
@click.option("--squash-name", is_flag=True, help="Draw equal names once, wherever they stand.")
@click.option("--dpi", type=click.IntRange(1), default=150, show_default=True, help="Dots per inch.")
@click.option("--figwidth", type=click.FloatRange(0, min_open=True), help="Inches; both sides are filled.")
@click.option("--figheight", type=click.FloatRange(0, min_open=True), help="Inches.")
@click.option("--save-json", type=click.Path(path_type=Path), help="Also write the tree to this file.")
@click.option("--verbose", is_flag=True, help="Print each step.")
def command(
    trace_file: Path, out: Path, show_repetition: bool, prune_leaves: bool, squash_name: bool, dpi: int,
    figwidth: float | None, figheight: float | None, save_json: Path | None, verbose: bool,
) -> None:  # fmt: skip
    """Draw a graph, top down, from the trace file of torchspy's CallTracer.

    `sightline graph` draws a recording of sightline itself.
    """
    from sightline.compat.torchspy.trace_graph import (
        build_tree,
        parse_trace,
        render_graph,
        save_tree_json,
    )

    def say(text: str) -> None:
        if verbose:
            click.echo(printable_text(text), err=True)

    try:
        paths = parse_trace(trace_file)
    except ValueError as error:
        raise UsageError(f"{trace_file}: {error}.") from error
    tree = build_tree(paths)
    say(f"{len(paths)} calls in {trace_file}")
    if save_json is not None:
        save_tree_json(tree, save_json)
        say(f"wrote {save_json}")
    dot = render_graph(tree, show_repetition, prune_leaves, squash_name, dpi, figwidth, figheight)
    written = dot.render(out, cleanup=True, format=out.suffix.lower().removeprefix(".") or "png")
    click.echo(printable_text(f"wrote {written}"), err=True)
