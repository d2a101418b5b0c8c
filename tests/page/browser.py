"""A page in the system's Chromium, which may not log an error or make a request."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sightline.page
from sightline.api import Trace
from sightline.diff_api import Diff

_PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_VIEWER = Path(sightline.page.__file__).with_name("viewer.js")
_AXE = Path(__file__).parents[2] / "viewer/node_modules/axe-core/axe.min.js"
#: A node of the graph holds its tooltip too, which the rule takes for visible text.
_NOT_CHECKED = "label-content-name-mismatch"
_OPTIONS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run"
).split()


def needed() -> None:
    """Skip where there is no browser; fail where there has to be one."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        missing = "playwright is not installed"
    else:
        missing = "" if _PATH else "there is no Chromium here"
        missing = missing or ("" if _VIEWER.exists() and _AXE.exists() else "the viewer is not built")
    if missing and os.environ.get("SIGHTLINE_BROWSER") == "required":
        pytest.fail(f"The tests of the page may not be skipped here, and {missing}.")
    if missing:
        pytest.skip(missing)


@contextmanager
def browser() -> Iterator[Any]:
    """The browser, closed at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_PATH, args=_OPTIONS)
        yield started
        started.close()


class OpenPage:
    """A page that was opened, with everything it said and asked for."""

    def __init__(
        self, chromium: Any, shown: Trace | Diff, folder: Path, *, scheme: str = "light", fragment: str = ""
    ) -> None:
        path = folder / "run.html"
        shown.html(path)
        self.page = chromium.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        self.page.set_default_timeout(10_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = path.as_uri()
        self.page.goto(self.address + fragment)
        self.page.wait_for_selector("[data-ready]")

    def text(self, selector: str) -> str:
        """The text of the first element, white space as one space."""
        return " ".join(self.page.inner_text(selector).split())

    def line(self) -> str:
        """The source line that is selected, with its ops; it may not have been scrolled to yet."""
        return self.page.text_content(".code-line.current") or ""

    def fragment(self) -> str:
        found = self.page.evaluate("location.hash")
        assert isinstance(found, str)
        return found

    def barriers(self) -> list[str]:
        """The barriers that axe finds for people with a screen reader, a keyboard or weak eyes."""
        self.page.evaluate(_AXE.read_text("utf-8"))
        rules = {_NOT_CHECKED: {"enabled": False}}
        report = self.page.evaluate("rules => axe.run(document, { rules })", rules)
        return [f"{found['id']}: {found['nodes'][0]['html']}" for found in report["violations"]]

    def close(self) -> None:
        """It said nothing, and asked for nothing but itself."""
        self.page.close()
        assert self.said == []
        assert {url.partition("#")[0] for url in self.asked} == {self.address}


def op_named(trace: Trace, name: str) -> int:
    """The number of the first op of a name."""
    return next(op.id for op in trace.ops if op.name == name)
