"""The page in a real browser: what a person does with it, by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.api import Trace
from tests.builders import TraceBuilder
from tests.page.browser import OpenPage, browser, needed
from tests.views.odd_traces import SCRIPT, hostile

Opener = Callable[..., OpenPage]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    needed()
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Opener]:
    pages: list[OpenPage] = []

    def opener(trace: Trace, **options: Any) -> OpenPage:
        pages.append(OpenPage(chromium, trace, tmp_path, **options))
        return pages[-1]

    yield opener
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def gpt2() -> Trace:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=64, n_positions=32, eos_token_id=0, bos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 64, (2, 16))
    with sl.trace(model, stats=True, name="gpt2") as t:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return t


def op_named(trace: Trace, name: str) -> int:
    return next(op.id for op in trace.ops if op.name == name)


def test_the_tree_shows_equal_layers_once(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    assert page.text("h1") == "gpt2"
    assert "GPT2LMHeadModel" in page.text("#tree")
    page.page.fill("#search", "h.0")
    assert "h.0 … h.2 ×3 GPT2Block" in page.text("#tree")


def test_search_selects_what_it_finds(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.keyboard.press("/")
    page.page.keyboard.type("cross_entropy")
    page.page.keyboard.press("Enter")
    op = op_named(gpt2, "F.cross_entropy")
    assert page.fragment() == f"#op-{op}"
    detail = page.text(".detail")
    assert "F.cross_entropy" in detail
    assert str(gpt2.ops[op].inputs[0]) in detail
    assert "made by view" in detail


def test_an_op_is_one_click_from_its_line(opened: Opener, gpt2: Trace) -> None:
    op = op_named(gpt2, "F.cross_entropy")
    page = opened(gpt2, fragment=f"#op-{op}")
    frame = gpt2.ops[op].frame
    assert frame is not None
    assert page.page.get_attribute(".row[aria-selected=true]", "id") is not None
    page.page.click("#tab-source")
    current = page.line()
    assert "cross_entropy" in current
    assert "_log_softmax" in current
    assert "cross_entropy(" in page.text(".code-line.current mark") or "nn" in page.text(
        ".code-line.current mark"
    )


def test_the_graph_expands_in_place_and_selects(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.click("#tab-graph")
    assert page.page.locator(".node.call", has_text="lm_head").count() == 1
    page.page.locator(".node.call", has_text="transformer").locator(".expand").click()
    group = page.page.locator(".node.group", has_text="h.0 … h.2 ×3")
    assert group.count() == 1
    loss = page.page.locator(".node.op", has_text="F.cross_entropy")
    loss.focus()
    loss.press("Enter")
    assert page.fragment() == f"#op-{op_named(gpt2, 'F.cross_entropy')}"
    assert "f32[2, 16, 64]" in (page.page.text_content(".canvas svg") or "")


def test_a_value_is_followed_from_op_to_op(opened: Opener, gpt2: Trace) -> None:
    op = gpt2.ops[op_named(gpt2, "F.cross_entropy")]
    page = opened(gpt2, fragment=f"#op-{op.id}")
    maker = op.inputs[0].producer
    assert maker is not None
    page.page.locator(".values .flow .link").first.click()
    assert page.fragment() == f"#value-{op.inputs[0].id}"
    assert maker.name in page.text(".detail h2")
    assert f"Value ${op.inputs[0].id}" in page.text(".value-detail")


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


def test_a_drag_on_the_timeline_zooms_into_it(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    box = page.page.locator(".timeline canvas").bounding_box()
    page.page.mouse.move(box["x"] + 200, box["y"] + 40)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 500, box["y"] + 40)
    page.page.mouse.up()
    page.page.click("text=whole run")
    assert page.page.locator("text=whole run").count() == 0


def test_problems_come_first(opened: Opener) -> None:
    layer, x, target = nn.Linear(3, 1), torch.ones(5, 3), torch.ones(5)
    with sl.trace(layer) as t:
        ((layer(x) - target) ** 2).mean()
    page = opened(t)
    assert page.page.get_attribute("#tab-problems", "aria-selected") == "true"
    assert "broadcast" in page.text(".problem")
    page.page.click("text=Show the line")
    assert "layer(x) - target" in page.line()


def test_dark_is_dark(opened: Opener, gpt2: Trace) -> None:
    for scheme, is_dark in (("light", False), ("dark", True)):
        page = opened(gpt2, scheme=scheme)
        color = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in color[4:-1].split(",")) < 384) == is_dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_out(opened: Opener, gpt2: Trace, scheme: str) -> None:
    page = opened(gpt2, scheme=scheme, fragment=f"#op-{op_named(gpt2, 'F.cross_entropy')}")
    for tab in ("problems", "graph", "source"):
        page.page.click(f"#tab-{tab}")
        assert page.barriers() == []


def test_hostile_names_are_text(opened: Opener) -> None:
    page = opened(hostile())
    for key in ("1", "2", "3"):
        page.page.keyboard.press(key)
    page.page.fill("#search", "alert")
    page.page.keyboard.press("Enter")
    assert SCRIPT in page.page.inner_text("body")
    assert page.page.evaluate("document.querySelectorAll('script').length") == 1
    assert page.page.evaluate("document.querySelectorAll('img').length") == 0


def test_nothing_recorded_is_said(opened: Opener) -> None:
    page = opened(TraceBuilder().build())
    assert "Nothing was recorded in this run." in page.text("#tree")


def test_a_link_to_nothing_selects_nothing(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2, fragment="#op-99999999")
    assert page.page.locator(".row[aria-selected=true]").count() == 0
