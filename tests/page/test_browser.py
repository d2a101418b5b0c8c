"""The page in a real browser, as a person uses it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.analysis.problems import find
from sightline.api import Trace
from sightline.page.payload import payload
from tests.builders import TraceBuilder, make_trace
from tests.device_work import kernels, timed
from tests.page.browser import OpenPage, op_named
from tests.page.conftest import Opener
from tests.views.odd_traces import SCRIPT, hostile


def test_the_tree_shows_equal_layers_once(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    assert page.text("h1") == "gpt2"
    assert "GPT2LMHeadModel" in page.text("#tree")
    page.page.fill("#search", "h.0")
    assert "h.0 … h.2 ×3 GPT2Block" in page.text("#tree")


def test_search_selects_its_matches(opened: Opener, gpt2: Trace) -> None:
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


def brushed(page: OpenPage, start: int, end: int) -> None:
    """Drag over the timeline, in pixels from its left edge."""
    box = page.page.locator("#timeline").bounding_box()
    page.page.mouse.move(box["x"] + start, box["y"] + 40)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + end, box["y"] + 40)
    page.page.mouse.up()


def brushed_with_most_ops(page: OpenPage, trace: Trace) -> None:
    """Drag over the part of the timeline in which most ops ran: a busy machine may pause anywhere."""
    width, starts = page.page.locator("#timeline").bounding_box()["width"], trace.data.ops.start
    first, last = (int(width * starts[len(starts) * part // 10] / starts[-1]) for part in (2, 8))
    brushed(page, first, max(last, first + 20))


def test_a_drag_on_the_timeline_selects_its_ops(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    brushed_with_most_ops(page, gpt2)
    found = re.fullmatch(r"#time-(\d+)-(\d+)", page.fragment())
    assert found is not None
    start, end = int(found[1]), int(found[2])
    ran = [op for op in gpt2.ops if start <= gpt2.data.ops.start[op.id] <= end]
    count = int(page.text(".detail .facts dd").replace(",", ""))
    assert count >= len(ran)  # and those that began before it
    assert "op time" in page.text(".detail")
    assert "makes" in page.text(".detail")
    assert page.text(".time-buttons output").startswith(f"{count:,} ops in ")
    assert page.page.locator(".row[aria-selected=true]").count() > 1
    page.page.click("text=Only these in the tree")
    names = set(page.page.locator("#tree .row.op .name").all_inner_texts())
    assert names <= {op.name for op in gpt2.ops[max(0, ran[0].id - 40) : ran[-1].id + 1]}
    assert page.text(".found").startswith(f"{count:,} found")
    assert page.barriers() == []
    page.page.keyboard.press("Escape")
    assert page.fragment() == ""


def test_a_stretch_of_time_can_be_zoomed_into_and_linked_to(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    brushed(page, 300, 600)
    fragment, count = page.fragment(), page.text(".detail .facts dd")
    page.page.click(".time-buttons >> text=zoom in")
    assert page.page.locator(".time-buttons >> text=zoom in").count() == 0
    page.page.click("text=whole run")
    assert page.page.locator("text=whole run").count() == 0
    other = opened(gpt2, fragment=fragment)
    assert other.text(".detail .facts dd") == count


def test_a_double_click_on_the_timeline_shows_the_row(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    box = page.page.locator("#timeline").bounding_box()
    page.page.mouse.dblclick(box["x"] + 300, box["y"] + 40)
    assert page.page.locator("text=whole run").count() == 1
    assert page.page.locator(".row[aria-selected=true]").count() == 1
    page.page.mouse.dblclick(box["x"] + 300, box["y"] + 5)
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


def test_a_problem_says_in_how_many_steps_it_occurs(opened: Opener) -> None:
    layer, x, target = nn.Linear(3, 1), torch.ones(5, 3), torch.ones(5)
    optimizer = torch.optim.SGD(layer.parameters())
    with sl.trace(layer) as t:
        for _ in range(3):
            ((layer(x) - target) ** 2).mean().backward()
            optimizer.step()
    problem = next(each for each in find(t.index) if each.kind == "broadcast")
    assert problem.times == "in 3 of 3 steps"
    page = opened(t)
    shown = page.page.locator(".problem", has_text="broadcast").inner_text()
    assert "in 3 of 3 steps" in shown
    assert problem.why in shown


def test_a_nan_is_marked_where_it_comes_out(opened: Opener) -> None:
    class Lost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.fc(x) * torch.nan
            return y.relu()

    model = Lost()
    with sl.trace(model, stats=True) as t:
        model(torch.ones(2, 4))
    page = opened(t)
    marked = page.page.locator(".row", has=page.page.locator(".badge")).locator(".name").all_inner_texts()
    assert "F.linear" not in marked
    assert "*" in marked
    page.page.click("#tab-graph")
    assert page.page.locator(".node.faulty", has_text="Tensor.relu").count() == 1
    assert page.page.locator(".node.faulty", has_text="Linear").count() == 0


def test_hostile_names_are_text(opened: Opener) -> None:
    page = opened(hostile())
    for key in ("1", "2", "3", "4"):
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


def test_the_lineage_leads_back(opened: Opener, gpt2: Trace) -> None:
    op = gpt2.ops[op_named(gpt2, "F.cross_entropy")]
    page = opened(gpt2, fragment=f"#op-{op.id}")
    steps = page.page.locator(".lineage li")
    assert "F.cross_entropy" in steps.nth(0).inner_text()
    assert "Tensor.view" in steps.nth(1).inner_text()
    assert "ops before these" in page.text(".lineage")
    assert "lm_head.weight" in page.text(".lineage") or "wte.weight" in page.text(".lineage")
    steps.nth(1).locator(".link").click()
    assert "Tensor.view" in page.text(".detail h2")


def test_the_costs_are_boxes_that_lead_to_their_rows(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.keyboard.press("4")
    assert "forward" in page.text(".icicle")
    page.page.click("text=FLOPs")
    assert page.page.get_attribute("button:has-text('FLOPs')", "aria-pressed") == "true"
    group = page.page.locator(".icicle-box", has_text="h.0 … h.2 ×3").first
    group.click()
    assert page.text(".detail h2") == "h.0 … h.2 ×3"
    group.dblclick()
    assert page.text(".cost-head .crumbs").endswith("h.0 … h.2")
    assert "F.scaled_dot_product_attention" in page.text(".by-name")


def test_a_graph_larger_than_the_screen_has_a_map(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.click("#tab-graph")
    assert page.page.locator(".minimap").count() == 0
    page.page.locator(".node.call", has_text="transformer").locator(".expand").click()
    minimap = page.page.locator(".minimap")
    minimap.wait_for()
    before = page.page.get_attribute(".camera", "style")
    box = minimap.bounding_box()
    page.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 4)
    assert page.page.get_attribute(".camera", "style") != before


def test_a_row_expands_where_it_is_and_its_nodes_come_out_of_it(opened: Opener, gpt2: Trace) -> None:
    page = opened(gpt2)
    page.page.click("#tab-graph")
    node = page.page.locator(".node.call", has_text="transformer")
    name = node.get_attribute("data-node")
    node.locator(".expand").click()
    moving = page.page.evaluate("document.querySelector('.camera').getAnimations({ subtree: true }).length")
    assert moving > 5
    box = page.page.locator(f".box[data-node={name}]")
    assert box.count() == 1
    box.locator("text").click()
    assert page.page.locator(f".node[data-node={name}]").count() == 1


def test_a_step_can_be_looked_at_alone(opened: Opener) -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with sl.trace(model) as t:
        for _ in range(4):
            model(x).sum().backward()
            optimizer.step()
    page = opened(t)
    assert "step1 … step3 ×3" in page.text("#tree")
    page.page.select_option("[aria-label=Step]", label="step2")
    names = page.page.locator("#tree .name").all_inner_texts()
    assert "step2" in names
    assert not {"step0", "step1", "step3"} & set(names)
    page.page.click("text=clear")
    assert page.page.input_value("[aria-label=Step]") == "-1"


def test_a_captured_tensor_is_drawn(opened: Opener) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    with sl.trace(model, capture=True) as t:
        model(torch.randn(4, 8))
    page = opened(t, fragment=f"#op-{op_named(t, 'relu')}")
    assert page.page.locator(".histogram rect").count() > 10
    painted = page.page.evaluate(
        "() => { const c = document.querySelector('.heat-map');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x > 0); }"
    )
    assert painted
    assert 't.tensors["1/output/0/0"]' in page.page.content().replace("&quot;", '"')
    assert page.barriers() == []


def test_copy_buttons_copy(opened: Opener, gpt2: Trace) -> None:
    op = op_named(gpt2, "F.cross_entropy")
    page = opened(gpt2, fragment=f"#op-{op}")
    page.page.evaluate(
        "() => { window.copied = []; Object.defineProperty(navigator, 'clipboard',"
        " { value: { writeText: async text => { window.copied.push(text); } } }); }"
    )
    page.page.click(f"[aria-label='Copy t.ops[{op}]']")
    page.page.locator(".values .value-head").first.click()
    value = gpt2.ops[op].inputs[0]
    page.page.click(f"[aria-label='Copy t.values[{value.id}]']")
    page.page.click(f"[aria-label='Copy {value}']")
    copied = page.page.evaluate("window.copied")
    assert copied == [f"t.ops[{op}]", f"t.values[{value.id}]", str(value)]


def test_devices_have_tracks(opened: Opener) -> None:
    trace = make_trace()
    works = [*kernels(trace.data), *kernels(trace.data, stream=9)]
    page = opened(timed(trace, works))
    box = page.page.locator(".timeline canvas").bounding_box()
    x, streams = box["x"] + box["width"] * 0.6, {}
    for y in range(int(box["y"]), int(box["y"] + box["height"]), 6):
        page.page.mouse.move(x, y)
        text = page.text(".tip") if page.page.locator(".tip").count() else ""
        if text.startswith("cuda:0"):
            streams[text.partition(": ")[0]] = (y, text)
    assert list(streams) == ["cuda:0 #7", "cuda:0 #9"]
    y, text = streams["cuda:0 #9"]
    launched = re.search(r"(\S+)_kernel, .*, launched by (\S+)$", text)
    assert launched is not None
    assert launched[1] == launched[2]
    page.page.mouse.click(x, y)
    assert page.text(".detail h2") == launched[1]
    assert "device" in page.text(".detail .facts")


def test_a_very_long_run_says_that_it_is_folded(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))
    with sl.trace(model) as t:
        model(torch.ones(2, 3))
    held = payload(t.index, most_ops=10)
    monkeypatch.setattr("sightline.page.document.payload", lambda index: held)
    page = opened(t)
    assert "folded" in page.text(".header")
    assert f"This run has {len(t.ops)} ops." in page.text(".detail")
    assert "0 … 29 ×30" in page.text("#tree")
    assert "of equal steps the first only" in page.text(".timeline")
    brushed(page, 100, 900)
    assert "the modules and ops of the first only" in page.text(".detail")
    assert page.barriers() == []


def test_a_notebook_shows_the_page(chromium: Any, gpt2: Trace, tmp_path: Path) -> None:
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><title>notebook</title><body style='width:900px'>{gpt2._repr_html_()}")
    page = chromium.new_page(viewport={"width": 1000, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("[data-ready]").wait_for()
    frame.locator("#tab-graph").click()
    frame.locator(".node.call", has_text="lm_head").click()
    assert "Linear" in frame.locator(".detail").inner_text()
    frame.locator(".detail .copy").first.click()
    assert page.evaluate("location.hash") == ""
    page.close()
    assert said == []
