"""``sightline validate``: read all of a recording and check that it is sound."""

from __future__ import annotations

import sys

import click

from sightline.api import Trace
from sightline.cli.command import Command, examples, open_recording, printable_text, recording_argument
from sightline.cli.screen import wait_message
from sightline.errors import SightlineError
from sightline.notation import bytes_text
from sightline.ranks.folder import ranks_text, unread_text
from sightline.store.reader import LoadedTrace, load


@click.command(
    "validate",
    cls=Command,
    epilog=examples(
        "sightline validate run.sight",
        "sightline validate run.sight && rsync -a run.sight host:",
    ),
)
@recording_argument
def command(recording: str) -> None:
    """Check that a recording is sound.

    Every table, source file and kept tensor is read, and the invariants of the recording are checked: ids
    resolve, calls nest, values are produced before they are used. The exit code is 0 if it is sound, else 1.
    The recording of a process that was killed, or still runs, is reported as `sound, but not finished`. Of
    a distributed job every rank is checked, or the one of `--rank`.
    """
    trace = open_recording(recording)
    folder = trace._folder
    if folder is None:
        click.echo(f"{printable_text(recording)} is {_report(trace)}.")
        return
    sound, worlds = [], [0]
    for rank, path in folder.paths.items():
        try:
            of_rank = Trace(load(path))
            text = _report(of_rank)
            recorded = of_rank.info.get("rank", rank)
            worlds.append(int(of_rank.info.get("world_size") or 0))
            if recorded == rank:
                sound.append(rank)
            else:
                text = f"not sound: it is the recording of rank {recorded}"
        except SightlineError as error:
            text = f"not sound: {str(error).removesuffix('.')}"
        click.echo(printable_text(f"rank {rank} is {text}."))
    for note in folder.notes:
        click.echo(printable_text(note))
    bad = [rank for rank in folder.paths if rank not in sound]
    if bad:
        raise click.ClickException(
            f"{printable_text(recording)} is not sound: {len(bad)} of its {len(folder.paths)} ranks "
            f"{'is' if len(bad) == 1 else 'are'} not, {ranks_text(bad)}."
        )
    if folder.unread:
        raise click.ClickException(
            printable_text(f"{recording} is not sound: {unread_text(folder)}; {_ranks_sound(sound)}.")
        )
    missing = [rank for rank in range(max(worlds)) if rank not in folder.paths]
    if missing:
        raise click.ClickException(
            f"{printable_text(recording)} is not whole: {ranks_text(missing)} of {max(worlds)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; {_ranks_sound(sound)}."
        )
    click.echo(f"{printable_text(recording)} is sound: {ranks_text(sound)}.")


def _ranks_sound(sound: list[int]) -> str:
    return f"{ranks_text(sound)} {'is' if len(sound) == 1 else 'are'} sound"


def _report(trace: Trace) -> str:
    """Read all of one recording; returns its state and its size."""
    with wait_message():
        report = trace.validate()
    counts = [
        _count_text(report.ops, "op"),
        _count_text(report.values, "value"),
        _count_text(report.calls, "module call"),
    ]
    data = trace.data
    assert isinstance(data, LoadedTrace)
    for name in data.sources:
        data.sources[name]  # reading is the check
    whole = len(data.source_lines.whole)
    parts = len(data.sources) - whole
    counts += [_count_text(whole, "source file")] if whole else []
    counts += [f"lines of {_count_text(parts, 'other file')}"] if parts else []
    tensors = trace.tensors.where()
    if tensors:
        size, hidden = 0, not sys.stderr.isatty()
        with click.progressbar(tensors, label="tensors", file=sys.stderr, hidden=hidden) as shown:
            for tensor in shown:
                size += tensor.raw.nbytes
        counts.append(f"{_count_text(len(tensors), 'kept tensor')} of {bytes_text(size)}")
    if report.external:
        counts.append(f"{report.external:,} values from outside")
    state = "sound, but not finished" if trace.info.get("unfinished") else "sound"
    return f"{state}: {', '.join(counts)}"


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
