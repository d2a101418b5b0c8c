"""Jobs of several processes: each has a recording of its own, and a launcher is told how to be recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import sightline as sl
from sightline.cli import main
from sightline.process_rank import Rank, path_of_rank, this_rank
from tests.recording.engines import BOTH_ENGINES

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.Linear(3, 2)
def step():
    net(torch.ones(1, 3)).sum().backward()
    dist.all_reduce(net.weight.grad)
if sys.argv[1] == "own":
    import sightline as sl
    with sl.trace(net, path="own.sight") as t:
        step()
    t.save("copy.sight")
else:
    step()
dist.destroy_process_group()
"""


@BOTH_ENGINES
@pytest.mark.parametrize("way", ["own", "run"])
def test_each_process_has_its_recording(tmp_path: Path, engine: str, way: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    program = ["-m", "sightline", "run", "-o", "x.sight", "train.py", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SIGHTLINE_ENGINE": engine}
    done = subprocess.run(
        [*launcher, *(program if way == "run" else ["train.py", "own"])],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for stem in ["x"] if way == "run" else ["own", "copy"]:
        for rank in (0, 1):
            t = sl.load(tmp_path / f"{stem}.sight" / f"rank{rank}.sight")
            name = "train" if way == "run" else "Linear"
            assert t.info["name"] == f"{name}, rank {rank} of 2"
            assert (t.info["rank"], t.info["local_rank"], t.info["world_size"]) == (rank, rank, 2)
            assert t.info["engine"] == engine
            assert len(t.module_calls) == 1
            assert t.validate().ops
    assert len(list(tmp_path.glob("*.sight"))) == (1 if way == "run" else 2)
    if way == "run":
        assert done.stderr.count("\ntrace train, rank") == 1, "one of them shows the overview"
        assert "Look at it: sightline show x.sight/rank1.sight\n" in done.stderr


def test_ranks_are_read_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert this_rank() is None
    monkeypatch.setenv("RANK", "5")
    assert this_rank() is None
    for world in ("", "1", "many", "-3", "5"):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert this_rank() is None
        assert path_of_rank(Path("a/x.sight")) == Path("a/x.sight")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert this_rank() == Rank(5, 5, 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert this_rank() == Rank(5, 1, 8)
    for given in ("a/x.sight", "a/x", "a/x.sight/rank5.sight"):
        assert path_of_rank(Path(given)) == Path("a/x.sight/rank5.sight")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert path_of_rank(Path("a/x.sight")) == Path("a/x.sight/rank5.restart2.sight")


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ("--stats torchrun --nproc-per-node 2 train.py --lr 1",
         "type instead: torchrun --nproc-per-node 2 -m sightline run --stats train.py --lr 1"),
        ("-q -m torch.distributed.run --nproc-per-node=2 -m pkg.train -x",
         "type instead: torchrun --nproc-per-node=2 -m sightline run -q -m pkg.train -x"),
        ("-o a.sight /usr/bin/accelerate launch --cpu --num_processes 2 train.py -m",
         "type instead: accelerate launch --cpu --num_processes 2 -m sightline run -o a.sight train.py -m"),
        ("deepspeed train.py", "have it start `python -m sightline run SCRIPT` instead of `python SCRIPT`."),
        ("torchrun --no-such train.py",
         "have it start `python -m sightline run SCRIPT` instead of `python SCRIPT`."),
    ],
)  # fmt: skip
def test_a_launcher_is_not_recorded_but_told(given: str, typed: str) -> None:
    told = CliRunner().invoke(main, ["run", *given.split()])
    assert told.exit_code == 1
    assert told.output.startswith("Error: ")
    assert " starts the processes of a job, which would not be recorded; " in told.output
    assert told.output.endswith(f"{typed}\n")
