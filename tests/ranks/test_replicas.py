"""Replicas that are not equal where they must be, or equal where they should not: each with its lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sightline as sl
from tests.ranks.fake_ranks import problems_of, record_ranks
from tests.recording.engines import BOTH_ENGINES


def line(function: Callable[..., object], after: int) -> str:
    """A line of a function of this file, as it is shown."""
    return f"test_replicas.py:{function.__code__.co_firstlineno + after} in {function.__qualname__}"


def test_replicas_that_drift_apart_and_ranks_in_other_modes(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        model.train(rank != 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4) * (1 + (step == 1 and rank == 1))).sum().backward()
            optimizer.step()

    record_ranks(tmp_path / "run.sight", run, 2, stats=sl.Stats(parameters=True))
    modes, drift = problems_of(tmp_path / "run.sight")
    assert drift.kind == "replicas"
    assert drift.title == "weight of rank 1 differs from that of rank 0 since its update 2"
    assert drift.place.endswith(line(run, 8))
    assert modes.title == "Linear is in training mode on rank 0 and in evaluation mode on rank 1"
    assert modes.place.endswith(line(run, 7))
    assert modes.detail.endswith(line(run, 7))


@pytest.mark.parametrize("update", [1, 2, 3])
def test_an_update_that_writes_a_weight_twice_counts_once(tmp_path: Path, update: int) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)  # decays, then updates
        for step in range(3):
            optimizer.zero_grad()
            sign = -1 if step == update - 1 and rank == 1 else 1
            (sign * model(torch.ones(2, 4)).sum()).backward()
            optimizer.step()

    record_ranks(tmp_path / "run.sight", run, 2, stats=sl.Stats(parameters=True))
    (drift,) = problems_of(tmp_path / "run.sight")
    assert drift.title == f"weight of rank 1 differs from that of rank 0 since its update {update}"


def test_a_weight_that_is_changed_by_hand_has_no_update(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model.weight.mul_(1 + rank)

    record_ranks(tmp_path / "run.sight", run, 2, stats=sl.Stats(parameters=True))
    (drift,) = problems_of(tmp_path / "run.sight")
    assert drift.title == "weight of rank 1 differs from that of rank 0 since a change of it"


def test_a_rank_that_also_evaluates_is_in_no_other_mode(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        model(torch.ones(2, 4)).sum().backward()
        if rank == 0:
            model.eval()(torch.ones(2, 4))

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    assert problems_of(tmp_path / "run.sight") == []


def replica(rank: int, *, batch: float = 1.0, dropout: float = 0.0, seed: int = 0) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 64), torch.nn.Dropout(dropout)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    torch.manual_seed(seed)
    with model.no_sync():  # a fake group cannot reduce
        out = model(torch.full((2, 4), batch))
        out.square().mean().backward()


def test_equal_batches_of_replicas_are_noticed(tmp_path: Path) -> None:
    record_ranks(tmp_path / "same.sight", replica, 2, stats=True)
    (problem,) = problems_of(tmp_path / "same.sight")
    assert problem.kind == "same-batch"
    assert problem.title == "Both replicas are given the same batch in the one step recorded"
    assert problem.place.endswith(line(replica, 6))
    record_ranks(tmp_path / "own.sight", lambda rank: replica(rank, batch=rank + 1.0), 2, stats=True)
    assert problems_of(tmp_path / "own.sight") == []


def test_equal_batches_are_noticed_though_their_losses_differ(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", lambda rank: replica(rank, dropout=0.5, seed=rank), 2, stats=True)
    assert [each.kind for each in problems_of(tmp_path / "run.sight")] == ["same-batch"]


def language_model(rank: int, tokens: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    torch.manual_seed(rank)  # another dropout, and so another loss
    with model.no_sync():
        for step in range(2):
            ids = (torch.arange(64).view(2, 32) + step) % tokens[rank]
            model(ids).square().mean().backward()


@BOTH_ENGINES
def test_batches_of_tokens_are_compared(tmp_path: Path, engine: str) -> None:
    record_ranks(
        tmp_path / "same.sight", lambda rank: language_model(rank, (50, 50)), 2, stats=True, engine=engine
    )
    (problem,) = problems_of(tmp_path / "same.sight")
    assert problem.title == "Both replicas are given the same batch in each of 2 steps"
    assert problem.place.endswith(line(language_model, 8))
    record_ranks(
        tmp_path / "own.sight", lambda rank: language_model(rank, (50, 49)), 2, stats=True, engine=engine
    )
    assert problems_of(tmp_path / "own.sight") == []


def test_equal_dropout_of_replicas_is_noticed(tmp_path: Path) -> None:
    record_ranks(
        tmp_path / "run.sight", lambda rank: replica(rank, batch=rank + 1.0, dropout=0.5), 2, stats=True
    )
    (problem,) = problems_of(tmp_path / "run.sight")
    assert (problem.kind, problem.severity.word) == ("seeds", "note")
    assert problem.title == "Both replicas draw the same random numbers"
    assert problem.place.endswith(line(replica, 6))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_other_random_numbers_or_none_are_no_problem(tmp_path: Path, dropout: float) -> None:
    record_ranks(
        tmp_path / "run.sight",
        lambda rank: replica(rank, batch=rank + 1.0, dropout=dropout, seed=rank),
        2,
        stats=True,
    )
    assert problems_of(tmp_path / "run.sight") == []


def by_hand(rank: int, seeds: tuple[int, ...]) -> None:
    torch.manual_seed(seeds[rank])
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def test_other_seeds_of_replicas_that_a_program_makes_itself(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", lambda rank: by_hand(rank, (0, 0, 7)), 3, stats=True)
    problems = problems_of(tmp_path / "run.sight")
    assert [each.kind for each in problems] == ["seeds"]
    assert problems[0].title == "weight is not the same on rank 2 as on rank 0 before the first forward pass"
    assert problems[0].detail == "seeds as the recording began: 0 on rank 0, 7 on rank 2"
    assert problems[0].place.endswith(line(by_hand, 2))


def test_weights_that_are_taken_from_one_rank_begin_equal(tmp_path: Path) -> None:
    """A fake group broadcasts nothing, but the weights before the broadcast are still not compared."""

    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 2)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    assert problems_of(tmp_path / "run.sight") == []


def test_weights_of_their_own_are_no_problem(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        torch.nn.Linear(4, 2)(torch.ones(2, 4)).sum().backward()
        dist.barrier()

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    assert problems_of(tmp_path / "run.sight") == []


def tensor_parallel(rank: int, batch: float) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.full((2, 4), batch))


def test_tensor_parallel_ranks_with_other_batches(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", lambda rank: tensor_parallel(rank, 1.0 + rank), 2, stats=True)
    (problem,) = problems_of(tmp_path / "run.sight")
    assert problem.kind == "other-batch"
    assert problem.title == "Rank 1 of one tensor-parallel model is given another batch than rank 0 in call 0"
    assert problem.place.endswith(line(tensor_parallel, 5))
    assert problem.detail.endswith(line(tensor_parallel, 5))
    record_ranks(tmp_path / "same.sight", lambda rank: tensor_parallel(rank, 1.0), 2, stats=True)
    assert problems_of(tmp_path / "same.sight") == []


def parallel_tokens(rank: int, shift: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    layers = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model = parallelize_module(layers, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
    model(torch.arange(6).view(2, 3) + rank * shift)


def test_tensor_parallel_ranks_with_other_tokens(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", lambda rank: parallel_tokens(rank, 1), 2, stats=True)
    assert [each.kind for each in problems_of(tmp_path / "run.sight")] == ["other-batch"]
    record_ranks(tmp_path / "same.sight", lambda rank: parallel_tokens(rank, 0), 2, stats=True)
    assert problems_of(tmp_path / "same.sight") == []
