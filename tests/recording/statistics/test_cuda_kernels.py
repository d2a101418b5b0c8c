"""Statistics, fingerprints and checks on a GPU, against the CPU's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64,
]  # fmt: skip


def numbers(tensor: Any, fingerprint: bool = True) -> Any:
    with sl.trace(ops="aten", stats=sl.Stats(fingerprint=fingerprint)) as t:
        tensor.clone()
    assert not t.info["faults"]
    found = t.ops.where(name="clone")[0].outputs[0].stats
    assert found is not None
    return found


@cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1000,), (64, 4096), (17, 33, 129), (2048, 1031)])
def test_numbers_agree_with_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    here, there = numbers(tensor), numbers(tensor.cuda())
    assert here.fingerprint == there.fingerprint != 0
    assert (here.min, here.max, here.zeros, here.nans, here.infs) == (
        there.min, there.max, there.zeros, there.nans, there.infs,
    )  # fmt: skip
    for one, other in ((here.mean, there.mean), (here.std, there.std), (here.l2, there.l2)):
        assert math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5 * (here.l2 + 1e-9))


@cuda
def test_tokens_on_a_device_have_the_fingerprint_of_the_cpu() -> None:
    tokens = torch.randint(0, 50257, (4, 333))
    found = []
    for device in ("cpu", "cuda"):
        model, given = torch.nn.Embedding(50257, 8).to(device), tokens.to(device)
        with sl.trace(model, stats=True) as t:
            model(given)
        assert not t.info["faults"]
        found.append(t.module_calls[0].inputs[0].stats)
    here, there = found
    assert here is not None
    assert there is not None
    assert here.fingerprint == there.fingerprint != 0
    assert (here.min, here.max, here.zeros) == (there.min, there.max, there.zeros)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_is_counted_and_nans_are_one(dtype: torch.dtype) -> None:
    tensor = torch.randn(300, 70).to(dtype)
    tensor[3, 4] = float("nan")
    tensor[5, 6] = float("inf")
    tensor[7, 8] = -float("inf")
    odd = tensor.cuda()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd.view(width)[3, 4] |= 1  # another payload
    here, there = numbers(tensor), numbers(odd)
    assert here.fingerprint == there.fingerprint
    assert (there.nans, there.infs, there.min, there.max) == (1, 2, here.min, here.max)


@cuda
def test_a_strided_tensor_has_the_fingerprint_of_its_elements() -> None:
    tensor = torch.randn(130, 70)
    assert numbers(tensor.cuda().t().contiguous().t()).fingerprint == numbers(tensor).fingerprint


@cuda
@pytest.mark.parametrize("odd", [[], [5], [0, 4096 * 3 + 7, -1]])
def test_a_permuted_tensor_is_read_where_it_lies(odd: list[int]) -> None:
    tensor = torch.randn(40, 130, 70).to(torch.bfloat16)
    tensor.view(-1)[odd] = float("nan")
    permuted = tensor.cuda().permute(2, 0, 1).contiguous().permute(1, 2, 0)
    here, there = numbers(tensor), numbers(permuted, fingerprint=False)
    assert not permuted.is_contiguous()
    assert (there.min, there.max, there.zeros, there.nans) == (here.min, here.max, here.zeros, here.nans)
    assert there.mean == pytest.approx(here.mean, rel=1e-4, abs=1e-6)


@cuda
def test_the_plain_way_agrees_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(33, 4097).cuda()
    fused = numbers(tensor)
    monkeypatch.setattr("sightline.recording.statistics.device._fused", lambda device, fill: None)
    plain = numbers(tensor)
    assert (plain.fingerprint, plain.min, plain.max) == (fused.fingerprint, fused.min, fused.max)


@cuda
def test_the_check_stops_the_run_and_names_the_first_op() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()

    def run() -> None:
        x = torch.randn(8, 64, device="cuda")
        first, *rest = model.children()
        x = first(x)
        x = (x - 1e6).log()  # the culprit
        for layer in rest:
            x = layer(x)

    with pytest.raises(sl.NonFiniteError, match=r"^log made 512 NaN of 512 in f32\[8, 64\]"):
        with sl.trace(model, check="nonfinite"):
            run()


@cuda
def test_copies_of_what_was_checked_have_its_counts() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 4.0], device="cuda", dtype=torch.bfloat16)
    with sl.trace(ops="aten", check=sl.Check(nonfinite=True, on="report")) as t:
        x.log().float().clone().add(1)
    told = [(op.name, op.outputs[0].stats) for op in t.ops]
    assert [(name, n.nans, n.infs) for name, n in told if n] == [
        ("log", 1, 1), ("_to_copy", 1, 1), ("clone", 1, 1), ("add.Tensor", 1, 1),
    ]  # fmt: skip


@cuda
def test_nothing_waits_for_the_device_while_it_is_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
    x = torch.randn(8, 64, device="cuda")
    with sl.trace(model, stats=True):
        model(x)
    recorder = sl.trace(model, stats=True, check=sl.Check(on="report"))
    recorder.start()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            model(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        t = recorder.stop()
    assert not t.info["faults"]
    assert all(call.outputs[0].stats is not None for call in t.module_calls)


@cuda
@pytest.mark.parametrize("streamed", [False, True])
def test_captured_tensors_come_over_as_they_were(tmp_path: Path, streamed: bool) -> None:
    layer = torch.nn.Linear(512, 2048).cuda()
    xs = [torch.randn(256, 512, device="cuda") for _ in range(20)]
    layer(xs[0])
    kept = []
    recorder = sl.trace(layer, capture=True, path=tmp_path / "run.sight" if streamed else None)
    recorder.start()
    layer(xs[0]).detach().zero_()  # the first makes a stream
    torch.cuda.set_sync_debug_mode("error")  # nothing waits
    try:
        for x in xs:
            y = layer(x)
            kept.append(y.detach().clone())
            y.detach().zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        t = recorder.stop()
    assert not t.info["faults"]
    for captured, expected in zip(t.tensors["Linear"][1:], kept, strict=True):
        assert torch.equal(captured.torch(), expected.cpu())


@cuda
def test_a_tensor_is_captured_sampled_and_cast_on_its_device() -> None:
    layer = torch.nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8, device="cuda")
    with sl.trace(layer, capture=sl.Capture(dtype=torch.bfloat16, sample=10)) as t:
        y = layer(x)
    assert torch.equal(t.tensors["Linear"][0].torch(), y.detach().flatten()[::4].bfloat16().cpu())
