"""The page of a comparison in a real browser."""

from __future__ import annotations

import pytest
import torch

import sightline as sl
from sightline.diff_api import Diff
from tests.page.conftest import Opener
from tests.views.odd_traces import SCRIPT, hostile


@pytest.fixture(scope="module")
def parted() -> Diff:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
    model = GPT2Model(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)).eval()
    tokens = torch.randint(0, 64, (2, 16))

    def recorded(name: str) -> sl.Trace:
        with torch.no_grad(), sl.trace(model, stats=True, name=name) as t:
            model(tokens)
        return t

    first = recorded("before")
    model.h[1].ln_2.eps = 0.1
    return sl.diff(first, recorded("after"))


def test_the_verdict_comes_first(opened: Opener, parted: Diff) -> None:
    page = opened(parted)
    assert "eps 1e-05 against 0.1" in page.text(".verdict")
    assert page.page.locator(".verdict .frame-text", has_text="self.ln_2(hidden_states)").count() == 2
    assert page.text("h1").split() == ["a", "before", "against", "b", "after"]


def test_the_first_divergence_is_selected_on_both_sides(opened: Opener, parted: Diff) -> None:
    page = opened(parted)
    assert page.page.locator(".pair[aria-selected=true].first").count() == 1
    details = page.page.locator(".both-details .detail")
    assert "1e-05" in details.nth(0).inner_text()
    assert "0.1" in details.nth(1).inner_text()
    assert page.fragment().startswith("#pair-")
    assert "h.1.ln_2" in page.page.locator(".module-pair .current").inner_text()


def test_a_module_leads_to_its_ops(opened: Opener, parted: Diff) -> None:
    page = opened(parted)
    page.page.locator(".module-pair button", has_text="h.2.mlp.c_fc").click()
    assert "addmm" in page.page.locator(".both-details h2").nth(0).inner_text()
    assert "h.2" in page.page.locator(".both-details .crumbs").nth(1).inner_text()


def test_a_link_and_the_keyboard_select_pairs(opened: Opener, parted: Diff) -> None:
    page = opened(parted, fragment="#pair-2")
    assert page.page.get_attribute(".pair[aria-selected=true]", "id") == "pair-2"
    page.page.focus(".aligned")
    page.page.keyboard.press("ArrowDown")
    assert page.fragment() != "#pair-2"


def test_both_sources_stand_beside_each_other(opened: Opener, parted: Diff) -> None:
    page = opened(parted)
    page.page.click("#tab-sources")
    lines = page.page.locator(".code-line.current")
    assert lines.count() == 2
    for at in range(2):
        assert "self.ln_2(hidden_states)" in (lines.nth(at).text_content() or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_out(opened: Opener, parted: Diff, scheme: str) -> None:
    page = opened(parted, scheme=scheme)
    for tab in ("ops", "sources"):
        page.page.click(f"#tab-{tab}")
        assert page.barriers() == []


def test_runs_that_are_the_same_say_so(opened: Opener, parted: Diff) -> None:
    page = opened(sl.diff(parted.a, parted.a))
    assert "same, to the last bit" in page.text(".verdict")
    assert page.page.locator(".depth-chart").count() == 0


def test_hostile_names_are_text(opened: Opener) -> None:
    page = opened(sl.diff(hostile(), hostile()))
    page.page.click("#tab-sources")
    assert SCRIPT in page.page.inner_text("body")
    assert page.page.evaluate("document.querySelectorAll('script, img').length") == 1


def test_nothing_to_compare_is_said(opened: Opener) -> None:
    from tests.builders import TraceBuilder

    page = opened(sl.diff(TraceBuilder().build(), TraceBuilder().build()))
    assert "No values could be compared." in page.text(".verdict")
    assert "No ops were compared." in page.text(".middle")
