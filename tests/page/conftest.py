"""The browser that the tests of the page share, and pages opened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import OpenPage, browser, needed

Opener = Callable[..., OpenPage]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    needed()
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Opener]:
    """Opens the page of a trace or a comparison; at the end it has logged and requested nothing."""
    pages: list[OpenPage] = []

    def opener(shown: Any, **options: Any) -> OpenPage:
        pages.append(OpenPage(chromium, shown, tmp_path, **options))
        return pages[-1]

    yield opener
    for page in pages:
        page.close()
