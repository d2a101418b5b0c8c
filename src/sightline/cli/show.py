"""``sightline show``: the views of a recording, with the filters that each of them takes."""

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
    from sightline.views.rendering import Block, View

#: Each view, and the method of `Trace` that makes it: its arguments are the options that the view takes.
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
              help="Which view.  [default: overview, or code if there are filters]")  # fmt: skip
@filter_options("step", "module", "op", "phase", "depth", "tail")
@click.option("--level", type=click.Choice(["api", "aten"]),
              help="code, source: calls as written, or aten ops.")  # fmt: skip
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Repeats once, with ×N; summary: layers that look alike.  [default: fold]",
)
@click.option("--stats/--no-stats", default=None, help="Statistics of values, where they were taken.")
@click.option("--names", is_flag=True, default=None, help="code: names of parameters and variables, too.")
@click.option("--all", is_flag=True, default=None,
              help="code, log: also what builds the model, and what a trainer does around it.")  # fmt: skip
@click.option("--torch-frames", is_flag=True, default=None, help="code: lines of torch's own source, too.")
@click.option("--inside", is_flag=True, default=None, help="log: what ran inside leaf modules, too.")
@click.option("--order", type=click.Choice(["entry", "completion"]), help="order: by entry or completion.")
@click.option("--file", metavar="GLOB", help="source: these files; a part of a path will do.")
@renamed_option("--only", "file")
@click.option("--kind", metavar="KIND", help="problems: only this kind.")
@click.option("--allow", metavar="GLOB", multiple=True, default=None,
              help="nonfinite: ops and modules that may make them; may be given several times.")  # fmt: skip
@click.option("--width", metavar="N", type=click.IntRange(20), help="summary, source: columns to fill.")
@click.option("--open", "page", is_flag=True, help="Open the page of the recording in the browser instead.")
@screen_options
def command(
    recording: str, view: str | None, step: str | None, page: bool, screen: Screen, **options: Any
) -> None:
    """Show a recording: its code, log, call order, summary, memory, source or problems.

    A filter that matches nothing is an error that names what is near. On a terminal the text is paged; on a
    pipe it is plain, and comes while it is made.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if page:
        _open_page(recording, view, step, given)
        return
    view = view or ("code" if given else "overview")
    for name in given:
        if name not in options_of(view):
            raise click.UsageError(_wrong_option_text(name, view))
    if view == "problems" and step is not None:  # which looks at that step of every rank
        given["step"], step = step, None
    trace = open_recording(recording, step)
    blocks = _blocks(trace, view, given, screen)
    if "allow" in given:
        _warn_unmatched(trace, given["allow"])
    screen.show(blocks)


def options_of(view: str) -> list[str]:
    """The options that a view takes."""
    from sightline.api import Trace

    arguments = inspect.signature(getattr(Trace, VIEWS[view])).parameters
    return [name for name in arguments if name not in _NO_OPTIONS]


def _open_page(recording: str, view: str | None, step: str | None, given: dict[str, Any]) -> None:
    """The page has all views and filters of its own; of a long run it can show a step."""
    from pathlib import Path

    from sightline.cli.html import open_temporary

    flags = [*(["--view"] if view else []), *map(_flag, given)]
    if flags:
        raise click.UsageError(f"{flags[0]} does not go with --open: the page has all views. --step does.")
    open_temporary(open_recording(recording, step), Path(recording.rstrip("/")).stem)


def _warn_unmatched(trace: Trace, globs: Sequence[str]) -> None:
    """A glob that matches nothing allows nothing: the answer stands, with a warning."""
    from sightline.analysis.unmatched_globs import unmatched_allow

    for each in unmatched_allow(trace.data, globs):
        click.echo(printable_text(f"sightline: --allow {each}"), err=True)


def _wrong_option_text(name: str, view: str) -> str:
    """The sentence about an option that a view does not take."""
    taken = _join_words([_flag(each) for each in options_of(view)], "and") or "no filters"
    homes = _join_words([each for each in VIEWS if name in options_of(each)], "or")
    return f"{_flag(name)} does not go with --view {view}, which takes {taken}; it goes with --view {homes}."


def _join_words(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _overview(trace: Trace) -> View:
    """The overview of a recording, or of all ranks of a job."""
    from sightline.ranks.overview import ranks_overview
    from sightline.views.overview import overview

    run = trace._run()
    return (
        overview(trace, more=_MORE)
        if run is None
        else ranks_overview(run, more=f"--view ranks, --rank N {_MORE}")
    )


def _blocks(trace: Trace, view: str, given: dict[str, Any], screen: Screen) -> Iterator[Block]:
    """The blocks of a view; those of the code, which may be long, while they are made."""
    from sightline.views.rendering import WIDTH

    room = screen.room
    if "width" in given:  # asked for, and so whatever the terminal has
        room = None
    elif "width" in options_of(view):
        given["width"] = room or WIDTH
    if view == "code":
        from sightline.views.code import code_lines

        yield from code_lines(trace, **given)
    elif view == "log":
        from sightline.views.log import log_lines

        yield from log_lines(trace, **given)
    elif view == "overview":
        yield from _overview(trace).within(room)
    else:
        yield from getattr(trace, VIEWS[view])(**given).within(room)
