"""Distributed jobs, really started by torchrun: recorded unchanged, and every way to part is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sightline as sl
from sightline.analysis.problems.problem import Problem
from tests.ranks.fake_ranks import problems_of
from tests.ranks.torchrun import ROOT, start
from tests.recording.engines import BOTH_ENGINES, needs_native

HERE = Path(__file__).parent


WAYS = ("ddp", "fsdp", "tensor_parallel", "pipeline")
FIRST, SECOND = 8 * 16 + 16, 16 * 8 + 8  #: the parameters of the two layers of the job's model


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, "native"), marks=needs_native), pytest.param((4, "native"), marks=needs_native),
        (2, "python"),
    ],
)  # fmt: skip
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of the ways to train in parallel, whose results are those without us."""
    folder = tmp_path_factory.mktemp("parallel")
    count, engine = request.param
    for how in ("plain", "recorded"):
        done = start(folder, count, str(HERE / "parallel_job.py"), how, engine=engine)
        assert done.returncode == 0, done.stderr
    for rank in range(count):
        plain, recorded = ((folder / f"{how}.{rank}.txt").read_text() for how in ("plain", "recorded"))
        assert [line.split()[0] for line in plain.splitlines()] == list(WAYS)
        assert plain == recorded, "the recorded run is the same run, bit for bit"
    return folder


def kinds(path: Path, rank: int = 0) -> list[tuple[str, int]]:
    """Kind and elements of each collective of a rank."""
    return [(each.kind, each.elements) for each in sl.load(path).ranks[rank].collectives]


def test_ways_to_train_in_parallel_have_no_problem_between_ranks(parallel: Path) -> None:
    for way in WAYS:
        assert problems_of(parallel / f"{way}.sight") == []
        for rank in sl.load(parallel / f"{way}.sight").ranks.values():
            assert rank.validate().ops
            assert not rank.info["faults"]
            assert len(rank.collectives)


def test_buckets_of_ddp_belong_to_it(parallel: Path) -> None:
    t = sl.load(parallel / "ddp.sight")
    world = len(t.ranks)
    reduced = [each for each in t.collectives if each.kind == "all_reduce"]
    assert [each.elements for each in reduced] == [FIRST + SECOND] * 2, "one bucket in each of two steps"
    assert {each.peers for each in reduced} == {tuple(range(world))}
    assert {t.collectives.module_of(each) for each in reduced} == {"DistributedDataParallel"}
    assert f"ranks      ranks {'0–3' if world == 4 else '0 and 1'}: " in str(t), "they ran the same ops"


def test_gathers_of_fsdp_belong_to_the_module_they_serve(parallel: Path) -> None:
    t = sl.load(parallel / "fsdp.sight")
    world = len(t.ranks)
    found = [(each.kind, each.elements, t.collectives.module_of(each)) for each in t.collectives]
    step = [
        ("all_gather", FIRST // world, "0"),
        ("all_gather", SECOND // world, "2"),
        ("all_gather", SECOND // world, "2"),
        ("all_gather", FIRST // world, "0"),
    ]
    assert [each for each in found if each[0] == "all_gather"] == step * 2, "forward, then backward"
    assert f"ranks      ranks {'0–3' if world == 4 else '0 and 1'}: " in str(t), "threads of a backend aside"
    reduced = [("reduce_scatter", SECOND, "2"), ("reduce_scatter", FIRST, "0")]
    assert [each for each in found if each[0] == "reduce_scatter"] == reduced * 2


def test_pipeline_stages_send_and_receive(parallel: Path) -> None:
    t = sl.load(parallel / "pipeline.sight")
    for rank, trace in t.ranks.items():
        is_first, peer = rank % 2 == 0, rank ^ 1
        sent = [each for each in trace.collectives if each.kind == "send" and each.dtype == "float32"]
        received = [each for each in trace.collectives if each.kind == "recv" and each.dtype == "float32"]
        assert [each.elements for each in sent] == [2 * 16] * 2, "a half of the batch, twice"
        assert [each.elements for each in received] == [2 * 16] * 2
        assert {each.peers for each in (*sent, *received)} == {(peer,)}
        assert {each.root for each in sent} == {peer}, "a rank of the job, not of the pair"
        first = min((*sent, *received), key=lambda each: each.op)
        assert first.kind == ("send" if is_first else "recv")
        assert {call.module.label for call in trace.module_calls} >= ({"0", "1"} if is_first else {"2"})


def test_placements_and_the_mesh_are_shown(parallel: Path) -> None:
    t = sl.load(parallel / "tensor_parallel.sight")
    world = len(t.ranks)
    code = str(t.code(fold=True))
    assert "addmm(f32[16] Shard(0), f32[4, 8] Replicate, f32[8, 16] Shard(1)) -> f32[4, 16] Shard(1);" in code
    assert "-> f32[4, 8] Partial" in code
    assert t.info["meshes"][0] == {"names": ["all"], "ranks": list(range(world)), "device": "cpu"}
    assert f"mesh       {world} all" in str(t)
    weight = next(value for value in t.values if value.name == "0.weight" and value.kind == "parameter")
    assert str(weight.meta) == "f32[16, 8] Shard(0)"


def test_results_that_have_not_come_are_not_measured(parallel: Path) -> None:
    for way in ("ddp", "fsdp", "tensor_parallel"):
        t = sl.load(parallel / f"{way}.sight")
        measured = set(t.data.stats.value.tolist())
        for each in t.collectives:
            assert not measured.intersection(t.data.ops.outputs_of(each.op)), each


@BOTH_ENGINES
def test_buffers_of_replicas_are_compared_as_calls_are_given_them(tmp_path: Path, engine: str) -> None:
    done = start(tmp_path, 2, str(HERE / "buffers_job.py"), engine=engine)
    assert done.returncode == 0, done.stderr
    lines = (HERE / "buffers_job.py").read_text().splitlines()

    def line(text: str, function: str, number: int = 0) -> str:
        at = [at for at, each in enumerate(lines, 1) if text in each][number]
        return f"buffers_job.py:{at} in {function}"

    def one(name: str) -> Problem:
        (problem,) = problems_of(tmp_path / f"{name}.sight")
        assert problem.kind == "replicas"
        return problem

    assert problems_of(tmp_path / "alike.sight") == [], "DDP copies them before each forward pass"
    problem = one("running")
    assert problem.severity.word == "note", "it is so by design"
    assert problem.title == (
        "Running statistics of module.1 on rank 1 differ from those on rank 0 since call 1 of module.1"
    )
    assert problem.place.endswith(line("model(torch.randn", "train"))
    assert "SyncBatchNorm" in problem.why
    problem = one("evaluated")
    assert problem.severity.word == "warning"
    assert problem.title.endswith("differ from those on rank 0 since call 0 of module.1 in evaluation mode")
    problem = one("changed")
    assert problem.severity.word == "warning"
    assert problem.title == "module.2.scale of rank 1 differs from that of rank 0 since call 2 of module.2"
    assert problem.module == "module.2"
    assert problem.place.endswith(changed := line("scale.mul_(2)", "changed", 1))
    here, there = (each.rpartition("/")[2].rpartition(" at ")[2] for each in problem.detail.splitlines())
    assert (here, there) == (line('register_buffer("scale"', "Head.__init__"), changed)
    problem = one("counted")
    assert problem.title == "module.2.count of rank 1 differs from that of rank 0 since call 1 of module.2"
    assert problem.place.endswith(line("count.add_(5)", "counted"))
    assert line("self.count += 1", "Head.forward") in problem.detail


# The plain engine loses the last third of a second where a library aborts the process.
@needs_native
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_part_are_named_with_both_lines(tmp_path: Path, count: int) -> None:
    done = start(tmp_path, count, str(HERE / "desync_job.py"))
    lines = (HERE / "desync_job.py").read_text().splitlines()
    others, run = ("Rank 0", "runs") if count == 2 else ("Ranks 0, 2 and 3", "run")

    def line(text: str, number: int = 0) -> str:
        """The position of a line of the job's, as it is shown."""
        return f"desync_job.py:{[at for at, each in enumerate(lines, 1) if text in each][number]} in "

    def one(name: str) -> tuple[Problem, str]:
        found: Any = problems_of(tmp_path / f"{name}.sight")
        assert len(found) == 1, (found, done.stderr)
        return found[0], f"{found[0].place}\n{found[0].detail}"

    problem, text = one("branch")
    assert problem.kind == "desync"
    assert problem.title.startswith(
        f"{others} {run} all_reduce #1 of 4 float32 where rank 1 runs broadcast #1"
    )
    assert line("dist.all_reduce(x, group=group)", 1) in text
    assert line("dist.broadcast") in text
    assert "they part after collective #0" in text
    assert f"rank 1 runs relu at {problem.place.partition('desync_job.py')[0]}{line('.relu()')}" in text

    problem, text = one("missing")
    assert problem.kind == "hang"
    assert (
        problem.title == f"Rank 1 never came to all_reduce #2 of 4 float32, in which {others.lower()} waited"
    )
    assert "they part after collective #0:\n  rank 0 runs all_reduce" in text
    assert line("dist.all_reduce(y") in text
    assert line("y = x * step") in text

    problem, text = one("failing")
    assert problem.title == f"Rank 1 died before all_reduce #1 of 4 float32, in which {others.lower()} waited"
    assert "rank 1: raised RuntimeError: shape '[3]' is invalid for input of size 4" in text
    assert line("x.reshape(3)") in text or line("dist.all_reduce(x, group=group)", 2) in text

    problem, text = one("tag")
    assert problem.title == "Rank 1 waits for a message with tag 5 from rank 0, which sends one with tag 3"
    assert line("tag=5)") in problem.place
    assert line("tag=3)") in problem.detail

    problem, text = one("shape")
    assert problem.title.startswith(
        f"{others} {run} all_reduce #1 of 4 float32 where rank 1 runs all_reduce #1 of 5 float32"
    )
    assert f"shapes differ since ones at {problem.place.partition('desync_job.py')[0]}" in text
    assert "f32[4] on rank 0, f32[5] on rank 1" in text


@needs_native  # for the same reason
@pytest.mark.parametrize("last", [0, 40])
def test_a_killed_rank_leaves_all_readable(tmp_path: Path, last: int) -> None:
    done = start(tmp_path, 4, str(HERE / "killed_job.py"), str(last))
    assert done.returncode != 0
    t = sl.load(tmp_path / "run.sight")
    assert list(t.ranks) == [0, 1, 2, 3]
    assert t.ranks[3].info["unfinished"]
    assert [each.number for each in t.collectives][-1] == 20, "of a ring, too, the order number is known"
    assert len(t.collectives) == (10 if last else 21)
    (problem,) = problems_of(tmp_path / "run.sight")
    assert problem.kind == "hang"
    assert problem.title == "Rank 3 never came to all_reduce #20 of 4 float32, in which ranks 0–2 waited"
    assert problem.place.endswith(" in stuck")
    assert "rank 3: was cut short in or after all_reduce at " in problem.detail
    assert "they part after collective #19:\n  rank 0 runs exp at " in problem.detail
    assert problem.detail.endswith("\n  rank 3 ends")
    assert "stuck" in (tmp_path / "run.sight" / "rank0.sight" / "stacks.txt").read_text()
    text = " ".join(str(t).split())
    assert "at the end rank" in text
    assert "rank 3 was cut short" in text


def test_run_starts_the_processes_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(int(sys.argv[1])))\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "sightline", "run", "--no-stats", "--nproc", "2", "train.py", "7"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run train  2 ranks on 1 host · gloo" in done.stderr
    assert done.stderr.endswith("Look at it: sightline show train.sight\n")
    assert kinds(tmp_path / "train.sight", 1) == [("all_reduce", 7)]
    again = subprocess.run(
        [*command[:-2], "-o", "train.sight", "train.py", "7"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.stderr == "Error: train.sight is there already; give another -o, or --force to replace it.\n"
