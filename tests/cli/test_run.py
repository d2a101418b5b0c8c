"""``sightline run``: the script's run is its own, and the recording is beside it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import sightline as sl
from sightline.cli import main
from sightline.cli.run import _make_folder
from sightline.cli.step_range import parse_steps
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
    before, after = recorded.stderr.split(alone.stderr)
    assert before == "", "the traceback comes first"
    note, overview = after.split("\n\n", 1)
    assert note.startswith("sightline: dot failed at fails.py:4 in f, inside @\n")
    assert overview.startswith("trace fails  torch ")
    assert overview.count("\n") <= 25
    assert overview.endswith("Look at it: sightline show fails.sight --tail 20\n")
    t = sl.load(tmp_path / "fails.sight")
    assert t.ops[-1].raised
    assert "RuntimeError" in t.info["exception"]


@pytest.mark.parametrize("columns", ["60", "100", "200"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_last_screen_has_at_most_25_lines(tmp_path: Path, columns: str, fails: bool) -> None:
    script = SPIRALS.read_text() + ("\ntorch.ones(2) @ torch.ones(3)\n" if fails else "")
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, "train.py", "--steps", "5", env={**os.environ, "COLUMNS": columns})
    assert done.returncode == fails
    screen = done.stderr[done.stderr.index("\ntrace train ") :]
    assert screen.count("\n") <= 25, screen
    assert "\nproblems: " in screen
    assert "Look at it: sightline show train.sight" in screen


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
    assert "sightline: processes that the script has spawned are not recorded; in the function" in done.stderr


def test_what_is_not_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("x = (\n")
    result = CliRunner().invoke(main, ["run", "none.py"])
    assert result.exit_code == 1
    assert result.output == (
        "Error: There is no script 'none.py'; give the path of a Python file, or `-m` and a module.\n"
    )
    result = CliRunner().invoke(main, ["run", "-m", "no.such"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: The module 'no.such' cannot be found: No module named 'no'")
    done = run(tmp_path, "bad.py")
    assert done.returncode == 1
    assert done.stderr == ran(tmp_path, "bad.py").stderr
    assert CliRunner().invoke(main, ["run"]).exit_code == 2


def test_a_recording_never_goes_over_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(_make_folder(None, "train", force=False)) for _ in range(3)] == [
        "train.sight", "train-2.sight", "train-3.sight",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"train\.sight is there already; give another -o, or --force"):
        _make_folder("train.sight", "train", force=False)
    with pytest.raises(UsageError, match=r"train\.sight is no recording and is not replaced"):
        _make_folder("train.sight", "train", force=True)
    Path("train.sight", "rank0.journal").touch()
    with pytest.raises(UsageError, match=r"train\.sight is still being recorded, or its process was killed"):
        _make_folder("train.sight", "train", force=True)
    Path("train.sight", "rank0.journal").rename(Path("train.sight", "rank0.db"))
    assert not os.listdir(_make_folder("train.sight", "train", force=True))
    Path("notes").touch()
    with pytest.raises(UsageError, match=r"written to notes/x\.sight: Not a directory; say where with -o\."):
        _make_folder("notes/x.sight", "train", force=False)


def test_runs_at_the_same_time_have_recordings_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "opt.py").write_text("import torch\ntorch.ones(2).relu()\nprint('done')\n")
    calls = [[], [], ["-o", "same.sight"], ["-o", "same.sight"]]
    command = [sys.executable, "-m", "sightline", "run", "-q"]
    started = [
        subprocess.Popen([*command, *options, "opt.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE) for options in calls
    ]  # fmt: skip
    written = [process.communicate() for process in started]
    assert [process.returncode for process in started[:2]] == [0, 0]
    assert sorted(process.returncode for process in started[2:]) == [0, 1]
    assert [out for out, _ in written].count("done\n") == 3
    refused = next(err for process, (_, err) in zip(started, written, strict=True) if process.returncode)
    assert refused == "Error: same.sight is there already; give another -o, or --force to replace it.\n"
    for name in ("opt", "opt-2", "same"):
        assert sl.load(tmp_path / f"{name}.sight").validate().ops == 4


def test_a_script_that_goes_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "cd.py").write_text("import os, torch\nos.chdir('/')\ntorch.ones(2)\nprint('out')\nexit(7)\n")
    done = run(tmp_path, "-q", "cd.py")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr.endswith("Look at it: sightline show cd.sight\n")
    assert sl.load(tmp_path / "cd.sight").validate().ops == 2


@pytest.mark.parametrize("options", [["-q"], [], ["-q", "--last", "9"], ["-q", "--capture", "**"]])
def test_a_script_that_removes_the_recording(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "gone.py").write_text(
        "import shutil, torch\ntorch.nn.ReLU()(torch.ones(2))\nshutil.rmtree('gone.sight')\n"
        "torch.ones(2)\nprint('out')\nraise SystemExit(3)\n"
    )
    done = run(tmp_path, *options, "gone.py")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert done.stderr == (
        f"sightline: No bundle was made: {tmp_path / 'gone.sight'} was removed while it was written to; "
        "nothing of it is on disk.\n"
    )
    assert os.listdir(tmp_path) == ["gone.py"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('never')\n")
    done = run(Path("/proc"), str(tmp_path / "script.py"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: No recording can be written to script.sight: ")
    assert done.stderr.endswith("; say where with -o.\n")
    assert done.stderr.count("\n") == 1


def test_a_forked_child_reports_nothing(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(
        "import os, sys, torch\ntorch.ones(2)\nif os.fork() == 0:\n    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    for options in ([], ["--steps", "1:2"]):
        done = run(tmp_path, "-q", *options, "fork.py")
        assert (done.returncode, done.stdout) == (0, "5\n")
        assert done.stderr.count("sightline: ") == 1
    assert sorted(os.listdir(tmp_path)) == ["fork.py", "fork.sight"], "no step was taken: no folder is left"


def test_options_before_the_script_are_ours(tmp_path: Path) -> None:
    (tmp_path / "mirror.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = run(tmp_path, "-q", "--statts", "mirror.py")
    assert done.returncode == 2
    assert "No such option '--statts'" in done.stderr
    assert "'--stats'" in done.stderr
    done = run(tmp_path, "-q", "mirror.py", "--statts", "--", "-q", "--help")
    assert done.stdout == "['--statts', '--', '-q', '--help']\n"
    done = run(tmp_path, "--module", "fc", "mirror.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: --module chooses where statistics are taken: give --stats with it." in done.stderr


def test_a_glob_that_matched_nothing_is_told_even_to_the_quiet(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import sys, torch\n"
        "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.attn = torch.nn.Linear(2, 2)\n    def forward(self, x):\n        return self.attn(x)\n"
        "Net()(torch.ones(1, 2))\nsys.exit(0)\n"
    )
    options = ["--capture", "atn", "--stats", "--module", "atn"]
    quiet, loud = run(tmp_path, "-q", *options, "net.py"), run(tmp_path, *options, "net.py")
    for option in ("--capture", "--module"):
        assert f"sightline: {option} 'atn' matched nothing; near: attn.\n" in quiet.stderr
        assert f"{option} 'atn' matched nothing; near: attn\n" in loud.stderr
    assert "raised" not in loud.stderr, "sys.exit(0) is no failure"


def test_a_folder_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "__main__.py").write_text(MIRROR)
    alone, recorded = ran(tmp_path, "pk", "4"), run(tmp_path, "-q", "pk", "4")
    assert (recorded.returncode, recorded.stdout) == (4, alone.stdout)
    assert '"package": ""' in alone.stdout
    assert recorded.stderr.endswith("Look at it: sightline show pk.sight\n")


def test_a_second_interrupt_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop.py").write_text(
        "import torch\ntorch.ones(2)\ndef f():\n    raise KeyboardInterrupt\nf()\n"
    )
    program = (
        "import sightline.cli.run as run\nfrom sightline.cli import main\n"
        "def interrupted(*_):\n    raise KeyboardInterrupt\n"
        "{place} = interrupted\nmain(['run', 'stop.py'], prog_name='sightline')\n"
    )
    for place in ("run._print_report", "run.sys.stdout.flush", "import_finish().finish"):
        text = program.format(place=place).replace(
            "import_finish()",
            "__import__('sightline.recording.streaming.writer', fromlist=['x']).StreamWriter",
        )
        done = ran(tmp_path, "-c", text)
        assert done.returncode == -signal.SIGINT
        assert "interrupted" in done.stderr
        assert 'stop.py", line 5, in <module>\n' in done.stderr
        assert "sightline/cli" not in done.stderr


def test_names_are_quoted_for_the_shell(tmp_path: Path) -> None:
    (tmp_path / "my script é.py").write_text(
        "import torch\nwith torch.no_grad():\n    torch.ones(2).relu()\n"
    )
    done = run(tmp_path, "--no-stats", "my script é.py")
    assert done.stderr.endswith("Look at it: sightline show 'my script é.sight'\n")
    assert "sightline run --stats finds NaN" in done.stderr
    assert not re.search(r"\bt\.\w+\(|stats=|path=|sl\.", done.stderr)


@pytest.mark.parametrize(
    ("text", "span"),
    [("3", range(3, 4)), ("0:5", range(5)), ("10:", range(10, sys.maxsize)), (":", range(sys.maxsize))],
)
def test_steps(text: str, span: range) -> None:
    assert parse_steps(text) == span


@pytest.mark.parametrize("text", ["x", "3:2", "-1", "1:1", "1:2:3", ""])
def test_steps_that_mean_nothing(text: str) -> None:
    if text:
        with pytest.raises(UsageError, match="--steps"):
            parse_steps(text)
    else:
        assert parse_steps(text) == range(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_device_time_without_a_device(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("print('it ran')")
    done = run(tmp_path, "--time", "device", "net.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "Error: --time device reads the times of a CUDA device, and torch sees none here: leave it out, or "
        "record where torch.cuda.is_available().\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.py"]
