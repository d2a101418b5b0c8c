"""``sightline run``: the script's run is its own, and the recording is beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import sightline as sl
from sightline.cli import main
from sightline.cli.run import _place
from sightline.cli.stepping import span_of
from sightline.errors import UsageError

ROOT = Path(__file__).parents[2]
SPIRALS = ROOT / "examples" / "train_spirals.py"

#: Everything a script can see of how it was started.
MIRROR = """
import json, os, pickle, sys
import torch

class Point:
    def __init__(self, x):
        self.x = x

def mirror():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "name": __name__, "file": __file__, "spec": str(__spec__ and __spec__.name),
        "package": __package__, "path": sys.path[0], "cwd": os.getcwd(), "own": main.__dict__ is globals(),
        "cached": __cached__, "loader": type(__loader__).__name__, "doc": __doc__,
        "pickled": pickle.loads(pickle.dumps(Point(torch.ones(2).sum().item()))).x,
        "module": Point.__module__, "names": sorted(name for name in globals() if name[:2] == "__"),
    }

if __name__ == "__main__":
    print(json.dumps(mirror(), sort_keys=True))
    sys.exit(int(sys.argv[-1]) if sys.argv[-1].isdigit() else "an end in words")
"""


def ran(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command, as a person would type it, in a folder."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, **options
    )


def run(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """``sightline run`` in a folder."""
    return ran(folder, "-m", "sightline", "run", *arguments, **options)


def test_a_training_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    alone, recorded = ran(tmp_path, str(SPIRALS)), run(tmp_path, str(SPIRALS))
    assert (recorded.returncode, recorded.stdout) == (0, alone.stdout)
    assert "weights " in alone.stdout
    assert "problems: none found" in recorded.stderr
    assert recorded.stderr.endswith("Look at it: sightline show train_spirals.sight\n")
    t = sl.load(tmp_path / "train_spirals.sight")
    assert t.validate().ops == len(t.ops) > 5000
    assert len(t.module_calls.where(module="head")) == 20
    outermost = {op.frame.chain[0].file for op in t.ops if op.frame is not None}
    assert outermost == {str(SPIRALS)}, "nothing of the command is above the script"


@pytest.mark.parametrize("end", ["0", "3", "words"])
def test_the_script_sees_what_it_would_see(tmp_path: Path, end: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "mirror.py").write_text(MIRROR)
    arguments = ["scripts/mirror.py", "--ops", "none", "-o", "mine", end]
    alone, recorded = ran(tmp_path, *arguments), run(tmp_path, "-q", *arguments)
    assert recorded.stdout == alone.stdout
    assert recorded.returncode == alone.returncode
    assert alone.stderr in recorded.stderr
    assert (tmp_path / "mirror.sight").is_dir()


def test_a_module_sees_what_it_would_see(tmp_path: Path) -> None:
    package = tmp_path / "tools" / "mirror"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(MIRROR)
    alone, recorded = (
        ran(tmp_path, "-m", "tools.mirror", "-x", "4"),
        run(tmp_path, "-o", "out.sight", "-m", "tools.mirror", "-x", "4"),
    )
    assert (recorded.returncode, recorded.stdout) == (4, alone.stdout)
    assert len(sl.load(tmp_path / "out.sight").ops.where(level="aten")) == 3


def test_an_exception_is_told_as_python_tells_it(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import torch\n\ndef f(x):\n    return x @ torch.ones(3)\n\n"
        "print('before', flush=True)\nf(torch.ones(2))\n"
    )
    alone, recorded = ran(tmp_path, "fails.py"), run(tmp_path, "fails.py")
    assert (recorded.returncode, recorded.stdout) == (alone.returncode, "before\n") == (1, "before\n")
    assert alone.stderr.startswith("Traceback (most recent call last):\n")
    assert alone.stderr in recorded.stderr, "the same traceback, and then the note"
    assert "fails.py:4" in recorded.stderr.split(alone.stderr)[1]
    t = sl.load(tmp_path / "fails.sight")
    assert t.ops[-1].raised
    assert "RuntimeError" in t.info["exception"]


def test_only_some_training_steps(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "1:3", "--capture", "head", "--stats", str(SPIRALS), "--steps", "5")
    assert done.returncode == 0
    t = sl.load(tmp_path / "train_spirals.sight")
    assert [step.name for step in t.steps] == ["step1", "step2"]
    assert sum(len(step.ops) for step in t.steps) >= len(t.ops) - 2
    assert [key.partition("/")[0] for key in t.tensors] == ["step1", "step2"]
    assert t.ops.where(name="addmm")[0].outputs[0].stats is not None
    assert {op.frame.chain[0].file for op in t.ops if op.frame is not None} == {str(SPIRALS)}


def test_a_nan_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text("import torch\nx = torch.ones(3) - 2\ny = x.log()\nprint('never')\n")
    done = run(tmp_path, "--check", "--last", "1000", "nan.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert "NonFiniteError: log made 3 NaN" in done.stderr
    assert "nan.py:3" in done.stderr
    assert len(sl.load(tmp_path / "nan.sight").ops.where(level="aten")) >= 3


def test_an_interrupt_ends_it_as_it_would_end(tmp_path: Path) -> None:
    script = "import torch, os, signal\ntorch.ones(2)\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')\n"
    (tmp_path / "stop.py").write_text(script)
    alone, done = ran(tmp_path, "stop.py"), run(tmp_path, "stop.py")
    assert done.returncode == alone.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr
    assert len(sl.load(tmp_path / "stop.sight").ops) >= 1


def test_a_script_with_processes_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(
        "import multiprocessing as mp, sys\n"
        "def double(x):\n    return 2 * x, 'torch' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [1, 2]))\n"
    )
    done = run(tmp_path, "pool.py")
    assert (done.returncode, done.stdout) == (0, "[(2, False), (4, False)]\n")


def test_what_is_not_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("x = (\n")
    told = CliRunner().invoke(main, ["run", "none.py"])
    assert told.exit_code == 1
    assert told.output == (
        "Error: There is no script 'none.py'; give the path of a Python file, or `-m` and a module.\n"
    )
    told = CliRunner().invoke(main, ["run", "-m", "no.such"])
    assert told.exit_code == 1
    assert told.output.startswith("Error: The module 'no.such' cannot be found: No module named 'no'")
    done = run(tmp_path, "bad.py")
    assert done.returncode == 1
    assert done.stderr == ran(tmp_path, "bad.py").stderr
    assert CliRunner().invoke(main, ["run"]).exit_code == 2


def test_a_recording_never_goes_over_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _place(None, "train", force=False) == Path("train.sight")
    Path("train.sight").mkdir()
    Path("train-2.sight").mkdir()
    assert _place(None, "train", force=False) == Path("train-3.sight")
    with pytest.raises(UsageError, match=r"train\.sight is there already; give another -o, or --force"):
        _place("train.sight", "train", force=False)
    with pytest.raises(UsageError, match=r"train\.sight is no recording and is not replaced"):
        _place("train.sight", "train", force=True)
    Path("train.sight", "rank0.db").touch()
    assert not _place("train.sight", "train", force=True).exists()


@pytest.mark.parametrize(
    ("text", "span"),
    [("3", range(3, 4)), ("0:5", range(5)), ("10:", range(10, sys.maxsize)), (":", range(sys.maxsize))],
)
def test_steps(text: str, span: range) -> None:
    assert span_of(text) == span


@pytest.mark.parametrize("text", ["x", "3:2", "-1", "1:1", "1:2:3", ""])
def test_steps_that_mean_nothing(text: str) -> None:
    if text:
        with pytest.raises(UsageError, match="--steps"):
            span_of(text)
    else:
        assert span_of(text) == range(1)
