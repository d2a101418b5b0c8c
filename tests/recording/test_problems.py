"""Problems of work done twice, planted beside healthy twins; and whole architectures, which are healthy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import sightline as sl
from sightline.analysis.problems import Problem, Severity
from tests.recording.architecture_runs import execute, prepare, pristine
from tests.recording.architectures import ZOO, Architecture
from tests.recording.engines import BOTH_ENGINES
from tests.recording.problematic import BATCH, STATS, Calls, found, kinds, only, plain, trained

# -- the same again ----------------------------------------------------------------------------------------


def test_a_layer_that_is_called_twice_on_the_same_input() -> None:
    problem = only(trained(Calls(lambda net, x: net.second(net.first(x)) + net.first(x))), "computed-again")
    assert problem.severity is Severity.NOTE
    assert problem.title == "Linear is called again on the same inputs (768 FLOPs)"
    assert problem.module == "first"


def test_a_product_that_is_computed_twice() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.second(net.first(x))
        result: Tensor = (h @ h.T).relu() + (h @ h.T).tanh()
        return result

    assert only(trained(Calls(forward)), "computed-again").title.startswith(
        "@ runs again on the same f32[6, 8]"
    )


def chained(net: Any, x: Tensor) -> Tensor:
    """The same layers, but each time on something else."""
    h = net.first(x)
    result: Tensor = net.second(net.first(h)) + net.second(h.relu())
    return result


def test_the_same_layer_on_other_inputs_is_healthy() -> None:
    assert kinds(trained(Calls(chained))) == []


def test_two_views_of_a_dropout_are_healthy() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net.second(F.dropout(net.first(x))) + net.second(F.dropout(x))
        return result

    assert kinds(trained(Calls(forward))) == []


def test_a_model_that_is_run_twice_is_healthy() -> None:
    model, x = plain(), torch.randn(BATCH, 8)
    with sl.trace(model) as t, torch.no_grad():
        model(x)
        model(x)
    assert kinds(t) == []


def test_numbers_that_the_host_reads_are_told_on_a_cpu_too() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.second(net.first(x))
        result: Tensor = h * h.max().item() if h.sum() > -1e9 else h
        return result

    problem = only(trained(Calls(forward)), "host-sync")
    assert (problem.severity, problem.count) == (Severity.NOTE, 2)
    assert "On a GPU each one waits" in problem.why


@pytest.mark.parametrize(("home", "found"), [("torch.nn.parallel.x", []), (__name__, ["host-sync"])])
def test_what_a_wrapper_of_torchs_reads_is_its_own(home: str, found: list[str]) -> None:
    class Wrapper(torch.nn.Module):
        __module__ = home

        def __init__(self) -> None:
            super().__init__()
            self.inner = plain()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x)
            return result if result.sum().item() < 1e9 else x

    assert kinds(trained(Wrapper())) == found


@pytest.mark.parametrize("ops", ["both", "aten", "api", "none"])
def test_a_run_that_has_not_ended_can_be_looked_at(ops: Any) -> None:
    seen: list[list[Problem]] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        seen.append(found(t))
        h.register_hook(lambda gradient: seen.append(found(t)))
        result: Tensor = net.second(h)
        return result

    model = Calls(forward)
    with sl.trace(model, ops=ops, stats=STATS) as t:
        model(torch.randn(BATCH, 8)).sum().backward()
    assert seen == [[], []]
    assert found(t) == []


# -- whole architectures -----------------------------------------------------------------------------------

FIRST, LAST = "encoder.layers.0.conv", "encoder.layers.9.conv"
#: What is really so in these models as they are configured here, by kind and module.
QUIRKS: dict[str, set[tuple[str, str]]] = {
    # The pooler runs, and a masked language model makes no use of it.
    "big_bird": {("no-gradient", "bert.pooler")},
    "fnet": {("no-gradient", "fnet.pooler.dense")},
    # A decision transformer embeds states, actions and returns, and inherits an embedding of tokens.
    "decision_transformer": {("unused-parameter", "encoder.wte")},
    # The token for masked patches is only used in pre-training.
    "dinov2": {("unused-parameter", "dinov2.embeddings")},
    # The codes are picked by an argmax: in this implementation nothing reaches the encoder.
    "encodec": {
        ("no-gradient", f"{FIRST}.parametrizations.weight … {LAST}.parametrizations.weight"),
        ("no-gradient", f"{FIRST} … {LAST}"),
        ("no-gradient", "encoder.layers.7.lstm"),
    },
    # The bias is made and never added.
    "reformer": {("unused-parameter", "lm_head")},
    # Without token types there are no segments, and without permutations no masks.
    "xlnet": {
        ("unused-parameter", "transformer"),
        ("unused-parameter", "transformer.layer.0.rel_attn, transformer.layer.1.rel_attn"),
    },
}  # fmt: skip

#: Enough kinds of code for tests that need not run all of it.
LOW = ("gpt2", "llama", "gemma", "mixtral", "mamba", "bert", "t5", "vit", "resnet", "whisper")


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    pristine(ZOO[0])  # the first model built adds a method to nn.Module, for good
    yield
    transformers.logging.set_verbosity(before)
    pristine.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("architecture", ZOO, ids=str)
def test_real_architectures_are_healthy(architecture: Architecture, mode: str) -> None:
    run = prepare(architecture, mode)
    with sl.trace(run.model, stats=STATS) as t:
        execute(run, mode)
    expected = QUIRKS.get(architecture.name, set()) if mode == "train" else set()
    assert {(problem.kind, problem.module) for problem in found(t)} == expected, found(t)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "gemma", "mixtral", "bert", "t5", "vit", "resnet", "whisper"]
)
def test_real_architectures_of_low_precision_are_healthy(name: str, precision: str) -> None:
    run = prepare(next(one for one in ZOO if one.name == name), "train")
    if precision == "bfloat16":
        run.model.to(torch.bfloat16)
        run.inputs = {key: _lower(value) for key, value in run.inputs.items()}
    around = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    with sl.trace(run.model) as t, around:
        execute(run, "train")
    assert found(t) == []


def _lower(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if floating else value


@BOTH_ENGINES
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_dropout_in_evaluation_drops_nothing(engine: Any, guard: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    with sl.trace(model, engine=engine) as t, guard():
        model(torch.ones(2, 4))
    assert str(t.problems()).startswith("problems: none")
