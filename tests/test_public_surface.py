"""The public surface: exactly these names, each explained with an example, and nothing by accident."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest

import sightline as sl

NAMES = {
    "Bundle",
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


def test_no_module_has_the_name_of_something_public() -> None:
    """Importing a submodule binds its name in the package: ``sl.trace`` would turn into a folder."""
    modules = {module.name for module in pkgutil.iter_modules(sl.__path__)}
    assert modules & set(sl.__all__) == set()
    assert {"data", "store", "compare"} <= modules


def test_errors_are_one_family() -> None:
    for name in ("UsageError", "NothingMatched", "TorchMissing", "UnsupportedTorch", "InvalidTrace"):
        assert issubclass(getattr(sl, name), sl.SightlineError)
    assert issubclass(sl.UsageError, ValueError)
    assert issubclass(sl.TorchMissing, ImportError)
