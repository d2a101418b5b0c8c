"""Writing past the page cache: the same bytes in the same files, and as usual where it cannot be done."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.data.trace_data import Bytes
from sightline.store.shards import direct_file, shard_file
from sightline.store.shards.direct_file import PAGE, DirectFile, address_of
from sightline.store.shards.stores import ShardStore
from sightline.store.shards.writer import DIRECT_BYTES, ShardWriter
from tests.store.shards.captured import capture, put, some_bytes

LARGE = DIRECT_BYTES // 4  # elements of float32


def opened(path: Path, start: int = 0) -> DirectFile:
    direct = DirectFile.open(path, start)
    if direct is None:
        pytest.skip("this file system cannot be written to directly")
    return direct


def in_memory(nbytes: int, offset: int, seed: int) -> Bytes:
    """Random bytes that begin so far into a page."""
    data: Bytes = np.frombuffer(mmap.mmap(-1, nbytes + PAGE), dtype=np.uint8)[offset : offset + nbytes]
    data[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    assert not nbytes or address_of(data) % PAGE == offset  # an empty array has no address of its own
    return data


sizes = st.one_of(
    st.integers(0, 3 * PAGE), st.sampled_from([PAGE, 5 * PAGE, (1 << 20) - 1, 1 << 20, (2 << 20) + 7])
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(sizes, st.sampled_from([0, 64, 511])), max_size=6), st.sampled_from([0, 2 * PAGE]))
def test_what_is_appended_is_in_the_file(parts: list[tuple[int, int]], start: int) -> None:
    data = [in_memory(nbytes, offset, seed) for seed, (nbytes, offset) in enumerate(parts)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(bytes(start))
        direct = opened(path, start)
        expected = bytes(start)
        for part in data:
            direct.append(part)
            expected += part.tobytes()
            assert path.read_bytes().rstrip(b"\0") == expected.rstrip(b"\0")
        direct.close()
        assert path.read_bytes()[: len(expected)] == expected


def test_a_start_inside_a_page_is_not_possible(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert DirectFile.open(tmp_path / "file", 100) is None
    assert DirectFile.open(tmp_path / "missing", 0) is None


def test_a_system_that_has_no_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    (tmp_path / "file").write_bytes(b"")
    assert DirectFile.open(tmp_path / "file", 0) is None


def test_large_and_small_tensors_come_back(tmp_path: Path) -> None:
    shapes = [LARGE, 10, LARGE + 3, LARGE + 1024, 7, 2 * LARGE, LARGE + 1]
    captures = [capture(f"m{index}", shape=(size,)) for index, size in enumerate(shapes)]
    with ShardWriter(tmp_path) as writer:
        for seed, info in enumerate(captures):
            put(writer, info, some_bytes(info, seed))
    store = ShardStore(tmp_path)
    assert store.captures() == captures
    read = {key: data for name in store.names() for key, data in _loaded(tmp_path / name).items()}
    for seed, info in enumerate(captures):
        np.testing.assert_array_equal(store.read(info.key), some_bytes(info, seed))
        np.testing.assert_array_equal(read[info.key].view(np.uint8), some_bytes(info, seed))


def _loaded(path: Path) -> dict[str, Any]:
    return safetensors.numpy.load_file(path)


def test_the_file_is_the_same_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [capture(f"m{index}", shape=(LARGE + 5 * index,)) for index in range(4)]
    for name in ("direct", "usual"):
        if name == "usual":
            monkeypatch.setattr(DirectFile, "open", lambda *_: None)
        with ShardWriter(tmp_path / name) as writer:
            for seed, info in enumerate(captures):
                put(writer, info, some_bytes(info, seed))
    direct, usual = ((tmp_path / name / "000000.safetensors").read_bytes() for name in ("direct", "usual"))
    assert direct == usual


def test_a_disk_that_refuses_it_is_written_to_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DirectFile._write
    calls: list[int] = []

    def refuses(self: DirectFile, pages: Bytes, position: int) -> None:
        calls.append(position)
        if len(calls) > 2:
            write(self, pages[:PAGE], position)  # some of it may have arrived
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        write(self, pages, position)

    monkeypatch.setattr(DirectFile, "_write", refuses)
    captures = [capture(f"m{index}", shape=(LARGE + 3,)) for index in range(4)]
    with ShardWriter(tmp_path) as writer:
        for seed, info in enumerate(captures):
            put(writer, info, some_bytes(info, seed))
    store = ShardStore(tmp_path)
    assert store.captures() == captures
    for seed, info in enumerate(captures):
        np.testing.assert_array_equal(store.read(info.key), some_bytes(info, seed))
    assert len(calls) in (0, 3)


def test_a_full_disk_keeps_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = shard_file.write_all
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def limited_write(file: Any, view: memoryview) -> None:
        if len(view) > DIRECT_BYTES:  # a tensor, not a header
            write(file, view[:1000])
            raise full
        write(file, view)

    class Os:
        """The module, on a disk that has room for two tensors."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pwrite(self, file: int, data: Any, position: int) -> int:
            if sum(written) > 2 * DIRECT_BYTES:
                raise full
            written.append(len(data))
            return os.pwrite(file, data, position)

    opened_path = tmp_path / "file"
    opened_path.write_bytes(b"")
    opened(opened_path).close()
    monkeypatch.setattr(direct_file, "os", Os())
    monkeypatch.setattr(shard_file, "write_all", limited_write)
    captures = [capture(f"m{index}", shape=(LARGE + 3,)) for index in range(4)]
    with ShardWriter(tmp_path / "tensors", on_error="report") as writer:
        for seed, info in enumerate(captures):
            put(writer, info, some_bytes(info, seed))
    store = ShardStore(tmp_path / "tensors")
    assert store.captures() == captures[:2]
    for seed, info in enumerate(captures[:2]):
        np.testing.assert_array_equal(store.read(info.key), some_bytes(info, seed))
    assert writer.failures == 2
    assert writer.failure is not None
    assert "No space left on device" in writer.failure
