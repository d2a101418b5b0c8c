"""``sightline engine``: which engine records here and why, and the native one built ahead."""

from __future__ import annotations

import click

from sightline.cli.command import Command, examples, printable_text


@click.command(
    "engine",
    cls=Command,
    epilog=examples(
        "sightline engine",
        "sightline engine --build   # ahead: in a container, before the jobs of a cluster",
        "SIGHTLINE_ENGINE=python sightline run train.py",
    ),
)
@click.option("--build", is_flag=True, help="Build the native engine now, also if that failed before.")
def command(build: bool) -> None:
    """Say which engine records here and why, or build the native one.

    The native engine is compiled on first use for the torch, the Python and the compiler that are installed,
    and kept in a cache folder. With --build the exit code is 0 if it can be used, else 1.
    """
    from sightline.recording.engine_choice import engine_status

    found = engine_status(build=build)
    if build and found.path is None:
        raise click.ClickException(printable_text(found.reason))
    lines = {
        "engine": found.engine,
        "why": found.reason,
        "built": found.path,
        "torch": found.torch,
        "python": found.python,
        "compiler": found.compiler or "none found",
        "cache": found.cache or "none",
    }
    for name, what in lines.items():
        if what is not None:
            click.echo(printable_text(f"{name:<8}  {what}"))
