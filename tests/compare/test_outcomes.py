"""The verdict of a diff covers all outcomes: outputs, losses, results, gradients, updated weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

import sightline as sl
from sightline.cli import main
from tests.compare.models import inputs, net, recorded
from tests.growth import assert_grows_in_line

Code = Callable[[Tensor], Any]


def _ran(after: Code | None = None, *, train: bool = False, **options: Any) -> sl.Trace:
    """A recording of a model, of code on its output, and of training on the result."""
    model, x = net(), inputs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sl.trace(model, **{"stats": True, **options}) as trace:
        result = model(x)
        if after is not None:
            result = after(result)
        if train:
            result.backward()
            optimizer.step()
    return trace


def _diff(one: Code | None, other: Code | None, **options: Any) -> sl.Diff:
    return sl.diff(_ran(one, **options), _ran(other, **options))


def _squares(y: Tensor) -> Any:
    return (y**2).sum() * 3


def _entropy(y: Tensor) -> Any:
    return torch.logsumexp(y, -1).mean()


# -- differences among values without a partner --------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_a_loss_computed_by_other_ops_is_compared(train: bool) -> None:
    diff = _diff(_squares, _entropy, train=train)
    assert diff.verdict == "different"
    assert diff.divergence is not None
    assert "against torch.logsumexp, Tensor.mean at" in diff.divergence.text
    assert diff.divergence.text.endswith("inputs are the same")


def test_a_term_that_is_added_to_the_loss_is_named_although_the_rest_has_a_partner() -> None:
    diff = _diff(lambda y: (y**2).mean(), lambda y: (y**2).mean() + 0.1 * y.abs().mean(), train=True)
    assert diff.verdict == "different"
    assert diff.divergence is not None
    assert "Tensor.abs, Tensor.mean, * 0.1, + only on the second side" in diff.divergence.text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_output_of_a_compiled_model_is_compared(backend: str, factor: float) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(net(factor, 1.0, 1.0), backend=backend)
    diff = sl.diff(recorded(net()), recorded(compiled))
    torch.compiler.reset()
    assert diff.verdict == ("different" if factor != 1.0 else "same"), str(diff)
    assert [outcome.name for outcome in diff.comparison.outcomes] == ["the output of Net"]
    if factor != 1.0:
        assert diff.divergence is not None
        assert diff.divergence.reason.kind == "compiled"


class _TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Any:
        ctx.save_for_backward(y)
        return (y**2).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grads[0] * y * (4 / y.numel())


def test_a_wrong_backward_of_a_right_loss_is_a_difference() -> None:
    diff = _diff(lambda y: (y**2).mean(), _TwiceTheGradient.apply, train=True)
    assert diff.verdict == "different"
    differing = {outcome.name for outcome in diff.comparison.different_outcomes}
    assert "the gradient of head.weight" in differing
    assert "head.weight after its update" in differing
    assert not any(name.startswith("the loss") for name in differing)


class _Chaos(nn.Module):
    """Every step doubles the error of the step before, which no single op is to blame for."""

    def forward(self, x: Tensor) -> Any:
        for _ in range(40):
            x = 4 * x * (1 - x)
        return x


def test_an_output_that_differs_is_a_difference_although_no_op_is_found() -> None:
    x = torch.linspace(0.1, 0.9, 100)
    diff = sl.diff(recorded(_Chaos(), x), recorded(_Chaos(), x.double()))
    assert diff.verdict == "different"
    assert diff.divergence is None
    text = " ".join(str(diff).split())
    assert "they part: the output of _Chaos differs by " in text
    assert "; no op was found where that begins" in text


# -- values that were not compared --------------------------------------------------------------------

UNKNOWN: dict[str, tuple[Code | None, Code | None, str]] = {
    "a result that one run lacks": (lambda y: y.sum(), None, "Tensor.sum at {}: b has no counterpart of it"),
    "a loss against none": (_squares, None, "* at {}: b has no counterpart of it"),
    "integers made by other ops": (
        lambda y: y.argmax(-1), lambda y: y.argmin(-1), "Tensor.argmax at {}: neither a nor b measured it"),
    "integers made with another constant": (
        lambda y: (y > 0).sum(), lambda y: (y > 0.1).sum(),
        "Tensor.sum at {}: neither a nor b measured it"),
    "elements in another order": (
        lambda y: y[0, :4].T, lambda y: y[0, :4], "Tensor.T at {}: b has no counterpart of it"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_the_verdict_is_unknown_where_something_was_not_compared(case: str) -> None:
    one, other, sentence = UNKNOWN[case]
    diff = _diff(one, other)
    assert diff.verdict == "unknown"
    name, _, why = sentence.partition("{}")
    assert len(diff.uncompared) == 1
    assert diff.uncompared[0].startswith(f"the result of {name}")
    assert diff.uncompared[0].endswith(f"was not compared{why}")
    assert "verdict    unknown: the result of" in str(diff)
    assert sl.diff(diff.a, diff.a).verdict == "same"


def test_a_model_whose_output_only_one_run_measured() -> None:
    diff = sl.diff(_ran(), _ran(stats=sl.Stats(modules="blocks.*")))
    assert diff.verdict == "unknown"
    assert diff.uncompared == ["the output of Net was not compared: b did not measure it"]
    neither = sl.diff(*(_ran(stats=sl.Stats(modules="blocks.*")) for _ in "ab"))
    assert neither.uncompared == ["the output of Net was not compared: neither a nor b measured it"]


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) @ torch.ones(3)


def test_a_model_that_did_not_return() -> None:
    model = _Fails()
    with pytest.raises(RuntimeError), sl.trace(model, stats=True) as failed:
        model(inputs())
    diff = sl.diff(failed, failed)
    assert diff.verdict == "unknown"
    assert diff.uncompared == ["the output of _Fails was not compared: _Fails did not return in a and b"]


def test_unknown_is_known_to_the_command_line_and_to_json(tmp_path: Path) -> None:
    paths = []
    for name, code in (("a", lambda y: y.sum()), ("b", None)):
        _ran(code).save(tmp_path / f"{name}.sight")
        paths.append(str(tmp_path / f"{name}.sight"))
    run = CliRunner().invoke
    for fail_on, status in (("divergence", 0), ("rounding", 0), ("unknown", 3)):
        assert run(main, ["diff", *paths, "--fail-on", fail_on]).exit_code == status
    data = json.loads(run(main, ["diff", *paths, "--json"]).output)
    assert data["verdict"] == "unknown"
    assert data["uncompared"][0].startswith("the result of Tensor.sum at")
    states = {outcome["name"].partition(" at ")[0]: outcome["state"] for outcome in data["outcomes"]}
    assert states == {"the output of Net": "same", "the result of Tensor.sum": "unknown"}


def test_unknown_is_known_to_the_page() -> None:
    from sightline.page.comparison import _verdict

    verdict = _verdict(_diff(lambda y: y.sum(), None).comparison)
    assert verdict["verdict"] == "unknown"
    assert verdict["text"].startswith(
        "Whether the two runs are the same is unknown. The result of Tensor.sum at"
    )


# -- equal programs ------------------------------------------------------------------------------------------

EQUAL: dict[str, tuple[Code | None, Code | None]] = {
    "nothing after the model": (None, None),
    "a result that is detached": (lambda y: y.detach().clone(), None),
    "the indices of the largest": (lambda y: y.argmax(-1), lambda y: y.argmax(-1)),
    "how many are positive": (lambda y: (y > 0).sum(), lambda y: (y > 0.0).sum()),
    "a part that is not used": (lambda y: y.chunk(2)[0].sum(), lambda y: y[:1].sum()),
    "a loss by another call": (lambda y: (y**2).mean(), lambda y: F.mse_loss(y, torch.zeros_like(y))),
    "a loss of a module": (
        lambda y: nn.MSELoss()(y, torch.zeros_like(y)), lambda y: F.mse_loss(y, torch.zeros_like(y))),
    "cross entropy of its parts": (
        lambda y: F.cross_entropy(y.flatten(0, 1), torch.zeros(10, dtype=torch.long)),
        lambda y: F.nll_loss(F.log_softmax(y.flatten(0, 1), -1), torch.zeros(10, dtype=torch.long))),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
def test_equal_programs_are_compared_in_full(case: str) -> None:
    diff = _diff(*EQUAL[case])
    assert diff.verdict in ("same", "close"), str(diff)
    assert diff.uncompared == []


@pytest.mark.parametrize("options", [{}, {"engine": "python"}, {"ops": "aten"}, {"ops": "api"}])
def test_training_is_compared_in_full_at_every_level(options: dict[str, Any]) -> None:
    diff = sl.diff(_ran(_squares, train=True), _ran(_squares, train=True, **options))
    assert diff.verdict == "same", str(diff)
    names = {outcome.name.partition(" at ")[0] for outcome in diff.comparison.outcomes}
    assert {"the output of Net", "the loss"} <= names
    if options.get("ops") != "api":
        assert {"the gradient of head.bias", "head.bias after its update"} <= names


@pytest.mark.parametrize("stats", [True, False])
def test_values_that_were_not_measured_are_looked_behind_once(stats: bool) -> None:
    """Integers, and all values without statistics, which each op here reads twice."""

    def make(size: int) -> Callable[[], object]:
        def code(out: Tensor) -> Tensor:
            total = out.argmax(-1) if stats else out
            for _ in range(size):
                total = total + total
            return total

        sides = [_ran(code, stats=stats or None) for _ in range(2)]
        return lambda: str(sl.diff(*sides))

    assert_grows_in_line(make, 6, times=3)
    assert ("the same" in str(make(3)())) is stats
