"""The engine of tests that choose none: the environment's, or the native one where it can be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sightline.recording.engine_choice import resolve_engine

NATIVE = resolve_engine("auto") == "native"
needs_native = pytest.mark.skipif(
    resolve_engine("auto") != "native",
    reason="the native engine cannot be built here, or the plain one was asked for",
)

BOTH_ENGINES = pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "python"])

#: Both engines, and the ways in which what they record is kept.
EVERY_WAY = pytest.mark.parametrize(
    ("engine", "kept"),
    [
        pytest.param(engine, kept, marks=[needs_native] if engine == "native" else [], id=f"{engine}-{kept}")
        for engine in ("native", "python")
        for kept in ("memory", "path", "last")
    ],
)


def options(engine: str, kept: str, folder: Path) -> dict[str, Any]:
    """What `sightline.data` is given to record in one of these ways."""
    kept_so: dict[str, dict[str, Any]] = {
        "memory": {},
        "path": {"path": folder / "run.sight"},
        "last": {"last": 5000},
    }
    return {"engine": engine, **kept_so[kept]}
