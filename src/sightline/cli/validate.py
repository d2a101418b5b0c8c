"""``sightline validate``: whether a recording is sound, all of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sightline.cli.command import Command, examples, open_recording, printable_text, recording_argument
from sightline.cli.screen import wait_message
from sightline.notation import bytes_text
from sightline.trace.bundle.reader import LoadedTrace

if TYPE_CHECKING:
    from sightline.api import Trace


@click.command(
    "validate",
    cls=Command,
    epilog=examples(
        "sightline validate run.sight",
        "sightline validate run.sight && rsync -a run.sight host:",
    ),
)
@recording_argument
def command(file: str) -> None:
    """Check that a recording is sound.

    Every table, source file and kept tensor is read, and the recording's own invariants are proved: ids
    resolve, calls nest, values are made before they are read. The exit code is 0 if so, else 1. A recording
    whose process was killed, or still runs, may be sound as far as it goes: then it says `not finished`.
    """
    trace = open_recording(file)
    with wait_message():
        report = trace.validate()
    told = [
        _count_text(report.ops, "op"),
        _count_text(report.values, "value"),
        _count_text(report.calls, "module call"),
    ]
    told += _sources(trace) + _tensors(trace)
    if report.external:
        told.append(f"{report.external:,} values from outside")
    state = "sound, but not finished" if trace.info.get("unfinished") else "sound"
    click.echo(f"{printable_text(file)} is {state}: {', '.join(told)}.")


def _sources(trace: Trace) -> list[str]:
    data = trace.data
    assert isinstance(data, LoadedTrace)
    for name in data.sources:
        data.sources[name]  # reading is the check
    whole = len(data.source_lines.whole)
    parts = len(data.sources) - whole
    told = [_count_text(whole, "source file")] if whole else []
    return [*told, f"lines of {_count_text(parts, 'other file')}"] if parts else told


def _tensors(trace: Trace) -> list[str]:
    """Read every kept tensor; only here may it take long, so only here is progress shown."""
    tensors = trace.tensors.where()
    if not tensors:
        return []
    size = 0
    hidden = not sys.stderr.isatty()
    with click.progressbar(tensors, label="tensors", file=sys.stderr, hidden=hidden) as shown:
        for tensor in shown:
            size += tensor.raw.nbytes
    return [f"{_count_text(len(tensors), 'kept tensor')} of {bytes_text(size)}"]


def _count_text(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
