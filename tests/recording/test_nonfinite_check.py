"""The NaN hunt: planted faults, each named by its own line; and what is no fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import sightline as sl
from sightline.notation import short_path
from sightline.recording import nonfinite_check
from sightline.recording.statistics.cpu import StatisticsBuffer, is_finite
from tests.recording.architectures import ZOO, Architecture
from tests.recording.engines import needs_native


def log_of_a_negative() -> None:
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    y = x * 2
    z = y.log()  # here
    (z + 1).sum()


def zero_by_zero() -> None:
    a = torch.tensor([0.0, 1.0])
    b = a * 0
    ((a * 0) / b).sum()  # here


def overflow_in_half() -> None:
    a = torch.full((4,), 300.0, dtype=torch.float16)
    b = a + 1
    (b * a).relu()  # here


def exp_overflow() -> None:
    a = torch.full((4,), 50.0)
    (a * a).exp().sum()  # here


def gradient_of_a_root_at_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    y = x.sqrt()  # here
    y.sum().backward()


def only_in_the_backward() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    norm = (x * 0).norm()
    ((norm - 0).sqrt() * 0).backward()  # here


def hidden_by_where() -> None:
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    logs = (x * 1).log()  # here
    torch.where(x > 0, logs, torch.zeros(2)).sum().backward()


def softmax_of_nothing() -> None:
    scores = torch.randn(2, 3)
    mask = torch.tensor([[True, True, True], [False, True, False]])
    scores = scores.masked_fill(mask, float("-inf"))
    scores.softmax(-1).sum()  # here


def infinity_minus_infinity() -> None:
    mask = torch.full((3,), float("inf"))
    (mask - mask).sum()  # here


def in_place_on_a_slice() -> None:
    x = torch.rand(4, 4) + 1
    x[:, 1].sub_(5).log_()  # here
    x.sum()


def in_a_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net(torch.randn(2, 4)).sub(1e6).sqrt()  # here


FAULTS: list[Callable[[], None]] = [
    log_of_a_negative, zero_by_zero, overflow_in_half, exp_overflow, gradient_of_a_root_at_zero,
    only_in_the_backward, hidden_by_where, softmax_of_nothing, infinity_minus_infinity, in_place_on_a_slice,
    in_a_module,
]  # fmt: skip


def line_of(fault: Callable[[], None]) -> int:
    """The line of a planted fault: the one that says so."""
    lines, first = inspect.getsourcelines(fault)
    return first + next(number for number, line in enumerate(lines) if "# here" in line)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("ops", ["aten", "both"])
def test_the_check_names_the_line(fault: Callable[[], None], ops: Any) -> None:
    with pytest.raises(sl.NonFiniteError) as caught, sl.trace(ops=ops, check="nonfinite"):
        fault()
    headline = str(caught.value).splitlines()[0]
    assert f"test_nonfinite_check.py:{line_of(fault)} in {fault.__name__}" in headline, str(caught.value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_statistics_name_the_same_line(fault: Callable[[], None]) -> None:
    with sl.trace(stats=True) as t:
        fault()
    headline = str(t.nonfinite()).splitlines()[0]
    assert f"test_nonfinite_check.py:{line_of(fault)} in {fault.__name__}" in headline


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        nothing = x - x
        return F.relu(nothing / nothing) * gradient


def in_a_backward_of_ones_own() -> None:
    x = torch.ones(3, requires_grad=True)
    (Root.apply(x * 2) + 1).sum().backward()


def in_a_hook_of_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: (gradient - 5).log())
    (y + 1).sum().backward()


HERE = short_path(__file__)
OWN_CODE = [
    (in_a_backward_of_ones_own, "div.Tensor", "nothing / nothing", "Root.backward", "* at {} in Root."),
    (in_a_hook_of_a_gradient, "log", "(gradient - 5)", "in_a_hook_of_a_gradient.<locals>.<lambda>", "* at"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "op", "code", "function", "forward"), OWN_CODE, ids=["function", "hook"])
def test_code_of_ones_own_in_the_backward_pass_is_named_by_its_line(
    fault: Callable[[], None], op: str, code: str, function: str, forward: str
) -> None:
    lines = inspect.getsource(inspect.getmodule(fault)).splitlines()  # type: ignore[arg-type]
    line = 1 + next(number for number, text in enumerate(lines) if code in text)
    forward = forward.format(f"{HERE}:{1 + lines.index('        return x * x')}")
    with pytest.raises(sl.NonFiniteError) as caught, sl.trace(check="nonfinite"):
        fault()
    headline, given = str(caught.value).splitlines()[:2]
    assert headline.startswith(f"{op} made 3 NaN of 3 in f32[3], ")
    assert f"{HERE}:{line} in {function}, backward of {forward}" in headline
    assert "backward of" not in given  # once is enough
    with sl.trace(stats=True) as t:
        fault()
    assert str(t.nonfinite()).splitlines()[0] == headline
    assert f"{HERE}:{line} in {function}" in str(t.code(phase="backward"))
    assert f"{HERE}:{line} in {function}" in str(t.problems())


def test_the_error_shows_the_inputs() -> None:
    with pytest.raises(sl.NonFiniteError) as caught, sl.trace(check="nonfinite"):
        log_of_a_negative()
    first, *inputs = str(caught.value).splitlines()
    assert first.startswith("log made 1 NaN of 2 in f32[2], ")
    assert inputs[0].startswith("  self f32[2] = *, ")
    assert inputs[0].endswith("; -2 … 2, mean 0, std 2.83")


def causal_mask_by_full() -> None:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    (torch.randn(4, 4) + mask).softmax(-1).sum()


def mask_by_slices() -> None:
    mask = torch.zeros(4, 4)
    mask[:, 2:] = float("-inf")
    (torch.randn(4, 4) + mask).softmax(-1).sum()


def mask_by_where() -> None:
    keep = torch.tensor([True, False, True])
    scores = torch.where(keep, torch.randn(3), torch.tensor(float("-inf")))
    scores.softmax(0).sum()


def uninitialised() -> None:
    held = torch.empty(1000)
    held[:] = 1.0
    held.sum()


def attention_with_a_mask() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


@pytest.mark.parametrize(
    "fine",
    [causal_mask_by_full, mask_by_slices, mask_by_where, uninitialised, attention_with_a_mask],
    ids=lambda fine: fine.__name__,
)
def test_what_is_meant_is_no_fault(fine: Callable[[], None]) -> None:
    with sl.trace(check="nonfinite") as t:
        fine()
    assert t.info["checked"] > 0
    with sl.trace(stats=True) as t:
        fine()
    assert "made" not in str(t.nonfinite()).splitlines()[0]


def test_what_is_allowed_and_what_is_only_reported() -> None:
    with sl.trace(check=sl.Check(allow="log")):
        log_of_a_negative()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    class Mask(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x - 1e6).log()

    masked = nn.Sequential(net, Mask())
    with sl.trace(masked, check=sl.Check(allow="1")):
        masked(torch.randn(2, 4))
    with pytest.raises(sl.NonFiniteError), sl.trace(masked, check=sl.Check(allow="0")):
        masked(torch.randn(2, 4))
    with sl.trace(check=sl.Check(on="report")) as t:
        log_of_a_negative()
    assert str(t.nonfinite()).startswith("log made 1 NaN of 2")


MASK = torch.full((4, 4), float("-inf")).triu(1)


def in_place_on_a_mask_from_outside() -> None:
    MASK.clone().triu_(1)
    MASK.triu_(1)


def in_place_on_a_mask_made_by_slices() -> None:
    mask = torch.zeros(4, 4)
    mask[:, 2:] = float("-inf")
    mask.mul_(1.0)


def told_to_be_nan() -> None:
    torch.ones(3) * float("nan")
    torch.full((3,), float("nan"))


@pytest.mark.parametrize(
    "fine",
    [in_place_on_a_mask_from_outside, in_place_on_a_mask_made_by_slices, told_to_be_nan],
    ids=lambda fine: fine.__name__,
)
def test_what_was_there_or_was_asked_for_is_no_fault(fine: Callable[[], None]) -> None:
    with sl.trace(check="nonfinite"):
        fine()
    with sl.trace(check=sl.Check(on="report")) as t:
        fine()
    assert "made" not in str(t.nonfinite()).splitlines()[0]


def test_a_parameter_that_came_with_a_nan_is_named() -> None:
    broken = nn.Linear(4, 1)
    net = nn.Sequential(nn.Linear(4, 4), broken)
    with torch.no_grad():
        broken.weight.fill_(float("nan"))
    with sl.trace(net, stats=True) as t:
        net(torch.ones(2, 4)).sum().backward()
    assert "parameter 1.weight came with 4 NaN" in str(t.nonfinite())
    assert "parameter 1.weight came with 4 NaN of 4" in str(t.problems())


def test_what_a_check_allowed_is_remembered() -> None:
    with sl.trace(check=sl.Check(allow="log")) as t:
        torch.zeros(2).log()
    assert "log made" not in str(t.nonfinite())


def test_a_single_element_of_any_stride_is_measured() -> None:
    with sl.trace(stats=True) as t:
        torch.topk(torch.randn(1, 50), 5)[0][..., -1, None] + 0
    assert not t.info["faults"]


def test_the_trace_is_there_after_the_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(sl.NonFiniteError), sl.trace(model, check="nonfinite") as t:
        (model(torch.randn(2, 4)) - 1e6).log()
    assert [call.module.label for call in t.module_calls] == ["Sequential", "0", "1"]
    assert t.ops.where(level="aten")[-1].name == "log"
    t.validate()


@pytest.fixture(scope="module", autouse=True)
def transformers_are_ready() -> None:
    """The first model of transformers that is built adds a method to nn.Module, for good."""
    ZOO[0].build()


#: Architectures that do make infinities out of finite numbers, and the op that may.
INFINITE: dict[str, str] = {
    **dict.fromkeys(["t5", "longt5", "switch_transformers", "prophetnet", "wavlm"], "log"),  # of distance 0
    "gpt_neo": "add",  # two masks of the lowest number there is, added up
    "wav2vec2": "_ctc_loss",  # probabilities of what cannot be, in logarithms
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ZOO, ids=str)
def test_no_false_alarm_on_real_architectures(architecture: Architecture) -> None:
    def run(allow: str = "") -> sl.Trace:
        torch.manual_seed(0)
        model, inputs = architecture.build()
        with sl.trace(model, check=sl.Check(allow=[allow] if allow else [])) as t:
            returned = [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]
            losses = [leaf.float().square().mean() for leaf in returned if leaf.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        return t

    allowed = INFINITE.get(architecture.name, "")
    if allowed:
        with pytest.raises(sl.NonFiniteError, match=rf"^{allowed}\S* made \d+ -?Inf of "):
            run()
    assert run(allowed).info["checked"] > 10


def test_copies_of_what_was_looked_at_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.dtype] = []

    def noted(tensor: Any) -> bool:
        looked.append(tensor.dtype)
        return is_finite(tensor)

    monkeypatch.setattr(nonfinite_check, "is_finite", noted)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with sl.trace(ops="aten", check="nonfinite", engine="python") as t:
        y = x * 2
        (y.float().clone() + 1).to(torch.bfloat16)
    assert looked == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert t.info["checked"] == 5


@needs_native
def test_copies_count_as_examined_on_the_native_engine() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with sl.trace(ops="aten", check=sl.Check(nonfinite=True, on="report"), engine="native") as t:
        y = x * 2
        (y.float().clone() + 1).to(torch.bfloat16)
        (y / 0).float()
    assert t.info["checked"] == 7
    for op in t.ops[-2:]:
        stats = op.outputs[0].stats
        assert stats is not None
        assert stats.nans + stats.infs == 12


def test_a_copy_has_the_counts_of_what_it_was_made_from() -> None:
    checker: Any = SimpleNamespace(
        _copies=[(5, 2, False), (6, 5, True), (9, 8, False)], buffer=StatisticsBuffer()
    )
    counts = np.array([[2, 0, 7, 1], [3, 0, 0, 0]])
    floats, more = nonfinite_check.NonFiniteChecker._with_copies(
        checker, np.arange(10.0).reshape(2, 5), counts
    )
    assert more.tolist() == [*counts.tolist(), [5, 0, 7, 1], [6, 0, 7, 0]]
    assert floats[2:].tolist() == [floats[0].tolist()] * 2


@pytest.mark.parametrize(
    ("wide", "narrow"), [(torch.float16, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_a_cast_that_overflows_is_named(wide: torch.dtype, narrow: torch.dtype) -> None:
    big = torch.full((3,), 1e5, dtype=narrow)
    with pytest.raises(sl.NonFiniteError, match="_to_copy"), sl.trace(ops="aten", check="nonfinite"):
        (big * 2).to(wide)


def test_a_copy_of_what_was_changed_through_a_view_is_looked_at() -> None:
    with sl.trace(ops="aten", check=sl.Check(nonfinite=True, on="report")) as t:
        x = torch.ones(4) * 2
        x[1:].fill_(float("inf"))
        (x.clone() - x).sum()
    found = t.nonfinite()
    assert "sub.Tensor" in str(found)
