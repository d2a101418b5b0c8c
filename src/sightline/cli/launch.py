"""``sightline run --nproc N``: start torchrun, and report all its processes at the end."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click

from sightline.cli.command import has_torch, printable_text
from sightline.cli.job_watch import JobWatch
from sightline.errors import SightlineError, UsageError
from sightline.hints import for_command_line
from sightline.process_rank import this_rank
from sightline.store.paths import clear_recording, free_path, holds_recording

_LOOK_SECONDS: Final = 1.0  #: between two looks at the positions of the processes


def launch(
    nproc: int, own: list[str], output: str | None, force: bool, quiet: bool, program: list[str], name: str
) -> int:
    """Run a program in ``nproc`` processes, and report; returns the exit code of the launcher.

    ``own`` are the options of ``sightline run`` as they were typed; ``program`` is the script with its
    arguments, after ``-m`` for a module.
    """
    from sightline.ranks.folder import rank_folder

    if this_rank() is not None:
        raise UsageError("--nproc starts torchrun, and this process was started by it; leave --nproc out.")
    if not has_torch():
        raise UsageError("Running a script with a model needs torch; install it, then run it again.")
    folder = Path(output) if output is not None else free_path(Path(), name)
    folder = folder.with_name(f"{folder.name.removesuffix('.sight')}.sight")
    ranks = rank_folder(folder)
    if holds_recording(folder) or ranks is not None:
        if not force:
            raise UsageError(f"{folder} is there already; give another -o, or --force to replace it.")
        for path in [folder] if ranks is None else ranks.paths.values():
            clear_recording(path, "give another -o")
            path.rmdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    with tempfile.TemporaryDirectory(prefix="sightline-", ignore_cleanup_errors=True) as positions:
        options = [*_without_nproc(own), "--launched", positions, "-o", str(folder)]
        run = [*command, "-m", "sightline", "run", *options, *program]
        watch = JobWatch(Path(positions), folder, f"sightline show {shlex.quote(str(folder))}")
        code = _wait(subprocess.Popen(run), None if quiet else watch)  # noqa: S603 — the program the user has named
    _report(folder, quiet)
    return code


def _without_nproc(own: list[str]) -> list[str]:
    """The options without ``--nproc N`` and ``-m``, which stands before the module.

    >>> _without_nproc(["--stats", "--nproc", "2", "-m", "--nproc=4", "-q"])
    ['--stats', '-q']
    """
    kept = list(own)
    while "--nproc" in kept:
        at = kept.index("--nproc")
        del kept[at : at + 2]
    return [option for option in kept if option != "-m" and not option.startswith("--nproc=")]


def _wait(process: subprocess.Popen[bytes], watch: JobWatch | None) -> int:
    """Wait for the launcher, which handles interrupts itself, while the watch checks its processes."""

    def terminate(*_: Any) -> None:
        process.terminate()

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        while True:
            with suppress(KeyboardInterrupt):  # the terminal has sent it to the launcher too
                try:
                    return process.wait(None if watch is None else _LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    assert watch is not None
                    with suppress(Exception):  # a failed message must not end the job
                        watch.look()
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(folder: Path, quiet: bool) -> None:
    """Print all ranks on one screen, and the path of the recording."""
    from sightline.ranks.folder import rank_folder
    from sightline.ranks.merge import merge
    from sightline.ranks.overview import ranks_overview

    where = shlex.quote(str(folder))
    ranks = rank_folder(folder)
    if ranks is None:
        click.echo("sightline: nothing was recorded.", err=True)
        return
    try:
        if not quiet:
            click.echo(err=True)
            more = f"sightline show {where} --view ranks, --rank N --view code, summary …"
            with for_command_line(show="sightline show"):
                ranks_overview(merge(ranks), more=more).print(file=sys.stderr)
            click.echo(err=True)
    except SightlineError as error:  # this must not change how the program has ended
        click.echo(printable_text(f"sightline: the recording cannot be shown: {error}"), err=True)
    click.echo(printable_text(f"Look at it: sightline show {where}"), err=True)
