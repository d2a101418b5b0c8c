"""Which engine records: the native one where it can be built, else the plain one.

`choose_engine` chooses, `new_session` makes a session of the chosen engine, `engine_status` explains the
choice. Whatever keeps the native engine from being used is one sentence, a `NativeUnavailable`.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, Protocol

import torch

from sightline.errors import NativeUnavailable, UsageError
from sightline.options import one_of
from sightline.process_rank import this_rank
from sightline.recording.native import engine as native_engine
from sightline.recording.native.builder import cache_folder, write_progress
from sightline.recording.native.compiler import find_compiler
from sightline.recording.native.engine import find_extension, load
from sightline.recording.native.prebuilt import FOLDER, minors
from sightline.recording.plain import hooks as plain_hooks
from sightline.recording.plain.session import PlainSession
from sightline.recording.session import Session

ENGINES: Final = ("auto", "native", "python")
ENGINE: Final = "SIGHTLINE_ENGINE"

_has_warned = False


@dataclass(frozen=True)
class Choice:
    """The engine of a recording."""

    engine: Literal["native", "python"]
    reason: str = ""  #: why the plain engine records though it was not requested, a sentence


class EngineHooks(Protocol):
    """The module ``hooks`` of an engine."""

    def install(self, session: Any) -> None:
        """Begin to record on this thread."""

    def uninstall(self, session: Any) -> None:
        """Stop recording. Safe to call again, from any thread, and in any order with other recordings."""


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


def statistics_are_cheap() -> bool:
    """Whether statistics cost little: C++ takes them, and there is no device but the CPU."""
    return resolve_engine("auto") == "native" and not torch.cuda.is_available()


def new_session(
    engine: str, model: Any, name: str, level: str, caller: FrameType | None, outer_frames: bool
) -> tuple[Session, EngineHooks]:
    """A session of the engine that ``engine=`` means here, and the hooks that install it."""
    choice = choose_engine(engine)
    reason = choice.reason
    if choice.engine == "native":
        from sightline.recording.native import hooks as native_hooks
        from sightline.recording.native.session import NativeSession, NoSlot

        for attempt in (1, 2):
            try:
                return NativeSession(load(), model, name, level, caller, outer_frames), native_hooks
            except NoSlot as error:
                reason = str(error)
                if attempt == 1:
                    gc.collect()  # recordings in unreachable cycles hold slots too
                elif engine == "native":
                    raise
    plain = PlainSession(model, name, level, caller, outer_frames)
    plain.engine_reason = reason
    if reason:
        _warn_of_fallback(reason)
    return plain, plain_hooks


def _warn_of_fallback(reason: str) -> None:
    """Print once per process, on standard error, that the plain engine records and why.

    A line and no Python warning: where warnings are errors, a recording must not fail the run.
    """
    global _has_warned  # noqa: PLW0603 — once per process
    process = this_rank()
    if _has_warned or (process is not None and process.local_rank):
        return
    _has_warned = True
    write_progress(f"sightline: the plain engine records, which is slower. {reason}\n")


def _environment_choice() -> str:
    choice = os.environ.get(ENGINE, "") or "auto"
    if choice not in ENGINES:
        listed = ", ".join(map(repr, ENGINES))
        raise UsageError(f"{ENGINE}={choice!r} is not a choice; it is one of {listed}.")
    return choice


@dataclass(frozen=True)
class EngineStatus:
    """Which engine is used here and why, and the versions that it depends on."""

    engine: Literal["native", "python"]
    reason: str  #: a sentence
    path: Path | None  #: of the extension
    wheel: str  #: which engines the installed wheel brings along, and why the one for this torch is not used
    torch: str
    python: str
    compiler: str | None  #: its version in a line
    cache: Path | None  #: None where the user has no home


def engine_status(build: bool = False) -> EngineStatus:
    """Which engine is used here. ``build`` compiles it now, also if that failed before."""
    choice = _environment_choice()
    engine: Literal["native", "python"] = "python"
    path: Path | None = None
    try:
        path = find_extension(build)
    except NativeUnavailable as error:
        reason = str(error)
        if choice == "native":
            reason = f"{ENGINE}=native is set, so that nothing can be recorded. {reason}"
    else:
        engine = "python" if choice == "python" else "native"
        if choice == "python":
            reason = f"{ENGINE}=python is set."
        elif path is None:
            reason = (
                "It is built when it is first used, in 15 to 60 s; `sightline engine --build` builds it now."
            )
        elif path.parent == FOLDER:
            reason = "The wheel brings it for this torch and this Python, and its self-test passed."
        else:
            reason = "It was built here for this torch and this Python, and its self-test passed."
    try:
        compiler = find_compiler(os.environ)
    except NativeUnavailable:
        compiler = None
    try:
        cache = cache_folder()
    except NativeUnavailable:
        cache = None
    return EngineStatus(
        engine=engine, reason=reason, path=path, wheel=_engines_of_wheel(),
        torch=str(torch.__version__), python=sys.version.split()[0],
        compiler=None if compiler is None else compiler.name, cache=cache,
    )  # fmt: skip


def _engines_of_wheel() -> str:
    if native_engine.refused_prebuilt:
        return native_engine.refused_prebuilt
    brought = minors(FOLDER)
    return f"has engines for torch {', '.join(brought)}" if brought else "has no engines"
