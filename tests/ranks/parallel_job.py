"""Trains small models in the ways torch distributes them; recorded if the first argument says so.

Each rank writes a digest of every result, so that the recorded run can be compared with the other.
"""

import contextlib
import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sightline as sl

dist.init_process_group("gloo")
RANK = dist.get_rank()
pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
pair = pairs[RANK // 2]
assert isinstance(pair, dist.ProcessGroup)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def train(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def ddp() -> nn.Module:
    model = DistributedDataParallel(net(RANK))  # which gives all ranks the weights of the first
    train(model, torch.full((4, 8), RANK + 1.0))
    return model


def fsdp() -> nn.Module:
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.full((4, 8), RANK + 1.0))
    return model


def tensor_parallel() -> nn.Module:
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, torch.ones(4, 8))
    return model


def pipeline() -> nn.Module:
    """Pipelines of two stages, one of each two ranks, with two microbatches."""
    stages = net()
    own = stages[2:] if RANK % 2 else stages[:2]
    stage = PipelineStage(own, RANK % 2, 2, torch.device("cpu"), group=pair)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    given: dict[str, Any] = {"target": torch.zeros(4, 8)} if RANK % 2 else {}
    schedule.step(*(() if RANK % 2 else (torch.full((4, 8), RANK + 1.0),)), **given)
    return own


def digest(model: nn.Module) -> str:
    parts = [
        part.to_local() if isinstance(part, DTensor) else part
        for one in model.parameters()
        for part in (one.detach(), one.grad)
        if part is not None
    ]
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()[:16]


for way in (ddp, fsdp, tensor_parallel, pipeline):
    recording = sl.trace(path=f"{way.__name__}.sight", stats=True)
    with recording if sys.argv[1] == "recorded" else contextlib.nullcontext():
        result = way()
    with open(f"{sys.argv[1]}.{RANK}.txt", "a") as file:
        print(way.__name__, digest(result), file=file)
    dist.barrier()
dist.destroy_process_group()
