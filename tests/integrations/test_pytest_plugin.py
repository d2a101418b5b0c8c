"""``pytest --sightline``, in processes of its own."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import sightline as sl
from sightline.recording.native.builder import cache_folder
from tests.recording.engines import BOTH_ENGINES

ROOT = Path(__file__).parents[2]
CACHE = cache_folder()
PLUGIN = "sightline.integrations.pytest"

TESTS = """
    import pytest, torch

    @pytest.fixture
    def x():
        return torch.ones(2)

    def test_passes(x):
        assert x.sum() == 2

    @pytest.mark.parametrize("size", [3, "4/é"])
    def test_fails(x, size):
        x @ torch.ones(3)

    class TestNet:
        def test_wrong(self, x):
            assert x.relu().sum() == 3

    def test_skipped(x):
        x.relu()
        pytest.skip("not now")

    @pytest.mark.xfail(strict=True)
    def test_expected(x):
        x @ torch.ones(3)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    """pytest in a subprocess, with the plugin of this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("SIGHTLINE_CACHE", str(CACHE))  # `pytester` moves the home: the engine is built there
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    extra = () if installed else ("-p", PLUGIN)
    return lambda *arguments: pytester.runpytest_subprocess("-p", "no:cacheprovider", *extra, *arguments)


def test_it_is_registered_where_sightline_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"sightline": PLUGIN}


@BOTH_ENGINES
def test_failing_tests_keep_their_recordings(
    pytester: pytest.Pytester, run: object, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("SIGHTLINE_ENGINE", engine)
    pytester.makepyfile(test_net=TESTS)
    done = run("--sightline")  # type: ignore[operator]
    done.assert_outcomes(passed=1, failed=3, skipped=1, xfailed=1)
    done.stdout.fnmatch_lines(["E *sightline: dot failed at test_net.py:12 in test_fails*"])
    done.stdout.fnmatch_lines(
        ["*- sightline -*", "sightline show .sightline/test_net.py.TestNet.test_wrong.sight"]
    )
    kept = sorted(folder.name for folder in (pytester.path / ".sightline").iterdir())
    assert [name.partition("~")[0] for name in kept] == [
        "test_net.py.TestNet.test_wrong.sight", "test_net.py.test_fails[3].sight",
        "test_net.py.test_fails[4",
    ]  # fmt: skip
    t = sl.load(pytester.path / ".sightline" / "test_net.py.test_fails[3].sight")
    assert t.info["name"] == "test_net.py::test_fails[3]"
    assert t.info["engine"] == engine
    assert "RuntimeError" in t.info["exception"]
    assert t.ops[-1].raised


def test_an_earlier_recording_makes_room_and_goes_when_the_test_passes(
    pytester: pytest.Pytester, run: object
) -> None:
    pytester.makepyfile(test_one="import torch\n\ndef test_it():\n    assert torch.ones(2).sum() == 3\n")
    for _ in range(2):
        run("--sightline", "--sightline-dir", "kept").assert_outcomes(failed=1)  # type: ignore[operator]
        assert sl.load(pytester.path / "kept" / "test_one.py.test_it.sight").validate().ops
    pytester.makepyfile(test_one="import torch\n\ndef test_it():\n    assert torch.ones(2).sum() == 2\n")
    run("--sightline", "--sightline-dir", "kept").assert_outcomes(passed=1)  # type: ignore[operator]
    assert not (pytester.path / "kept").exists()


def test_a_folder_that_cannot_be_written_fails_no_test(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(test_one="def test_good():\n    pass\n\ndef test_bad():\n    assert 1 == 2\n")
    (pytester.path / ".sightline").touch()
    done = run("--sightline")  # type: ignore[operator]
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["no recording was made: No recording can be written to *"])


def test_without_the_flag_nothing_is_imported(pytester: pytest.Pytester, run: object) -> None:
    pytester.makepyfile(
        test_one="import sys\n\ndef test_it():\n    assert 'sightline' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'sightline.tracing', 'sightline.api'} & sys.modules.keys()\n"
    )
    run().assert_outcomes(passed=1)  # type: ignore[operator]
    assert not (pytester.path / ".sightline").exists()
