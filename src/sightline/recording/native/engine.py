"""The native engine's extension: built on first use, and loaded once per process."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Final

from sightline.errors import NativeUnavailable
from sightline.recording.native.builder import NAME, Builder, NotLoadable, cache_folder, import_extension
from sightline.recording.native.compiler import Toolchain

SOURCES: Final = Path(__file__).parent

_lock: Final = threading.Lock()
#: The outcome of the first `load` of this process: the extension, or the sentence why there is none.
_outcome: ModuleType | str | None = None


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


def find_extension(build: bool) -> Path | None:
    """The extension that loads, or None where it would be built; raises if neither is possible.

    ``build`` builds it now, also if that failed before.
    """
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
