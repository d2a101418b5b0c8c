"""Programs that start the processes of a job: what to type so that each of those is recorded."""

from __future__ import annotations

import argparse
import io
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

#: Modules that launch, and the command that is the same.
_MODULES: Final = {
    "torch.distributed.run": ["torchrun"],
    "torch.distributed.launch": ["torchrun"],
    "accelerate.commands.launch": ["accelerate", "launch"],
}
#: Launchers whose options are not known here.
_OTHERS: Final = frozenset({"deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "composer"})


def instead_of(script: str, as_module: bool, arguments: Sequence[str], options: Sequence[str]) -> str | None:
    """The sentence for somebody who would record a launcher; None if it is a program like any other.

    ``options`` are those of ``sightline run``, which the command has to be given again.

    >>> print(instead_of("mpirun", False, ["-n", "2", "python", "train.py"], ["--stats"]))
    mpirun starts the processes of a job, which would not be recorded; have it start \
`python -m sightline run --stats SCRIPT` instead of `python SCRIPT`.
    """
    command, rest = _command(script, as_module, list(arguments))
    if not command:
        return None
    own = [option for option in options if option != "-m"] if as_module else list(options)
    run = shlex.join(["sightline", "run", *own])
    head = f"{' '.join(command)} starts the processes of a job, which would not be recorded"
    asked = _asked(command, rest)
    if asked is None:
        return f"{head}; have it start `python -m {run} SCRIPT` instead of `python SCRIPT`."
    before = rest[: len(rest) - len(asked.training_script_args) - 1]
    program = [asked.training_script, *asked.training_script_args]
    if not asked.module:
        typed = f"{shlex.join([*command, *before])} -m {run} {shlex.join(program)}"
    else:
        typed = f"{shlex.join([*command, *before])} {run} -m {shlex.join(program)}"
    return f"{head}; type instead: {typed}"


def _command(script: str, as_module: bool, arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher that is meant, if any, and what it is given."""
    if as_module:
        return _MODULES.get(script, []), arguments
    name = Path(script).name
    if name == "torchrun" or name in _OTHERS:
        return [name], arguments
    if name == "accelerate" and arguments[:1] == ["launch"]:
        return ["accelerate", "launch"], arguments[1:]
    return [], arguments


def _asked(command: list[str], arguments: list[str]) -> Any:
    """What a launcher was asked for, read by its own parser; None where that is not to be had."""
    try:
        parser = _parser(command[0])
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            asked = None if parser is None else parser().parse_args(arguments)
    except (ImportError, SystemExit):
        return None
    return None if asked is None or getattr(asked, "no_python", False) else asked


def _parser(name: str) -> Callable[[], argparse.ArgumentParser] | None:
    from importlib import import_module

    home, function = {
        "torchrun": ("torch.distributed.run", "get_args_parser"),
        "accelerate": ("accelerate.commands.launch", "launch_command_parser"),
    }.get(name, ("", ""))
    found: Callable[[], argparse.ArgumentParser] | None = (
        getattr(import_module(home), function) if home else None
    )
    return found
