"""Random small jobs whose truth is known, compared with their first screen.

A seed makes a job: so many ranks train a small model by hand with `all_reduce`, healthy or with one planted
fault of a known kind, rank, step and line. `errors` records it on fake ranks, and compares every number,
name, rank and line of its screen with the planted fault. Nothing here reads the code under test.
"""

from __future__ import annotations

import inspect
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

import sightline as sl
from tests.ranks.fake_ranks import let_ranks_wait, record_ranks

FAULTS: Final = (
    "seeds", "same-batch", "drift", "modes", "kind", "size", "dtype", "missing", "raises", "slow", "draws",
)  # fmt: skip
_ENDS_TOGETHER: Final = ("", "seeds", "same-batch", "drift", "modes", "slow", "draws")
_DELAY: Final = 0.03  #: seconds in each step of a slow rank


@dataclass
class Job:
    """A job, and the fault that is planted in it."""

    seed: int
    fault: str = ""
    world: int = 2
    steps: int = 3
    rank: int = 1  #: the one with the fault
    step: int = 1  #: in which it shows
    sizes: list[int] = field(default_factory=list)  #: of the layers
    way: str = "each"  #: gradients are reduced one by one, as means, or in a bucket
    logs: bool = False  #: rank 0 reads its loss
    evaluates: bool = False  #: rank 0 does, at the end
    dropout: bool = False

    @classmethod
    def of(cls, seed: int, fault: str = "") -> Job:
        """The job of a seed."""
        chance = random.Random(f"{seed} {fault}")
        world, steps = chance.randint(2, 4), chance.randint(2, 5)
        sizes = [chance.choice([4, 6, 8]) for _ in range(chance.randint(2, 4))]
        job = cls(
            seed=seed, fault=fault, world=world, steps=steps, rank=chance.randrange(1, world),
            step=chance.randrange(1, steps), sizes=sizes,
            way=chance.choice(["each", "mean", "bucket"]), logs=chance.random() < 0.5,
            evaluates=chance.random() < 0.3, dropout=chance.random() < 0.4,
        )  # fmt: skip
        if fault == "slow":
            job.steps, job.evaluates = 10, False
        if fault == "draws":
            job.dropout = True
        return job

    # -- the program -----------------------------------------------------------------------------------------

    def run(self, rank: int) -> None:
        """The program of one rank."""
        is_odd = rank == self.rank and bool(self.fault)
        torch.manual_seed(7 if is_odd and self.fault == "seeds" else 3)
        layers: list[nn.Module] = []
        for before, after in zip(self.sizes, self.sizes[1:], strict=False):
            layers += [nn.Linear(before, after), nn.Tanh()]  # L:model
        model = nn.Sequential(*layers, *([nn.Dropout(0.5)] if self.dropout else []))
        torch.manual_seed(5 if self.fault == "draws" else 100 + rank)
        noise = torch.Generator().manual_seed(1 if self.fault == "same-batch" else rank + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_odd and self.fault == "modes":
            model.eval()
        for step in range(self.steps):
            is_faulty = is_odd and step == self.step
            optimizer.zero_grad()
            if is_odd and self.fault == "slow":
                time.sleep(_DELAY)
            x = torch.randn(64, self.sizes[0], generator=noise)  # L:batch
            loss = model(x).square().mean()  # L:call
            loss.backward()
            if is_faulty and self.fault == "raises":
                x.reshape(7, -1)  # L:raise
            self.reduce(model, is_faulty)
            optimizer.step()
            if is_faulty and self.fault == "drift":
                with torch.no_grad():
                    next(model.parameters()).mul_(1.5)  # L:drift
            if self.logs and rank == 0:
                loss.item()
        if self.evaluates and rank == 0:
            with torch.no_grad():
                model.eval()(torch.ones(2, self.sizes[0]))

    def reduce(self, model: nn.Module, is_faulty: bool) -> None:
        """Reduce gradients; a fake group leaves each rank its own, so that they are made the same before."""
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        for grad in grads:
            grad.fill_(0.01)
        tensors = [torch.cat([grad.flatten() for grad in grads])] if self.way == "bucket" else grads
        for number, tensor in enumerate(tensors):
            fault = self.fault if is_faulty and number == 0 else ""
            if fault == "kind":
                dist.broadcast(tensor, 0)  # L:kind
            elif fault == "size":
                dist.all_reduce(torch.zeros(tensor.numel() + 1))  # L:size
            elif fault == "dtype":
                dist.all_reduce(tensor.double())  # L:dtype
            elif fault != "missing":
                dist.all_reduce(tensor)  # L:reduce
            if self.way == "mean":
                tensor /= self.world
        start = 0
        for grad in grads if self.way == "bucket" else ():
            grad.copy_(tensors[0][start : start + grad.numel()].view_as(grad))
            start += grad.numel()

    # -- its truth -------------------------------------------------------------------------------------------

    @property
    def reduced(self) -> list[int]:
        """The elements of each `all_reduce` of a step."""
        parameters = [n for a, b in zip(self.sizes, self.sizes[1:], strict=False) for n in (a * b, b)]
        return [sum(parameters)] if self.way == "bucket" else parameters

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]


def ranks_text(ranks: list[int]) -> str:
    """Up to three ranks in words, as a screen has them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == 3 and ranks[2] - ranks[0] == 2:
        return f"ranks {ranks[0]}–{ranks[2]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def line(mark: str) -> str:
    """The line with a mark, as it is shown."""
    for function in (Job.run, Job.reduce):
        source, first = inspect.getsourcelines(function)
        for number, text in enumerate(source, first):
            if f"# L:{mark}" in text:
                return f"job_exam.py:{number} in {function.__qualname__}"
    raise LookupError(mark)


def errors(job: Job, folder: Path) -> list[str]:
    """The errors and omissions of the first screen of a job, which is recorded in an empty folder."""
    path = folder / "run.sight"
    for rank in range(job.world):
        with suppress(RuntimeError):  # the planted one
            record_ranks(path, job.run, job.world, ranks=[rank], stats=True)
    t = sl.load(path)
    text = " ".join(str(t).split())
    problems = _sentences(text)
    if job.fault in ("", "slow"):
        # Fake ranks wait for nobody and so fall behind: only ranks that have waited show who is late.
        let_ranks_wait(path)
        late = [each for each in _sentences(" ".join(str(sl.load(path)).split())) if "[straggler]" in each]
        problems = [each for each in problems if "[straggler]" not in each] + late
    else:
        problems = [each for each in problems if "[straggler]" not in each]
    wrong = [f"missing: {each!r}" for each in _numbers(job) if each not in text]
    for rank in range(job.world):
        count = f"{len(t.ranks[rank].ops):,}"
        if not re.search(rf"(?<![\d,]){count}(–[\d,]+)? ops|–{count} ops", text):
            wrong.append(f"rank {rank} has {count} ops")
    title, lines = _planted(job)
    named = [each for each in problems if title and each.startswith(title)]
    if title and not named:
        wrong.append(f"missing: {title!r}")
    wrong += [f"missing: {each!r} in {named[0]!r}" for each in lines if named and each not in named[0]]
    allowed = (title, *_also(job)) if title else _also(job)
    wrong += [f"false: {each[:300]!r}" for each in problems if not each.startswith(allowed)]
    return [f"{each}\n    {job}" for each in wrong]


def _sentences(text: str) -> list[str]:
    """The problems of a screen: ``error … [hang]``."""
    return re.findall(r"(?:error|warning|note) (?:Ranks?|Both|All|[\w.]+ (?:is|of)) .*?\[[a-z-]+\]", text)


def _numbers(job: Job) -> list[str]:
    """Errors in the size of a job."""
    texts = [f"run trace {job.world} ranks on 1 host · fake · torch {torch.__version__}"]
    if job.fault in _ENDS_TOGETHER:
        count, size = job.steps * len(job.reduced), 4 * job.steps * sum(job.reduced)
        texts += [f"{count} collective{'s' * (count != 1)}", "all_reduce "]
        texts += [f" {count} {size} B " if size < 1024 else f" {count} {size / 1024:.2f} KiB "]
    return texts


def _planted(job: Job) -> tuple[str, list[str]]:
    """The beginning of the planted problem, and the other texts in it."""
    odd, others = f"rank {job.rank}", ranks_text(job.others)
    number, first = job.step * len(job.reduced), job.reduced[0]
    run = "runs" if len(job.others) == 1 else "run"
    where = f"error {others.capitalize()} {run} all_reduce #{number} of {first} float32 where {odd} runs"
    equal = "Both" if job.world == 2 else f"All {job.world}"
    match job.fault:
        case "seeds":
            seeds = f"seeds as the recording began: 100 on rank 0, {100 + job.rank} on {odd}"
            return (
                f"error 0.weight is not the same on {odd} as on rank 0 before the first forward pass",
                [line("model"), seeds],
            )
        case "same-batch":
            title = f"warning {equal} replicas are given the same batch in each of {job.steps} steps"
            return title, [line("call")]
        case "drift":
            last = job.step == job.steps - 1  # then rank 0 has no other version to compare it with
            title = f"error 0.weight of {odd} differs from that of rank 0 since its update {job.step + 2}"
            return ("", []) if last else (title, [line("drift")])
        case "modes":
            training = [rank for rank in job.others if rank or not job.evaluates]
            title = f"warning Sequential is in training mode on {ranks_text(training) if training else ''}"
            return (f"{title} and in evaluation mode on {odd}", [line("call")]) if training else ("", [])
        case "kind":
            return f"{where} broadcast #{number} of {first} float32 from rank 0", [
                line("kind"),
                line("reduce"),
            ]
        case "size":
            return f"{where} all_reduce #{number} of {first + 1} float32", [line("size"), line("reduce")]
        case "dtype":
            return f"{where} all_reduce #{number} of {first} float64", [line("dtype"), line("reduce")]
        case "raises":
            title = f"error Rank {job.rank} only: RuntimeError: shape '[7, -1]' is invalid for input of size "
            return title, [line("raise")]
        case "slow":
            return f"warning Rank {job.rank} comes last to ", [
                " at and before ",
                line("batch"),
                "for the same ops",
            ]
        case "draws":
            return f"note {equal} replicas draw the same random numbers", [line("call")]
    return "", []


def _also(job: Job) -> tuple[str, ...]:
    """Other sentences that are true: consequences of the fault."""
    match job.fault:
        case "modes":
            return (f"warning Rank {job.rank} only: Sequential is trained in evaluation mode",)
        case "missing":  # later collectives are others, or one is missing at the end; its weights may drift
            others = f"error {ranks_text(job.others).capitalize()} run"
            return (
                others,
                f"note Rank {job.rank} has no all_reduce",
                *(f"error 0.{name} of rank {job.rank} differs" for name in ("weight", "bias")),
            )
        case "raises":
            return (f"note Rank {job.rank} ", f"error Rank {job.rank} died before all_reduce", "note Rank")
    return ()
