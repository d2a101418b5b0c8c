"""``sightline demo``: run the embedded example and print the views of it.

The example is ``examples/tiny_transformer.py``; the wheel carries it beside this file. It runs as
a user's script in a folder of its own, so that its frames are shown like a user's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

from sightline.cli.command import has_torch

EXAMPLE: Final = "tiny_transformer.py"
VIEWS: Final = ("overview", "call_order", "log", "code", "source", "summary")


@click.command("demo")
@click.option("--view", "views", multiple=True, type=click.Choice(VIEWS), help="Only this view.")
@click.option("--source", "show_source", is_flag=True, help="Print the example's source and stop.")
@click.pass_context
def command(context: click.Context, views: tuple[str, ...], show_source: bool) -> None:
    """Trace a small transformer, forward and backward, and print the views."""
    if show_source:
        click.echo(source(), nl=False)
        return
    if not has_torch():
        raise click.ClickException("The demo runs a model: install torch, then run it again.")
    context.exit(run(views or VIEWS))


def source() -> str:
    """The text of the example: from the wheel, or from the folder of examples of a checkout."""
    here = Path(__file__).resolve()
    places = [here.with_name(EXAMPLE), here.parents[3] / "examples" / EXAMPLE]
    for place in places:
        if place.is_file():
            return place.read_text("utf-8")
    raise click.ClickException(f"{EXAMPLE} is missing from this installation: install sightline again.")


def run(views: tuple[str, ...]) -> int:
    """Run the example in a folder of its own; returns its exit status."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, known] if known else [root]),
        "PYTHONUTF8": "1",
    }
    with tempfile.TemporaryDirectory(prefix="sightline-demo-") as folder:
        Path(folder, EXAMPLE).write_text(source(), "utf-8")
        arguments = [sys.executable, EXAMPLE, *views]
        done = subprocess.run(arguments, cwd=folder, env=environment, check=False)  # noqa: S603 — our own script
    return done.returncode
