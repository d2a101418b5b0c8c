"""``pytest --sightline``: records each test, and keeps the recordings of those that fail.

pytest imports this module wherever sightline is installed, so it imports nothing else without the flag.
"""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sightline.tracing import trace

_LONGEST = 180  #: bytes of a name; disks take 255
_HELP = "record each test with sightline, and keep the recordings of those that fail"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("sightline", "sightline")
    group.addoption("--sightline", action="store_true", help=_HELP)
    group.addoption(
        "--sightline-dir", metavar="DIR", default=".sightline",
        help="where recordings of failed tests go, from the root folder on  [default: .sightline]",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Have tests recorded if that is asked for."""
    if not config.getoption("--sightline"):
        return
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise pytest.UsageError("--sightline records what torch runs: install torch, or leave it out.")
    folder = config.rootpath / config.getoption("--sightline-dir")
    config.pluginmanager.register(TestRecorder(folder), "sightline-recorder")


class TestRecorder:
    """Records the call of each test: what its fixtures do before and after is not part of it."""

    __test__ = False  # its name is no test's

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, Path] = {}
        self._troubles: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """A test runs."""
        traced = self._begun(pyfuncitem)
        if traced is None:
            return (yield)
        try:
            result = yield
        except BaseException as error:
            self._ended(traced, pyfuncitem, error)
            raise
        self._ended(traced, pyfuncitem, None)
        return result

    def _begun(self, item: pytest.Function) -> trace | None:
        from sightline.ranks import path_of_rank
        from sightline.trace.bundle.paths import remove_recording
        from sightline.tracing import trace

        place = path_of_rank(self._folder / f"{_file_name(item.nodeid)}.sight")
        try:
            remove_recording(place)  # of this test, from an earlier run
            traced = trace(path=place, name=item.nodeid)
            traced.start()
        except Exception as error:  # noqa: BLE001 — a test does not fail for its recording
            self._troubles[item.nodeid] = str(error) or type(error).__name__
            return None
        self._places[item.nodeid] = place
        return traced

    def _ended(self, traced: trace, item: pytest.Function, error: BaseException | None) -> None:
        try:
            traced.__exit__(None if error is None else type(error), error, None)
        except Exception as own:  # noqa: BLE001 — the same
            self._troubles[item.nodeid] = str(own) or type(own).__name__

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Say where the recording of a failed test is; the others go."""
        report = yield
        if call.when != "call":
            return report
        place, trouble = self._places.pop(item.nodeid, None), self._troubles.pop(item.nodeid, "")
        if report.failed and trouble:
            report.sections.append(("sightline", f"no recording was made: {trouble}"))
        elif report.failed and place is not None:
            report.sections.append(("sightline", self._told(place)))
        elif place is not None:
            self._remove(place)
        return report

    def _told(self, place: Path) -> str:
        try:
            shown = place.relative_to(Path.cwd())
        except ValueError:
            shown = place
        return f"sightline show {shlex.quote(str(shown))}"

    def _remove(self, place: Path) -> None:
        from sightline.trace.bundle.paths import remove_recording

        remove_recording(place)
        with suppress(OSError):
            self._folder.rmdir()  # if it is empty


def _file_name(test: str) -> str:
    """The name of a test as one of a file: ``tests~test_net.py.test_forward``; never that of another test."""
    from sightline.trace.file_names import file_name

    plain = test.replace("::", ".")
    name = file_name(plain, "")
    if name == plain.replace("/", "~") and len(name) <= _LONGEST:
        return name
    return f"{name.encode()[:_LONGEST].decode(errors='ignore')}~{zlib.crc32(test.encode()):08x}"
