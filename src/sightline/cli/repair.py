"""``sightline repair``: finish a recording that was cut off."""

from __future__ import annotations

import click

from sightline.cli.command import Command, examples, printable_text, recording_argument


@click.command(
    "repair",
    cls=Command,
    epilog=examples("sightline repair run.sight     # after the process was killed"),
)
@recording_argument
def command(recording: str) -> None:
    """Finish the recording of a killed process, and remove its temporary files.

    A recording that was cut off can be viewed as it is; repaired, it is one file again, opens faster and can
    be passed on. Damaged parts are reported and left out.
    """
    from sightline.store.repair import repair

    for line in repair(recording) or [f"{recording} needs no repair."]:
        click.echo(printable_text(line))
