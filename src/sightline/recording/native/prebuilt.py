"""The native engines that a wheel brings along, one for each minor version of torch.

A wheel is for one CPython and one kind of processor, and so are the engines in it. torch keeps the
layout of its classes within a minor version, and the builds of one version for a CPU and for CUDA share it.
"""

from __future__ import annotations

import json
import platform
import re
import sysconfig
from pathlib import Path
from typing import Final

from sightline.errors import NativeUnavailable
from sightline.recording.native import trusted_files
from sightline.recording.native.compiler import sources_digest

FOLDER: Final = Path(__file__).parent / "engines"
#: The facts that all engines in the folder share: see `facts_of_wheel`.
FACTS: Final = "facts.json"
#: Versions that the makers of torch publish. A build of somebody else may have other options and layouts.
_PUBLISHED: Final = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?")


def file_name(minor: str) -> str:
    """The name of the engine for a minor version of torch: ``torch-2.13.so``."""
    return f"torch-{minor}.so"


def facts_of_wheel(sources: Path, soabi: str, machine: str) -> dict[str, str]:
    """The facts that an engine depends on besides torch."""
    return {"sources": sources_digest(sources), "soabi": soabi, "machine": machine}


def find_prebuilt(torch: str, sources: Path, folder: Path) -> Path | None:
    """The engine for this version of torch and this Python; None if there is none, or of other sources.

    Raises NativeUnavailable where another user could have changed it.
    """
    published = _PUBLISHED.fullmatch(torch)
    if published is None:
        return None
    path = folder / file_name(published[1])
    if not path.is_file():
        return None
    try:
        facts = json.loads(trusted_files.read_text(folder / FACTS) or "")
    except NativeUnavailable:  # a ValueError, too
        raise
    except (OSError, ValueError):
        return None
    here = facts_of_wheel(sources, str(sysconfig.get_config_var("SOABI")), platform.machine())
    fits = isinstance(facts, dict) and facts | here == facts
    return path if fits and trusted_files.exists(path) else None


def minors(folder: Path) -> list[str]:
    """The minor versions of torch that this installation has an engine for."""
    found = re.compile(r"torch-(\d+)\.(\d+)\.so")
    matches = (found.fullmatch(path.name) for path in folder.glob("torch-*.so"))
    versions = sorted((int(each[1]), int(each[2])) for each in matches if each is not None)
    return [f"{major}.{minor}" for major, minor in versions]
