"""``sightline diff``: where two recordings diverge."""

from __future__ import annotations

import json

import click

from sightline.cli.command import Command, examples, open_recording, printable_text
from sightline.cli.screen import Screen, screen_options, wait_message
from sightline.notation import bytes_text

#: For each value of ``--fail-on`` the verdicts it fails on.
_FAILURES = {
    "divergence": ("different",),
    "rounding": ("different", "close"),
    "unknown": ("different", "unknown"),
}


@click.command(
    "diff",
    cls=Command,
    epilog=examples(
        "sightline diff before.sight after.sight",
        "sightline diff paper.sight mine.sight --rename mixer=attn --view source",
        "sightline diff run.sight run.sight --step step10 --step-b step11",
        "sightline diff run.sight --rank 0 --rank 3",
        "sightline diff before.sight after.sight --html diff.html",
        "sightline diff a.sight b.sight --fail-on divergence      # exit code 3 in CI",
    ),
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="[B]", type=click.Path(), required=False)
@click.option("--view", type=click.Choice(["verdict", "modules", "source"]), default="verdict",
              show_default=True,
              help="The verdict, the table of modules, or both sources side by side.")  # fmt: skip
@click.option("--all", is_flag=True, help="source: all lines, not only those around the divergence.")
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    help="Module OLD of one run is NEW in the other; can be repeated.",
)
@click.option(
    "--rtol", type=click.FloatRange(0), help="Relative tolerance.  [default: as much as rounding explains]"
)
@click.option("--atol", type=click.FloatRange(0), help="Absolute tolerance.")
@click.option("--values", type=click.Choice(["auto", "tensors", "statistics", "fingerprints", "none"]),
              default="auto", show_default=True, help="How values are compared.")  # fmt: skip
@click.option("--step", metavar="NAME", help="Only this step: a number, a name, 3:5, or last.")
@click.option("--step-b", metavar="NAME", help="The step of B, if it is another one.")
@click.option("--rank", metavar="N", type=click.IntRange(0), multiple=True,
              help="Only this rank of a distributed job; twice: one of A and one of B.")  # fmt: skip
@click.option("--html", "page", metavar="OUT", type=click.Path(),
              help="Write a page with both runs side by side to this file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--fail-on", type=click.Choice(list(_FAILURES)),
              help="Exit with code 3 if the runs diverge; rounding: also if they differ by rounding; "
              "unknown: also if not all results of the runs could be compared.")  # fmt: skip
@screen_options
def command(
    a: str, b: str | None, view: str, all: bool, rename: tuple[str, ...], rtol: float | None,
    atol: float | None, values: str, step: str | None, step_b: str | None, rank: tuple[int, ...],
    page: str | None, as_json: bool, fail_on: str | None, screen: Screen,
) -> None:  # fmt: skip
    """Show where two recordings diverge, and why.

    Without B, two ranks or steps of A are compared. The first true divergence is the first value that
    differs although all inputs it was computed from agree: it is shown with its line and module on both
    sides and the likely reason. Record both runs with statistics: `sightline run --stats`.
    """
    from sightline.diff_api import diff, opened

    if b is None and len(rank) < 2 and step_b is None:
        raise click.UsageError("Missing argument B; two ranks or steps of A: --rank 0 --rank 1, or --step-b.")
    if len(rank) > 2:
        raise click.UsageError("--rank is given once for both recordings, or twice: one rank for each.")
    first, second = opened(a, "a", open_recording), opened(a if b is None else b, "b", open_recording)
    ranks = (rank[0], rank[-1]) if rank else None
    names = {}
    for pair in rename:
        old, equals, new = pair.partition("=")
        if not equals or not old:
            raise click.UsageError(f"--rename {pair!r} must be two names: --rename mixer=attn.")
        names[old] = new
    steps = (step, step_b if step_b is not None else step)
    with wait_message("comparing …"):
        result = diff(
            first, second, rename=names, rtol=rtol, atol=atol, values=values, step=steps, rank=ranks
        )
    if page is not None:
        from sightline.page.document import save_diff_page

        size = save_diff_page(result.comparison, page)
        click.echo(f"Wrote {printable_text(page)}: {bytes_text(size)}.", err=True)
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    elif view == "modules":
        screen.show(result.summary().within(screen.room))
    else:
        shown = result.source(all=all) if view == "source" else result._verdict()
        screen.show(shown.within(screen.room))
    if fail_on is not None and result.verdict in _FAILURES[fail_on]:
        raise click.exceptions.Exit(3)
