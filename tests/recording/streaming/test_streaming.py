"""``path=``: what is written while the model runs is what a recording in memory holds."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import sightline as sl
from sightline.errors import CaptureError, UsageError
from sightline.recording.streaming import journal_file
from sightline.recording.streaming import writer as stream_writer
from sightline.store.reader import LoadedTrace
from tests.limits import measured
from tests.recording.engines import needs_native
from tests.recording.nets import Net
from tests.recording.streaming.streams import (
    TIMES,
    Awkward,
    awkward,
    both_ways,
    differences,
    session_of,
    train,
)

_MILLION = """
import torch, sightline as sl
x = torch.ones(4)
def record(count):
    with sl.trace(path=sys.argv[1], stats=sl.Stats(fingerprint=True), ops="aten"):
        for _ in range(count):
            x.mul_(1.0)
def check(count):
    t = sl.load(sys.argv[1])
    assert t.validate().ops == len(t.ops) == count
    assert t.info["faults"] == []
    last = t.ops[-1].outputs[0].stats
    assert (last.min, last.max, last.mean) == (1.0, 1.0, 1.0)
attempt("imported", lambda: None)
attempt("recorded", lambda: record(1_000_000))
attempt("read", lambda: check(1_000_000))
"""


@pytest.mark.slow
@needs_native
def test_a_million_ops_with_statistics_take_little_memory(tmp_path: Path) -> None:
    """A recording that is not streamed takes 1.5 GB here when it is read."""
    found = measured(_MILLION, str(tmp_path / "run.sight"), limit=16 << 30, seconds=150)
    assert [text for text, _ in found.values()] == [""] * 3
    peaks = {name: peak - found["imported"][1] for name, (_, peak) in found.items()}
    assert peaks["recorded"] < 600
    assert peaks["read"] < 700


#: Sums depend on where a tensor lies in memory, and so do the storages of what was not made by an op.
LOOSE = {"mean", "std", "l2", "fingerprint", "storage", "storages"}

VIEWS: dict[str, Callable[[sl.Trace], Any]] = {
    "code": lambda t: t.code(),
    "log": lambda t: t.log(),
    "call_order": lambda t: t.call_order(),
    "graph": lambda t: t.graph(level="api").to_mermaid(),
}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches as small as they can be."""
    monkeypatch.setattr(stream_writer, "SECONDS", 0.001)


@pytest.fixture
def flaky_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk that is full while the list is not empty; the list counts the writes it refused."""
    refused: list[int] = []
    write = journal_file._write_all

    def full(file: int, data: bytes, at: int) -> None:
        if refused:
            refused.append(len(data))
            os.pwrite(file, data[: len(data) // 2], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data, at)

    monkeypatch.setattr(journal_file, "_write_all", full)
    return refused


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"ops": "aten", "stats": True}, {"stats": True, "check": "nonfinite"}, {"ops": "api"},
        {"ops": "none"}, {"capture": True},
    ],
)  # fmt: skip
@pytest.mark.usefixtures("often")
def test_a_streamed_recording_says_what_one_in_memory_says(tmp_path: Path, asked: dict[str, Any]) -> None:
    inside, streamed = both_ways(awkward, asked, path=tmp_path / "run.sight")
    assert isinstance(streamed.data, LoadedTrace)
    assert differences(inside.data, streamed.data, TIMES | LOOSE) == []
    assert inside.info.keys() == streamed.info.keys()
    for name, view in VIEWS.items() if len(inside.ops) and "stats" not in asked else ():
        if name != "graph" or asked.get("ops") in (None, "api"):
            assert str(view(streamed)) == str(view(inside)), name
    loaded = sl.load(tmp_path / "run.sight")
    assert str(loaded.call_order()) == str(inside.call_order())
    for key in inside.tensors if "capture" in asked else ():
        assert (inside.tensors[key].numpy() == loaded.tensors[key].numpy()).all()
    beside = {"rank0.db", "tensors"} if "capture" in asked else {"rank0.db"}
    assert set(os.listdir(tmp_path / "run.sight")) == beside


def test_a_bundle_that_was_streamed_is_the_one_that_save_writes(tmp_path: Path) -> None:
    model = Awkward()
    with sl.trace(model, path=tmp_path / "run.sight") as t:
        train(model, 2)
    t.save(tmp_path / "again.sight")
    again = sl.load(tmp_path / "again.sight")
    assert differences(t.data, again.data, set()) == []
    assert isinstance(again.data, LoadedTrace)
    assert isinstance(t.data, LoadedTrace)
    assert dict(again.data.sources) == dict(t.data.sources)


@pytest.mark.usefixtures("often")
def test_inside_the_block_it_is_a_snapshot(tmp_path: Path) -> None:
    model = Awkward()
    seen: list[tuple[int, bool]] = []

    def look(*_: Any) -> None:
        seen.append((len(t.ops), t.module_calls[0].unfinished))
        t.validate()

    handle = model.norm.register_forward_hook(look)
    with sl.trace(model, path=tmp_path / "run.sight") as t:
        model(torch.randn(5, 8))
        before = len(t.ops)
        first = t.data
        model(torch.randn(5, 8))
        assert len(t.ops) > before == len(first.ops)
    handle.remove()
    assert seen[0][1]
    assert 0 < seen[0][0] < before < seen[1][0]


@pytest.mark.usefixtures("often")
def test_threads_and_overlapping_recordings(tmp_path: Path) -> None:
    model = Awkward().eval()

    def work(name: str) -> None:
        with sl.trace(model, path=tmp_path / f"{name}.sight"):
            for _ in range(5):
                model(torch.randn(5, 8)).backward()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, two = sl.load(tmp_path / "one.sight"), sl.load(tmp_path / "two.sight")
    assert one.validate().calls == two.validate().calls == 20
    assert len(one.ops.where(phase="backward")) > 0


@pytest.mark.usefixtures("often")
def test_compiled_regions(tmp_path: Path) -> None:
    net = Net()
    compiled = torch.compile(net, backend="aot_eager")

    def work() -> None:
        for _ in range(3):
            hidden = compiled(torch.ones(2, 4))
            time.sleep(0.005)  # what came out is noticed in a later batch
            (hidden * 2).sum().backward()

    both_ways(lambda: (net, work), {})
    inside, streamed = both_ways(lambda: (net, work), {}, path=tmp_path / "run.sight")
    assert len(streamed.ops.where(flavour="opaque")) >= 3
    assert all(op.outputs for op in streamed.ops.where(flavour="opaque") if "backward" not in op.name)
    assert differences(inside.data, streamed.data, TIMES | LOOSE) == []


@pytest.fixture(scope="module")
def transformer() -> Any:
    """A tiny one; transformers leaves a name of its own in torch when the first one is made."""
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.usefixtures("often")
def test_a_transformer(tmp_path: Path, transformer: Any) -> None:
    def make() -> Any:
        tokens = torch.randint(0, 32, (2, 8))
        transformer.zero_grad()

        def work() -> None:
            transformer(tokens, labels=tokens).loss.backward()

        return transformer, work

    both_ways(make, {})
    inside, streamed = both_ways(make, {}, path=tmp_path / "run.sight")
    assert differences(inside.data, streamed.data, TIMES | LOOSE) == []
    assert str(inside.call_order()) == str(streamed.call_order())


def test_an_exception_is_in_the_bundle_and_gains_its_note(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        with sl.trace(path=tmp_path / "run.sight"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    assert "failed at" in caught.value.__notes__[0]
    loaded = sl.load(tmp_path / "run.sight")
    assert "shapes cannot be multiplied" in loaded.info["exception"]
    assert loaded.ops[-1].raised


def test_a_nonfinite_stops_the_run_and_is_in_the_bundle(tmp_path: Path) -> None:
    checked = sl.trace(check="nonfinite", path=tmp_path / "run.sight")
    with pytest.raises(sl.NonFiniteError, match="log made 2 NaN"), checked:
        torch.tensor([-1.0, 1.0]).exp().neg().log()
    loaded = sl.load(tmp_path / "run.sight")
    assert "log made 2 NaN of 2" in str(loaded.nonfinite())
    assert loaded.info["exception"].startswith("NonFiniteError")


@pytest.mark.usefixtures("often")
def test_the_session_does_not_grow(tmp_path: Path) -> None:
    model = Awkward()
    trace = sl.trace(model, path=tmp_path / "run.sight")
    trace.start()
    session = session_of(trace)
    train(model, 2)
    sizes = []
    for _ in range(3):
        train(model, 5, torch.optim.SGD)
        session.stream_writer.flush()
        values = session.values
        tables = (values.names, values.kinds, values.storage_bytes, session.steps, session.regions)
        streams = (session.ops, values.fresh, values.stream)
        sizes.append((*map(len, tables), *(len(stream.numbers()) for stream in streams)))
    t = trace.stop()
    assert sizes[1][:3] == sizes[2][:3]  # the tensors there are, and no others
    assert all(size[3:] == (0,) * 5 for size in sizes)
    assert len(t.steps) == 17


# -- what can go wrong ---------------------------------------------------------------------------------------


def test_a_second_recording_needs_another_name(tmp_path: Path) -> None:
    trace = sl.trace(path=tmp_path / "run.sight")
    with trace:
        torch.ones(2).relu()
    with pytest.raises(
        UsageError,
        match="already holds a recording: give path= another name, or path=sl",
    ):
        trace.start()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"other things in it, such as 'notes.txt'; give path= a new one"):
        sl.trace(path=tmp_path / "other").start()
    with pytest.raises(UsageError, match="is a file; a recording is written to a folder"):
        sl.trace(path=tmp_path / "other" / "notes.txt").start()
    with pytest.raises(CaptureError, match=r"No recording can be written to .*: Not a directory; give path="):
        sl.trace(path=tmp_path / "other" / "notes.txt" / "run.sight").start()
    assert sorted(os.listdir(tmp_path)) == ["other", "run.sight"]


def test_a_path_or_a_name_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"^path=3 must be a path, or sl\.Bundle\(…\)\.$"):
        sl.trace(path=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^name=a Tensor must be a string\.$"):
        sl.trace(name=torch.ones(99))  # type: ignore[arg-type]


def test_of_many_that_claim_a_folder_one_gets_it(tmp_path: Path) -> None:
    won: list[int] = []
    lost: list[str] = []
    ready = threading.Barrier(8)

    def want(folder: Path) -> None:
        ready.wait()
        try:
            won.append(journal_file.claim(folder))
        except UsageError as error:
            lost.append(str(error))

    for number in range(20):
        threads = [threading.Thread(target=want, args=(tmp_path / f"{number}",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(won), len(lost)) == (20, 140)
    assert all("is where another recording begins: give path= another name" in text for text in lost)
    for file in won:
        os.close(file)


def test_one_that_begins_after_we_looked_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def late(path: Path, *flags: int) -> int:
        (tmp_path / "rank0.journal").write_bytes(b"another's")
        return opened(path, *flags)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(UsageError, match="holds a recording that is running"):
        journal_file.claim(tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.journal"]
    assert (tmp_path / "rank0.journal").read_bytes() == b"another's"


def test_a_block_that_goes_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    model = torch.nn.ReLU()
    with sl.trace(model, path="run.sight", capture=True) as t:
        os.chdir("elsewhere")
        model(torch.ones(2))
    assert t.tensors["ReLU"][0].numpy().tolist() == [1, 1]
    assert len(sl.load(tmp_path / "run.sight").tensors) == 1
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.faults
@pytest.mark.parametrize("more", [{}, {"last": 100}])
def test_a_folder_that_is_removed_costs_only_the_bundle(tmp_path: Path, more: dict[str, Any]) -> None:
    with sl.trace(path=tmp_path / "run.sight", **more) as t:
        torch.ones(2).relu()
        assert len(t.ops) == 4
        shutil.rmtree(tmp_path / "run.sight")
        torch.ones(2).exp()
        assert len(t.ops) == 8
    assert [op.name for op in t.ops.where(level="aten")] == ["ones", "relu", "ones", "exp"]
    assert "run.sight was removed while it was written to; nothing of it is on disk." in t.info["faults"][-1]
    assert os.listdir(tmp_path) == []


def test_an_exception_without_a_text_is_its_name() -> None:
    with pytest.raises(KeyboardInterrupt), sl.trace() as t:
        raise KeyboardInterrupt
    assert t.info["exception"] == "KeyboardInterrupt"


def test_what_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises((UsageError, CaptureError), match="cannot be used here"):
        sl.trace(path=tmp_path / "run.sight", capture=sl.Capture(device="nowhere")).start()
    assert os.listdir(tmp_path) == []


def trained_while(disk: list[int], full: range) -> Callable[[], Any]:
    """A training in which the disk is full for some of the calls of the model."""

    def make() -> Any:
        model, work = awkward()
        disk.clear()
        calls = itertools.count()

        def called(*_: Any) -> None:
            number = next(calls)
            if number == full.start:
                time.sleep(0.1)  # what came before is written
            if number in full:
                disk.append(0)
            else:
                disk.clear()

        model.register_forward_pre_hook(called)
        return model, work

    return make


@pytest.mark.faults
@pytest.mark.usefixtures("often")
def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, flaky_disk: list[int]) -> None:
    make = trained_while(flaky_disk, range(2, 100))
    inside, streamed = both_ways(make, {}, path=tmp_path / "run.sight")
    assert len(flaky_disk) > 1
    assert differences(inside.data, streamed.data, TIMES | LOOSE) == []
    assert "No space left on device" in streamed.info["faults"][-1]
    assert "rank0.journal stays" in streamed.info["faults"][-1]
    begun = sl.load(tmp_path / "run.sight")
    assert 0 < len(begun.ops) <= len(streamed.ops)
    begun.validate()


@pytest.mark.faults
@pytest.mark.usefixtures("often")
def test_a_disk_that_has_room_again_gets_everything(tmp_path: Path, flaky_disk: list[int]) -> None:
    make = trained_while(flaky_disk, range(1, 3))
    inside, streamed = both_ways(make, {}, path=tmp_path / "run.sight")
    assert isinstance(streamed.data, LoadedTrace)
    assert differences(inside.data, streamed.data, TIMES | LOOSE) == []


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    model = Awkward()
    with sl.trace(model, path=tmp_path / "run.sight") as t:
        model(torch.randn(5, 8))
        t._source()
        size = (tmp_path / "run.sight" / "rank0.journal").stat().st_size
        child = os.fork()
        if child == 0:
            try:
                model(torch.randn(5, 8))
                assert len(t.ops) > 0
                time.sleep(2 * stream_writer.SECONDS)
                same = (tmp_path / "run.sight" / "rank0.journal").stat().st_size == size
                os._exit(0 if same else 3)
            except BaseException:  # noqa: BLE001  # a child must never come back into pytest
                os._exit(4)
        assert os.waitpid(child, 0)[1] == 0
        model(torch.randn(5, 8))
    assert len(t.module_calls) == 8


def test_what_still_runs_at_the_end_is_finished(tmp_path: Path) -> None:
    script = """
        import sys, torch, sightline as sl
        trace = sl.trace(path=sys.argv[1])
        trace.start()
        torch.ones(3).relu()
        raise SystemExit(5)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run.sight")], check=False
    )
    assert run.returncode == 5
    assert os.listdir(tmp_path / "run.sight") == ["rank0.db"]
    assert [op.name for op in sl.load(tmp_path / "run.sight").ops.where(level="aten")] == ["ones", "relu"]
