"""The page in a real browser by keyboard alone, in the dark, and for people who do not see it."""

from __future__ import annotations

import re

import pytest

from sightline.api import Trace
from tests.page.browser import op_named
from tests.page.conftest import Opener


def test_the_keyboard_alone_walks_the_tree(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.focus("#tree")
    for key in ("Home", "ArrowDown", "ArrowDown"):
        page.page.keyboard.press(key)
    before = page.fragment()
    was_open = page.page.get_attribute(".row[aria-selected=true]", "aria-expanded")
    page.page.keyboard.press("ArrowLeft" if was_open == "true" else "ArrowRight")
    assert page.fragment() == before
    assert page.page.get_attribute(".row[aria-selected=true]", "aria-expanded") != was_open
    page.page.keyboard.press("3")
    assert page.page.get_attribute("#tab-source", "aria-selected") == "true"


def test_tab_alone_comes_to_every_part_of_the_page(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.click("#tab-graph")
    page.page.focus("#search")
    met: list[str] = []
    where = (
        "() => { const e = document.activeElement; const part = e.closest('.search, #tree, .tabs, .graph,"
        " .detail, .timeline'); return [part?.id || part?.classList[0] || '', e.matches(':focus-visible')]; }"
    )
    for _ in range(60):
        part, is_visible = page.page.evaluate(where)
        assert is_visible or not part
        if part and part not in met:
            met.append(part)
        page.page.keyboard.press("Tab")
    assert met == ["search", "tree", "tabs", "graph", "detail", "timeline"]


def test_the_keyboard_alone_expands_and_closes_a_node(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.click("#tab-graph")
    node = page.page.locator(".node.call", has_text="transformer")
    name = node.get_attribute("data-node")
    node.focus()
    page.page.keyboard.press("Space")
    box = page.page.locator(f".box[data-node={name}] [role=button]")
    box.focus()
    page.page.keyboard.press("Enter")
    assert page.page.locator(f".node[data-node={name}]").count() == 1


def test_a_node_that_the_keyboard_comes_to_is_brought_into_view(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.click("#tab-graph")
    page.page.locator(".node.call", has_text="transformer").locator(".expand").click()
    page.page.wait_for_timeout(400)  # the animation
    canvas = page.page.locator(".canvas").bounding_box()
    last = page.page.locator(".node.op", has_text="F.cross_entropy")
    last.focus()
    box = last.bounding_box()
    assert canvas["y"] <= box["y"]
    assert box["y"] + box["height"] <= canvas["y"] + canvas["height"]


def test_the_keyboard_alone_walks_source_and_costs(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.keyboard.press("3")
    library = page.page.locator(".source-head option", has_text="modeling_gpt2.py")
    page.page.select_option(".source-head select", library.get_attribute("value"))
    page.page.focus(".code")
    page.page.keyboard.press("ArrowDown")
    first = page.line()
    page.page.keyboard.press("ArrowDown")
    assert first
    assert page.line() != first
    page.page.keyboard.press("4")
    page.page.focus(".icicle")
    page.page.keyboard.press("Escape")
    for key in ("ArrowDown", "ArrowDown"):
        page.page.keyboard.press(key)
    assert page.page.locator(".icicle-box.selected").count() == 1
    page.page.keyboard.press("Enter")
    crumbs = page.text(".cost-head .crumbs")
    assert "›" in crumbs
    page.page.keyboard.press("Backspace")
    assert page.text(".cost-head .crumbs") != crumbs


def test_a_dialog_explains_the_keys(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2, fragment=f"#op-{op_named(gpt2, 'F.cross_entropy')}")
    page.page.keyboard.press("?")
    assert "on the timeline: from op to op" in page.text("dialog")
    assert page.barriers() == []
    page.page.keyboard.press("Escape")
    assert page.page.locator("dialog[open]").count() == 0
    assert page.fragment() != ""  # it closed the dialog, and nothing else


def test_the_keyboard_alone_selects_a_stretch_of_time(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.focus("#timeline")
    page.page.keyboard.press("ArrowRight")
    first = page.fragment()
    page.page.keyboard.press("ArrowRight")
    assert re.fullmatch(r"#op-\d+", first)
    assert page.fragment() not in ("", first)
    for _ in range(3):
        page.page.keyboard.press("Shift+ArrowRight")
    start, end = map(int, page.fragment().removeprefix("#time-").split("-"))
    page.page.keyboard.press("Shift+ArrowLeft")
    assert page.fragment().startswith(f"#time-{start}-")
    assert int(page.fragment().rpartition("-")[2]) < end
    page.page.keyboard.press("z")
    assert page.page.locator("text=whole run").count() == 1
    page.page.keyboard.press("0")
    assert page.page.locator("text=whole run").count() == 0


def test_dark_is_dark(opened: Opener, gpt2: Trace) -> None:
    for scheme, is_dark in (("light", False), ("dark", True)):
        page = opened(gpt2, scheme=scheme)
        color = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in color[4:-1].split(",")) < 384) == is_dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_out(opened: Opener, gpt2: Trace, scheme: str) -> None:
    page = opened(gpt2, scheme=scheme, fragment=f"#op-{op_named(gpt2, 'F.cross_entropy')}")
    for tab in ("problems", "graph", "source", "cost"):
        page.page.click(f"#tab-{tab}")
        assert page.barriers() == []


def test_escape_selects_the_run_again(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2, fragment=f"#op-{op_named(gpt2, 'F.cross_entropy')}")
    assert page.page.locator(".row[aria-selected=true]").count() == 1
    page.page.keyboard.press("Escape")
    assert page.page.locator(".row[aria-selected=true]").count() == 0
    assert page.fragment() == ""
    assert "Memory at the peak" in page.text(".detail")
