"""Both engines record the same of distributed training, here in a job of one process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sightline as sl
from tests.recording.engine_parity import assert_parity, record
from tests.recording.engines import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def job(tmp_path: Path) -> Iterator[None]:
    """A distributed job of this process alone."""
    hook = sys.excepthook  # torch puts its own in the place, and leaves it there
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    sys.excepthook = hook
    dist.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, steps: int = 5) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()


def backward_calls(t: sl.Trace) -> int:
    return [op.name for op in t.ops].count("Tensor.backward")


@pytest.mark.parametrize("settings", [{}, {"static_graph": True}, {"find_unused_parameters": True},
                                      {"gradient_as_bucket_view": True}], ids=str)  # fmt: skip
def test_distributed_data_parallel(settings: dict[str, bool]) -> None:
    t = assert_parity(lambda: train(DistributedDataParallel(net(), **settings)))  # type: ignore[arg-type]
    assert backward_calls(t) == 5


def test_gradients_that_are_accumulated_without_synchronisation() -> None:
    def run() -> None:
        model = DistributedDataParallel(net())
        with model.no_sync():
            model(torch.randn(5, 4)).sum().backward()
        model(torch.randn(5, 4)).sum().backward()

    assert backward_calls(assert_parity(run)) == 2


def test_a_communication_hook() -> None:
    def halve(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().mul_(0.5))
        return done

    def run() -> None:
        model = DistributedDataParallel(net())
        model.register_comm_hook(None, lambda state, bucket: halve(bucket))
        train(model, 2)

    assert backward_calls(assert_parity(run)) == 2


def test_what_the_first_screen_says_of_a_step() -> None:
    model = DistributedDataParallel(net())
    t = record(lambda: train(model), "native", model)
    assert "one step  DistributedDataParallel; backward; SGD (lr 0.1)" in str(t)


@pytest.mark.parametrize("mixed", [False, True], ids=["f32", "bf16"])
def test_fully_sharded_data_parallel(mixed: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (1,))
    pristine = net()

    def run() -> None:
        model = copy.deepcopy(pristine)
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        train(model, 3)

    assert backward_calls(assert_parity(run)) == 3
