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

_MAX_NAME = 180  #: bytes; file systems allow 255
_HELP = "record each test with sightline, and keep the recordings of those that fail"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("sightline", "sightline")
    group.addoption("--sightline", action="store_true", help=_HELP)
    group.addoption(
        "--sightline-dir", metavar="DIR", default=".sightline",
        help="where recordings of failed tests go, from the root folder on  [default: .sightline]",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder if ``--sightline`` is set."""
    if not config.getoption("--sightline"):
        return
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise pytest.UsageError(
            "--sightline records torch, which is not installed: install it, or leave the option out."
        )
    folder = config.rootpath / config.getoption("--sightline-dir")
    config.pluginmanager.register(TestRecorder(folder), "sightline-recorder")


class TestRecorder:
    """Records the call of each test, without its fixtures."""

    __test__ = False  # pytest would collect it by its name

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._errors: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Record a test while it runs."""
        traced = self._start(pyfuncitem)
        if traced is None:
            return (yield)
        try:
            result = yield
        except BaseException as error:
            self._stop(traced, pyfuncitem, error)
            raise
        self._stop(traced, pyfuncitem, None)
        return result

    def _start(self, item: pytest.Function) -> trace | None:
        from sightline.process_rank import path_of_rank
        from sightline.store.paths import remove_recording
        from sightline.tracing import trace

        path = path_of_rank(self._folder / f"{_file_name(item.nodeid)}.sight")
        try:
            remove_recording(path)  # of this test, from an earlier run
            traced = trace(path=path, name=item.nodeid)
            traced.start()
        except Exception as error:  # noqa: BLE001 — a test does not fail for its recording
            self._errors[item.nodeid] = str(error) or type(error).__name__
            return None
        self._paths[item.nodeid] = path
        return traced

    def _stop(self, traced: trace, item: pytest.Function, error: BaseException | None) -> None:
        try:
            traced.__exit__(None if error is None else type(error), error, None)
        except Exception as failure:  # noqa: BLE001 — a test does not fail for its recording
            self._errors[item.nodeid] = str(failure) or type(failure).__name__

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report where the recording of a failed test is; remove the others."""
        report = yield
        if call.when != "call":
            return report
        path, error = self._paths.pop(item.nodeid, None), self._errors.pop(item.nodeid, "")
        if report.failed and error:
            report.sections.append(("sightline", f"no recording was made: {error}"))
        elif report.failed and path is not None:
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            report.sections.append(("sightline", f"sightline show {shlex.quote(str(shown))}"))
        elif path is not None:
            from sightline.store.paths import remove_recording

            remove_recording(path)
            with suppress(OSError):
                self._folder.rmdir()  # if it is empty
        return report


def _file_name(test: str) -> str:
    """A unique file name for a test: ``tests~test_net.py.test_forward``."""
    from sightline.store.shards.file_names import file_name

    plain = test.replace("::", ".")
    name = file_name(plain, "")
    if name == plain.replace("/", "~") and len(name) <= _MAX_NAME:
        return name
    return f"{name.encode()[:_MAX_NAME].decode(errors='ignore')}~{zlib.crc32(test.encode()):08x}"
