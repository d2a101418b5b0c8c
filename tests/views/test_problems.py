from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.analysis.problems import KINDS, find
from sightline.api import Trace
from sightline.errors import NothingMatched, UsageError
from sightline.views.last_screen import last_screen
from sightline.views.problems import problems
from sightline.views.rendering import width
from tests.builders import TraceBuilder, make_trace
from tests.views.odd_traces import crashed, hostile, nested

MIXED = """\
problems: 1 error, 1 note in 8 ops

error    add.Tensor failed on tensors of cpu and cuda:0: f32[4], f32[4]@cuda:0
         net.py:11 in Net.forward
         An op works on one device: move its tensors there, or make them there. [mixed-devices]

note     _local_scalar_dense of f32[4]@cuda:0: a tensor is read as a Python number
         net.py:3 in Layer.forward  ×7
         in layers.0 … layers.6
         On a GPU each one waits until the GPU has finished all its work, and then the GPU is idle.
         Keep it a tensor (torch.where for a branch), or read it outside the model. [host-sync]

no backward pass ran: with one, parameters without a gradient are found
statistics were not taken: stats=True finds NaN, dead or saturated activations, masks that leave out
  everything, targets out of range, results that differ
no optimizer stepped: with steps, mistakes of the training loop are found"""


def mixed(layer: str = "layers") -> Trace:
    """Seven layers that wait for a device, and an op that was given two."""
    b = TraceBuilder()
    x, away = b.value(4), b.value(4, device="cuda:0")
    for at in range(7):
        b.module(f"{layer}.{at}", "Layer")
        with b.at("net.py", 9, "Net.forward"), b.call(f"{layer}.{at}", away):
            with b.at("net.py", 3, "Layer.forward"):
                b.op("_local_scalar_dense", away)
    with b.at("net.py", 11, "Net.forward"):
        b.op("add.Tensor", x, away, raised=True)
    return b.build()


def test_what_where_and_why() -> None:
    assert str(problems(mixed())) == MIXED


def test_nothing_wrong_says_so_and_what_was_not_looked_at() -> None:
    head, looked, *rest = str(problems(make_trace(backward=False))).splitlines()
    assert head == "problems: none found in 46 ops"
    assert looked.startswith(f"looked for {len(KINDS)} kinds: numbers that are not finite, gradients, losses")
    assert "no backward pass ran: with one, parameters without a gradient are found" in rest
    assert any(line.startswith("statistics were not taken: stats=True finds NaN, dead") for line in rest)


def test_module_calls_alone_tell_little() -> None:
    b = TraceBuilder(ops="none")
    with b.call("", b.value(4)):
        pass
    assert 'aten ops were not recorded: ops="both" finds' in str(problems(b.build()))


def test_filters() -> None:
    assert "1 note in 8 ops with kind='host-sync'" in str(problems(mixed(), kind="host-sync"))
    assert "1 note in 8 ops with module='layers.3'" in str(problems(mixed(), module="layers.3"))
    healthy = str(problems(mixed(), module="layers.3", kind="broadcast"))
    assert healthy == "problems: none found in 8 ops with module='layers.3', kind='broadcast'"


def test_a_filter_that_means_nothing_says_what_there_is() -> None:
    with pytest.raises(NothingMatched, match=r"module='layer' matches no module of this trace; did you mean"):
        problems(mixed(), module="layer")
    with pytest.raises(UsageError, match=r"kind='nan' is none of the \d+ kinds .*; it has .*'non-finite'"):
        problems(mixed(), kind="nan")
    with pytest.raises(UsageError, match="module=3 must be a string"):
        problems(mixed(), module=3)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    "make", [make_trace, nested, crashed, hostile, mixed, TraceBuilder().build, lambda: mixed("x" * 150)]
)
def test_it_fits_a_hundred_columns(make: Callable[[], Trace]) -> None:
    assert max(map(width, str(problems(make())).splitlines())) <= 100


def test_hostile_names_stay_text() -> None:
    view = problems(mixed("<script>\x1b[31m"))
    assert "\x1b" not in str(view)
    assert "<script>" in str(view)
    assert "<script>" not in view._repr_html_()


def test_none_found_is_not_all_there_is_to_say_of_a_recording_that_was_cut_short() -> None:
    b = TraceBuilder(unfinished=True)
    b.op("relu", b.value(2), out=(2,))
    head, *_ = lines = str(problems(b.build())).splitlines()
    assert head == "problems: none found in 1 ops of a recording that was not finished"
    assert "the process ended before the recording did: what it did last may be missing" in lines
    assert "finished" not in str(problems(make_trace()))


def test_modules_of_several_models_have_the_names_of_the_program() -> None:
    """Those that the tables of modules have, on all screens with problems; and filters know them."""
    with sl.trace(stats=True) as t:
        body, head = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        head(body(torch.ones(2, 3))).sum().backward()
        optimizer.step()
    texts = str(t.problems()), str(last_screen(t.index, "run.sight"))
    for text in texts:
        assert "Sequential_1" not in text
        assert re.search(r"head gets gradients in \d+ parameters", text)
    (problem,) = (each for each in find(t.index) if each.kind == "parameters-without-optimizer")
    assert (problem.module, problem.modules) == ("head", ("Sequential_1",))
    assert "head gets gradients" in str(t.problems(module="head"))
    assert str(t.problems(module="head")) == str(t.problems(module="Sequential_1")).replace(
        "Sequential_1", "head"
    )
    for name in ("summary", "code", "log", "call_order"):
        shown = str(getattr(t, name)(module="head.0"))
        assert shown == str(getattr(t, name)(module="Sequential_1.0")), name
    with pytest.raises(sl.NothingMatched):
        t.code(module="tail")


def test_the_origin_of_bad_numbers_has_the_name_of_its_model() -> None:
    mean, spread = nn.Linear(3, 1), nn.Linear(3, 1)
    with torch.no_grad():
        spread.bias.fill_(-9.0)
    with sl.trace(stats=True) as t:
        x = torch.ones(2, 3)
        m, s = mean(x), spread(x)
        loss = (m + s.log()).mean()
        loss.backward()
    text = " ".join(str(t.problems()).split())
    assert re.search(r"come from linear at \S+ \(spread\)", text)
    assert "Linear_1" not in text
