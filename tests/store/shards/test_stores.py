"""Where tensors are read from: memory as it was put in, and files that may be anything."""

from __future__ import annotations

import gc
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.errors import DamagedFile, NotCaptured
from sightline.store.shards.stores import MemoryStore, ShardStore
from tests.store.shards.captured import capture, some_bytes, written

ROOT = Path(__file__).parent.parent.parent
Header = dict[str, Any]


def test_memory_is_handed_out_as_it_is_and_cannot_be_written_to() -> None:
    held = np.arange(8, dtype=np.uint8)
    read = MemoryStore({"k": held}).read("k")
    assert np.shares_memory(read, held)
    assert held.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_memory_that_is_still_on_its_way_is_waited_for_once() -> None:
    asked = []

    def arrive() -> Any:
        asked.append(1)
        return np.zeros(8, dtype=np.uint8)

    store = MemoryStore({"k": arrive})
    assert not asked
    assert store.read("k").nbytes == store.read("k").nbytes == 8
    assert len(asked) == 1


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_an_unknown_key_is_a_sentence_and_a_key_error(where: str, tmp_path: Path) -> None:
    store = MemoryStore({}) if where == "memory" else ShardStore(tmp_path)
    with pytest.raises(KeyError) as error:
        store.read("fc/output/0/0")
    assert isinstance(error.value, NotCaptured)
    assert str(error.value).endswith("under 'fc/output/0/0'.")


def test_files_are_mapped_only_while_an_array_is_in_use(tmp_path: Path) -> None:
    info = capture(shape=(1000,))
    store = ShardStore(written(tmp_path, info))
    first, second = store.read(info.key), store.read(info.key)
    np.testing.assert_array_equal(first, some_bytes(info))
    assert not first.flags.writeable
    assert first.ctypes.data == second.ctypes.data
    assert first.ctypes.data % 64 == 0
    assert len(store._mapped) == 1
    del first, second
    gc.collect()
    assert len(store._mapped) == 0


def test_captures_come_in_their_order_over_all_shards(tmp_path: Path) -> None:
    dtypes = ["float32", "int64", "bool", "float32", "bfloat16", "int64"]
    infos = [capture(f"m{index}", dtype=dtype) for index, dtype in enumerate(dtypes)]
    store = ShardStore(written(tmp_path, *infos))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4  # one for each width
    assert store.captures() == infos


def test_temporary_and_other_files_are_not_looked_at(tmp_path: Path) -> None:
    info = capture()
    written(tmp_path, info)
    for name in (".000007.safetensors.part", "x.safetensors", "q.pt", "notes.txt"):
        (tmp_path / name).write_bytes(b"\xff" * 20)
    (tmp_path / "folder").mkdir()
    assert ShardStore(tmp_path).captures() == [info]


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "000000.safetensors").write_bytes(b"rubbish")
    store = ShardStore(tmp_path)
    with pytest.raises(DamagedFile):
        store.captures()


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"nowhere cannot be read: No such file or directory\.$"):
        ShardStore(tmp_path / "nowhere").captures()


def head(path: Path) -> tuple[Header, bytes]:
    """The header of a file, and what comes after it."""
    text = path.read_bytes()
    (length,) = struct.unpack("<Q", text[:8])
    return json.loads(text[8 : 8 + length]), text[8 + length :]


def rewrite(path: Path, header: Header | bytes, rest: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


KEYS = ("a/output/0/0", "b/output/0/0")


def entry(key: str, **fields: Any) -> Callable[[Header], None]:
    return lambda header: header[key].update(fields)


def described(**fields: Any) -> Callable[[Header], None]:
    """Alter what is said of the first capture."""

    def alter(header: Header) -> None:
        rows = json.loads(header["__metadata__"]["captures"])
        rows[0].update(fields)
        header["__metadata__"]["captures"] = json.dumps(rows)

    return alter


def metadata(**fields: Any) -> Callable[[Header], None]:
    return lambda header: header["__metadata__"].update(fields)


HOSTILE: dict[str, tuple[Callable[[Header], Any], str]] = {
    "overlap": (entry(KEYS[1], data_offsets=[4, 12]), "'b/output/0/0' overlaps another tensor"),
    "gap": (entry(KEYS[0], data_offsets=[0, 4], shape=[1]), "'b/output/0/0' leaves a gap before it"),
    "beyond": (entry(KEYS[1], data_offsets=[8, 800]), "'b/output/0/0' ends at byte 800 of 16"),
    "negative": (entry(KEYS[1], data_offsets=[-8, 8]), "is not described by a dtype, a shape and offsets"),
    "backwards": (entry(KEYS[1], data_offsets=[16, 8]), "has invalid offsets"),
    "three offsets": (entry(KEYS[1], data_offsets=[8, 9, 16]), "has invalid offsets"),
    "floats": (entry(KEYS[1], shape=[2.0]), "is not described by"),
    "true": (entry(KEYS[1], shape=[True, 2]), "is not described by"),
    "huge": (entry(KEYS[1], shape=[1 << 62, 1 << 62]), "has 8 bytes, which do not make F32 of its shape"),
    "absurd": (entry(KEYS[1], shape=[10**400]), "is not described by"),
    "wrong size": (entry(KEYS[1], shape=[3]), "has 8 bytes, which do not make F32 of its shape"),
    "wrong dtype": (entry(KEYS[1], dtype="I32"), "is not stored as 'float32' of its shape would be"),
    "other dtype": (entry(KEYS[1], dtype="F7"), "has the unknown dtype 'F7'"),
    "no dtype": (entry(KEYS[1], dtype=None), "is not described by"),
    "no object": (lambda header: header.update({KEYS[1]: "tensor"}), "is not described by"),
    "left over": (lambda header: header.pop(KEYS[1]), "8 bytes belong to no tensor"),
    "no metadata": (lambda header: header.pop("__metadata__"), "it was not written by sightline"),
    "newer": (metadata(sightline="9"), "it has version '9', and this sightline reads version 1"),
    "no captures": (metadata(captures=None), "it has no list of captures"),
    "bad captures": (metadata(captures="[" * 100_000), "its list of captures is not valid JSON"),
    "fewer captures": (metadata(captures="[]"), "its tensors are not those of its list of captures"),
    "no capture": (metadata(captures="[1, 2]"), "its list of captures has an invalid entry"),
    "other key": (described(module="c"), "its tensors are not those of its list of captures"),
    "number as name": (described(name=7), "a capture has the name 7"),
    "true as call": (described(call=True), "a capture has the call True"),
    "bad shape": (described(shape=[-1]), "a capture has the shape"),
    "other shape": (described(shape=[1, 3]), "is not stored as 'float32' of its shape would be"),
    "true dtype": (described(dtype="complex64"), "is not stored as 'complex64' of its shape would be"),
    "bad role": (described(role="<b>"), "a capture has the role '<b>'"),
    "escape codes": (described(role="\x1b[31m" * 99), "a capture has the role '\\x1b[31m"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_header_is_one_sentence_with_the_file_and_the_reason(fault: str, tmp_path: Path) -> None:
    alter, reason = HOSTILE[fault]
    written(tmp_path, capture("a"), capture("b"))
    path = tmp_path / "000000.safetensors"
    header, rest = head(path)
    alter(header)
    rewrite(path, header, rest)
    with pytest.raises(DamagedFile) as error:
        ShardStore(tmp_path).read(KEYS[0])
    text = str(error.value)
    assert text.startswith(f"{path} is damaged: ")
    assert reason in text
    assert text.endswith(".")
    assert "\x1b" not in text
    assert len(text) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has 0 bytes, too few for a header"),
        (b"1234567", "it has 7 bytes, too few for a header"),
        (struct.pack("<Q", 50) + b"{}", "it claims a header of 50 bytes, but has only 2"),
        (struct.pack("<Q", (1 << 64) - 1), "it claims a header of 18446744073709551615 bytes, more than the"),
        (struct.pack("<Q", 100_000_001) + b"{}", "more than the 100000000 allowed"),
        (struct.pack("<Q", 0), "its header is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "its header is not a JSON object"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "its header is not valid JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "its header is not valid JSON (RecursionError)"),
        (struct.pack("<Q", 10_007) + b'{"a": ' + b"9" * 10_000 + b"}", "its header is not valid JSON"),
        (struct.pack("<Q", 16) + b'{"a": 1, "a": 2}', "'a' appears twice"),
        (bytes(4096), "its header is not valid JSON"),  # what a writer leaves that was killed
    ],
)
def test_a_file_that_is_no_shard_is_one_sentence(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "000000.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFile) as error:
        ShardStore(tmp_path).captures()
    assert str(error.value).startswith(f"{path} is damaged: ")
    assert reason in str(error.value)


@pytest.mark.parametrize("size", [1, 8, 100, 4095, 4096, 4103])
def test_a_file_cut_short_is_damaged_wherever_it_was_cut(size: int, tmp_path: Path) -> None:
    written(tmp_path, capture("a"), capture("b"))
    path = tmp_path / "000000.safetensors"
    os.truncate(path, size)
    with pytest.raises(DamagedFile, match="is damaged"):
        ShardStore(tmp_path).captures()


def test_a_file_cut_short_after_it_was_opened_is_seen_before_it_is_mapped(tmp_path: Path) -> None:
    info = capture()
    store = ShardStore(written(tmp_path, info))
    store.captures()
    os.truncate(tmp_path / "000000.safetensors", 4096)
    with pytest.raises(DamagedFile, match="was cut short after it was opened"):
        store.read(info.key)


def test_one_key_in_two_files_is_damage(tmp_path: Path) -> None:
    written(tmp_path, capture())
    content = (tmp_path / "000000.safetensors").read_bytes()
    (tmp_path / "000001.safetensors").write_bytes(content)
    with pytest.raises(
        DamagedFile, match=r"000001.safetensors is damaged: 'fc/output/0/0' is also in 000000"
    ):
        ShardStore(tmp_path).captures()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "000000.safetensors")
    with pytest.raises(DamagedFile, match="it is not a regular file"):
        ShardStore(tmp_path).captures()


def test_no_torch_is_needed_to_write_or_read(tmp_path: Path) -> None:
    script = f"""
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
from pathlib import Path
from sightline.store.shards.stores import ShardStore
from sightline.data.tensors import Tensors
from tests.store.shards.captured import DTYPES, capture, written
folder = Path({str(tmp_path)!r})
written(folder, *(capture(dtype, dtype=dtype) for dtype in DTYPES))
store = ShardStore(folder)
tensors = Tensors(store.captures(), store)
print(tensors, *(tensors[key].numpy().dtype for key in tensors))
assert "torch" not in sys.modules
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("<21 captured tensors, 160 B: ")
