"""``stats=``: the numbers are right, for every op, and taking them changes nothing."""

from __future__ import annotations

import math
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.models.reformer.modeling_reformer import ReformerLayer

import sightline as sl
from sightline.recording.statistics.cpu import read
from tests.recording.architectures import ZOO, Architecture
from tests.recording.engines import BOTH_ENGINES


def reference(tensor: Any) -> tuple[float, ...]:
    wide = torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
    fine = wide[torch.isfinite(wide)]
    unit = fine.abs().max().item() or 1.0
    spread = (fine / unit).std().item() if fine.numel() > 1 else 0.0
    mean, norm = (fine / unit).mean().item(), (fine / unit).norm().item()
    return fine.min().item(), fine.max().item(), mean * unit, spread * unit, norm * unit


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(5, 7) + 1e4,
        torch.randn(1000) * 1e-25,
        torch.randn(1000) * 1e30,
        torch.full((3, 3), 2.5),
        torch.zeros(4),
        torch.tensor(3.0),
        torch.randn(6, 5, dtype=torch.float64),
        torch.randn(40).bfloat16(),
        torch.randn(40).half() * 1000,
        torch.randn(40).to(torch.float8_e5m2),
        torch.randn(9, dtype=torch.complex64),
        torch.tensor([1.0, float("nan"), 3.0, float("inf"), -2.0]),
        torch.randn(10, 10).t()[::2],
        torch.randn(50, dtype=torch.float64) * 1e300,
        torch.tensor([1.5e308, -1.5e307, 0.0], dtype=torch.float64),
        torch.randn(50, dtype=torch.float64) * 1e-200,
        torch.randint(0, 50257, (4, 33)),
        torch.tensor([-(2**40), 0, 7]),
        torch.arange(255, dtype=torch.uint8).view(5, 51).t(),
        torch.tensor([True, False, True]),
    ],
)
def test_the_numbers_of_a_tensor(tensor: Any) -> None:
    found = read(tensor, fingerprint=False)
    for mine, theirs in zip(found[:5], reference(tensor), strict=True):
        assert math.isclose(mine, theirs, rel_tol=2e-4, abs_tol=1e-5 * abs(reference(tensor)[4]) + 1e-35)
    wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()
    assert found.zeros == int((wide == 0).sum())
    assert found.nans == int(torch.isnan(wide).sum())
    assert found.infs == int(torch.isinf(wide).sum())


class Net(torch.nn.Module):
    """Views, slices, in-place ops, several results and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        h = self.drop(self.fc(x).relu_())
        a, b = h.view(2, 2, 8).transpose(0, 1).unbind()
        out = torch.empty(2, 8)
        out[0] = a.sum(0)
        out[1] = b.max(0).values
        return out.softmax(-1)


@pytest.mark.parametrize("ops", ["none", "api", "aten", "both"])
def test_the_run_is_the_same_run(ops: Any) -> None:
    def run(**options: Any) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model, x = Net(), torch.randn(4, 8)
        if not options:
            loss = model(x).square().sum()
            loss.backward()
        else:
            with sl.trace(model, **options) as t:
                loss = model(x).square().sum()
                loss.backward()
            assert not t.info["faults"]
        return (loss, *(p.grad for p in model.parameters()), torch.get_rng_state())

    plain, measured = run(), run(ops=ops, stats=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))


def test_every_floating_result_is_measured_as_it_was() -> None:
    torch.manual_seed(1)
    model = Net()
    with sl.trace(model, ops="aten", stats=True, capture=sl.Capture(ops="*")) as t:
        model(torch.randn(4, 8)).sum().backward()
    looked_at = 0
    for kept in t.tensors.where(role="op"):
        value = t.values[kept.info.value]
        if value.stats is None or kept.numpy().size == 0:
            continue
        looked_at += 1
        numbers = kept.numpy()[np.isfinite(kept.numpy())]  # what was never written may be anything
        assert (value.stats.min, value.stats.max) == (numbers.min(), numbers.max()), kept.key
        assert value.stats.zeros == int((numbers == 0).sum()), kept.key
    assert looked_at > 20
    made = [op for op in t.ops if op.outputs and op.outputs[0].dtype == "float32"]
    unmeasured = {op.name for op in made if op.outputs[0].stats is None and "empty" not in op.name}
    assert unmeasured <= {"t", "transpose.int", "permute"}, "of a parameter, which is not measured"


@BOTH_ENGINES
@pytest.mark.parametrize("make", ["before", "inside"])
def test_integers_are_measured_where_modules_are_given_them(engine: Any, make: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 2))
    tokens = torch.arange(12).view(3, 4) * 4

    def given() -> Any:
        return tokens if make == "before" else tokens.clone()

    with sl.trace(model, stats=True, engine=engine) as t:
        first = given()
        model(first)
        model(first if make == "before" else given())
        model(tokens + 1)
        tokens.argmax()  # which no module is given
    inputs = [next(call.inputs[0].stats for call in t.module_calls if call.index == at) for at in range(3)]
    assert [(one.min, one.max, one.zeros, one.nans) for one in inputs if one is not None] == [
        (0.0, 44.0, 1, 0), (0.0, 44.0, 1, 0), (1.0, 45.0, 0, 0)
    ]  # fmt: skip
    prints = [one.fingerprint for one in inputs if one is not None]
    assert prints[0] == prints[1] != prints[2]
    assert 0 not in prints
    assert t.ops.where(name="argmax")[0].outputs[0].stats is None
    assert not t.info["faults"]


@BOTH_ENGINES
def test_integers_whose_memory_was_freed_are_not_read(engine: Any) -> None:
    tokens = torch.arange(1000)
    tokens.untyped_storage().resize_(0)
    with sl.trace(torch.nn.Identity(), stats=True, engine=engine) as t:
        torch.nn.Identity()(tokens)
    assert t.module_calls[0].inputs[0].stats is None
    assert not t.info["faults"]


@BOTH_ENGINES
def test_a_mask_of_very_many_elements_is_not_read(engine: Any) -> None:
    mask = torch.ones(1, 8, dtype=torch.bool).expand(1 << 30, 8)
    with sl.trace(torch.nn.Identity(), stats=True, engine=engine) as t:
        torch.nn.Identity()(mask)
    assert t.module_calls[0].inputs[0].stats is None
    assert not t.info["faults"]


def test_an_uninitialised_tensor_is_not_measured_and_what_fills_it_is() -> None:
    with sl.trace(stats=True) as t:
        z = torch.empty(4, 4)
        z.fill_(1.0)
        z[2:] = 2.0
        z.t().contiguous()
    numbers = {op.name: op.outputs[0].stats for op in t.ops.where(level="aten")}
    assert numbers["empty.memory_format"] is None
    assert numbers["t"] is not None
    assert (numbers["t"].min, numbers["t"].max) == (1.0, 2.0)


@BOTH_ENGINES
def test_uninitialised_memory_is_read_where_it_explains_a_nan(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it, about to be filled, may hold a NaN, which is nobody's mistake."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # memory that is not initialised holds NaN
    try:
        with sl.trace(stats=True, engine=engine) as t:
            z = torch.empty(4, 4)
            z[:2] = 1.0
    finally:
        torch.use_deterministic_algorithms(False)
    numbers = {op.name: op.outputs[0].stats for op in t.ops.where(level="aten")}
    assert numbers["empty.memory_format"] is not None
    assert numbers["empty.memory_format"].nans == 16
    assert str(t.nonfinite()).startswith("no NaN or Inf")


def test_globs_choose_what_is_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with sl.trace(model, stats=sl.Stats(modules="1")) as t:
        model(torch.randn(2, 4))
    whole, first, second = t.module_calls
    assert first.inputs[0].stats is None
    assert second.outputs[0].stats is not None
    assert second.inputs[0].stats is not None, "what goes into a module that is meant is read, too"
    assert whole.outputs[0] == second.outputs[0]
    with sl.trace(model, stats=sl.Stats(ops="relu", fingerprint=False)) as t:
        model(torch.randn(2, 4))
    stats = t.ops.where(name="relu")[0].outputs[0].stats
    assert stats is not None
    assert stats.fingerprint == 0


def test_parameters_on_request() -> None:
    layer = torch.nn.Linear(4, 4)
    with sl.trace(layer, stats=sl.Stats(parameters=True)) as t:
        layer(torch.randn(2, 4))
    stats = t.values.where(name="weight")[0].stats
    assert stats is not None
    assert stats.max == layer.weight.max().item()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stats": "yes"}, r"^stats='yes' is not a choice; it is True or sl\.Stats\(…\)\.$"),
        ({"check": "nan"}, r"""^check='nan' is not a choice; it is "nonfinite" or sl\.Check\(…\)\.$"""),
        ({"check": "nonfinite", "ops": "none"}, r"^check=\"nonfinite\" looks at ops: use ops="),
        ({"capture": 3}, r"^capture=3 is not a choice; it is True, a glob, a list of globs, or sl\.Capture"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sl.UsageError, match=sentence):
        sl.trace(**options)


@pytest.fixture(scope="module")
def transformers_are_ready() -> None:
    """The first model of transformers that is built adds a method to nn.Module, for good."""
    ZOO[0].build()


def set_seed(layer: torch.nn.Module, name: str) -> None:
    setattr(layer, name, torch.manual_seed(7).initial_seed())


@pytest.mark.usefixtures("transformers_are_ready")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ZOO, ids=str)
def test_real_architectures_run_the_same_with_everything_on(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reformer seeds itself in its forward with entropy of the system, by way of a device if there is one.
    for name in ("attention_seed", "feed_forward_seed"):
        monkeypatch.setattr(ReformerLayer, f"_init_{name}", partialmethod(set_seed, name=name))

    def run(**options: Any) -> list[Any]:
        torch.manual_seed(0)
        model, inputs = architecture.build()
        with sl.trace(model, **options) as t:
            returned = [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]
            losses = [leaf.float().square().mean() for leaf in returned if leaf.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        assert not t.info["faults"]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*returned, *gradients, torch.get_rng_state()]

    plain = run()
    watched = run(stats=True, check=sl.Check(on="report"), capture=sl.Capture(inputs=True, gradients=True))
    assert len(plain) == len(watched)
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one, other) or bool(torch.isnan(one).any())


@BOTH_ENGINES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_measured_tensor_can_still_be_resized(engine: Any, dtype: torch.dtype) -> None:
    """FSDP frees and resizes the storages of its weights; what is shared with NumPy cannot be resized."""
    x = torch.zeros(77, dtype=dtype)
    with sl.trace(stats=True, engine=engine) as t:
        y = x.cos()
    assert len(t.data.stats) >= 1
    for each in (x, y):
        assert each.untyped_storage().resizable()
        each.untyped_storage().resize_(8)
