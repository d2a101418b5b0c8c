"""The public surface: exactly these names, each explained with an example, and nothing by accident."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import sightline as sl

NAMES = {
    "Capture",
    "CaptureError",
    "Check",
    "DamagedFile",
    "Diff",
    "ExportError",
    "InvalidGraph",
    "InvalidTrace",
    "NativeUnavailable",
    "NoSuchNode",
    "NonFiniteError",
    "NotCaptured",
    "NothingMatched",
    "SightlineError",
    "Stats",
    "TorchMissing",
    "Trace",
    "UnsupportedTorch",
    "UsageError",
    "__version__",
    "diff",
    "export",
    "load",
    "load_graph",
    "spy",
    "step",
    "trace",
}


def test_exactly_these_names() -> None:
    assert set(sl.__all__) == NAMES
    assert sorted(NAMES) == dir(sl)
    assert len(sl.__all__) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_every_name_is_there_with_a_docstring_and_an_example(name: str) -> None:
    found = getattr(sl, name)
    assert found.__name__ == name
    assert found.__doc__, f"sl.{name} has no docstring"
    assert ">>>" in found.__doc__, f"the docstring of sl.{name} has no example"


def test_the_version_is_the_one_of_the_installed_package() -> None:
    metadata = pytest.importorskip("importlib.metadata")
    try:
        installed = metadata.version("sightline")
    except metadata.PackageNotFoundError:
        pytest.skip("sightline is run from its source folder")
    assert sl.__version__ == installed


def test_the_changelog_knows_the_version() -> None:
    changelog = Path(__file__).parent.parent / "CHANGELOG.md"
    assert f"## [{sl.__version__}]" in changelog.read_text("utf-8")


def test_an_unknown_name_gets_one_clear_sentence() -> None:
    with pytest.raises(AttributeError, match=r"^sightline has no 'tarce'; its names are .*\.$"):
        _ = sl.tarce  # type: ignore[attr-defined]  # the point of the test


def test_trace_is_the_recorder_although_a_folder_has_the_same_name() -> None:
    data = importlib.import_module("sightline.trace.data")
    assert isinstance(sl.trace, type)
    assert sl.trace.__module__ == "sightline.tracing"
    assert data.TraceData.__module__ == "sightline.trace.data"


@pytest.mark.parametrize("first", ["sightline.trace.data", "sightline.api", "sightline.tracing"])
def test_trace_is_the_recorder_whatever_was_imported_first(first: str) -> None:
    script = (
        f"import sys, {first}, sightline\n"
        "from sightline import trace\n"
        "from sightline.trace import forms\n"
        "assert sightline.trace is trace and trace.__module__ == 'sightline.tracing'\n"
        "assert forms is sys.modules['sightline.trace.forms']\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_errors_are_one_family() -> None:
    for name in ("UsageError", "NothingMatched", "TorchMissing", "UnsupportedTorch", "InvalidTrace"):
        assert issubclass(getattr(sl, name), sl.SightlineError)
    assert issubclass(sl.UsageError, ValueError)
    assert issubclass(sl.TorchMissing, ImportError)
