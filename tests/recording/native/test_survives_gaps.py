"""Ops, shapes and events that the native engine misses or tells wrongly: what is known, one test each."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sightline as sl
from sightline.recording.engine_choice import engine_status
from tests.recording.native.comparison import aten, record, unchanged

if engine_status(build=True).engine != "native":
    pytest.skip("the native engine cannot be built here", allow_module_level=True)

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.mark.xfail(
    strict=True, reason="Ops that compute tangents run inside their op, where nothing is looked at."
)
def test_ops_of_forward_mode_are_seen() -> None:
    def run() -> Any:
        with forward_ad.dual_level():
            y = forward_ad.make_dual(torch.ones(3), torch.ones(3)).sin()
            return tuple(forward_ad.unpack_dual(y))

    assert "cos" in aten(unchanged(run))


@pytest.mark.xfail(
    strict=True, reason="Under vmap of grad the ops on single examples are recorded, not those that run."
)
def test_vmap_of_grad_shows_the_batch() -> None:
    x = torch.ones(2, 3)
    t = unchanged(lambda: torch.vmap(torch.func.grad(lambda v: (v**2).sum()))(x))
    powers = [op for op in t.ops.where(level="aten") if op.name.startswith("pow")]
    assert [tuple(op.inputs[0].shape) for op in powers] == [(2, 3)] * len(powers)


@pytest.mark.xfail(strict=True, reason="What a mode of the user's runs inside an aten op is not looked at.")
def test_ops_inside_a_dispatch_mode_of_the_users_are_seen() -> None:
    class Twice(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            torch.ones(5).neg()
            return func(*args, **(kwargs or {}))

    def run() -> Any:
        with Twice():
            return X.cos()

    assert sorted(aten(unchanged(run))) == ["cos", "neg", "ones"]


def test_a_profiler_inside_a_dispatch_mode_sees_what_it_saw() -> None:
    class Profiled(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch.profiler.profile(acc_events=True) as profile:
                made = func(*args, **(kwargs or {}))
            seen.append([event.name for event in profile.events()])
            return made

    seen: list[list[str]] = []
    for block in (contextlib.nullcontext(), sl.trace(engine="native")):
        with block, Profiled():
            X.cos()
    assert seen[0] == seen[1]


def test_other_data_have_their_own_shape() -> None:
    p = nn.Parameter(torch.ones(3))

    def run() -> Any:
        p.mul(1)
        p.data = torch.zeros(4)
        return p * 2

    _, t = record(run)
    assert tuple(t.ops[-1].inputs[0].shape) == (4,)
