"""Four ranks; the last asks the others where they are, and is killed while they wait for it."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import sightline as sl

dist.init_process_group("gloo")
RANK = dist.get_rank()
pids = [0] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
LAST = int(sys.argv[1]) or None


def where(rank: int) -> bytes:
    """The position of a rank as it has written it, read again."""
    os.kill(pids[rank], signal.SIGUSR1)
    return Path(f"run.sight/rank{rank}.sight/stacks.txt").read_bytes()


with sl.trace(path="run.sight", last=LAST):
    x = torch.ones(4)
    for _ in range(20):
        dist.all_reduce(x.exp())
    if RANK == 3:
        while not all(b"all_reduce" in where(rank) for rank in range(3)):
            time.sleep(0.05)
        while b"stuck" not in where(0):
            time.sleep(0.05)
        while [each.number for each in sl.load("run.sight/rank3.sight").collectives][-1:] != [19]:
            time.sleep(0.05)  # ops younger than a third of a second are not written yet
        os.kill(os.getpid(), signal.SIGKILL)

    def stuck() -> None:
        dist.all_reduce(x.exp())

    stuck()
