"""Every sentence of a job's first screen, against jobs whose truth is known: healthy ones and faulty ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sightline as sl
from tests.ranks.job_exam import FAULTS, Job, errors
from tests.ranks.torchrun import start

HERE = Path(__file__).parent


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_healthy_jobs_have_no_problem(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert errors(Job.of(seed), folder) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(tmp_path: Path, fault: str) -> None:
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert errors(Job.of(seed, fault), folder) == []


#: The model of `exam_job.py`: 16 × 32 + 32 and 32 × 8 + 8 parameters, in 8 steps.
FIRST, SECOND, STEPS = 544, 264, 8
BYTES = 4 * (FIRST + SECOND)
#: The table of collectives for each way to train: kind, how many and how many bytes.
CARRIED = {
    "ddp": [("all_reduce", f"{STEPS}", f"{STEPS * BYTES / 1024:.1f} KiB")],
    # Both layers are gathered before the forward and again before the backward pass.
    "fsdp": [
        ("reduce_scatter", f"{2 * STEPS}", f"{STEPS * BYTES / 1024:.1f} KiB"),
        ("all_gather", f"{4 * STEPS}", f"{STEPS * BYTES / 1024:.1f} KiB"),
    ],
    "by_hand": [("all_reduce", f"{4 * STEPS}", f"{STEPS * BYTES / 1024:.1f} KiB")],
    "pipeline": [("send", "3", "768 B"), ("recv", "3", "768 B")],
}


def test_real_jobs_of_two_processes(tmp_path: Path) -> None:
    done = start(tmp_path, 2, str(HERE / "exam_job.py"))
    assert done.returncode == 0, done.stderr
    source = (HERE / "exam_job.py").read_text().splitlines()
    lines = {
        mark: next(at for at, text in enumerate(source, 1) if f"# L:{mark}" in text)
        for mark in ("batch", "call")
    }

    def screen(name: str) -> str:
        text = " ".join(str(sl.load(tmp_path / f"{name}.sight")).split())
        assert text.startswith(f"run {name} 2 ranks on 1 host · gloo · torch ")
        for kind, count, size in CARRIED.get(name, ()):
            assert f" {kind} " in text
            assert re.search(rf" {kind} \S+ {count} {size} ", text), (kind, text)
        return text

    for name in ("ddp", "fsdp", "by_hand", "pipeline", "alone"):
        text = screen(name)
        assert not re.search(r"\b(error|warning) [A-Z0-9]", text), text
        # A straggler may be shown: where other processes take the cores, one of the ranks is one.
        assert "Replicas must" not in text
    for name in ("ddp_same", "fsdp_same"):
        text = screen(name)
        assert f"warning Both replicas are given the same batch in each of {STEPS} steps" in text
        assert f"exam_job.py:{lines['call']} in train" in text
    text = screen("other_seeds")
    assert "error 0.weight is not the same on rank 1 as on rank 0 before the first forward pass" in text
    assert "seeds as the recording began: 100 on rank 0, 101 on rank 1" in text
    text = screen("ddp_slow")
    assert re.search(
        r"warning Rank 1 comes last to \d+ of \d+ collectives: rank 0 waits \d+ ms for it", text
    ), text
    lost = float(re.findall(r"rank 0 waits (\d+) ms", text)[0])
    assert lost > 0.7 * 80 * (STEPS - 1), "seven of eight steps come after a collective"
    assert re.search(
        rf"it spends \d+ ms at and before \S*exam_job.py:{lines['batch']} in train, rank 0 ", text
    ), text
