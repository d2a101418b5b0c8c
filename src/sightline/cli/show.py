"""``sightline show``: the views of a recording, each with its filters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from sightline.cli.command import (
    Command,
    examples,
    filter_options,
    open_recording,
    printable_text,
    recording_argument,
    renamed_option,
)
from sightline.cli.screen import Screen, screen_options

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.views.rendering import Block

#: Each view and its method of `Trace`, whose arguments are the options of the view.
VIEWS: Final = {
    "overview": "_overview",
    "code": "code",
    "log": "log",
    "order": "call_order",
    "summary": "summary",
    "source": "source",
    "memory": "memory",
    "problems": "problems",
    "nonfinite": "nonfinite",
    "ranks": "rank_times",
}
_MORE: Final = "--view code, log, order, summary, memory, source, problems or nonfinite"
#: Arguments that are no option.
_NO_OPTIONS: Final = frozenset({"self", "step", "rank", "tensor", "top"})


@click.command(
    "show",
    cls=Command,
    epilog=examples(
        "sightline show run.sight",
        "sightline show run.sight --view code --module 'blocks.0' --no-fold",
        "sightline show run.sight --phase backward --tail 40",
        "sightline show run.sight --step 3 --view code",
        "sightline show run.sight --view log --op '*matmul*' | less",
        "sightline show run.sight --view summary --depth 2",
        "sightline show run.sight --view source --file net.py",
        "sightline show run.sight --rank 3 --view code",
        "sightline show run.sight --view ranks",
        "sightline show run.sight --open",
    ),
)
@recording_argument
@click.option("--view", type=click.Choice(list(VIEWS)),
              help="The view to show.  [default: overview, or code if there are filters]")  # fmt: skip
@filter_options("step", "module", "op", "phase", "depth", "tail")
@click.option("--level", type=click.Choice(["api", "aten"]),
              help="code, source: calls as written, or aten ops.")  # fmt: skip
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Show repeats once, with ×N; summary: equal layers.  [default: fold]",
)
@click.option("--stats/--no-stats", default=None, help="Show statistics of values, where they were recorded.")
@click.option("--names", is_flag=True, default=None, help="code: also names of parameters and variables.")
@click.option("--all", is_flag=True, default=None,
              help="code, log: also ops that build the model, and a trainer's ops around it.")  # fmt: skip
@click.option("--torch-frames", is_flag=True, default=None, help="code: also lines of torch's own source.")
@click.option("--inside", is_flag=True, default=None, help="log: also ops inside leaf modules.")
@click.option("--order", type=click.Choice(["entry", "completion"]), help="order: by entry or completion.")
@click.option("--file", metavar="GLOB", help="source: only files whose path matches or contains this.")
@renamed_option("--only", "file")
@click.option("--kind", metavar="KIND", help="problems: only this kind.")
@click.option("--allow", metavar="GLOB", multiple=True, default=None,
              help="nonfinite: these ops and modules may produce NaN and Inf; can be repeated.")  # fmt: skip
@click.option("--width", metavar="N", type=click.IntRange(20), help="summary, source: width in columns.")
@click.option("--open", "page", is_flag=True, help="Open the recording as a web page in the browser instead.")
@screen_options
def command(
    recording: str, view: str | None, step: str | None, page: bool, screen: Screen, **options: Any
) -> None:
    """Show a recording: its code, log, call order, summary, memory, source or problems.

    A filter that matches nothing is an error, which suggests similar names. On a terminal the text goes
    through a pager; on a pipe it is plain.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if page:
        _open_page(recording, view, step, given)
        return
    view = view or ("code" if given else "overview")
    for name in given:
        if name not in options_of(view):
            taken = _join_words([_flag(each) for each in options_of(view)], "and") or "no filters"
            homes = _join_words([each for each in VIEWS if name in options_of(each)], "or")
            raise click.UsageError(
                f"{_flag(name)} does not go with --view {view}, which takes {taken}; "
                f"it goes with --view {homes}."
            )
    if view == "problems" and step is not None:  # this view reads the step of every rank
        given["step"], step = step, None
    trace = open_recording(recording, step)
    blocks = _blocks(trace, view, given, screen)
    if "allow" in given:  # a glob that matches nothing allows nothing: a warning, not an error
        from sightline.analysis.unmatched_globs import unmatched_allow

        for each in unmatched_allow(trace.data, given["allow"]):
            click.echo(printable_text(f"sightline: --allow {each}"), err=True)
    screen.show(blocks)


def options_of(view: str) -> list[str]:
    """The options that a view takes."""
    from sightline.api import Trace

    arguments = inspect.signature(getattr(Trace, VIEWS[view])).parameters
    return [name for name in arguments if name not in _NO_OPTIONS]


def _open_page(recording: str, view: str | None, step: str | None, given: dict[str, Any]) -> None:
    """Open the recording, or a step of it, as a page, which has all views and its own filters."""
    from pathlib import Path

    from sightline.cli.html import open_temporary

    flags = [*(["--view"] if view else []), *map(_flag, given)]
    if flags:
        raise click.UsageError(f"{flags[0]} does not go with --open: the page has all views. --step does.")
    open_temporary(open_recording(recording, step), Path(recording.rstrip("/")).stem)


def _join_words(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _blocks(trace: Trace, view: str, given: dict[str, Any], screen: Screen) -> Iterator[Block]:
    """The blocks of a view; those of the code and the log, which may be long, lazily."""
    from sightline.views.rendering import WIDTH

    room = screen.room
    if "width" in given:  # requested, on any terminal
        room = None
    elif "width" in options_of(view):
        given["width"] = room or WIDTH
    if view in ("code", "log") and trace._of_job:
        from sightline.ranks.overview import rank_lines

        yield from rank_lines(trace.info)
    if view == "code":
        from sightline.views.code import code_lines

        yield from code_lines(trace.index, **given)
    elif view == "log":
        from sightline.views.log import log_lines

        yield from log_lines(trace.index, **given)
    elif view == "overview":
        from sightline.ranks.overview import ranks_overview
        from sightline.views.overview import overview

        run = trace._run()
        if run is None:
            yield from overview(trace, more=_MORE).within(room)
        else:
            yield from ranks_overview(run, more=f"--view ranks, --rank N {_MORE}").within(room)
    else:
        yield from getattr(trace, VIEWS[view])(**given).within(room)
