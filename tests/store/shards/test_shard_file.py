"""Shards: all that was written comes back, in a format that others read."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.data.tensors import Tensors
from sightline.data.trace_data import CaptureInfo
from sightline.errors import UsageError
from sightline.store.shards.stores import ShardStore
from sightline.store.shards.writer import ShardWriter
from tests.store.shards.captured import DTYPES, capture, put, some_bytes, written


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    info = capture(dtype=dtype, shape=shape)
    store = ShardStore(written(tmp_path, info))
    assert store.captures() == [info]
    np.testing.assert_array_equal(store.read(info.key), some_bytes(info))


def test_a_dtype_nobody_knows_is_kept_as_bytes(tmp_path: Path) -> None:
    info = capture(dtype="quint4x2", shape=(7,))
    with ShardWriter(tmp_path) as writer:
        put(writer, info, np.arange(4, dtype=np.uint8))
    store = ShardStore(tmp_path)
    assert store.captures() == [info]
    tensor = Tensors([info], store)[info.key]
    assert tensor.nbytes == 4
    assert tensor.raw.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match=r"^numpy has no numbers for quint4x2; `.raw` has the bits\.$"):
        tensor.numpy()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

infos = st.builds(
    CaptureInfo,
    step=texts,
    module=texts,
    name=texts,
    call=st.integers(0, 10**9),
    slot=st.integers(0, 99),
    role=st.sampled_from(["input", "output", "op", "spy", "gradient"]),
    path=texts,
    value=st.integers(-1, 2**31 - 1),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    whole=st.booleans(),
)


@settings(max_examples=60)
@given(st.lists(infos, max_size=12, unique_by=lambda info: info.key), st.integers(1, 200))
def test_whatever_is_put_comes_back(captures: list[CaptureInfo], size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ShardWriter(folder, queue_bytes=size, shard_bytes=size) as writer:
            for seed, info in enumerate(captures):
                put(writer, info, some_bytes(info, seed))
        store = ShardStore(folder)
        assert store.captures() == captures
        for seed, info in enumerate(captures):
            np.testing.assert_array_equal(store.read(info.key), some_bytes(info, seed))
        for path in folder.iterdir():
            with safetensors.safe_open(path, "np") as file:
                assert set(file.keys()) <= {info.key for info in captures}


def test_safetensors_reads_what_numpy_knows(tmp_path: Path) -> None:
    numbers = {
        "float32": "f4",
        "int64": "i8",
        "bool": "?",
        "uint16": "u2",
        "complex128": "c16",
        "float16": "f2",
    }
    infos = {dtype: capture(dtype, dtype=dtype, shape=(3, 2)) for dtype in numbers}
    written(tmp_path, *infos.values())
    store = ShardStore(tmp_path)
    loaded = {}
    for path in tmp_path.glob("*.safetensors"):
        loaded.update(safetensors.numpy.load_file(path))
    for dtype, code in numbers.items():
        found = loaded[infos[dtype].key]
        expected = Tensors([infos[dtype]], store)[infos[dtype].key].numpy()
        if dtype == "complex128":
            assert found.shape == (3, 2, 2)
            found = np.ascontiguousarray(found).view(code).reshape(3, 2)
        np.testing.assert_array_equal(found, expected)


def test_safetensors_reads_all_into_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    written(tmp_path, *(capture(dtype, dtype=dtype, shape=(3,)) for dtype in DTYPES))
    loaded = {}
    for path in tmp_path.glob("*.safetensors"):
        loaded.update(load_file(path))
    store = ShardStore(tmp_path)
    assert len(loaded) == len(DTYPES)
    for key, tensor in loaded.items():
        np.testing.assert_array_equal(tensor.view(torch.uint8).numpy().reshape(-1), store.read(key))
    assert loaded["bfloat16/output/0/0"].dtype == torch.bfloat16
    assert loaded["float8_e5m2/output/0/0"].dtype == torch.float8_e5m2


def test_the_metadata_of_a_shard_is_strings_with_a_version(tmp_path: Path) -> None:
    written(tmp_path, capture("block", step="s\"'\n"))
    with safetensors.safe_open(tmp_path / "000000.safetensors", "np") as file:
        metadata = file.metadata()
    assert metadata["sightline"] == "1"
    (row,) = json.loads(metadata["captures"])
    assert (row["step"], row["module"], row["shape"]) == ("s\"'\n", "block", [2])
