"""Memory against the allocator's own account, on both engines: in memory, streamed, and with ``last=``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import sightline as sl
from sightline.analysis.held_memory import held_memory
from sightline.analysis.memory import MemoryUsage, usage_of
from sightline.convert.query import Query
from sightline.errors import NothingMatched, UsageError
from tests.recording.engines import BOTH_ENGINES

Step = Callable[[], None]


def small_cnn() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    return model, training_step(model, lambda: nn.functional.cross_entropy(model(images), labels))


def tiny_gpt2() -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=300, n_positions=32, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 300, (4, 32))
    return model, training_step(model, lambda: model(input_ids=tokens, labels=tokens).loss)


@pytest.fixture(scope="module", autouse=True)
def transformers_has_built() -> None:
    """The first model that transformers builds leaves a method on every module."""
    tiny_gpt2()


def training_step(model: nn.Module, loss_of: Callable[[], Any]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def usage(trace: sl.Trace, **chosen: Any) -> MemoryUsage:
    return usage_of(trace.index, **chosen)[0]


def profiled_peak(step: Step) -> int:
    """The most that the allocator gave out at once while a plain step ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@BOTH_ENGINES
@pytest.mark.parametrize("make", [small_cnn, tiny_gpt2])
def test_the_peak_is_the_allocators(make: Callable[[], tuple[nn.Module, Step]], engine: Any) -> None:
    torch.manual_seed(0)
    model, step = make()
    step()
    gc.collect()
    expected = profiled_peak(step)
    gc.collect()
    with sl.trace(model, engine=engine) as t:
        step()
    found = usage(t)
    made = found.peak.nbytes - found.held_before()
    assert found.exact
    assert made == pytest.approx(expected, rel=0.02)


@BOTH_ENGINES
@pytest.mark.parametrize("kept", ["memory", "path", "last"])
def test_frees_are_seen_however_it_is_kept(engine: Any, kept: str, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {"path": {"path": tmp_path / "run.sight"}, "last": {"last": 3}}
    how = ways.get(kept, {})
    x = torch.ones(1000)
    with sl.trace(engine=engine, **how) as t:
        gone = x + 1
        shown = gone.view(10, 100)
        del gone
        stays = x * 2
        del shown
        last = stays + 1
        last = last + 1
        last = last + 1
    held = held_memory(t.data)
    total = int(held.nbytes[held.end >= held.over].sum())
    assert total == x.nbytes + stays.nbytes + last.nbytes
    assert sorted(held.nbytes[held.end < held.over].tolist())[-1] == 4000
    assert t.validate().ops == len(t.ops)


@BOTH_ENGINES
def test_a_view_keeps_its_storage(engine: Any) -> None:
    x = torch.ones(1000)
    with sl.trace(engine=engine) as t:
        part = (x + 1)[:10]
        y = x * 2
        del part
        z = x * 3
    held = held_memory(t.data)
    spans: dict[str, tuple[int, int]] = {}
    for row in range(len(held)):
        op = t.values[int(held.value[row])].producer
        if op is not None:
            spans.setdefault(op.name, (int(held.start[row]), int(held.end[row])))
    assert spans["mul.Tensor"][0] < spans["add.Tensor"][1] < held.over
    assert y.shape == z.shape


@BOTH_ENGINES
def test_who_holds_what(engine: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    step = training_step(model, lambda: model(torch.ones(512, 64)).sum())
    step()
    with sl.trace(model, engine=engine) as t:
        step()
    found = usage(t)
    kinds = {share.name: share.nbytes for share in found.by_kind()}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert kinds["parameters"] == weights
    assert 2 * weights <= kinds["optimizer state"] <= 2 * weights + 64
    assert sum(kinds.values()) == found.peak.nbytes
    assert sum(share.nbytes for share in found.by_module()) == found.peak.nbytes
    assert sum(share.nbytes for share in found.by_line()) == found.peak.nbytes
    tanh = next(held for held in found.largest(20) if held.value is not None
                and held.value.producer is not None and held.value.producer.name == "tanh")  # fmt: skip
    assert tanh.why == "for backward of"
    assert tanh.for_op is not None
    text = str(t.memory())
    assert "for backward of tanh" in text
    assert "test_memory.py" in text
    assert "peak" in str(t.summary())


@BOTH_ENGINES
def test_filters(engine: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    with sl.trace(model, engine=engine) as t:
        model(torch.ones(512, 64)).sum().backward()
    assert usage(t, module="0").peak.nbytes < usage(t).peak.nbytes
    owned = {share.name for share in usage(t, module="0").by_module()}
    assert owned == {"0"}
    assert usage(t, phase="forward").peak.nbytes <= usage(t).peak.nbytes
    op = usage(t, phase="forward").peak_op
    assert op is not None
    assert op.phase == "forward"
    with pytest.raises(NothingMatched, match="module='nope' matches no module of this trace"):
        t.memory(module="nope")
    with pytest.raises(UsageError, match="phase='later' is no phase; choose"):
        t.memory(phase="later")
    with pytest.raises(UsageError, match="depth=-1 must be a whole number from 0 up"):
        t.memory(depth=-1)
    with pytest.raises(UsageError, match="module=3"):
        t.memory(module=3)  # type: ignore[arg-type]


@BOTH_ENGINES
def test_a_storage_that_is_resized(engine: Any) -> None:
    x = torch.ones(1000)
    with sl.trace(engine=engine) as t:
        y = x + 1
        y.untyped_storage().resize_(0)
        x * 2
        y.untyped_storage().resize_(8000)
        y + 1
    sizes = {int(nbytes) for nbytes in held_memory(t.data).nbytes}
    assert {4000, 8000} <= sizes or engine == "python"  # the plain engine looks when it meets the tensor anew


@BOTH_ENGINES
def test_nothing_is_kept_alive(engine: Any) -> None:
    """The recorder holds no tensor, also while the block goes on: not by a method, not by a cycle."""
    model = nn.Linear(4, 4)
    gc.disable()
    try:
        with sl.trace(model, engine=engine) as t:
            loss = model(torch.ones(2, 4)).transpose(0, 1).contiguous().sum()
            loss.backward()
            del loss
        held = held_memory(t.data)
        left = {t.values[int(held.value[row])].kind for row in range(len(held)) if held.end[row] >= held.over}
        assert left <= {"parameter", "gradient"}
    finally:
        gc.enable()


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(100, 200)

    def forward(self, x: Any) -> Any:
        hidden = self.fc(x).relu()
        return hidden + torch.empty(1 << 50)


@BOTH_ENGINES
def test_out_of_memory_says_who_has_it(engine: Any) -> None:
    model, x = Greedy(), torch.ones(64, 100)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught, sl.trace(model, engine=engine):
        model(x)
    lines = caught.value.__notes__[0].splitlines()
    assert 5 <= len(lines) <= 10
    assert lines[0].startswith("sightline: out of memory: 4.00 PiB was requested by empty.memory_format, ")
    assert "in Greedy.forward (Greedy)" in lines[0]
    assert "parameters 78.9 KiB" in lines[1]
    assert "activations 50.0 KiB" in lines[1]
    assert "test_memory.py" in lines[2]
    assert lines[3] == "  78.1 KiB f32[200, 100] parameter fc.weight"
    assert lines[4].startswith("  50.0 KiB f32[64, 200] = relu, ")


def test_out_of_memory_on_a_device() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has …")
    with pytest.raises(torch.OutOfMemoryError) as caught, sl.trace():
        raise error
    assert "out of memory: 20.00 MiB was requested" in caught.value.__notes__[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@BOTH_ENGINES
def test_the_peak_on_a_gpu_is_the_allocators(engine: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))] * 4).cuda()
    x = torch.randn(256, 512, device="cuda")
    step = training_step(model, lambda: model(x).square().mean())
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with sl.trace(model, engine=engine) as t:
        step()
    most = torch.cuda.max_memory_allocated()
    found = usage(t)
    assert found.device == "cuda:0"
    unseen = max(before - found.held_before(), 0)
    assert found.peak.nbytes + unseen == pytest.approx(most, rel=0.02)
    assert t.info["allocator"]["cuda:0"]["most"][1] == most
    assert "allocator" in str(t.memory())


@BOTH_ENGINES
def test_buffers_are_no_parameters(engine: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    with sl.trace(model, engine=engine) as t:
        model(torch.ones(2, 2, 5, 5))
    parameters = sum(each.nbytes for each in model.parameters())
    buffers = sum(each.nbytes for each in model.buffers())
    sizes = {use: sum(share.nbytes for share in usage_of(t.index)[0].by_kind() if share.name == use)
             for use in ("parameters", "buffers")}  # fmt: skip
    assert sizes == {"parameters": parameters, "buffers": buffers}
    select = "select use, sum(bytes) from storages where use in ('parameters', 'buffers') group by 1"
    with Query(t.index, select) as query:
        assert dict(query.rows) == sizes
