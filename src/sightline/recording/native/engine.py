"""The native engine's extension, of the wheel or built on first use, and loaded once per process."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from sightline.errors import NativeUnavailable
from sightline.recording.native import prebuilt
from sightline.recording.native.builder import NAME, Builder, NotLoadable, cache_folder, import_extension
from sightline.recording.native.compiler import SANITIZE, Toolchain, one_line

SOURCES: Final = Path(__file__).parent

_lock: Final = threading.Lock()
#: The outcome of the first `load` of this process: the extension, or the sentence why there is none.
_outcome: ModuleType | str | None = None


#: Why the engine that the wheel brought along is not used, a sentence; empty if it is, or if there is none.
refused_prebuilt = ""


def load() -> ModuleType:
    """The extension, built if the wheel has none for this torch.

    Raises `NativeUnavailable`, again if it did before.
    """
    global _outcome  # noqa: PLW0603 — an extension is loaded once per process
    with _lock:
        if _outcome is None:
            _outcome = _try_to_load(again=False)
        outcome = _outcome
    if isinstance(outcome, str):
        raise NativeUnavailable(outcome)
    return outcome


def find_extension(build: bool) -> Path | None:
    """The extension that loads, or None where it would be built; raises if neither is possible.

    ``build`` builds it now, also if that failed before.
    """
    global _outcome  # noqa: PLW0603 — a build that succeeds now is used from now on
    if build:
        with _lock:
            if not isinstance(_outcome, ModuleType):
                _outcome = _try_to_load(again=True)
    if isinstance(_outcome, str):
        raise NativeUnavailable(_outcome)
    if isinstance(_outcome, ModuleType) and _outcome.__file__ is not None:
        return Path(_outcome.__file__)
    if _find_prebuilt() is not None:
        return Path(load().__file__ or "")
    builder = _builder()
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


def _find_prebuilt() -> Path | None:
    if os.environ.get(SANITIZE, "") not in ("", "0"):
        return None
    try:
        return prebuilt.find_prebuilt(str(torch.__version__), SOURCES, prebuilt.FOLDER)
    except NativeUnavailable as error:
        _refuse_prebuilt(prebuilt.FOLDER, error)
        return None


def _refuse_prebuilt(path: Path, error: Exception) -> None:
    global refused_prebuilt  # noqa: PLW0603 — for `sightline engine`
    refused_prebuilt = f"The engine in {path} is not used: {one_line(error)}"


def _load_prebuilt() -> ModuleType | None:
    path = _find_prebuilt()
    if path is None:
        return None
    try:
        return _checked(import_extension(path))
    except Exception as error:  # it is built here then
        _refuse_prebuilt(path, error)
        return None


def _checked(module: ModuleType) -> ModuleType:
    """The extension, if it records a small program as it should."""
    from sightline.recording.native.self_test import failed_check

    failed = failed_check(module)
    if failed:
        raise NativeUnavailable(
            f"The native engine does not work with torch {torch.__version__} and Python "
            f"{sys.version.split()[0]} (in its self-test {failed}); the Python engine records here."
        )
    return module


def _try_to_load(*, again: bool) -> ModuleType | str:
    module = _load_prebuilt()
    try:
        if module is None:
            module = _checked(_build(again=again))
    except NativeUnavailable as error:
        return str(error)
    except Exception as error:  # "auto" must not end a run that the Python engine can record
        return f"The native engine cannot be built ({type(error).__name__}: {error})."
    sys.modules[NAME] = module
    return module


def _build(*, again: bool) -> ModuleType:
    builder = _builder()
    path = builder.build(again=again)
    try:
        return import_extension(path)
    except NotLoadable:
        if not again:
            raise
        path.unlink()
        return import_extension(builder.build(again=True))
