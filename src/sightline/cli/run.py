"""``sightline run``: an unchanged script, recorded.

The script is run as Python would run it: its output, exit code, ``__main__``, ``sys.argv`` and exceptions are
its own. What is said about the recording goes to standard error, after the script has ended.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from sightline.cli.command import Command, examples, has_torch, safe, spoken_asked, spoken_error, spoken_view
from sightline.cli.script import Program, instead_of, tell
from sightline.errors import UsageError
from sightline.notation import bytes_text
from sightline.ranks import path_of_rank, this_rank
from sightline.trace.bundle.paths import clear_recording, numbered_paths
from sightline.views.outline import Line

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.cli.step_range import StepRecorder
    from sightline.options import Stats
    from sightline.views.outline import Block


_HEAD_LINES: Final = 5  #: of the overview, where something is wrong
_TAIL_LINES: Final = 5  #: where the recording is, and what stands apart
#: What is told of the overview there.
_SHORT: Final = ("trace", "aten ops", "modules", "faults", "asked", "")


@click.command(
    "run",
    cls=Command,
    context_settings={"allow_interspersed_args": False},  # what comes after the script is the script's
    epilog=examples(
        "sightline run train.py --epochs 1",
        "sightline run --steps 3:5 -o slow.sight train.py",
        "sightline run --check --stats -m mypackage.train --lr 1e-3",
        "sightline run --capture 'blocks.*.attn' --ops none train.py",
        "sightline run --last 100000 train.py     a flight recorder for a long run",
        "sightline run --time device --steps 3 train.py     what the GPU spent on each op",
    ),
)
@click.option("-m", "as_module", is_flag=True, help="Run a module instead of a file, as `python -m` does.")
@click.option("-o", "--output", type=click.Path(), help="The recording.  [default: <script>.sight, numbered]")
@click.option("--force", is_flag=True, help="Replace a recording that is there.")
@click.option(
    "--ops", type=click.Choice(["none", "api", "aten", "both"]), default="both", show_default=True,
    help="What is recorded: module calls, API calls, aten ops, or all.",
)  # fmt: skip
@click.option("--capture", multiple=True, metavar="GLOB", help="Keep what these modules return; '**' is all.")
@click.option("--stats/--no-stats", default=None,
              help="Minimum, maximum … and a fingerprint of every result; partly on by itself.")  # fmt: skip
@click.option("--check", is_flag=True, help="Stop at the op that makes the first NaN or infinity.")
@click.option("--module", multiple=True, metavar="GLOB", help="With --stats: only in these modules.")
@click.option(
    "--time", type=click.Choice(["host", "device"]), default="host", show_default=True,
    help="Whose time is taken: also what a CUDA device spent on each op, and when it was idle.",
)  # fmt: skip
@click.option("--last", type=click.IntRange(1), metavar="N", help="Keep only the last N ops.")
@click.option(
    "--steps", metavar="A:B", help="Record only these training steps; each ends with optimizer.step()."
)
@click.option("--no-source", is_flag=True, help="Leave out the text of the source files.")
@click.option("--no-environment", is_flag=True, help="Leave out versions, host name and command line.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing at the end but where the recording is.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context, /, as_module: bool, output: str | None, force: bool, script: str,
    arguments: tuple[str, ...], steps: str | None, quiet: bool, **asked: Any,
) -> None:  # fmt: skip
    """Run a script unchanged, and record what its model did.

    SCRIPT and its arguments are what would follow `python`. The recording is there even if the script fails
    or is killed; look at it with `sightline show`.
    """
    if asked["module"] and not asked["stats"]:
        raise click.UsageError("--module says where statistics are taken: give --stats with it.")
    own = context.meta["arguments"][: -len(arguments) - 1]
    launcher = instead_of(script, as_module, arguments, own)
    if launcher is not None:
        raise UsageError(launcher)
    program = _found(script, arguments, as_module)
    place = _place(output, program.name, force)
    home = place.absolute()  # the script may go to another folder
    began = os.getpid()
    try:
        recording = _recording(program.name, home, steps, asked)
        ended = _run(program, recording)
    finally:
        if os.getpid() == began:  # not in a child of the script
            _leave(home)
    if os.getpid() == began:
        failed = ended is not None and not isinstance(ended, SystemExit)
        if ended is not None and failed:
            with suppress(KeyboardInterrupt):  # a second one hides nothing of the first
                _flush()
            program.tell(ended)
        here = this_rank()  # of several processes, one shows what it saw
        _report(recording, place, home, quiet or bool(here and here.rank), failed)
    if ended is not None:
        _end(context, ended)


def _found(script: str, arguments: tuple[str, ...], as_module: bool) -> Program:
    if as_module:
        return Program.module(script, arguments)
    try:
        return Program.script(script, arguments)
    except SyntaxError as error:  # as Python says it
        tell(error.with_traceback(None))
        raise SystemExit(1) from None


def _place(output: str | None, name: str, force: bool) -> Path:
    """Where the recording goes: never over another one, unless that is asked for.

    The folder is made here, which decides between processes that want the same one, and says before the
    script runs that nothing can be written.
    """
    places = [path_of_rank(Path(output))] if output is not None else list(numbered_paths(Path(), name))
    for place in places:
        try:
            with suppress(FileExistsError):  # a file: the next line says what is wrong with that
                place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(0o700)
            return place
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"No recording can be written to {place}: {error.strerror or error}; say where with -o."
            ) from error
    if output is None:
        raise UsageError(f"{places[0]} and {len(places) - 1} more are there already; give another -o.")
    if not force:
        raise UsageError(f"{place} is there already; give another -o, or --force to replace it.")
    clear_recording(place, "give another -o")
    return place


def _leave(home: Path) -> None:
    """Take the folder away again if nothing came into it."""
    with suppress(OSError):
        home.rmdir()


def _recording(name: str, place: Path, steps: str | None, asked: dict[str, Any]) -> StepRecorder:
    """The trace of the run, ready to begin."""
    if not has_torch():
        raise UsageError("Running a script with a model needs torch; install it, then run it again.")
    from sightline.cli.step_range import StepRecorder, span_of
    from sightline.options import Capture, Stats
    from sightline.tracing import trace

    modules = list(asked["module"]) or None
    stats = Stats(modules=modules) if asked["stats"] else _cheap_stats(asked)
    globs = list(asked["capture"])
    # A full disk is no reason for the script to end.
    capture = Capture(modules=globs, on_error="report") if globs else None
    traced = trace(
        ops=asked["ops"], capture=capture, stats=stats, last=asked["last"],
        check="nonfinite" if asked["check"] else None, path=place, name=name, time=asked["time"],
        source=not asked["no_source"], environment=not asked["no_environment"],
    )  # fmt: skip
    return StepRecorder(traced, span_of(steps))


def _cheap_stats(asked: dict[str, Any]) -> Stats | None:
    """Statistics where they cost little: on a CPU, read by the native engine, without fingerprints."""
    if asked["stats"] is False or asked["check"] or asked["ops"] not in ("aten", "both"):
        return None
    from sightline.options import Stats
    from sightline.recording.native.engine import reads_cheaply

    return Stats(fingerprint=False) if reads_cheaply() else None


def _run(program: Program, recording: StepRecorder) -> BaseException | None:
    """Run it; the result is how it ended, if not by itself."""
    names = program.begin()
    recording.begin()
    try:
        with recording:
            exec(program.code, names)  # noqa: S102 — it is what was asked for
    except BaseException as error:  # noqa: BLE001 — whatever it is, it is the script's and is told below
        return error
    return None


def _flush() -> None:
    with suppress(OSError, ValueError):  # a pipe that is closed is the script's own affair
        sys.stdout.flush()


def _report(recording: StepRecorder, place: Path, home: Path, quiet: bool, failed: bool) -> None:
    """Say how it went. The script has ended: whatever goes wrong here changes nothing about that."""
    try:
        _flush()
        _say(recording, place, home, quiet, failed)
    except KeyboardInterrupt:
        _tell(f"the report was interrupted; the recording is {place}.")
    except Exception as error:  # noqa: BLE001 — a script may leave anything behind
        with suppress(Exception):
            _tell(f"the recording cannot be shown: {str(error) or type(error).__name__}")


def _say(recording: StepRecorder, place: Path, home: Path, quiet: bool, failed: bool) -> None:
    """Where the recording is, what was in it and what looks wrong."""
    if recording.trouble:
        _tell(spoken_error(recording.trouble))
    trace = recording.trace
    if trace is None:
        if not recording.trouble:
            _tell("nothing was recorded: the script took no such step.")
        return
    if not any(home.glob("rank*")):
        faults = trace.info.get("faults") or [f"{place} was removed while the script ran."]
        _tell(faults[-1])
        return
    where = shlex.quote(str(place))
    if quiet:
        _say_missing(trace)
    else:
        _show(trace, where, failed)
    if _has_spawned():
        _tell("processes that the script has spawned are not recorded; in the function they run, write "
              "`with sl.trace(path=…):`.")  # fmt: skip
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
    _tell(f"{_counted(trace, home)} in {place}, {bytes_text(size)}{_said_stats(trace)}.")
    click.echo(safe(f"Look at it: {_next(trace, where, quiet)}"), err=True)


def _said_stats(trace: Trace) -> str:
    """That statistics were taken which nobody asked for."""
    asked = trace.info.get("asked") or {}
    cheap = "stats" in asked and len(trace.data.stats) and not trace.data.stats.fingerprint.any()
    return "; statistics were taken, --no-stats leaves them out" if cheap else ""


def _next(trace: Trace, where: str, quiet: bool) -> str:
    from sightline.views.last_screen import next_command

    return f"sightline show {where}" if quiet else next_command(trace, where)


def _counted(trace: Trace, home: Path) -> str:
    """How many ops are on disk; a disk that is full has fewer than were recorded."""
    from sightline.trace.bundle import load, schema

    every = len(trace.ops)
    if (home / schema.DATABASE).exists():
        return f"{every:,} ops"
    return f"{len(load(home).ops):,} of {every:,} ops"


def _has_spawned() -> bool:
    """Whether Python processes were started that begin anew; a forked one is the script's own."""
    return any(f"multiprocessing.popen_{way}" in sys.modules for way in ("spawn_posix", "forkserver"))


def _show(trace: Trace, where: str, failed: bool) -> None:
    """The overview and what looks wrong; after a failure, which stands above, only the overview's head."""
    from sightline.analysis.problems import find
    from sightline.views.last_screen import SCREEN, last_screen
    from sightline.views.overview import overview

    whole = overview(trace, more=f"sightline show {where}")
    wrong = last_screen(trace, where, SCREEN - _HEAD_LINES - _TAIL_LINES)
    if failed or find(trace.index):
        head = takewhile(lambda block: not isinstance(block, Line) or block.spans, whole.blocks)
        short = (block for block in head if not _is_note(block))
        whole = replace(whole, blocks=tuple(islice(short, _HEAD_LINES)), fit=None)
    for view in (whole, wrong):
        click.echo(err=True)
        spoken_view(view, after_run=True).print(file=sys.stderr)
    click.echo(err=True)


def _is_note(block: Block) -> bool:
    """Whether a line of the overview says what the traceback and the problems say better."""
    return isinstance(block, Line) and block.spans[0].text.strip() not in _SHORT


def _say_missing(trace: Trace) -> None:
    """What was asked for and did not come about, or went wrong: even the quiet want to know it."""
    from sightline.analysis.unmatched import left_out_text, unmatched

    missing = [spoken_asked(str(each)) for each in unmatched(trace.data)]
    left_out = left_out_text(trace.info)
    for text in (*missing, *([f"tensors: {left_out}"] if left_out else [])):
        _tell(f"{text}.")
    for fault in (trace.info.get("faults") or ())[-1:]:
        _tell(f"the recorder failed: {fault}")


def _tell(text: str) -> None:
    click.echo(safe(f"sightline: {text}"), err=True)


def _end(context: click.Context, error: BaseException) -> None:
    """End as the script would have ended."""
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt):  # a shell wants to know that it was the signal
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    context.exit(1)
