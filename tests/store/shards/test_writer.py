"""Writing in the background: all that was put is there, nothing half-written, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.data.trace_data import CaptureInfo
from sightline.errors import CaptureError, UsageError
from sightline.store.shards import shard_file
from sightline.store.shards.stores import ShardStore
from sightline.store.shards.writer import ShardWriter
from tests.store.shards.captured import capture, put, some_bytes, written

ROOT = Path(__file__).parent.parent.parent
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


# When


def test_the_data_are_asked_for_in_the_thread_of_the_writer(tmp_path: Path) -> None:
    threads = []

    def data() -> Any:
        threads.append(threading.current_thread().name)
        return np.zeros(8, dtype=np.uint8)

    with ShardWriter(tmp_path) as writer:
        put(writer, capture(), data)
    assert threads == ["sightline-writer"]


def test_shards_are_closed_when_full(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, shard_bytes=100) as writer:
        for index in range(10):
            put(writer, capture(f"m{index}", shape=(10,)))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_a_header_that_is_full_begins_the_next_shard_and_the_next_header_is_larger(tmp_path: Path) -> None:
    infos = [capture("m" * 50, call=index) for index in range(3000)]
    written(tmp_path, *infos)
    assert ShardStore(tmp_path).captures() == infos
    assert 4 <= len(list(tmp_path.glob("*.safetensors"))) <= 16
    huge = capture("n" * 100_000)
    assert ShardStore(written(tmp_path / "huge", huge)).captures() == [huge]


def test_a_shard_is_closed_when_it_is_old_even_if_nothing_comes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        put(writer, capture())
        wait_until(lambda: bool(list(tmp_path.glob("*.safetensors"))))
        assert ShardStore(tmp_path).captures() == [capture()]


def test_flush_waits_until_all_can_be_read(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.flush()
        put(writer, capture("a"))
        put(writer, capture("b", dtype="int64"))
        writer.flush()
        assert len(ShardStore(tmp_path).captures()) == 2
        put(writer, capture("c"))
        assert writer.nbytes >= 24
    writer.flush()
    assert len(ShardStore(tmp_path).captures()) == 3
    assert writer.nbytes == 32


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> None:
    write = shard_file.write_all

    def slow(file: Any, view: memoryview) -> None:
        time.sleep(seconds)
        write(file, view)

    monkeypatch.setattr(shard_file, "write_all", slow)


def test_what_waits_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    alive = peak = 0
    lock = threading.Lock()

    class Watched(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1000

    with ShardWriter(tmp_path, queue_bytes=5000) as writer:
        for index in range(40):
            data = Watched((1000,), np.uint8)
            with lock:
                alive += 1000
                peak = max(peak, alive)
            put(writer, capture(f"m{index}", shape=(250,)), data)
            del data
    assert peak <= 5000 + 1000  # and the one that is being handed over
    assert len(ShardStore(tmp_path).captures()) == 40


def test_a_tensor_larger_than_the_bound_goes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    infos = [capture("small"), capture("large", shape=(5000,)), capture("last")]
    with ShardWriter(tmp_path, queue_bytes=100) as writer:
        for info in infos:
            put(writer, info)
            assert writer._worker._unwritten <= max(100, 4 * info.shape[0])
    assert ShardStore(tmp_path).captures() == infos


def test_many_threads_may_put(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, queue_bytes=64) as writer:

        def puts(module: str) -> None:
            for call in range(50):
                put(writer, capture(module, call=call))

        threads = [threading.Thread(target=puts, args=(f"m{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ShardStore(tmp_path).captures()) == 200


# The end


def test_a_closed_writer_says_so_and_may_be_closed_again(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    put(writer, capture())
    writer.close()
    writer.close()
    with pytest.raises(
        CaptureError, match=r"^The writer of .* is closed: no more tensors can be put into it\.$"
    ):
        put(writer, capture("b"))
    assert not [thread for thread in threading.enumerate() if thread.name == "sightline-writer"]


def test_a_writer_that_got_nothing_leaves_nothing(tmp_path: Path) -> None:
    ShardWriter(tmp_path / "t").close()
    assert list((tmp_path / "t").iterdir()) == []


def test_a_forgotten_writer_is_closed_when_it_is_collected(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    put(writer, capture())
    del writer
    gc.collect()
    assert ShardStore(tmp_path).captures() == [capture()]


def run(script: str, folder: Path) -> subprocess.Popen[str]:
    head = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
from pathlib import Path
from sightline.store.shards.writer import ShardWriter
from tests.store.shards.captured import capture, put
folder = Path({str(folder)!r})
"""
    return subprocess.Popen([sys.executable, "-c", head + script], stdout=subprocess.PIPE, text=True)


def test_a_forgotten_writer_is_closed_when_the_interpreter_exits(tmp_path: Path) -> None:
    script = "writer = ShardWriter(folder)\nfor i in range(20): put(writer, capture(call=i))"
    with run(script, tmp_path) as process:
        assert process.wait(30) == 0
    assert len(ShardStore(tmp_path).captures()) == 20


def test_a_killed_process_leaves_whole_shards_and_no_half_tensor(tmp_path: Path) -> None:
    script = """
writer = ShardWriter(folder, shard_bytes=500_000)
i = 0
while True:
    put(writer, capture(call=i, shape=(10_000,)))
    i += 1
"""
    with run(script, tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("*.safetensors"))) > 20)
        process.send_signal(signal.SIGKILL)
    store = ShardStore(tmp_path)
    captures = store.captures()
    assert len(captures) > 200
    assert [info.call for info in captures] == list(range(len(captures)))
    expected = some_bytes(captures[0])
    assert all(np.array_equal(store.read(info.key), expected) for info in captures)


def test_a_killed_process_that_wrote_little_keeps_what_is_half_a_second_old(tmp_path: Path) -> None:
    script = """
writer = ShardWriter(folder)
put(writer, capture())
while not list(folder.glob("*.safetensors")): time.sleep(0.01)
put(writer, capture("late"))
while not list(folder.glob(".*.part")): time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    with run(script, tmp_path) as process:
        assert process.wait(30) == -signal.SIGKILL
    assert ShardStore(tmp_path).captures() == [capture()]
    assert any(path.name.endswith(".part") for path in tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_writes_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        put(writer, capture("parent"))

        def child() -> None:
            put(writer, capture("child"))
            writer.put_file("child.pt", lambda path: path.touch(), 0)
            writer.flush()
            writer.close()

        with writer._worker._lock:  # as if the thread held the lock at the moment of the fork
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
        process.join(30)
        assert process.exitcode == 0
        put(writer, capture("after"))
    assert [info.module for info in ShardStore(tmp_path).captures()] == ["parent", "after"]
    assert not (tmp_path / "child.pt").exists()


# What goes wrong


def failing_data() -> Any:
    raise RuntimeError("CUDA error: out of memory")


def test_a_fault_is_raised_by_the_next_put_and_what_came_before_is_kept(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    put(writer, capture("a"))
    put(writer, capture("b"), failing_data)
    wait_until(lambda: writer.failures == 1)
    sentence = f"{tmp_path}: the tensor 'b/output/0/0' could not be written: CUDA error: out of memory."
    for name in "cd":
        with pytest.raises(CaptureError) as error:
            put(writer, capture(name))
        assert str(error.value) == writer.failure == sentence
        assert isinstance(error.value.__cause__, RuntimeError)
    writer.close()  # the fault is known already
    assert ShardStore(tmp_path).captures() == [capture("a")]


@pytest.mark.parametrize("end", ["close", "flush"])
def test_a_fault_nobody_saw_is_raised_at_the_end(end: str, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    put(writer, capture(), failing_data)
    with pytest.raises(CaptureError, match="out of memory"):
        getattr(writer, end)()
    writer.close()


def test_the_error_that_ended_the_block_is_not_replaced(tmp_path: Path) -> None:
    def block() -> None:
        with ShardWriter(tmp_path) as writer:
            put(writer, capture(), failing_data)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()


def test_a_reported_fault_leaves_out_one_tensor_and_goes_on(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, on_error="report") as writer:
        put(writer, capture("a"), failing_data)
        writer.flush()  # the first fault is the one that is kept
        put(writer, capture("b"))
        put(writer, capture("c"), lambda: np.zeros(3, dtype=np.uint8))
        put(writer, capture("d"), lambda: np.zeros(2, dtype=np.float32))
        put(writer, capture("b"))
        put(writer, capture("\ud800"))
    assert writer.failures == 5
    assert writer.failure is not None
    assert "'a/output/0/0' could not be written: CUDA error" in writer.failure
    assert ShardStore(tmp_path).captures() == [capture("b")]


@pytest.mark.parametrize(
    ("info", "data", "why"),
    [
        (capture(), np.zeros(3, dtype=np.uint8), r"it has 3 bytes, not the 8 of float32 \[2\]\."),
        (
            capture(),
            np.zeros(16, dtype=np.uint8)[::2],
            "its bytes are not a contiguous numpy array of uint8.",
        ),
        (capture(), None, "its bytes are not a contiguous numpy array of uint8."),
        (capture("\udc00"), b"", "its key cannot be a name in a file."),
    ],
)
def test_what_cannot_be_a_tensor_is_said(info: CaptureInfo, data: Any, why: str, tmp_path: Path) -> None:
    def block() -> None:
        with ShardWriter(tmp_path) as writer:
            writer.put(info.key, info.dtype, info.shape, data, info)

    with pytest.raises(CaptureError, match=f"could not be written: {why}$"):
        block()


def test_a_key_that_is_used_twice_is_said(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    put(writer, capture())
    with pytest.raises(
        CaptureError, match=r"'fc/output/0/0' could not be written: its key was used before\.$"
    ):
        put(writer, capture())
    writer.close()
    with pytest.raises(UsageError, match=r"^the key 'a' is not that of its capture, 'fc/output/0/0'\.$"):
        writer.put("a", "float32", (2,), np.zeros(8, dtype=np.uint8), capture())


def full_after(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A disk on which so many bytes of tensors have room; the last write is half done, as on a real one."""
    write = shard_file.write_all
    left = nbytes

    def limited(file: Any, view: memoryview) -> None:
        nonlocal left
        if len(view) % 4096:  # a tensor, not the room for a header
            if len(view) > left:
                write(file, view[:left])
                raise FULL
            left -= len(view)
        write(file, view)

    monkeypatch.setattr(shard_file, "write_all", limited)


def test_a_full_disk_keeps_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_after(monkeypatch, 1500)
    with ShardWriter(tmp_path, on_error="report") as writer:
        for index, size in enumerate([100, 100, 200, 10, 300, 5]):
            put(writer, capture(f"m{index}", shape=(size,)))
    store = ShardStore(tmp_path)
    assert [info.module for info in store.captures()] == ["m0", "m1", "m3", "m5"]
    assert all(np.array_equal(store.read(info.key), some_bytes(info)) for info in store.captures())
    assert writer.failures == 2
    assert writer.failure is not None
    assert writer.failure.endswith("'m2/output/0/0' could not be written: No space left on device.")


def test_a_full_disk_never_makes_anybody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "write_all", lambda file, view: (_ for _ in ()).throw(FULL))
    with ShardWriter(tmp_path, queue_bytes=50, on_error="report") as writer:
        for index in range(30):
            put(writer, capture(f"m{index}", shape=(10,)))
    assert writer.failures == 30
    assert list(tmp_path.iterdir()) == []
    writer = ShardWriter(tmp_path, queue_bytes=50)
    for index in range(30):
        with contextlib.suppress(CaptureError):
            put(writer, capture(f"n{index}", shape=(10,)))
    writer.close()
    assert writer.failures >= 1


def test_a_shard_that_cannot_be_finished_is_counted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with ShardWriter(tmp_path, on_error="report") as writer:
        for index in range(3):
            put(writer, capture(f"m{index}"))
    assert writer.failures == 3
    assert writer.nbytes == 0
    assert writer.failure == (
        f"{tmp_path}: the shard '000000.safetensors' could not be written: Permission denied."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CaptureError, match=r"^No tensors can be written to .*: .*\.$"):
            ShardWriter(folder)


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(CaptureError, match=r"^No tensors can be written to .*: Permission denied\.$"):
        ShardWriter(tmp_path)


def test_a_folder_with_tensors_in_it_is_refused(tmp_path: Path) -> None:
    written(tmp_path, capture())
    with pytest.raises(
        CaptureError, match=r"already holds '000000.safetensors': tensors are written to an empty"
    ):
        ShardWriter(tmp_path)


@pytest.mark.parametrize("wrong", [{"on_error": "ignore"}, {"queue_bytes": 0}, {"shard_bytes": -1}])
def test_a_wrong_option_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ShardWriter(tmp_path / "t", **wrong)
    assert not (tmp_path / "t").exists()


# Files of their own


def test_a_file_is_written_under_a_temporary_name_first(tmp_path: Path) -> None:
    seen = []

    def write(path: Path) -> None:
        path.write_text("tensor")
        seen.append(path.name)

    with ShardWriter(tmp_path) as writer:
        assert writer.put_file("q.pt", write, 6) == "q.pt"
    assert [path.name for path in tmp_path.iterdir()] == ["q.pt"]
    assert seen[0].endswith(".part")
    assert writer.nbytes == 6


def test_a_file_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("half")
        raise FULL

    with ShardWriter(tmp_path, on_error="report") as writer:
        writer.put_file("q.pt", write, 6)
        writer.put_file("r.pt", lambda path: None, 6)  # writes nothing at all
    assert list(tmp_path.iterdir()) == []
    assert writer.failures == 2
    assert writer.failure == f"{tmp_path}: the file 'q.pt' could not be written: No space left on device."


@pytest.mark.parametrize(
    "name",
    ["a/b", "a\\b", "..", ".", "", "../x", "/etc/passwd", "a\0b", "C:x", "x\n", ".hidden", "x.", "x ",
     "000000.safetensors", "x.part", "\ud800"],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "t") as writer:
        with pytest.raises(UsageError, match="cannot be the name of a file of tensors"):
            writer.put_file(name, lambda path: path.touch(), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_flood_of_small_tensors_makes_few_files(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        data = np.zeros(400, dtype=np.uint8)
        for index in range(20_000):
            put(writer, capture(call=index, shape=(100,)), data)
    assert len(list(tmp_path.iterdir())) < 40
    assert len(ShardStore(tmp_path).captures()) == 20_000
