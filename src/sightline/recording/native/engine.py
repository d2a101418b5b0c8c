"""Which engine records; the native one is built on first use and loaded once per process.

`resolve_engine` chooses, `load` returns the extension, `status` explains. What keeps the native engine from
being used is one sentence, a `NativeUnavailable`.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

import torch

from sightline.errors import NativeUnavailable, UsageError
from sightline.options import one_of
from sightline.process_rank import this_rank
from sightline.recording.native.builder import (
    NAME,
    Builder,
    NotLoadable,
    cache_folder,
    import_extension,
    write_progress,
)
from sightline.recording.native.compiler import Toolchain, find_compiler

ENGINES: Final = ("auto", "native", "python")
ENGINE: Final = "SIGHTLINE_ENGINE"
SOURCES: Final = Path(__file__).parent

_lock: Final = threading.Lock()
#: The outcome of the first `load` of this process: the extension, or the sentence why there is none.
_outcome: ModuleType | str | None = None
_has_warned = False


@dataclass(frozen=True)
class Status:
    """Which engine is used here and why, and what that depends on."""

    engine: Literal["native", "python"]
    reason: str  #: a sentence
    path: Path | None  #: of the built extension
    torch: str
    python: str
    compiler: str | None  #: its version in a line
    cache: Path | None  #: None where the user has no home


@dataclass(frozen=True)
class Choice:
    """The engine of a recording."""

    engine: Literal["native", "python"]
    reason: str = ""  #: why the plain engine records though nobody asked for it, a sentence


def choose_engine(engine: str) -> Choice:
    """The engine that ``engine=`` means here; "auto" leaves it to ``$SIGHTLINE_ENGINE``."""
    one_of("engine", engine, ENGINES)
    choice = _environment_choice() if engine == "auto" else engine
    if choice == "python":
        return Choice("python")
    try:
        load()
    except NativeUnavailable as error:
        if choice == "native":
            raise
        return Choice("python", str(error))
    return Choice("native")


def resolve_engine(engine: str) -> Literal["native", "python"]:
    """The name of the engine that ``engine=`` means here."""
    return choose_engine(engine).engine


def warn_of_fallback(reason: str) -> None:
    """Say once per process, on standard error, that the plain engine records and why.

    A line and no Python warning: where warnings are errors, a recording must not fail the run.
    """
    global _has_warned  # noqa: PLW0603 — once per process
    process = this_rank()
    if _has_warned or (process is not None and process.local_rank):
        return
    _has_warned = True
    write_progress(f"sightline: the plain engine records, which is slower. {reason}\n")


def load() -> ModuleType:
    """The extension, built if needed; raises `NativeUnavailable`, again if it did before."""
    global _outcome  # noqa: PLW0603 — an extension is loaded once per process
    with _lock:
        if _outcome is None:
            _outcome = _try_to_load(again=False)
        outcome = _outcome
    if isinstance(outcome, str):
        raise NativeUnavailable(outcome)
    return outcome


def status(build: bool = False) -> Status:
    """Which engine is used here. ``build`` compiles it now, also if that failed before."""
    choice = _environment_choice()
    try:
        path = _extension_path(build)
    except NativeUnavailable as error:
        reason = str(error)
        if choice == "native":
            reason = f"{ENGINE}=native is set, so that nothing can be recorded. {reason}"
        return _status("python", reason, None)
    if choice == "python":
        return _status("python", f"{ENGINE}=python is set.", path)
    if path is None:
        reason = "It is built when it is first used, in 15 to 60 s; `sightline engine --build` builds it now."
        return _status("native", reason, None)
    return _status("native", "It is built for this torch and this Python, and loads.", path)


def _extension_path(build: bool) -> Path | None:
    """The extension that loads, or None where it would be built; raises if neither is possible."""
    global _outcome  # noqa: PLW0603 — a build that succeeds now is used from now on
    if build:
        with _lock:
            if not isinstance(_outcome, ModuleType):
                _outcome = _try_to_load(again=True)
    builder = _builder()
    if isinstance(_outcome, str):
        raise NativeUnavailable(_outcome)
    path = builder.existing()
    if path is not None:
        load()
        return path
    failed = builder.failure()
    if failed is not None:
        raise NativeUnavailable(failed)
    builder.check()
    return None


def _builder() -> Builder:
    return Builder(SOURCES, cache_folder(), Toolchain.here())


def _try_to_load(*, again: bool) -> ModuleType | str:
    try:
        builder = _builder()
        path = builder.build(again=again)
        try:
            module = import_extension(path)
        except NotLoadable:
            if not again:
                raise
            path.unlink()
            module = import_extension(builder.build(again=True))
    except NativeUnavailable as error:
        return str(error)
    except Exception as error:  # "auto" must not end a run that the Python engine can record
        return f"The native engine cannot be built ({type(error).__name__}: {error})."
    sys.modules[NAME] = module
    return module


def _environment_choice() -> str:
    choice = os.environ.get(ENGINE, "") or "auto"
    if choice not in ENGINES:
        listed = ", ".join(map(repr, ENGINES))
        raise UsageError(f"{ENGINE}={choice!r} is not a choice; it is one of {listed}.")
    return choice


def _status(engine: Literal["native", "python"], reason: str, path: Path | None) -> Status:
    try:
        compiler = find_compiler(os.environ)
    except NativeUnavailable:
        compiler = None
    try:
        cache = cache_folder()
    except NativeUnavailable:
        cache = None
    return Status(
        engine=engine,
        reason=reason,
        path=path,
        torch=str(torch.__version__),
        python=sys.version.split()[0],
        compiler=None if compiler is None else compiler.name,
        cache=cache,
    )


def statistics_are_cheap() -> bool:
    """Whether statistics cost little: C++ takes them, and there is no device but the CPU."""
    return resolve_engine("auto") == "native" and not torch.cuda.is_available()
