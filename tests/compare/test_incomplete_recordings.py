"""Recordings that lack something: of other models, without statistics, cut off, damaged, of another format.

Each case goes through ``sl.diff`` and through ``sightline diff``: a sentence names the parts that can
still be compared, and these are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.store.bundle_schema import ADDED
from sightline.store.journal import HEAD
from tests.cli.recorded import invoke
from tests.store.bundles import altered

_FACTOR = "factor 1.5 against 2.5"


class Net(nn.Module):
    def __init__(self, factor: float = 1.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.factor
        return x


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.convolution(x.view(1, 4, 8))
        return convolved.sigmoid().softmax(-1).cumsum(1)


def recorded(path: Path, model: nn.Module, **options: object) -> Path:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, 8)
    with sl.trace(model, **{"stats": True, **options}) as trace:  # type: ignore[arg-type]
        model(x)
    trace.save(path)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a`` and ``b`` have another factor; ``kept_a`` and ``kept_b`` are the same with their tensors."""
    folder = tmp_path_factory.mktemp("runs")
    for name, factor in (("a", 1.5), ("b", 2.5)):
        recorded(folder / f"{name}.sight", Net(factor))
        recorded(folder / f"kept_{name}.sight", Net(factor), capture=True)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of ``b`` by a process that was killed once a whole call was on disk."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "killed.py").write_text(
        "import contextlib, os, pathlib, signal, torch, sightline as sl\n"
        "from sightline.store.journal import Journal\n"
        "from tests.compare.test_incomplete_recordings import Net\n"
        "model = Net(2.5)\n"
        "torch.manual_seed(0)\n"
        "for parameter in model.parameters():\n"
        "    torch.nn.init.normal_(parameter)\n"
        "x = torch.randn(4, 8)\n"
        f"path = pathlib.Path({str(folder / 'killed.sight')!r})\n"
        "def batches():\n"
        "    with contextlib.closing(Journal(path / 'rank0.journal')) as journal:\n"
        "        return len(journal)\n"
        "with sl.trace(model, stats=True, path=path):\n"
        "    model(x)\n"
        "    before = batches()\n"
        "    while batches() < before + 2:\n"  # the second was begun after the first call had ended
        "        model(x)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, str(folder / "killed.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode < 0, ran.stderr
    return folder / "killed.sight"


def end_of_first_frame(journal: Path) -> int:
    """A frame is a mark, the length of its content, two more numbers, and its content."""
    (length,) = struct.unpack_from("<I", journal.read_bytes(), len(HEAD) + 4)
    return len(HEAD) + 16 + int(length)


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy.sight"))


def both(a: Path, b: Path, code: int = 3) -> tuple[sl.Diff, str]:
    """The comparison from Python and the output of the command; its exit code in CI must be this."""
    ran = invoke("diff", a, b, "--fail-on", "divergence")
    assert ran.exit_code == code, ran.output
    return sl.diff(a, b), " ".join(ran.output.split())


def refused(a: Path, b: Path) -> str:
    """The one sentence about a recording that cannot be opened, the same from both."""
    with pytest.raises(sl.SightlineError) as caught:
        sl.diff(a, b)
    ran = invoke("diff", a, b, "--fail-on", "divergence")
    assert ran.exit_code == 1  # not 3: nothing is known about a divergence
    assert " ".join(str(caught.value).split()) in " ".join(ran.output.split())
    return str(caught.value)


def test_different_models(runs: Path, tmp_path: Path) -> None:
    diff, printed = both(runs / "a.sight", recorded(tmp_path / "other.sight", Other()))
    sentence = "these look like different models: 0 of 9 ops have a partner; only their weights are compared"
    assert sentence in diff.notes
    assert f"verdict {sentence}" in printed
    assert diff.verdict == "different"
    assert "6 only in a, 2 only in b" in printed


def test_without_statistics(runs: Path, tmp_path: Path) -> None:
    plain = recorded(tmp_path / "plain.sight", Net(2.5), stats=None)
    diff, printed = both(runs / "a.sight", plain)
    assert diff.notes == [
        (
            "b has no statistics or kept tensors: ops, constants and shapes are compared, values are not; "
            "record both with stats=True"
        )
    ]
    assert f"{_FACTOR}; values were not compared" in printed
    same = recorded(tmp_path / "same.sight", Net(), stats=None)
    diff, printed = both(runs / "a.sight", same, code=0)
    assert diff.verdict == "unknown"
    assert "no values could be compared" in printed
    assert invoke("diff", runs / "a.sight", same, "--fail-on", "unknown").exit_code == 3


def test_without_ops(runs: Path, tmp_path: Path) -> None:
    calls = recorded(tmp_path / "calls.sight", Net(2.5), ops="none", stats=None)
    diff, printed = both(runs / "a.sight", calls, code=0)
    assert diff.notes == [
        'only module calls are compared: b has no ops (ops="none")',
        (
            "b has no statistics or kept tensors: module calls and shapes are compared, values are not; "
            "record both with stats=True"
        ),
    ]
    assert "4 module calls" in printed


def test_a_killed_process(runs: Path, killed: Path) -> None:
    diff, printed = both(runs / "a.sight", killed)
    assert diff.notes == ["b is cut off: the part written before its process ended is compared"]
    assert _FACTOR in printed
    assert diff.notes[0] in printed


def test_a_journal_whose_end_is_missing(runs: Path, killed: Path, tmp_path: Path) -> None:
    journal = copied(killed, tmp_path) / "rank0.journal"
    os.truncate(journal, end_of_first_frame(journal) + 50)
    diff, _ = both(runs / "a.sight", journal.parent, code=0)
    assert diff.verdict == "unknown"
    assert diff.notes == ["only parameters are compared: b was cut off before its first ops were written"]
    os.truncate(journal, 100)
    assert refused(runs / "a.sight", journal.parent).endswith(
        "its process ended before anything was written; nothing of b can be compared."
    )


def test_a_file_that_was_cut_short(runs: Path, tmp_path: Path) -> None:
    database = copied(runs / "b.sight", tmp_path) / "rank0.db"
    os.truncate(database, database.stat().st_size // 2)
    assert refused(runs / "a.sight", database.parent).endswith(
        "it was cut short or altered; nothing of b can be compared."
    )
    assert "nothing of a can be compared." in refused(database.parent, runs / "a.sight")


def overwritten(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def test_a_newer_format(runs: Path, killed: Path, tmp_path: Path) -> None:
    database = copied(runs / "b.sight", tmp_path) / "rank0.db"
    overwritten(database, 60, struct.pack(">I", 2))
    assert refused(runs / "a.sight", database.parent) == (
        f"{database} was written by a newer sightline (format 2; this one reads up to 1): "
        "update sightline to open it; nothing of b can be compared."
    )
    shutil.rmtree(database.parent)
    journal = copied(killed, tmp_path) / "rank0.journal"
    overwritten(journal, 8, struct.pack("<I", 2))
    assert "update sightline to open it; nothing of b can be compared." in refused(
        runs / "a.sight", journal.parent
    )


def test_a_bundle_of_an_earlier_version(runs: Path, tmp_path: Path) -> None:
    copy = copied(runs / "b.sight", tmp_path)
    connection = sqlite3.connect(copy / "rank0.db")
    ((text,),) = connection.execute("SELECT data FROM facts WHERE name = 'counts'")
    connection.close()
    counts = {name: count for name, count in json.loads(text).items() if name not in ADDED}
    for name in ADDED:
        altered(copy, f"DELETE FROM chunks WHERE kind = '{name}'")
    altered(copy, "UPDATE facts SET data = ? WHERE name = 'counts'", values=(json.dumps(counts),))
    diff, printed = both(runs / "a.sight", copy)
    assert diff.notes == []
    assert _FACTOR in printed


def damaged_statistics(copy: Path) -> str:
    connection = sqlite3.connect(copy / "rank0.db")
    connection.execute("UPDATE chunks SET data = x'00' || substr(data, 2) WHERE kind = 'stats'")
    connection.commit()
    connection.close()
    return "the statistics of b are left out, as they cannot be read: "


def missing_tensors(copy: Path) -> str:
    shutil.rmtree(copy / "tensors")
    return "not all kept tensors of b can be read, their statistics are compared: "


def cut_tensors(copy: Path) -> str:
    for file in (copy / "tensors").iterdir():
        os.truncate(file, file.stat().st_size - 64)
    return "not all kept tensors of b can be read, their statistics are compared: "


@pytest.mark.parametrize("damage", [damaged_statistics, missing_tensors, cut_tensors])
def test_damaged_parts_are_left_out(runs: Path, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    copy = copied(runs / "kept_b.sight", tmp_path)
    sentence = damage(copy)
    diff, printed = both(runs / "kept_a.sight", copy)
    str(diff)
    assert any(note.startswith(sentence) for note in diff.notes)
    assert sentence.strip() in printed
    assert _FACTOR in printed


def test_statistics_alone_that_are_damaged(runs: Path, tmp_path: Path) -> None:
    copy = copied(runs / "b.sight", tmp_path)
    damaged_statistics(copy)
    diff, printed = both(runs / "a.sight", copy)
    assert diff.notes[1:] == [
        "b has no statistics or kept tensors: ops, constants and shapes are compared, values are not"
    ]
    assert f"{_FACTOR}; values were not compared" in printed
