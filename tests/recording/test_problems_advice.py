"""What a problem says is to be done fits the case, and stands at the line that is to be changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.problems import CHECKS, Problem
from sightline.views.last_screen import _advice_lines, first_sections, last_screen
from sightline.views.overview import overview
from tests.recording.engines import BOTH_ENGINES
from tests.recording.problematic import Calls, only, trained

SQUARE = 8  #: as many rows as features


def line_of(code: Any, text: str) -> int:
    """The line of a text in the source of a function or class."""
    lines, first = inspect.getsourcelines(code)
    return first + next(at for at, line in enumerate(lines) if text in line)


def at_line(problem: Problem, code: Any, text: str) -> bool:
    return f":{line_of(code, text)} in " in problem.place


# -- gradients ---------------------------------------------------------------------------------------------


def test_a_cut_is_removed_or_the_parameters_are_frozen() -> None:
    problem = only(trained(Calls(lambda net, x: net.first(x) + net.second(x).detach())), "cut-gradient")
    assert "Remove the detach, or freeze the parameters if it is meant" in problem.why


def no_grad_block(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.second(x)
    return net.first(h)  # type: ignore[no-any-return]


def test_a_layer_in_a_block_without_gradients_moves_out() -> None:
    assert "Move it out of the block" in only(trained(Calls(no_grad_block)), "cut-gradient").why


def chosen(net: Any, x: Tensor) -> Tensor:
    return net.first(x) * F.one_hot(net.second(x).argmax(-1), 8)  # type: ignore[no-any-return]


def compared(net: Any, x: Tensor) -> Tensor:
    return net.first(x) * (net.second(x) > 0)  # type: ignore[no-any-return]


@BOTH_ENGINES
@pytest.mark.parametrize(("code", "repair"), [(chosen, "its softmax weight"), (compared, "by a sigmoid")])
def test_a_hard_choice_gets_a_soft_weight(code: Any, repair: str, engine: Any) -> None:
    problem = only(trained(Calls(code), engine=engine), "no-gradient")
    assert problem.title.endswith(" passes none back")
    assert problem.why.startswith("They stay as they were initialised. ")
    assert repair in problem.why
    assert "soft + (hard - soft).detach()" in problem.why


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


@BOTH_ENGINES
def test_the_activation_between_the_layers_is_named(engine: Any) -> None:
    torch.manual_seed(0)
    net = Tower()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sl.trace(net, engine=engine, stats=True) as t:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(6, 8)).pow(2).mean().backward()
            optimizer.step()
    problem = only(t, "vanishing-gradients")
    assert problem.title.endswith("; between them is sigmoid ×10")
    assert "x + sigmoid(layer(x))" in problem.why


# -- shapes and precision ----------------------------------------------------------------------------------


def squeezed(net: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(net.second(x)[:, :1]).squeeze(-1)
    return net.first(x) * gate  # type: ignore[no-any-return]


def averaged(net: Any, x: Tensor) -> Tensor:
    h = net.second(net.first(x))
    return h / h.norm(dim=1)  # type: ignore[no-any-return]


def scaled(net: Any, x: Tensor) -> Tensor:
    h = x.abs()
    return net.second(net.first(torch.tensor(2.0) * h / h.sum(dim=1)))  # type: ignore[no-any-return]


def indexed(net: Any, x: Tensor) -> Tensor:
    gate = net.second(x)[:, 2]
    return net.first(x) * gate  # type: ignore[no-any-return]


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("code", "line", "repair"),
    [
        (squeezed, ".squeeze(-1)", "Drop the squeeze, so that it stays [8, 1]"),
        (averaged, "h.norm", "Give norm keepdim=True"),
        (scaled, "h.sum", "Give sum keepdim=True"),
        (indexed, "[:, 2]", "Index with a range (x[:, 2:3] for x[:, 2])"),
    ],
)
def test_a_lost_dimension_is_kept_where_it_was_lost(code: Any, line: str, repair: str, engine: Any) -> None:
    problem = only(trained(Calls(code), torch.randn(SQUARE, 8), engine=engine), "broadcast")
    assert at_line(problem, code, line)
    assert "drops the last dimension of f32[8, " in problem.title
    assert problem.title.endswith("then applies the number of each row to a column")
    assert repair in problem.why


def test_two_shapes_of_a_loss_are_made_one() -> None:
    model, x, target = nn.Linear(8, 1), torch.randn(6, 8), torch.randn(6)
    with sl.trace(model) as t:
        ((model(x) - target) ** 2).mean().backward()
    why = only(t, "broadcast").why
    assert why.endswith(".squeeze(-1) on the f32[6, 1], or .unsqueeze(-1) on the f32[6].")


def table() -> Tensor:
    return torch.linspace(0, 1, 8).sin()


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.places = table()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.places
        return self.second(h)  # type: ignore[no-any-return]


@BOTH_ENGINES
def test_a_plain_attribute_becomes_a_buffer(engine: Any) -> None:
    with sl.trace(engine=engine) as t:
        model = Placed().bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(6, 8).bfloat16())
    problem = only(t, "upcast")
    assert problem.title.startswith("self.places is float32: + at ")
    assert 'self.register_buffer("places", …, persistent=False)' in problem.why
    assert at_line(problem, Placed, "self.places = ")


# -- weights, masks, numbers -------------------------------------------------------------------------------


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@BOTH_ENGINES
@pytest.mark.parametrize("recorded", [True, False])
def test_the_list_of_one_layer_is_told_where_it_is_made(recorded: bool, engine: Any) -> None:
    model = Repeated()
    with sl.trace(engine=engine) as t:
        model = Repeated() if recorded else model
        model(torch.randn(6, 8)).sum().backward()
    problem = only(t, "shared-layers")
    known = recorded and engine == "native"  # the other engine does not see how weights are made
    assert at_line(problem, Repeated, "ModuleList" if known else "x = layer(x)")


def attended(net: Any, x: Tensor) -> Tensor:
    q, k = net.first(x)[None], net.second(x)[None]
    mask = torch.zeros(8, 8, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def filled(net: Any, x: Tensor) -> Tensor:
    scores = net.first(x) @ net.second(x).T
    return scores.masked_fill(torch.ones(8, 8, dtype=torch.bool), -1e9).softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("code", "sense"),
    [
        (attended, "scaled_dot_product_attention keeps what is True, and here nothing is"),
        (filled, "masked_fill fills where the mask is True, and here all is"),
    ],
)
def test_the_sense_of_a_mask_is_that_of_the_function(code: Any, sense: str) -> None:
    problem = only(trained(Calls(code), torch.randn(8, 8), stats=True), "masks-everything")
    assert problem.why.startswith(sense)


def log_of_relu(net: Any, x: Tensor) -> Tensor:
    return net.second(torch.relu(net.first(x)).log())  # type: ignore[no-any-return]


def log_of_softmax(net: Any, x: Tensor) -> Tensor:
    return (net.first(x) * 1e4).softmax(-1).log() + net.second(x)  # type: ignore[no-any-return]


def divided(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.second(x) / (h - h)  # type: ignore[no-any-return]


def root(net: Any, x: Tensor) -> Tensor:
    return (net.first(x) - 9).sqrt() + net.second(x)  # type: ignore[no-any-return]


def raised(net: Any, x: Tensor) -> Tensor:
    return (net.first(x).abs() + 100).exp() * net.second(x)  # type: ignore[no-any-return]


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("code", "cause", "repair"),
    [
        (log_of_relu, " zeros come from relu at ", "softplus, which is never 0, instead of relu"),
        (log_of_softmax, " come from softmax at ", "F.log_softmax(scores, dim=-1)"),
        (divided, "48 zeros come from - at ", "Add an epsilon to the divisor"),
        (root, ", come from ", ".clamp(min=1e-6) before the sqrt"),
        (raised, " come from + at ", "Subtract the maximum first"),
    ],
)
def test_where_the_numbers_come_from_that_a_function_cannot_take(
    code: Any, cause: str, repair: str, engine: Any
) -> None:
    torch.manual_seed(0)
    with sl.trace(engine=engine, stats=True) as t:
        Calls(code)(torch.randn(6, 8))
    problem = only(t, "non-finite")
    assert cause in problem.title
    assert repair in problem.why


def test_the_gradient_of_a_root_at_zero() -> None:
    x = torch.zeros(6, requires_grad=True)
    with sl.trace(stats=True) as t:
        torch.sqrt(x).sum().backward()
    problem = only(t, "non-finite")
    assert problem.title.endswith(": the gradient of sqrt at 0 is infinite")
    assert "add 1e-6 inside the root" in problem.why


def test_a_row_that_is_masked_as_a_whole() -> None:
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    x, leave_out = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [False] * 5])
    with sl.trace(attend, stats=True) as t:
        attend(x, x, x, key_padding_mask=leave_out)[0].sum().backward()
    problem = only(t, "non-finite")
    assert problem.title.endswith(": some rows are -Inf throughout")
    assert "nn.MultiheadAttention leaves out what is True in its mask" in problem.why


# -- on the screen -----------------------------------------------------------------------------------------


def test_a_number_that_is_read_stays_a_tensor() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.second(net.first(x))
        return h / h.abs().max().item()  # type: ignore[no-any-return]

    why = only(trained(Calls(forward)), "host-sync").why
    assert "Leave .item() out: the 0-d tensor works as well, with .detach()" in why


def test_a_problem_in_every_step_says_in_how_many() -> None:
    net = Calls(averaged)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sl.trace(net) as t:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(SQUARE, 8)).sum().backward()
            optimizer.step()
    assert only(t, "broadcast").times == "in 3 of 3 steps"
    assert ", in 3 of 3 steps" in str(last_screen(t.index, "run.sight"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.kind)
def test_no_advice_is_cut_on_the_last_screen(check: Any) -> None:
    text = f"→ Perhaps a mistake. {check.why}"
    assert " ".join(line.strip() for line in _advice_lines(text)) == text


def test_advice_that_is_too_long_ends_with_a_sentence() -> None:
    *_, last = _advice_lines(
        "→ " + "Do this and that, and then some more of it, until all of it is done. " * 6
    )
    assert last.endswith(" done.")


class _Deep(nn.Module):
    """A parameter with a long name in a module of a module."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.ModuleDict({"first_very_long_name_of_a_layer": nn.ModuleDict()})
        layers = encoder["first_very_long_name_of_a_layer"]
        for name in ("query_projection", "key_projection", "value_projection", "output_projection"):
            layers[f"attention_{name}_of_the_layer"] = nn.Linear(4, 4)  # type: ignore[operator]  # a dict
        self.encoder_of_the_whole_model = encoder
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder_of_the_whole_model["first_very_long_name_of_a_layer"].values():  # type: ignore[operator]
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_last_screen_shortens_names_and_never_the_verdict(columns: int) -> None:
    net = _Deep()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    with sl.trace(net) as t:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).mean().backward()
            optimizer.step()
    lines = [block.text for block in last_screen(t.index, "run.sight").within(columns)]  # type: ignore[union-attr]
    told = " ".join(" ".join(lines).split())
    assert "5 more get gradients, and no optimizer holds them [parameters-without-optimizer]" in told
    assert "….attention_query_projection_of_the_layer.weight" in told
    assert max(map(len, lines)) <= columns
    assert len(lines) <= 15


def test_the_message_of_an_exception_is_quoted_as_it_is() -> None:
    message = "use torch.autograd.set_detect_anomaly(True, check_nan=False) to find the operation. " * 4

    def fail() -> None:
        with sl.trace() as t:
            traces.append(t)
            torch.ones(2).relu()
            raise ValueError(message)

    traces: list[sl.Trace] = []
    with pytest.raises(ValueError, match="set_detect_anomaly"):
        fail()
    (t,) = traces
    assert "…" not in str(last_screen(t.index, "run.sight"))


def test_of_a_first_screen_that_does_not_fit_the_head_is_cut() -> None:
    with sl.trace() as t:
        torch.ones(2).relu()
    whole = str(overview(t)).splitlines()
    assert str(first_sections(overview(t), 3)).splitlines() == whole[:3]
    assert str(first_sections(overview(t), 100)).splitlines() == whole
