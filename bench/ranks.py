"""What ranks cost: a step of DDP with and without us, and many ranks merged.

    python bench/ranks.py step [PROCESSES]     the added time of a step, of a recording in memory and on disk
    python bench/ranks.py merge [RANKS OPS]   simulated ranks, of which one parts from the others

The steps are measured side by side in one job: plain and recorded blocks of a few steps take turns, and the
best of each are compared; CPU time says something on a busy machine too. Simulated ranks are one real
recording, with torch's fake process group, copied for each rank.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

STEPS, ROUNDS = 5, 30


def main(arguments: list[str]) -> None:
    """Run what is asked for; both by default."""
    what, *rest = arguments or ["all"]
    if what == "rank":
        ddp_rank()
        return
    if what in ("all", "step"):
        for count in [int(rest[0])] if rest and what == "step" else [2, 4]:
            launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
            subprocess.run(
                [*launcher, "--nproc-per-node", str(count), __file__, "rank"],
                check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
    if what in ("all", "merge"):
        numbers = [int(each) for each in rest] if what == "merge" else []
        simulated(*(numbers or [1024, 10_000]))


def ddp_rank() -> None:
    """One process of the job: steps of DDP, with and without a recording."""
    import torch
    import torch.distributed as dist

    import sightline as sl

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.TransformerEncoder(layer, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 64, 128)
    folder = Path(tempfile.mkdtemp())

    def steps(run: torch.nn.Module) -> tuple[float, float]:
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
        ended = time.perf_counter() - began, time.process_time() - spent
        return ended[0] / STEPS * 1e3, ended[1] / STEPS * 1e3

    ops: dict[str, float] = {}

    def block(name: str, number: int) -> tuple[float, float]:
        run, make = ways[name]
        with make(number) as trace:
            spent = steps(run)
        ops[name] = 0 if trace is None else len(trace.ops) / STEPS
        return spent

    alone = model.module  # the same step of one process
    ways: dict[str, tuple[torch.nn.Module, Callable[[int], Any]]] = {
        "one process": (alone, lambda _: nullcontext()),
        "one, recorded": (alone, lambda _: sl.trace(alone)),
        "plain": (model, lambda _: nullcontext()),
        "in memory": (model, lambda _: sl.trace(model)),
        "on disk": (model, lambda number: sl.trace(model, path=folder / f"{number}.sight")),
        "last 10,000": (model, lambda _: sl.trace(model, last=10_000)),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name in ways:
            times[name].append(block(name, number))
    if dist.get_rank() == 0:
        print(f"DDP, {dist.get_world_size()} processes of one thread, one step: wall time and CPU time")
        found = {name: [min(each) for each in zip(*times[name][1:], strict=True)] for name in ways}
        for name, (wall, cpu) in found.items():
            plain = found["one process" if name.startswith("one") else "plain"]
            print(f"  {name:<14} {wall:7.1f} ms ×{wall / plain[0]:.2f}   {cpu:7.1f} ms ×{cpu / plain[1]:.2f}")

        here = (found["in memory"][1] - found["plain"][1]) / ops["in memory"] * 1e3
        single = (found["one, recorded"][1] - found["one process"][1]) / ops["one, recorded"] * 1e3
        mark = f"×{here / single:.2f} ≤ 1.1 {'✓' if here <= 1.1 * single else '✗'}"
        print(f"  CPU time added per op: {here:.2f} µs, in one process {single:.2f}: {mark}")
    shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


def simulated(count: int, ops: int) -> None:
    """Merge so many ranks of so many ops, and find the one that parts."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import sightline as sl
    from sightline.store.writer import amend_info

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run.sight"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "MASTER_PORT": "1"}
        odd = count * 2 // 3
        for rank in (0, odd):
            os.environ["RANK"] = str(rank)
            dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
            with sl.trace(path=folder):
                simulated_rank(ops, is_odd=rank == odd)
            dist.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
        amend_info(folder / f"rank{odd}.sight", {"began_ns": sl.load(folder).info["began_ns"]})
        recorded = len(sl.load(folder).ops)
        began = time.perf_counter()
        for rank in range(1, count):
            if rank != odd:
                shutil.copytree(folder / "rank0.sight", folder / f"rank{rank}.sight")
                amend_info(folder / f"rank{rank}.sight", {"rank": rank})
        size = sum(file.stat().st_size for file in folder.rglob("*.db"))
        took = time.perf_counter() - began
        print(f"{count:,} ranks × {recorded:,} ops, {size / 1e6:,.0f} MB, made in {took:.0f} s")
        merged(folder)


def simulated_rank(ops: int, *, is_odd: bool) -> None:
    """About so many ops, with a collective after every fifty; an odd one runs another towards the end."""
    import torch
    import torch.distributed as dist

    x = torch.ones(8, 8)
    steps = ops // 104
    for step in range(steps):
        for _ in range(25):
            x = (x @ x).tanh()
        if is_odd and step == steps * 9 // 10:
            dist.broadcast(x.relu(), 0)
        else:
            dist.all_reduce(x)


def merged(folder: Path) -> None:
    """Merge in a process of its own, so that its peak of memory is its own."""
    program = (
        "import sys, time\n"
        "began = time.perf_counter()\n"
        "import sightline as sl\n"
        "t = sl.load(sys.argv[1])\n"
        "print('\\n'.join(str(t).splitlines()[:14]))\n"
        "print(f'merged and shown in {time.perf_counter() - began:.1f} s, CPU {time.process_time():.1f} s')\n"
        "import resource\n"
        "peak = lambda: f'peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB'\n"
        "print(peak())\n"
        "began, spent = time.perf_counter(), time.process_time()\n"
        "print(str(t.problems()).splitlines()[0])\n"
        "took = time.perf_counter() - began, time.process_time() - spent\n"
        "print(f'problems of each rank in {took[0]:.1f} s more, CPU {took[1]:.1f} s, {peak()}')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
