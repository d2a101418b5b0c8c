"""What every test has: golden files, and the proof that it left nothing behind."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import settings

from tests import leftovers

GOLDENS = Path(__file__).parent / "goldens"

# A recorded example may import torch or compile something: how long it takes says nothing.
settings.register_profile("sightline", deadline=None, print_blob=True)
settings.load_profile("sightline")

Golden = Callable[[str, str], None]

_namespaces = leftovers.Namespaces()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="rewrite tests/goldens with what is printed"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden(name, text)``: the text must be that of ``tests/goldens/<name>.txt``."""
    update: bool = request.config.getoption("--update-goldens")

    def check(name: str, text: str) -> None:
        compare_golden(GOLDENS / f"{name}.txt", text, update=update)

    return check


def compare_golden(path: Path, text: str, *, update: bool) -> None:
    """Fail with a diff where the text is not the file's; with ``update`` write the file instead."""
    text = text.rstrip("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return
    if not path.exists():
        pytest.fail(f"There is no golden file {path.name} yet: `make goldens` writes it.", pytrace=False)
    wanted = path.read_text("utf-8")
    if text != wanted:
        lines = difflib.unified_diff(
            wanted.splitlines(), text.splitlines(), f"{path.name} (golden)", f"{path.name} (now)", lineterm=""
        )
        diff = "\n".join(lines) or "(only line endings differ)"
        pytest.fail(f"{diff}\n\nIf this is meant, `make goldens` rewrites the file.", pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test: no mode, hook, flag, patch or changed default is left in the process."""
    _namespaces.look()
    before = leftovers.state()
    yield
    found = leftovers.leftovers(before, leftovers.state()) + _namespaces.look()
    if found:
        pytest.fail("The test left something behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def same_rng() -> Callable[[], AbstractContextManager[None]]:
    """``with same_rng():`` fails if the block drew a random number."""
    return leftovers.same_rng


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Two test processes share two cores; more threads would only wait for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interrupts_interrupt() -> Iterator[None]:
    """Ctrl-C raises in tests and in processes they start, also where it is ignored, as under ``nohup``."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


pytest_plugins = ["pytester"]
