"""``sightline engine``: show which engine records here and why, or build the native one ahead."""

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
@click.option("--build", is_flag=True, help="Build the native engine now, even if that failed before.")
def command(build: bool) -> None:
    """Show which engine records here and why, or build the native one.

    Wheels for Linux bring the native engine for published versions of torch. For others it is compiled on
    first use, for the installed torch, Python and compiler, and kept in a cache folder. With --build the exit
    code is 0 if it can be used, else 1.
    """
    from sightline.recording.engine_choice import engine_status

    state = engine_status(build=build)
    if build and state.path is None:
        raise click.ClickException(printable_text(state.reason))
    lines = {
        "engine": state.engine,
        "why": state.reason,
        "file": state.path,
        "wheel": state.wheel,
        "torch": state.torch,
        "python": state.python,
        "compiler": state.compiler or "none found",
        "cache": state.cache or "none",
    }
    for name, text in lines.items():
        if text is not None:
            click.echo(printable_text(f"{name:<8}  {text}"))
