"""A script or a module, run as Python itself would; for launchers, the command to type instead."""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import io
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from sightline.errors import UsageError


@dataclass(frozen=True)
class Program:
    """A program that is found and compiled, but not started."""

    name: str  #: the name of its recording
    code: CodeType
    globals: dict[str, Any]  #: of ``__main__``: its file, its spec, its loader
    folder: str  #: where its own imports are looked for first
    arguments: tuple[str, ...]

    @classmethod
    def find(cls, script: str, arguments: tuple[str, ...], as_module: bool) -> Program:
        """The program of ``sightline run``; a syntax error is printed as Python prints it."""
        if as_module:
            return cls.module(script, arguments)
        try:
            return cls.script(script, arguments)
        except SyntaxError as error:
            print_exception(error.with_traceback(None))
            raise SystemExit(1) from None

    @classmethod
    def script(cls, path: str, arguments: tuple[str, ...]) -> Program:
        """A file, or a folder with a ``__main__.py`` in it."""
        file = Path(path)
        folder = file.is_dir()
        if folder:
            file /= "__main__.py"
        if not file.is_file():
            raise UsageError(
                f"There is no script {path!r}; give the path of a Python file, or `-m` and a module."
            )
        place = str(file.absolute())
        loader = importlib.machinery.SourceFileLoader("__main__", place)
        globals_: dict[str, Any] = dict.fromkeys(("__spec__", "__package__"))
        globals_ |= {"__file__": place, "__loader__": loader}
        if folder:  # to Python that is a module, and not a file
            spec = importlib.util.spec_from_file_location("__main__", place, loader=loader)
            globals_ |= {"__spec__": spec, "__package__": "", "__cached__": spec and spec.cached}
        name = Path(path).absolute().name if folder else file.stem
        with io.open_code(str(file)) as opened:
            code = compile(opened.read(), place, "exec", dont_inherit=True)
        return cls(name, code, globals_, str(file.resolve().parent), (path, *arguments))

    @classmethod
    def module(cls, name: str, arguments: tuple[str, ...]) -> Program:
        """A module by its name, or a package by its ``__main__``; the current folder comes first."""
        if not sys.flags.safe_path:
            sys.path.insert(0, "")
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError) as error:
            raise UsageError(f"The module {name!r} cannot be found: {error}.") from error
        finally:
            if not sys.flags.safe_path:
                sys.path.remove("")
        get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
        code = get_code(spec.name) if get_code is not None and spec is not None else None
        if spec is None or code is None:
            raise UsageError(
                f"There is no module {name!r} that can be run; is it installed, or in this folder?"
            )
        globals_ = {
            "__file__": spec.origin, "__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader,
            "__cached__": spec.cached,
        }  # fmt: skip
        return cls(
            name.rpartition(".")[2], code, globals_, str(Path.cwd()), (spec.origin or name, *arguments)
        )

    def begin(self) -> dict[str, Any]:
        """Take the place of ``__main__`` for the rest of the process; the result is its namespace."""
        main = ModuleType("__main__")
        own: dict[str, Any] = {"__cached__": None, "__annotations__": {}}
        own["__builtins__"] = sys.modules["builtins"]
        vars(main).update(own | self.globals)
        sys.modules["__main__"] = main
        sys.argv[:] = self.arguments
        if not sys.flags.safe_path:
            sys.path[:1] = [self.folder]
        return vars(main)

    def print_exception(self, error: BaseException) -> None:
        """Print the exception the program ended with, as Python would: from its own first frame on."""
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code is not self.code:
            own = own.tb_next
        print_exception(error.with_traceback(own or error.__traceback__))


def print_exception(error: BaseException) -> None:
    """Print an exception by this process's own hook."""
    sys.excepthook(type(error), error, error.__traceback__)


#: Modules that launch, and the command that is the same.
_MODULES: Final = {
    "torch.distributed.run": ["torchrun"],
    "torch.distributed.launch": ["torchrun"],
    "accelerate.commands.launch": ["accelerate", "launch"],
}
#: Launchers whose options are not known here.
_OTHERS: Final = frozenset({"deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "composer"})


def launcher_advice(
    script: str, as_module: bool, arguments: Sequence[str], options: Sequence[str]
) -> str | None:
    """The error for a launcher, with the command to type instead; None for any other program.

    ``options`` are those of ``sightline run``, which the command repeats.

    >>> print(launcher_advice("mpirun", False, ["-n", "2", "python", "train.py"], ["--stats"]))
    mpirun starts the processes of a job, which would not be recorded; have it start \
`python -m sightline run --stats SCRIPT` instead of `python SCRIPT`.
    """
    command, rest = _command(script, as_module, list(arguments))
    if not command:
        return None
    own = [option for option in options if option != "-m"] if as_module else list(options)
    run = shlex.join(["sightline", "run", *own])
    head = f"{' '.join(command)} starts the processes of a job, which would not be recorded"
    parsed = _parsed_arguments(command, rest)
    if parsed is None:
        return f"{head}; have it start `python -m {run} SCRIPT` instead of `python SCRIPT`."
    before = rest[: len(rest) - len(parsed.training_script_args) - 1]
    program = [parsed.training_script, *parsed.training_script_args]
    if not parsed.module:
        typed = f"{shlex.join([*command, *before])} -m {run} {shlex.join(program)}"
    else:
        typed = f"{shlex.join([*command, *before])} {run} -m {shlex.join(program)}"
    return f"{head}; type instead: {typed}"


def _command(script: str, as_module: bool, arguments: list[str]) -> tuple[list[str], list[str]]:
    """The words of the launcher, none if it is no launcher, and its arguments."""
    if as_module:
        return _MODULES.get(script, []), arguments
    name = Path(script).name
    if name == "torchrun" or name in _OTHERS:
        return [name], arguments
    if name == "accelerate" and arguments[:1] == ["launch"]:
        return ["accelerate", "launch"], arguments[1:]
    return [], arguments


def _parsed_arguments(command: list[str], arguments: list[str]) -> Any:
    """The arguments of a launcher, parsed by its own parser; None if that cannot be imported."""
    module, function = {
        "torchrun": ("torch.distributed.run", "get_args_parser"),
        "accelerate": ("accelerate.commands.launch", "launch_command_parser"),
    }.get(command[0], ("", ""))
    if not module:
        return None
    try:
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            parsed = parser.parse_args(arguments)
    except (ImportError, SystemExit):
        return None
    return None if getattr(parsed, "no_python", False) else parsed
