"""Recordings on disk, made once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.store import save
from tests.cli import recorded
from tests.store.bundles import captured
from tests.views import odd_traces


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of training, with tensors and statistics."""
    path = tmp_path_factory.mktemp("net") / "run.sight"
    recorded.record().save(path)
    return path


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Names of ops, modules, files and tensors that try to be more than text."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, trace in enumerate((odd_traces.hostile(), captured())):
        save(trace.data, folder / f"{number}.sight")
    return sorted(folder.iterdir())
