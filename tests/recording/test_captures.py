"""``capture=``, ``sl.spy`` and ``sl.step``: what is kept is what was there, under a key of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import sightline as sl
from sightline.store.shards import shard_file


class Pair(NamedTuple):
    """Two of something."""

    first: Any
    second: Any


class Attention(nn.Module):
    """Spies on its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        sl.spy("q", q)
        weights = (q @ k.mT).softmax(-1)
        return weights @ v


class Net(nn.Module):
    """Eleven layers, so that 1 and 10 are both there."""

    def __init__(self, layers: int = 11) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.attn = Attention()

    def forward(self, x: Any, *, scale: Any = None) -> Any:
        for layer in self.layers:
            x = layer(x)
        y = self.attn(x)
        return {"y": y, "pair": Pair(x, [y if scale is None else y * scale])}


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.arange(12.0).reshape(3, 4)


def test_globs_match_segments(model: Net) -> None:
    with sl.trace(model, capture="layers.1") as t:
        model(X)
    assert [key for key in t.tensors if "layers" in key] == ["layers.1/output/0/0"]
    with sl.trace(model, capture=["layers.*", "attn"]) as t:
        model(X)
    assert sum(key.startswith("layers.") for key in t.tensors) == 11
    assert "attn/output/0/0" in t.tensors
    assert "attn.qkv/output/0/0" not in t.tensors


def test_nested_outputs_inputs_and_keyword_arguments(model: Net) -> None:
    with sl.trace(model, capture=sl.Capture(modules="", inputs=True)) as t:
        result = model(X, scale=torch.tensor(2.0))
    kept = {info.path: t.tensors[info.key].torch() for info in t.data.captures if info.role == "output"}
    assert list(kept) == ["['y']", "['pair'].first", "['pair'].second[0]"]
    assert torch.equal(kept["['y']"], result["y"])
    assert torch.equal(kept["['pair'].second[0]"], result["pair"].second[0])
    inputs = t.tensors.where(role="input")
    assert [each.torch().tolist() for each in inputs] == [X.tolist(), 2.0]


def test_what_changes_later_was_kept_as_it_was() -> None:
    layer = nn.Linear(4, 4)
    with sl.trace(layer, capture=True) as t:
        y = layer(X)
        before = y.detach().clone()
        y.detach().zero_()
    assert torch.equal(t.tensors["Linear"][0].torch(), before)


def test_a_slice_does_not_drag_its_storage(tmp_path: Path) -> None:
    class Slice(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[::1000, :2]

    model = Slice()
    with sl.trace(model, capture=True, path=tmp_path / "run.sight") as t:
        model(torch.randn(10_000, 100))
    assert t.tensors["Slice"][0].shape == (10, 2)
    assert sum(file.stat().st_size for file in (tmp_path / "run.sight/tensors").iterdir()) < 20_000


def test_repeats_and_steps_never_overwrite(model: Net) -> None:
    with sl.trace(model, capture="attn") as t:
        for number in range(2):
            with sl.step(f"step{number}"):
                model(X)
                model(X + number)
    assert t.tensors["attn"].keys() == [
        "step0/attn/output/0/0", "step0/attn/output/1/0", "step1/attn/output/2/0", "step1/attn/output/3/0",
    ]  # fmt: skip
    assert t.tensors["attn.q"].keys() == [f"step{i}/attn/q/{j}/0" for i in range(2) for j in range(2)]
    assert [step.name for step in t.steps] == ["step0", "step1"]
    assert len(t.steps[0].module_calls) == len(t.steps[1].module_calls) == 2 * 14


def test_steps_nest_and_a_trace_may_start_inside() -> None:
    layer = nn.Linear(4, 4)
    with sl.step("epoch1"):
        with sl.trace(layer, capture=True) as t:
            with sl.step("a"):
                layer(X)
            layer(X)
    assert list(t.tensors) == ["epoch1.a/Linear/output/0/0", "epoch1/Linear/output/1/0"]
    assert [step.name for step in t.steps] == ["epoch1", "epoch1.a"]


def test_gradients_forward_and_backward(model: Net) -> None:
    with sl.trace(model, capture=sl.Capture(modules="attn*", gradients=True)) as t:
        model(X)["y"].sum().backward()
    assert not model.attn.qkv.weight._post_accumulate_grad_hooks
    assert torch.equal(t.tensors["attn.output.grad"][0].torch(), torch.ones(3, 4))
    model.zero_grad()
    with sl.trace(model, capture=sl.Capture(modules="attn.qkv", gradients=True)) as t:
        model(X)["y"].sum().backward()
    gradient = model.attn.qkv.weight.grad
    assert gradient is not None
    assert torch.equal(t.tensors["attn.qkv.weight.grad"][0].torch(), gradient)


def test_results_of_ops_and_variables(model: Net) -> None:
    with sl.trace(model, capture=sl.Capture(ops="*softmax")) as t:
        model(X)
    assert [key for key in t.tensors if "softmax" in key] == ["attn/_softmax/0/0"]
    assert t.tensors["attn.weights"][0].shape == (3, 3), "by the variable it was assigned to"
    assert not any("output" in key for key in t.tensors)


@pytest.mark.parametrize("ops", ["relu", "torch.relu"])
def test_gradients_of_results_of_ops(ops: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.relu(x * 2).exp()

    model = Net()
    with sl.trace(model, capture=sl.Capture(ops=ops, gradients=True)) as t:
        y = model(torch.ones(3, requires_grad=True))
        y.sum().backward()
    assert torch.equal(t.tensors["relu.grad"].only.torch(), y)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "bf16"}, r"^Capture\(dtype='bf16'\) takes a torch dtype"),
        ({"device": "nowhere"}, r"^Capture\(device='nowhere'\) cannot be used here: "),
    ],
)
def test_what_cannot_be_kept_so_is_said_before_anything_runs(options: Any, sentence: str) -> None:
    with pytest.raises(sl.UsageError, match=sentence), sl.trace(capture=sl.Capture(**options)):
        pass


def test_spies_by_name_with_an_owner_and_without_a_recording(model: Net) -> None:
    assert sl.spy("nothing", 3) == 3
    with sl.trace(model, capture=sl.Capture(names="q*")) as t:
        model(X)
        sl.spy("quite", {"a": X, "b": [X]}, module=model.attn)
        sl.spy("other", X)
    assert list(t.tensors) == ["attn/q/0/0", "attn/quite/0/0", "attn/quite/0/1"]
    assert t.values.where(name="q")


@pytest.mark.parametrize("name", ["a/b", "..", "a\\b", ""])
def test_a_name_that_cannot_be_a_key(name: str) -> None:
    with sl.trace(capture=True) as t:
        with pytest.raises(sl.UsageError, match=r"^sl\.spy"):
            sl.spy(name, X)
    with pytest.raises(sl.UsageError, match=r"^sl\.step"), sl.step(name):
        pass
    assert not len(t.tensors)


def test_when_sample_dtype_and_a_limit() -> None:
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 4))
    asked = []

    def when(candidate: Any) -> bool:
        asked.append((candidate.module, candidate.name, candidate.call, candidate.phase))
        return bool(candidate.module == "0")

    with sl.trace(model, capture=sl.Capture(when=when, sample=10, dtype=torch.bfloat16)) as t:
        y = model[0](X)
        model(X)
    kept = t.tensors["0"][0]
    assert kept.dtype == "bfloat16"
    assert kept.shape == (10,)
    assert not kept.info.whole
    assert torch.equal(kept.torch(), y.flatten()[::30].bfloat16())
    assert ("1", "output", 0, "forward") in asked
    with sl.trace(model, capture=sl.Capture(max_bytes=100)) as t:
        model(X)
    assert list(t.tensors) == ["1/output/0/0", "Sequential/output/0/0"]
    assert t.info["left_out"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize("format", ["memory", "safetensors", "pt"])
def test_every_way_of_keeping_gives_the_same(tmp_path: Path, dtype: torch.dtype, format: Any) -> None:
    class Cast(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to(dtype)

    options: dict[str, Any] = {"capture": True}
    if format != "memory":
        options = {"capture": sl.Capture(format=format), "path": tmp_path / "run.sight"}
    model = Cast()
    with sl.trace(model, **options) as t:
        y = model(X - 5)
    assert torch.equal(t.tensors["Cast"].only.torch(), y)
    if format == "pt":
        (file,) = (tmp_path / "run.sight/tensors").glob("*.pt")
        assert torch.equal(torch.load(file, weights_only=True), y)


def test_captures_are_there_while_the_block_runs(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    for path in (None, tmp_path / "run.sight"):
        with sl.trace(layer, capture=True, path=path) as t:
            y = layer(X)
            assert np.array_equal(t.tensors["Linear"][0].numpy(), y.detach().numpy())


def test_a_capture_is_kept_though_no_op_came_with_it(tmp_path: Path) -> None:
    with sl.trace(capture=True, path=tmp_path / "run.sight") as t:
        total = X.sum()
        assert not t.tensors  # the op has been written
        sl.spy("total", total)
        assert t.tensors["total"].only.numpy() == total.item()
    assert t.tensors["total"].only.numpy() == total.item()


def test_an_unwritable_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(sl.UsageError, match="is a file"), sl.trace(capture=True, path=tmp_path / "file"):
        pass


@pytest.mark.parametrize("on_error", ["raise", "report"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any) -> None:
    def full(file: Any, view: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file, "write_all", full)
    layer = nn.Linear(4, 4)
    recorder = sl.trace(layer, capture=sl.Capture(on_error=on_error), path=tmp_path / "run.sight")
    if on_error == "raise":
        with pytest.raises(sl.CaptureError, match="No space left on device"), recorder:
            layer(X)
    else:
        with recorder as t:
            layer(X)
        assert t.module_calls


def test_the_run_is_the_same_run(model: Net) -> None:
    def run(**options: Any) -> list[Any]:
        torch.manual_seed(0)
        fresh = Net()
        if options:
            with sl.trace(fresh, **options):
                loss = fresh(X)["y"].square().sum()
                loss.backward()
        else:
            loss = fresh(X)["y"].square().sum()
            loss.backward()
        return [loss, *(p.grad for p in fresh.parameters())]

    kept = run(capture=sl.Capture(modules="**", inputs=True, gradients=True, ops="*"))
    assert all(torch.equal(one, other) for one, other in zip(run(), kept, strict=True))
