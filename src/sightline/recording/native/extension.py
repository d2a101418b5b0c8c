"""An extension that was built, loaded from its file: in this process, or first in one of its own.

Used by `build` and `compilation`. Every way in which a file can fail to load is one sentence.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from sightline.errors import NativeUnavailable

NAME: Final = "sightline.recording.native._observer"
#: What to do about a build that failed; sentences end with it.
AGAIN: Final = "`sightline engine --build`"

_TRIAL_SECONDS: Final = 120.0
_TRIAL: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from sightline.recording.native import extension
try:
    extension.imported(extension.Path(sys.argv[2]))
except extension.NativeUnavailable as error:
    sys.exit(str(error))
"""


class NotLoadable(NativeUnavailable):
    """The file cannot be imported at all; building it again may help."""


def imported(path: Path) -> ModuleType:
    """The extension in this file, imported and asked whether it works here."""
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:
        raise NotLoadable(
            f"The native engine was built but cannot be loaded ({_one_line(error)}): "
            f"run {AGAIN} to build it again."
        ) from error
    check = getattr(module, "self_check", None)
    try:
        complaint = str(check() or "") if check is not None else ""
    except Exception as error:
        complaint = f"{type(error).__name__}: {_one_line(error)}"
    if complaint:
        raise NativeUnavailable(
            f"The native engine does not work with torch {torch.__version__} and Python "
            f"{sys.version.split()[0]} ({complaint}); the Python engine records here."
        )
    return module


def try_in_a_process(path: Path) -> None:
    """Import it in a process of its own first: if it crashes, the user's process does not."""
    program = sys.executable or ""
    if not Path(program).name.startswith("python"):
        return  # Python is embedded in another program, which must not be started for this
    command = [program, "-c", _TRIAL, json.dumps(sys.path), str(path)]
    try:
        done = subprocess.run(  # noqa: S603 — this Python, and what was just compiled
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_TRIAL_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(
            f"The native engine was built but did not load within {_TRIAL_SECONDS:.0f} s: "
            f"run {AGAIN} to try again."
        ) from None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise NativeUnavailable(
            f"The native engine was built but crashes when it is loaded ({name}); "
            "the Python engine records here."
        )
    if done.returncode:
        message = done.stderr.strip().rpartition("\n")[2]
        if not message.startswith("The native engine"):  # it failed before it came to the extension
            message = f"The native engine was built but could not be tried ({message}): run {AGAIN}."
        raise NativeUnavailable(message)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
