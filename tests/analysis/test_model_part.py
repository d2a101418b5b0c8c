"""Ops left out of the view of a script: those that build the model, and those of a trainer around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import sightline as sl
from sightline.analysis.select import model_part
from sightline.api import Trace
from sightline.views.code import code
from tests.builders import TraceBuilder

TRAINER = "/venv/lib/python3.12/site-packages/hub/trainer.py"
MODEL = "/venv/lib/python3.12/site-packages/hub/model.py"


def trained(*, backward: bool = True) -> Trace:
    """A script that builds a model of an installed package and hands it to the package's trainer."""
    b = TraceBuilder()
    b.source(TRAINER, "def train():\n    for x in data:\n        loss = model(x)\n        log(loss.sqrt())\n")
    with b.at("/home/me/main.py", 1, "<module>"), b.at(MODEL, 3, "Net.__init__"):
        weight = b.op("empty", out=(4,))
    for rate in (0.3, 0.2, 0.1):
        with b.at("/home/me/main.py", 2, "<module>"), b.at(TRAINER, 3, "train"):
            with b.call("", "Net", inputs=[b.value(2, 4)]), b.at(MODEL, 9, "Net.forward"):
                made = b.op("mul.Tensor", b.value(2, 4), weight, rate, out=(2, 4))
            if backward:
                with b.phase("backward"):
                    b.op("mul.Tensor", b.value(2, 4), weight, forward=made, out=(2, 4))
        with b.at("/home/me/main.py", 2, "<module>"), b.at(TRAINER, 4, "train"):
            b.op("sqrt", b.value(), out=())
    return b.build()


def test_the_code_is_that_of_the_model() -> None:
    first, *lines = str(code(trained().index, fold=True)).splitlines()
    left_out = "1 op that builds the model, 3 ops that installed packages run around it"
    assert first == f"# left out: {left_out}; all=True shows them"
    assert lines == [
        "# main.py:2 in <module>:",
        "│ ⬇️",
        "│ ┌ ×3  for x in data:",
        "│ ┊ # site-packages/hub/model.py:9 in Net.forward:",
        "│ ┊ │ # mul.Tensor(f32[2, 4], f32[4], 0.3…0.1) -> f32[2, 4];",
        "│ ┊ ── backward ────────────────────────────────",
        "│ ┊ # site-packages/hub/model.py:9 in Net.forward:",
        "│ ┊ │ # ⟵ mul.Tensor(f32[2, 4], f32[4]) -> f32[2, 4];",
        "│ └",
    ]


def test_everything_is_there_when_asked_for() -> None:
    text = str(code(trained().index, all=True, fold=False))
    assert "left out" not in text
    assert "empty()" in text
    assert text.count("# sqrt(") == 3
    assert "trainer.py:3 in train" in text


def test_an_op_that_is_asked_for_is_shown_wherever_it_ran() -> None:
    text = str(code(trained().index, op="sqrt", fold=False))
    assert text.count("# sqrt(") == 3
    assert "left out" not in text


def test_without_training_what_is_around_the_model_stays() -> None:
    part = model_part(trained(backward=False).index)
    assert part.building.sum() == 1
    assert not part.around.any()
    assert not part.hidden_frames.any()


def test_where_no_module_was_called_all_is_shown() -> None:
    b = TraceBuilder()
    with b.at("/home/me/main.py", 1, "Net.__init__"):
        b.op("empty", out=(4,))
    assert not model_part(b.build().index).excluded.any()


def test_code_of_the_users_own_is_never_left_out(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, path=tmp_path / "run.sight") as t:
        loss = (model(torch.ones(2, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
    assert not model_part(t.index).excluded.any()
    assert np.array_equal(model_part(sl.load(tmp_path / "run.sight").index).hidden_frames,
                          model_part(t.index).hidden_frames)  # fmt: skip


def test_what_a_package_prepares_before_the_first_call_is_left_out_without_training_too() -> None:
    b = TraceBuilder()
    with b.at("/home/me/main.py", 2, "<module>"):
        with b.at(TRAINER, 2, "generate"):
            b.op("ones", out=(4,))
        for _ in range(2):
            with b.at(TRAINER, 3, "generate"), b.call("", "Net"), b.at(MODEL, 9, "Net.forward"):
                b.op("mul.Tensor", b.value(2, 4), 0.5, out=(2, 4))
            with b.at(TRAINER, 4, "generate"):
                b.op("argmax", b.value(2, 4), out=(2,))
    text = str(code(b.build().index, fold=False))
    assert text.startswith("# left out: 1 op that installed packages run around it; ")
    assert text.count("# argmax(") == 2
    assert "# ones(" not in text


def test_decorators_of_a_package_are_left_out_unless_they_run_ops() -> None:
    b = TraceBuilder()
    with b.at("/home/me/main.py", 2, "<module>"), b.call("", "Net"):
        with b.at(TRAINER, 2, "returns_tuple.<locals>.wrapper"), b.at(MODEL, 9, "Net.forward"):
            b.op("mul.Tensor", b.value(2, 4), 0.5, out=(2, 4))
        with b.at(TRAINER, 5, "casts.<locals>.wrapper"):
            b.op("_to_copy", b.value(2, 4), out=(2, 4))
    trace = b.build()
    assert "returns_tuple" not in str(code(trace.index, fold=False))
    assert "casts.<locals>.wrapper" in str(code(trace.index, fold=False))
    assert "returns_tuple" in str(code(trace.index, all=True, fold=False))


def test_a_line_around_a_repeat_is_not_written_again_inside_it() -> None:
    b = TraceBuilder()
    b.source(TRAINER, "def train():\n    for x in data:\n        loss = model(x)\n")
    for step in range(6):
        with b.at("/home/me/main.py", 2, "<module>"), b.at(TRAINER, 2, "train"):
            with b.at("/home/me/data.py", 7, "Data.__getitem__"):
                b.op("randint", 9, out=(4,))
        with b.at("/home/me/main.py", 2, "<module>"), b.at(TRAINER, 3, "train"):
            with b.call("", "Net"), b.at(MODEL, 9, "Net.forward"):
                made = b.op("mul.Tensor", b.value(2, 4), 0.5, out=(2, 4))
                if step == 2:  # so that the steps before and after it are folded apart
                    b.op("relu", b.value(2, 4), out=(2, 4))
            with b.phase("backward"):
                b.op("mul.Tensor", b.value(2, 4), 0.5, forward=made, out=(2, 4))
    lines = str(code(b.build().index, fold=True)).splitlines()
    brackets = [at for at, each in enumerate(lines) if each.startswith("│ ┌ ×")]
    assert len(brackets) == 2
    for at in brackets:
        assert all(each.startswith("│ ┊ ") for each in lines[at + 1 : lines.index("│ └", at)])


def test_what_is_shown_by_the_same_lines_folds_whatever_leads_to_it() -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.at("/home/me/main.py", 2, "<module>"):
            for line in (3, 4):  # fetched here for the first batch, there for the next
                with b.at(TRAINER, line, "train"), b.at("/home/me/data.py", 7, "Data.__getitem__"):
                    b.op("randint", 9, out=(4,))
            with b.at(TRAINER, 5, "train"), b.call("", "Net"), b.at(MODEL, 9, "Net.forward"):
                made = b.op("mul.Tensor", b.value(2, 4), 0.5, out=(2, 4))
            with b.at(TRAINER, 6, "train"), b.phase("backward"):
                b.op("mul.Tensor", b.value(2, 4), 0.5, forward=made, out=(2, 4))
            with b.at(TRAINER, 7, "train"), b.phase("optimizer"):
                for size in (4, 8):
                    b.op("zeros_like", b.value(size), out=(size,))
                    b.op("add_", b.value(size), out=(size,))
    b.source(TRAINER, "def train():\n" + "    for x in data:\n" + "        step(x)\n" * 5)
    lines = str(code(b.build().index, fold=True)).splitlines()
    assert sum("randint" in each for each in lines) == 1
    assert any("randint(9) -> f32[4]; ×2" in each for each in lines)
    repeats = [each for each in lines if "┌ ×" in each]
    assert len(repeats) == 2
    assert repeats[0].endswith("┌ ×3  for x in data:")
    assert repeats[1].endswith("┌ ×2")  # over the weights of the optimizer, in torch: not the trainer's loop
