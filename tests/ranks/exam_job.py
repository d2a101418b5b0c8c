"""Small jobs of two processes, in several ways to train: healthy ones, and some with one planted fault."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sightline as sl

dist.init_process_group("gloo")
RANK = dist.get_rank()
STEPS = 8
halves = [dist.new_group([0]), dist.new_group([1])]
torch.optim.SGD([torch.ones(1)], lr=0.1).step()  # which imports much


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8)
    return nn.Sequential(*layers)


def train(model: nn.Module, own_batch: bool = True, delay: float = 0, reduce: bool = False) -> None:
    torch.manual_seed(100 + RANK)
    batches = torch.Generator().manual_seed(1 + RANK * own_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        time.sleep(delay if RANK else 0)
        x = torch.randn(4, 16, generator=batches)  # L:batch
        optimizer.zero_grad()
        model(x).square().mean().backward()  # L:call
        for parameter in model.parameters() if reduce else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()


def ddp() -> None:
    train(DistributedDataParallel(net()))


def ddp_slow() -> None:
    train(DistributedDataParallel(net()), delay=0.08)


def ddp_same() -> None:
    train(DistributedDataParallel(net()), own_batch=False)


def sharded(own_batch: bool) -> None:
    model = net()
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    train(model, own_batch)


def fsdp() -> None:
    sharded(own_batch=True)


def fsdp_same() -> None:
    sharded(own_batch=False)


def by_hand() -> None:
    train(net(), reduce=True)


def other_seeds() -> None:
    train(net(seed=RANK), reduce=True)


def pipeline() -> None:
    """Rank 0 sends three batches on; rank 1 sends back one gradient for each."""
    model = nn.Linear(16, 16)
    for _ in range(3):
        if RANK == 0:
            h = model(torch.randn(4, 16))
            dist.send(h.detach(), 1)
            g = torch.empty(4, 16)
            dist.recv(g, 1)
            h.backward(g)
        else:
            h = torch.empty(4, 16)
            dist.recv(h, 0)
            h.requires_grad_()
            model(h).square().mean().backward()
            assert h.grad is not None
            dist.send(h.grad, 0)


def alone() -> None:
    """Each rank has a group and a model of its own."""
    model = nn.Linear(16, 16)
    torch.manual_seed(RANK)
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=halves[RANK])


for job in (ddp, ddp_slow, ddp_same, fsdp, fsdp_same, by_hand, other_seeds, pipeline, alone):
    dist.barrier()
    with sl.trace(path=f"{job.__name__}.sight", name=job.__name__, stats=True):
        job()
dist.barrier()
dist.destroy_process_group()
