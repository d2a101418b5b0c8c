"""``sightline run``: an unchanged script, recorded.

The script is run as Python would run it: its output, exit code, ``__main__``, ``sys.argv`` and exceptions are
its own. The report about the recording goes to standard error, after the script has ended.
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

from sightline.cli.command import (
    Command,
    examples,
    has_torch,
    printable_text,
)
from sightline.cli.job_watch import position_written
from sightline.cli.launch import launch
from sightline.cli.script import Program, launcher_advice
from sightline.errors import UsageError
from sightline.hints import for_command_line
from sightline.notation import bytes_text
from sightline.process_rank import path_of_rank, this_rank
from sightline.store.paths import (
    clear_recording,
    holds_recording,
    make_job_folder,
    numbered_paths,
    refuse_recording,
    remove_if_empty,
)
from sightline.views.rendering import Line

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.cli.step_range import StepRecorder


_HEAD_LINES: Final = 5  #: of the overview of a run with problems
_TAIL_LINES: Final = 5  #: the lines after the views, and empty ones
#: Titles of the lines that the short overview keeps.
_SHORT: Final = ("trace", "engine", "aten ops", "modules", "faults", "asked", "")


@click.command(
    "run",
    cls=Command,
    context_settings={"allow_interspersed_args": False},  # arguments after the script belong to the script
    epilog=examples(
        "sightline run train.py --epochs 1",
        "sightline run --steps 3:5 -o slow.sight train.py",
        "sightline run --check --stats -m mypackage.train --lr 1e-3",
        "sightline run --capture 'blocks.*.attn' --ops none train.py",
        "sightline run --last 100000 train.py              # a flight recorder for a long run",
        "sightline run --nproc 4 train.py                  # four processes, started by torchrun",
        "sightline run --time device --steps 3 train.py    # GPU time of each op",
    ),
)
@click.option("-m", "as_module", is_flag=True, help="Run a module instead of a file, as `python -m` does.")
@click.option("-o", "--output", type=click.Path(), help="The recording.  [default: <script>.sight, numbered]")
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@click.option(
    "--ops", type=click.Choice(["none", "api", "aten", "both"]), default="both", show_default=True,
    help="Record API calls, aten ops, both, or none of them; module calls always.",
)  # fmt: skip
@click.option(
    "--capture", multiple=True, metavar="GLOB", help="Keep the outputs of these modules; '**' is all."
)
@click.option("--stats/--no-stats", default=None,
              help="Minimum, maximum … and a fingerprint of every result.  "
              "[default: without fingerprints, where that costs little]")  # fmt: skip
@click.option("--check", is_flag=True, help="Stop at the op that makes the first NaN or infinity.")
@click.option("--module", multiple=True, metavar="GLOB", help="With --stats: only in these modules.")
@click.option(
    "--time", type=click.Choice(["host", "device"]), default="host", show_default=True,
    help="device: also the time of each op on a CUDA device, and when the device was idle.",
)  # fmt: skip
@click.option(
    "--compiled", type=click.Choice(["opaque", "eager"]), default="opaque", show_default=True,
    help="eager: run compiled code without its compiler, so that its ops are seen.",
)  # fmt: skip
@click.option("--last", type=click.IntRange(1), metavar="N", help="Keep only the last N ops.")
@click.option(
    "--steps", metavar="A:B", help="Record only these training steps; each ends with optimizer.step()."
)
@click.option("--no-source", is_flag=True, help="Leave out the text of the source files.")
@click.option("--no-environment", is_flag=True, help="Leave out versions, host name and command line.")
@click.option("--nproc", type=click.IntRange(1), metavar="N",
              help="Start N processes with torchrun, and record each.")  # fmt: skip
# Set by --nproc, which reports for all processes: the folder into which each writes its position.
@click.option("--launched", type=click.Path(path_type=Path), hidden=True)
@click.option(
    "-q", "--quiet", is_flag=True, help="At the end, print only the path of the recording, and warnings."
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context, /, as_module: bool, output: str | None, force: bool, script: str,
    arguments: tuple[str, ...], steps: str | None, quiet: bool, nproc: int | None, launched: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Run a script unchanged, and record its model.

    SCRIPT and its arguments are those that follow `python`. A script that fails or is killed leaves its
    recording too; `sightline show` opens it.
    """
    if options["module"] and not options["stats"]:
        raise click.UsageError("--module chooses where statistics are taken: give --stats with it.")
    own = context.meta["arguments"][: -len(arguments) - 1]
    launcher = launcher_advice(script, as_module, arguments, own)
    if launcher is not None:
        raise UsageError(launcher)
    program = Program.find(script, arguments, as_module)
    if nproc is not None:
        called = [*(["-m"] if as_module else []), script, *arguments]
        context.exit(launch(nproc, own, output, force, quiet, called, program.name))
    place = _make_folder(output, program.name, force)
    home = place.absolute()  # the script may change the current folder
    began = os.getpid()
    try:
        with for_command_line():
            recording = _make_recorder(program.name, home, steps, options)
        with position_written(launched, home):
            ended = _run(program, recording)
    finally:
        if os.getpid() == began:  # not in a child of the script
            remove_if_empty(home)
    if os.getpid() == began:
        failed = ended is not None and not isinstance(ended, SystemExit)
        if ended is not None and failed:
            with suppress(KeyboardInterrupt):  # a second exception must not hide the first
                _flush()
            program.print_exception(ended)
        here = this_rank()  # of several processes, one prints its overview
        if not launched or recording.trouble:
            _report(recording, place, home, quiet or bool(here and here.rank), failed)
    if ended is not None:
        _exit_like(context, ended)


def _make_folder(output: str | None, name: str, force: bool) -> Path:
    """Create the folder of the recording; an existing one is replaced only with ``--force``.

    Creating it here decides between processes that want the same one, and fails before the script runs if
    nothing can be written.
    """
    places = [path_of_rank(Path(output))] if output is not None else list(numbered_paths(Path(), name))
    for place in places:
        if output is None and holds_recording(place.parent):  # of one process: not the folder of all ranks
            continue
        if not place.exists():
            refuse_recording(place, "give another -o")
        try:
            with suppress(FileExistsError):  # a file: the next line raises the error for that
                make_job_folder(place)
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


def _make_recorder(name: str, place: Path, steps: str | None, options: dict[str, Any]) -> StepRecorder:
    """The recorder of the run, not started yet."""
    if not has_torch():
        raise UsageError("Running a script with a model needs torch; install it, then run it again.")
    from sightline.cli.step_range import StepRecorder, parse_steps
    from sightline.options import Bundle, Capture, Stats
    from sightline.tracing import trace

    modules = list(options["module"]) or None
    stats = Stats(modules=modules) if options["stats"] else None
    if options["stats"] is None and not options["check"] and options["ops"] in ("aten", "both"):
        from sightline.recording.engine_choice import statistics_are_cheap

        stats = Stats(fingerprint=False) if statistics_are_cheap() else None
    globs = list(options["capture"])
    # A full disk must not end the script.
    capture = Capture(modules=globs, on_error="report") if globs else None
    bundle = Bundle(place, source=not options["no_source"], environment=not options["no_environment"])
    traced = trace(
        ops=options["ops"], capture=capture, stats=stats, last=options["last"],
        check="nonfinite" if options["check"] else None, path=bundle, name=name, time=options["time"],
        compiled=options["compiled"],
    )  # fmt: skip
    return StepRecorder(traced, parse_steps(steps))


def _run(program: Program, recording: StepRecorder) -> BaseException | None:
    """Run the program; the exception it ended with, or None."""
    names = program.begin()
    recording.begin()
    try:
        with recording:
            exec(program.code, names)  # noqa: S102 — the program the user has named
    except BaseException as error:  # noqa: BLE001 — the script's own, printed by the caller
        return error
    return None


def _flush() -> None:
    with suppress(OSError, ValueError):  # a closed pipe is up to the script
        sys.stdout.flush()


def _report(recording: StepRecorder, place: Path, home: Path, quiet: bool, failed: bool) -> None:
    """Print the report; an error in it must not change how the script has ended."""
    try:
        _flush()
        with for_command_line(show="sightline show"):
            _print_report(recording, place, home, quiet, failed)
    except KeyboardInterrupt:
        _print(f"the report was interrupted; the recording is {place}.")
    except Exception as error:  # noqa: BLE001 — a script may leave anything behind
        with suppress(Exception):
            _print(f"the recording cannot be shown: {str(error) or type(error).__name__}")


def _print_report(recording: StepRecorder, place: Path, home: Path, quiet: bool, failed: bool) -> None:
    """The path of the recording, its contents, its problems, and the command to type next."""
    from sightline.views.last_screen import next_command

    if recording.trouble:
        _print(recording.trouble)
    trace = recording.trace
    if trace is None:
        if not recording.trouble:
            _print("nothing was recorded: the script took no such step.")
        return
    if not any(home.glob("rank*")):
        faults = trace.info.get("faults") or [f"{place} was removed while the script ran."]
        _print(faults[-1])
        return
    where = shlex.quote(str(place))
    if quiet:
        _print_missing(trace)
    else:
        _show(trace, where, failed)
    if any(f"multiprocessing.popen_{way}" in sys.modules for way in ("spawn_posix", "forkserver")):
        _print("processes that the script has spawned are not recorded; in the function they run, write "
              "`with sl.trace(path=…):`.")  # fmt: skip
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
    requested, stats = trace.info.get("asked") or {}, trace.data.stats
    note = ""
    if "stats" in requested and len(stats) and not stats.fingerprint.any():  # without --stats
        note = "; statistics were taken, --no-stats leaves them out"
    _print(f"{_count_ops(trace, home)} in {place}, {bytes_text(size)}{note}.")
    following = f"sightline show {where}" if quiet else next_command(trace.index, where)
    click.echo(printable_text(f"Look at it: {following}"), err=True)


def _count_ops(trace: Trace, home: Path) -> str:
    """The number of ops on disk; fewer than were recorded if the disk was full."""
    from sightline.store import bundle_schema as schema
    from sightline.store import load

    every = len(trace.ops)
    if (home / schema.DATABASE).exists():
        return f"{every:,} ops"
    return f"{len(load(home).ops):,} of {every:,} ops"


def _show(trace: Trace, where: str, failed: bool) -> None:
    """Print one screen: the overview, as far as it fits, and the problems; of a bad run only its head."""
    from sightline.analysis.problems import find
    from sightline.views.last_screen import SCREEN, first_sections, last_screen
    from sightline.views.overview import overview
    from sightline.views.rendering import height

    whole = overview(trace, more=f"sightline show {where}")
    wrong = last_screen(trace.index, where, SCREEN - _HEAD_LINES - _TAIL_LINES, noted=failed)
    if failed or find(trace.index):
        head = takewhile(lambda block: not isinstance(block, Line) or block.spans, whole.blocks)
        # The traceback and the problems tell more than the notes of the overview.
        short = (
            block for block in head if not isinstance(block, Line) or block.spans[0].text.strip() in _SHORT
        )
        whole = replace(whole, blocks=tuple(islice(short, _HEAD_LINES)), fit=None)
    else:
        whole = first_sections(whole, SCREEN - _TAIL_LINES - sum(map(height, wrong.blocks)) - 2)
    for view in (whole, wrong):
        click.echo(err=True)
        view.print(file=sys.stderr)
    click.echo(err=True)


def _print_missing(trace: Trace) -> None:
    """Print warnings: requests that matched nothing, lost tensors, faults; even with --quiet."""
    from sightline.analysis.unmatched_globs import left_out_text, unmatched

    missing = [str(each) for each in unmatched(trace.data)]
    left_out = left_out_text(trace.info)
    for text in (*missing, *([f"tensors: {left_out}"] if left_out else [])):
        _print(f"{text}.")
    for fault in (trace.info.get("faults") or ())[-1:]:
        _print(f"the recorder failed: {fault}")


def _print(text: str) -> None:
    click.echo(printable_text(f"sightline: {text}"), err=True)


def _exit_like(context: click.Context, error: BaseException) -> None:
    """End as the script would have ended."""
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt):  # by the signal, which a shell can see
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    context.exit(1)
