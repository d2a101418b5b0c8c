"""The steps in the overview, and what is told of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.analysis.step_summaries import StepSummary, step_summaries
from sightline.data.trace_data import StepInfo
from sightline.notation import number_text
from sightline.views.overview import overview
from sightline.views.rendering import View
from sightline.views.steps import step_lines, step_table
from tests.builders import TraceBuilder
from tests.recording import training_loops as loops
from tests.recording.engines import BOTH_ENGINES


def text(steps: list[StepSummary]) -> list[str]:
    made = step_table(steps)
    assert made is not None
    return str(View((made,))).splitlines()[2:]


def facts(number: int, time: int = 1_000_000, **given: object) -> StepSummary:
    info = StepInfo(f"step{number}", 10 * number, 10 * number + 10, 0, 0, 0, time)
    kept = {"ops": 10, "losses": (), "norm": None, "peak": 0, "skipped": False} | given
    return StepSummary(number, info, **kept)  # type: ignore[arg-type]  # the fields of it


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "aten", "api"])
def test_the_loss_and_the_norm_are_the_numbers_that_were_read(engine: str, ops: str) -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = []
    with sl.trace(model, engine=engine, ops=ops) as t:  # type: ignore[arg-type]  # one of the words
        for _ in range(3):
            loss = model(torch.randn(5, 4)).pow(2).mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            read.append((loss.detach().item(), float(norm)))
    found = [(step.losses[0][0], step.norm) for step in step_summaries(t.index)]
    assert found == read


def test_a_loss_that_nobody_read_is_not_told_unless_statistics_know_it() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.plain(model, 2, read=False)
    assert [(step.losses, step.norm) for step in step_summaries(t.index)] == [((), None)] * 2
    assert not any(line.startswith("step ") and "loss" in line for line in str(t).splitlines())
    with sl.trace(model, stats=True) as t:
        loops.plain(model, 2, read=False)
    for step in step_summaries(t.index):
        assert math.isfinite(step.losses[0][0])
        assert step.norm is not None
        assert step.norm > 0


def test_the_loss_is_the_one_before_it_was_scaled() -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with sl.trace(model) as t:
        loss = model(torch.randn(5, 4)).pow(2).mean()
        scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        read = loss.item()
    assert [step.losses for step in step_summaries(t.index)] == [((read,),)]


def test_accumulated_losses_are_a_range_and_those_of_two_models_stand_beside_each_other() -> None:
    assert text([facts(0, losses=((0.5, 0.25),)), facts(1, losses=((0.5,), (1.0,)))]) == [
        "0     1.00 ms  0.5…0.25",
        "1     1.00 ms    0.5, 1",
    ]


def test_the_others_are_all_the_others() -> None:
    shown = text([facts(number, ops=count) for number, count in enumerate((12, 10, 10, 11, 10))])
    assert [shown[0].rpartition("ms")[2].strip(), shown[3].rpartition("ms")[2].strip()] == [
        "12 ops, most 10", "11 ops, most 10",
    ]  # fmt: skip
    shown = text([facts(number, ops=count) for number, count in enumerate((12, 10, 10))])
    assert shown[0].endswith("12 ops, the others 10")


def test_a_table_of_steps_has_the_usual_width() -> None:
    """Of a note the parts that fit are shown whole."""
    given: Any = {"norm": 1.0, "peak": 123_456, "losses": ((2.125, 1.125),), "skipped": True}
    steps = [facts(0, time=90_000_000, ops=1_234_567, **given), *(facts(n, **given) for n in range(1, 5))]
    made = step_table(steps)
    assert made is not None
    lines = str(View((made,))).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].endswith("skipped by the scaler, 90× the median")


def test_a_range_of_losses_has_the_lowest_and_the_highest_wherever_they_are() -> None:
    """Highest first where the losses fell, lowest first where they rose."""
    curves = [(0.5, 0.4, 0.1), (0.3, 0.4, 0.1), (0.3, 0.1, 0.4), (0.1, 0.4, 0.3), (0.4, 0.1, 0.3)]
    shown = text([facts(number, losses=(curve,)) for number, curve in enumerate(curves)])
    assert [line.split()[-1] for line in shown] == ["0.5…0.1", "0.4…0.1", "0.1…0.4", "0.1…0.4", "0.4…0.1"]


def test_a_skipped_step_says_so() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.scaled(model, 4, overflow=2)
    assert [step.skipped for step in step_summaries(t.index)] == [False, False, True, False]
    assert "skipped by the scaler" in str(t)


def test_many_steps_show_the_first_the_last_and_the_odd_ones() -> None:
    steps = [facts(number) for number in range(40)]
    steps[20] = facts(20, time=9_000_000)
    steps[30] = facts(30, losses=((math.nan,),))
    steps[31] = facts(31, ops=17)
    shown = text(steps)
    assert [line.split()[0] for line in shown if "more" not in line] == [
        *"0 1 2 20 30 31 38 39".split(),
    ]
    assert "… 17 more" in shown
    assert any(line.startswith("20 ") and line.endswith("9× the median") for line in shown)
    assert any(line.startswith("31 ") and line.endswith("17 ops, the others 10") for line in shown)


def test_one_step_is_a_line_and_none_is_nothing() -> None:
    assert step_table([facts(0)]) is None
    index = TraceBuilder().build().index
    assert step_lines(index, []) == []
    lines = step_lines(index, [facts(0, losses=((2.0,),))])
    assert [line.text for line in lines] == [
        "steps     1, 1.00 ms, recording included; loss 2; step=0 shows one"
    ]


def test_the_peak_of_a_step_is_its_own() -> None:
    model = nn.Linear(64, 64)
    with sl.trace(model) as t:
        loops.plain_of(model, [8, 512, 8])
    peaks = [step.peak for step in step_summaries(t.index)]
    assert peaks[1] > 2 * peaks[0]
    assert "peak memory" in str(t)


def test_a_sum_over_tokens_is_divided_before_it_is_a_loss() -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor(5)
    with sl.trace(model) as t:
        loss = model(torch.randn(5, 4)).pow(2).sum() / tokens
        (loss / 2).backward()
        optimizer.step()
        read = loss.item()
    assert [step.losses for step in step_summaries(t.index)] == [((read,),)]


def test_what_one_step_does_is_told_in_the_words_of_the_program() -> None:
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    makers = torch.optim.SGD(generator.parameters(), lr=0.5), torch.optim.Adam(critic.parameters(), lr=0.25)
    halving = torch.optim.lr_scheduler.ExponentialLR(makers[0], 0.5)
    with sl.trace() as t:
        for _ in range(3):
            fake = generator(torch.randn(2, 3))
            critic(fake.detach()).mean().backward()
            makers[1].step()
            critic(fake).mean().backward()
            makers[0].step()
            halving.step()
    text = str(t)
    assert "one step  generator, critic ×2; backward ×2; Adam (lr 0.25), SGD (lr 0.5 → 0.125)" in text
    assert "\ngenerator (Linear)" in text
    assert "\ncritic (Linear)" in text


def test_calls_that_repeat_without_training_are_counted() -> None:
    model = loops.net()
    with sl.trace(model) as t, torch.no_grad():
        for rows in (5, 1, 1, 1):
            model(torch.randn(rows, 4))
    told = r"^calls     Sequential ×4, \S+ \S+ at the median; the first \S+ \S+, on f32\[5, 4\]; the last on "
    assert re.search(told, str(t), re.MULTILINE)


def test_the_code_says_where_steps_begin() -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model) as t:
        for _ in range(4):
            model(torch.randn(5, 4)).mean().backward()
            optimizer.step()
    rules = [line.strip("═ ") for line in str(t.code()).splitlines() if line.startswith("══ ")]
    assert rules == ["step 0 of 4", "steps 1 … 3 of 4"]
    rules = [line.strip("═ ") for line in str(t.code(fold=False)).splitlines() if line.startswith("══ ")]
    assert rules == [f"step {number} of 4" for number in range(4)]
    assert "══" not in str(t.code(step=1))


def fact(trace: sl.Trace, title: str) -> str:
    """A fact of the first screen, without its line breaks."""
    text = re.sub(r"\n {10}(?=\S)", " ", str(trace))
    return next((row[10:] for row in text.splitlines() if row.startswith(f"{title:<10}")), "")


def trained(rates: list[float], schedule: Callable[[int], float], steps: int) -> sl.Trace:
    """A run with a parameter group for each rate."""
    layers = nn.ModuleList(nn.Linear(3, 1) for _ in rates)
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    x = torch.randn(2, 3)
    with sl.trace(layers) as t:
        for _ in range(steps):
            sum(layer(x).mean() for layer in layers).backward()
            optimizer.step()
            scheduler.step()
    return t


def warm_up(step: int) -> float:
    return min(step / 10, 0.97 * (1 - (step - 10) / 290) + 0.03)


@pytest.mark.parametrize("saved", [False, True])
def test_a_rate_shows_where_it_went_also_after_the_steps_that_are_kept(saved: bool, tmp_path: Path) -> None:
    t = trained([1e-3], warm_up, 301)
    if saved:
        t.save(tmp_path / "run.sight")
        t = sl.load(tmp_path / "run.sight")
    assert fact(t, "one step").endswith("SGD (lr 0 → 0.001 → 3e-05)")


def test_groups_whose_rates_differ_are_all_shown() -> None:
    assert fact(trained([0.1, 0.1], lambda _: 1.0, 2), "one step").endswith("SGD (lr 0.1)")
    told = fact(trained([0.1, 0.01], lambda step: 0.5**step, 2), "one step")
    assert told.endswith("SGD (lr 0.1 → 0.05 and 0.01 → 0.005)")
    told = fact(trained([0.1, 0.02, 0.3, 0.04], lambda _: 1.0, 2), "one step")
    assert told.endswith("SGD (lr of 4 groups: 0.02 in the lowest, 0.3 in the highest)")


def test_rates_of_a_step_are_not_given_in_an_order_that_is_unknown() -> None:
    """Of each step the lowest and the highest rate are recorded, not which group has which."""
    t = trained([0.01, 0.001], lambda step: 0.5**step, 3)
    one = "SGD (lr 0.0005 in the lowest group, 0.005 in the highest)"
    assert fact(t._at(1, None), "one step").endswith(one)
    assert fact(trained([0.1, 0.1], lambda _: 1.0, 2)._at(1, None), "one step").endswith("SGD (lr 0.1)")


def test_a_group_that_came_later_has_a_rate_from_then_on(tmp_path: Path) -> None:
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    with sl.trace(nn.Sequential(body, head)) as t:
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": body.parameters(), "lr": 0.001})
            optimizer.zero_grad()
            head(body(torch.ones(2, 3))).mean().backward()
            optimizer.step()
    t.save(tmp_path / "run.sight")
    for each in (t, sl.load(tmp_path / "run.sight")):
        assert fact(each, "one step").endswith("SGD (lr 0.01 and, after 1 step, 0.001)")


def test_a_rate_that_goes_up_and_down_is_cut_and_counted() -> None:
    told = fact(trained([1.0], lambda step: 1.0 + step % 2, 100), "one step")
    assert told.endswith("SGD (lr 1 → 2 → 1 → 2 → … 95 more turns → 2)")
    told = fact(trained([1.0], lambda step: 1.0 + step % 2, 6), "one step")
    assert told.endswith("SGD (lr 1 → 2 → 1 → 2 → … 1 more turn → 2)")


def test_a_step_by_itself_has_its_optimizer_and_its_number() -> None:
    t = trained([0.1, 0.01], lambda step: 0.5**step, 6)
    view = str(overview(t._at(3, None)))
    assert "\nstep      3, " in view
    assert "shows one" not in view
    assert "SGD (lr 0.00125 in the lowest group, 0.0125 in the highest)" in view
    several = str(overview(t._at("2:5", None)))
    assert "\nsteps     3, " in several
    assert "step=4 shows one" in several
    assert "SGD (lr 0.0025 → 0.000625 in the lowest group, 0.025 → 0.00625 in the highest)" in several


def test_a_late_step_of_a_long_run_has_its_optimizer() -> None:
    view = str(overview(trained([0.1], lambda _: 1.0, 270)._at(269, None)))
    assert "; SGD\n" in view, "its rate is not known"


RANGE = "the range over the 4 backward passes of a step"


@pytest.mark.parametrize(
    ("divide", "read", "told"),
    [
        (False, "each", f"{RANGE}, and their sum"),
        (False, "last", "known of 1 of the 4 backward passes of a step"),
        (True, "each", f"{RANGE}, which the program had divided by 4, and their sum"),
        (
            True,
            "before",
            f"{RANGE}, which the program then divides by 4, and their sum after that",
        ),
    ],
)
def test_losses_of_accumulated_gradients_say_whose_they_are(divide: bool, read: str, told: str) -> None:
    model = loops.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    with sl.trace(model) as t:
        for number in range(8):
            whole = model(torch.randn(5, 4)).pow(2).mean()
            loss = whole / 4 if divide else whole
            loss.backward()
            if read != "last" or number % 4 == 3:
                losses.append((whole if read == "before" else loss).item())
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert fact(t, "loss") == told
    first = losses[: len(losses) // 2]
    assert sorted(step_summaries(t.index)[0].losses[0]) == sorted(first)
    row = next(row for row in str(t).splitlines() if row.startswith("0  "))
    assert (f", sum {number_text(sum(first) / (4 if read == 'before' else 1))} " in row) is (read != "last")


def test_the_losses_of_two_models_are_named_by_their_lines() -> None:
    with sl.trace(stats=True) as t:
        loops.adversarial(nn.Linear(4, 4), nn.Linear(4, 1), 3)
    assert re.fullmatch(
        r"of the backward passes at training_loops.py:\d+, training_loops.py:\d+", fact(t, "loss")
    )


def test_two_models_that_are_clipped_have_no_norm_together() -> None:
    with sl.trace(stats=True) as t:
        loops.adversarial(nn.Linear(4, 4), nn.Linear(4, 1), 3)
    assert [step.norm for step in step_summaries(t.index)] == [None] * 3
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with sl.trace() as t:
        (first(torch.ones(2, 4)) + second(torch.ones(2, 4))).mean().backward()
        nn.utils.clip_grad_norm_(first.parameters(), 1.0).item()
        nn.utils.clip_grad_norm_(second.parameters(), 1.0).item()
        optimizer.step()
    assert [step.norm for step in step_summaries(t.index)] == [None]


def test_evaluation_and_sampling_have_a_line() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        with torch.no_grad():
            model(torch.randn(2, 4))
        loops.evaluating(model, 2)
        model(torch.randn(2, 4))
    told = fact(t, "outside")
    assert re.fullmatch(
        r"the steps: Sequential ×7 without gradients, before the first step, after step 0, 1; .+ at the "
        r"median; Sequential, after step 1; .+",
        told,
    )
    with sl.trace(model) as t:
        loops.plain(model, 2)
    assert not fact(t, "outside")


def test_a_loss_that_is_no_number_is_written_once() -> None:
    rows = text([facts(0, losses=((math.nan,),)), facts(1, losses=((0.5, math.nan),))])
    assert [row.split("  ")[-1] for row in rows] == [*map(str.strip, ("nan", "0.5 and nan"))]


@BOTH_ENGINES
def test_gradients_of_the_step_before_are_no_reason_to_look_for_a_nan(engine: Any) -> None:
    net = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    with sl.trace(net, stats=True, engine=engine) as t:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            loss = net(torch.ones(2, 4)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "t.nonfinite()" in str(t.step(1))
    assert "t.nonfinite()" not in str(t.step(2))


def _last_ops_of_steps(count: int, *, optimizers: int = 1) -> sl.Trace:
    """The last ops of twelve steps of 30 ops."""
    model = nn.Linear(8, 1)
    every = [torch.optim.SGD([each], lr=1e-3) for each in model.parameters()][:optimizers]
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    with sl.trace(model, last=count) as t:
        for _ in range(12):
            loss = ((model(x) - y) ** 2).mean()
            model.zero_grad()
            loss.backward()
            for each in every:
                each.step()
            loss.item()
    return t


def test_steps_of_the_last_ops_keep_their_numbers_and_the_cut_one_says_that_it_is_cut() -> None:
    t = _last_ops_of_steps(100)
    steps = step_summaries(t.index)
    assert [step.number for step in steps] == [8, 9, 10, 11]
    assert [step.incomplete for step in steps] == [True, False, False, False]
    assert not steps[0].losses
    text = str(t)
    assert "after 8 that were not kept" in text
    assert re.search(r"\n8 .*its first ops may not have been kept", text)
    assert "no module" not in text  # the cut step is not a kind of its own
    assert "its first ops may not have been kept" in str(t.step(8))
    assert "its first ops" not in str(t.step(9))
    assert re.search(r"══ steps? 8 .*of 12", str(t.code()))


def test_a_first_step_of_the_last_ops_that_is_whole_is_not_called_incomplete() -> None:
    whole = step_summaries(_last_ops_of_steps(100).index)[-1].ops
    steps = step_summaries(_last_ops_of_steps(4 * whole).index)
    assert [step.number for step in steps] == [8, 9, 10, 11]
    assert not any(step.incomplete for step in steps)


def test_steps_of_several_optimizers_are_said_to_be_those_that_were_kept() -> None:
    t = _last_ops_of_steps(100, optimizers=2)
    assert step_summaries(t.index)[0].number == 0
    assert "that were kept" in str(t)


@pytest.mark.parametrize("count", range(60, 130, 7))
def test_a_step_of_several_optimizers_ends_with_the_last_of_them_wherever_the_cut_is(count: int) -> None:
    whole, *_ = step_summaries(_last_ops_of_steps(10_000, optimizers=2).index)
    steps = step_summaries(_last_ops_of_steps(count, optimizers=2).index)
    assert {step.ops for step in steps[1:]} <= {whole.ops}


@pytest.mark.parametrize("reads", [0, 1, 2])
@pytest.mark.parametrize("loss", ["(a + b) / 2", "(a + b) * 0.25", "(a * b).sum() / 5"])
def test_a_loss_is_what_its_backward_pass_starts_from_whether_it_is_read_or_not(
    reads: int, loss: str
) -> None:
    """In no step, in each, or in every other one."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    truth = []
    with sl.trace(net, stats=True) as t:
        for step in range(4):
            a, b = net(torch.ones(2, 3)).square().mean(), net(torch.rand(2, 3)).abs().mean()
            whole = eval(loss, {"a": a, "b": b})
            optimizer.zero_grad()
            whole.backward()
            optimizer.step()
            truth.append(whole)
            if reads and step % reads == 0:
                whole.item()
    shown = [step.losses[0][0] for step in step_summaries(t.index)]
    assert shown == pytest.approx([each.item() for each in truth])
    assert "divided" not in str(t)
    assert "multiplied" not in str(t)


def test_a_loss_that_is_read_before_its_division_is_shown_so_in_every_step() -> None:
    net, truth = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sl.trace(net, stats=True) as t:
        for step in range(4):
            loss = net(torch.rand(2, 3)).square().mean()
            truth.append(loss)
            if step != 1:
                loss.item()
            (loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.losses[0][0] for step in step_summaries(t.index)] == pytest.approx(
        [each.item() for each in truth]
    )


def test_an_optimizer_that_finds_no_gradient_has_no_norm() -> None:
    net, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with sl.trace(net, stats=True) as t:
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.norm for step in step_summaries(t.index)] == [None] * 3
