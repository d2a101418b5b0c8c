"""Ranks that part in several ways, each recorded on its own, with a group of its own that times out."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import sightline as sl

dist.init_process_group("gloo")
RANK = dist.get_rank()


def branch(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)
    if RANK == 1:
        dist.broadcast(x.relu(), 0, group=group)
    else:
        dist.all_reduce(x, group=group)


def missing(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    for step in range(3):
        y = x * step
        if RANK == 1 and step == 1:
            continue
        dist.all_reduce(y, group=group)


def failing(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)
    if RANK == 1:
        x.reshape(3)
    dist.all_reduce(x, group=group)


def tag(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    if RANK == 0:
        sent = [x, x + 1]
        works = [dist.isend(each, 1, group=group, tag=tag) for tag, each in enumerate(sent, 1)]
        dist.send(x + 2, 1, group=group, tag=3)
        assert works
    elif RANK == 1:
        dist.recv(x, 0, group=group, tag=2)  # not in the order they were sent
        dist.recv(x, 0, group=group, tag=1)
        dist.recv(x, 0, group=group, tag=5)


def shape(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)
    dist.all_reduce(torch.ones(4 + (RANK == 1)), group=group)


Scenario = Callable[[torch.Tensor, dist.ProcessGroup], None]
scenarios: tuple[Scenario, ...] = (branch, missing, failing, tag, shape)
for scenario in scenarios:  # the last ends one of the processes
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    try:
        with sl.trace(path=f"{scenario.__name__}.sight"):
            scenario(torch.ones(4), group)
    except RuntimeError as error:
        print(RANK, scenario.__name__, type(error).__name__, flush=True)
    dist.barrier()
os._exit(0)  # groups that are out of step cannot be closed
