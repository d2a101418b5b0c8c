"""``sightline run``: an unchanged script, recorded.

The script is run as Python would run it: its output, exit code, ``__main__``, ``sys.argv`` and exceptions are
its own. What is said about the recording goes to standard error, after the script has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sightline.cli.program import Program, tell
from sightline.cli.verb import Verb, examples, safe
from sightline.errors import SightlineError, UsageError
from sightline.notation import bytes_text

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.cli.stepping import Stepping


@click.command(
    "run",
    cls=Verb,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "sightline run train.py --epochs 1",
        "sightline run --steps 3:5 -o slow.sight train.py",
        "sightline run --check --stats -m mypackage.train --lr 1e-3",
        "sightline run --capture 'blocks.*.attn' --ops none train.py",
        "sightline run --last 100000 train.py     a flight recorder for a long run",
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
@click.option("--stats", is_flag=True, help="Minimum, maximum, mean … and a fingerprint of every result.")
@click.option("--check", is_flag=True, help="Stop at the op that makes the first NaN or infinity.")
@click.option("--module", multiple=True, metavar="GLOB", help="Statistics only in these modules.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Keep only the last N ops.")
@click.option(
    "--steps", metavar="A:B", help="Record only these training steps; each ends with optimizer.step()."
)
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
    program = _found(script, arguments, as_module)
    place = _place(output, program.name, force)
    recording = _recording(program.name, place, steps, asked)
    ended = _run(program, recording)
    with suppress(SightlineError):  # the script has ended: whatever is wrong with showing it is not its fault
        _say(recording.trace, place, quiet)
    if ended is not None:
        _end(context, program, ended)


def _found(script: str, arguments: tuple[str, ...], as_module: bool) -> Program:
    if as_module:
        return Program.module(script, arguments)
    try:
        return Program.script(script, arguments)
    except SyntaxError as error:  # as Python says it
        tell(error.with_traceback(None))
        raise SystemExit(1) from None


def _place(output: str | None, name: str, force: bool) -> Path:
    """Where the recording goes: never over another one, unless that is asked for."""
    if output is None:
        numbered = (Path(f"{name}.sight" if n == 1 else f"{name}-{n}.sight") for n in range(1, 1 << 20))
        return next(place for place in numbered if not place.exists())
    place = Path(output)
    if place.exists():
        if not force:
            raise UsageError(f"{output} is there already; give another -o, or --force to replace it.")
        if not any(place.glob("rank*.db")):
            raise UsageError(f"{output} is no recording and is not replaced; give another -o.")
        shutil.rmtree(place)
    return place


def _recording(name: str, place: Path, steps: str | None, asked: dict[str, Any]) -> Stepping:
    """The trace of the run, ready to begin."""
    if not _has_torch():
        raise UsageError("Running a script with a model needs torch; install it, then run it again.")
    from sightline.cli.stepping import Stepping, span_of
    from sightline.options import Stats
    from sightline.tracing import trace

    modules = list(asked["module"]) or None
    stats = Stats(modules=modules) if asked["stats"] and modules else asked["stats"] or None
    traced = trace(
        ops=asked["ops"], capture=list(asked["capture"]) or None, stats=stats, last=asked["last"],
        check="nonfinite" if asked["check"] else None, path=place, name=name,
    )  # fmt: skip
    return Stepping(traced, span_of(steps))


def _run(program: Program, recording: Stepping) -> BaseException | None:
    """Run it; the result is how it ended, if not by itself."""
    names = program.begin()
    try:
        with recording:
            exec(program.code, names)  # noqa: S102 — it is what was asked for
    except BaseException as error:  # noqa: BLE001 — whatever it is, it is the script's and is told below
        return error
    return None


def _say(trace: Trace | None, place: Path, quiet: bool) -> None:
    """Where the recording is, what was in it and what looks wrong."""
    sys.stdout.flush()
    if trace is None:
        click.echo("sightline: nothing was recorded: the script took no such step.", err=True)
        return
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    if not quiet:
        from sightline.views.overview import overview

        for view in (overview(trace, more=f"sightline show {place}"), trace.problems()):
            click.echo(err=True)
            view.print(file=sys.stderr)
        click.echo(err=True)
    click.echo(f"sightline: {len(trace.ops):,} ops in {safe(str(place))}, {bytes_text(size)}.", err=True)
    click.echo(f"Look at it: sightline show {safe(str(place))}", err=True)


def _end(context: click.Context, program: Program, error: BaseException) -> None:
    """End as the script would have ended."""
    if isinstance(error, SystemExit):
        raise error
    program.tell(error)
    if isinstance(error, KeyboardInterrupt):  # a shell wants to know that it was the signal
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    context.exit(1)


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None
