"""``sightline html``: the page of a recording as one file."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sightline.cli.command import (
    Command,
    examples,
    filter_options,
    open_recording,
    printable_text,
    recording_argument,
)
from sightline.errors import UsageError
from sightline.notation import bytes_text

if TYPE_CHECKING:
    from sightline.api import Trace


@click.command(
    "html",
    cls=Command,
    epilog=examples(
        "sightline html run.sight",
        "sightline html run.sight -o run.html --open",
        "sightline html run.sight -o step3.html --step 3",
    ),
)
@recording_argument
@click.option("-o", "--output", metavar="OUT", type=click.Path(),
              help="The file to write.  [default: the recording's name, with .html]")  # fmt: skip
@filter_options("step")
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(recording: str, output: str | None, step: str | None, show: bool, force: bool) -> None:
    """Write a recording as a web page: one file that opens offline.

    The page holds everything it shows, including the text of the source files, and loads nothing from a
    network.
    """
    target = Path(output) if output else Path(Path(recording.rstrip("/")).stem + ".html")
    if (target.is_file() or target.is_dir()) and not force:  # a stream, as /dev/stdout, is no obstacle
        raise UsageError(f"{target} is there already: give another name with -o, or --force to replace it.")
    size = open_recording(recording, step)._save_page(target)
    click.echo(f"Wrote {printable_text(str(target))}: {bytes_text(size)}.", err=True)
    if show:
        open_page(target)


def open_temporary(trace: Trace, name: str) -> None:
    """Write the page of a recording to a temporary folder, and open it."""
    target = Path(tempfile.mkdtemp(prefix="sightline-"), f"{name or 'run'}.html")
    size = trace._save_page(target)
    click.echo(f"Wrote {printable_text(str(target))}: {bytes_text(size)}.", err=True)
    open_page(target)


def open_page(target: Path) -> None:
    """Open a page in the browser; without one, print how to open it."""
    if not webbrowser.open(target.resolve().as_uri()):
        click.echo(f"No browser could be started here: open {printable_text(str(target))} in one.", err=True)
