"""The same promises on a GPU. Without one these are skipped; the CPU tests cover the same logic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import sightline as sl
from tests.recording.nets import Net, aten

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, an op that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("level", ["none", "api", "aten", "both"])
def test_results_gradients_and_no_synchronisation(level: str) -> None:
    net = Net().cuda()
    x = torch.ones(3, 4, device="cuda")

    def step() -> list[torch.Tensor]:
        net.zero_grad()
        out = net(x)
        out.sum().backward()
        return [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]

    plain = step()
    with no_synchronisation(), sl.trace(net, ops=level) as t:  # type: ignore[arg-type]  # each is a choice
        traced = step()
    assert all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True))
    assert t.info["external"] == 0


def test_backward_ops_of_the_worker_thread_are_linked() -> None:
    net = Net().cuda()
    with sl.trace(net) as t:
        net(torch.ones(3, 4, device="cuda")).sum().backward()
    backward = t.ops.where(level="aten", phase="backward")
    assert len(backward) > 8
    assert all(op.forward is not None for op in backward)
    assert {op.thread for op in backward} - {0}
    assert "f32[3, 2]@cuda:0" in {str(value) for value in t.values}


def test_checkpoint_and_optimizer_on_the_device() -> None:
    from torch.utils.checkpoint import checkpoint

    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.ones(3, 4, device="cuda", requires_grad=True)
    with sl.trace(net) as t:
        checkpoint(net, x, use_reentrant=False).sum().backward()
        optimizer.step()
    assert "addmm" in aten(t, phase="recompute")
    assert len(t.ops.where(phase="optimizer")) > 0
    assert [call.phase for call in t.module_calls] == ["forward"] * 3 + ["recompute"] * 3


def test_a_larger_model_in_bf16() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).cuda().bfloat16()
    x = torch.randn(8, 32, 64, device="cuda", dtype=torch.bfloat16)
    with sl.trace(model) as t:
        model(x).float().sum().backward()
    assert t.info["external"] == 0
    assert not [op.name for op in t.ops.where(level="aten", phase="backward") if op.forward is None]
