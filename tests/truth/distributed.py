"""Programs of a distributed job: each process runs one, observed and recorded, and audits its own recording.

``python -m tests.truth.distributed SEED KIND RANK WORLD FOLDER`` is one process; `job` starts them all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from tests.truth.architectures import ARCHITECTURES, Architecture
from tests.truth.audit import audit
from tests.truth.findings import Finding
from tests.truth.ingredients import optimizer
from tests.truth.loops import Facts, Loop, block, text
from tests.truth.program import Program, program_of
from tests.truth.running import run

KINDS = ("replicated", "sharded")
_SECONDS = 120
#: Models that are sharded and replicated as they are: no buffers that change, nothing that is tied.
_ARCHITECTURES = ("residual", "tuple_output", "functional", "regression")


def _loop(kind: str, rng: random.Random, net: Architecture) -> Loop:
    """A plain loop around a model that is replicated (DDP) or sharded (FSDP2)."""
    steps, of = rng.randint(2, 3), optimizer(rng)
    wraps = {
        "replicated": "model = torch.nn.parallel.DistributedDataParallel(model)",
        "sharded": "torch.distributed.fsdp.fully_shard(model)",
    }
    body = block(
        f"for i in range({steps}):",
        "x, y = batch(4)",
        f"loss = {net.loss.format(model='model')}",
        "loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
        "losses.append(loss.item())",
    )
    kinds = {"replicated": "DistributedDataParallel", "sharded": f"FSDP{net.type}"}
    facts = Facts(
        steps, {"model": 1}, {"model": kinds[kind]}, optimizers=(of.type,), loss_read=True, distributed=True
    )
    return Loop(text(wraps[kind], f"optimizer = {of.text}"), body, facts)


def generate(seed: int, kind: str) -> Program:
    """The program of a seed; every rank has the same."""
    rng = random.Random(seed)
    architecture = rng.choice(_ARCHITECTURES)
    net = ARCHITECTURES[architecture](rng)
    loop = _loop(kind, rng, net)
    options = rng.choice([{}, {}, {"engine": "python"}, {"ops": "api"}])
    return program_of(seed, (kind, architecture), net, loop, options, rng)


def job(seed: int, kind: str, world: int, folder: Path) -> list[Finding]:
    """The false statements about each process of a job."""
    command = [sys.executable, "-m", "tests.truth.distributed", str(seed), kind]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src")])
    processes = []
    for rank in range(world):
        own = folder / f"rank{rank}"
        own.mkdir()
        processes.append(
            subprocess.Popen(
                [*command, str(rank), str(world), str(own)],
                cwd=root, text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
                     "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    findings = []
    for rank, process in enumerate(processes):
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            output, errors = process.communicate()
        if process.returncode:
            findings.append(
                Finding(f"rank {rank}: failed", f"exit code {process.returncode}", errors[-2000:])
            )
        else:
            findings += [Finding(*each) for each in json.loads(output.splitlines()[-1])]
    return findings


def main(seed: int, kind: str, rank: int, world: int, folder: Path) -> None:
    """One process of a job: prints its findings."""
    import torch.distributed as dist
    import torch.distributed.fsdp  # noqa: F401 — programs use it

    warnings.simplefilter("ignore")
    store = folder.parent / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        one = run(generate(seed, kind), folder)
        result = audit(replace(one, name=f", rank {rank} of {world}" if world > 1 else ""))
    finally:
        dist.destroy_process_group()
    print(json.dumps([[each.kind, each.statement, each.truth] for each in result.findings]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
