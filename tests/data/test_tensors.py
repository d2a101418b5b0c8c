"""Captured tensors as people hold them: every number exact, and found under every name it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sightline.data.dtypes import nbytes_of
from sightline.data.tensors import CapturedTensor, Captures, KeyPattern, Tensors
from sightline.data.trace_data import CaptureInfo
from sightline.errors import DamagedFile, NotCaptured, UsageError
from sightline.store.shards.stores import MemoryStore, ShardStore
from tests.store.shards.captured import DTYPES, capture, some_bytes, written


class Untouchable:
    """A store that must not be read."""

    def read(self, key: str) -> NDArray[np.uint8]:
        raise AssertionError(f"{key} was read")


def tensor(array: Any, dtype: str, shape: Sequence[int] | None = None) -> CapturedTensor:
    """A captured tensor with the bits of an array."""
    array = np.ascontiguousarray(array)
    info = capture(dtype=dtype, shape=array.shape if shape is None else shape)
    return CapturedTensor(info, MemoryStore({info.key: array.reshape(-1).view(np.uint8)}))


def held(*infos: CaptureInfo, names: dict[int, str] | None = None) -> Tensors:
    store = MemoryStore({info.key: some_bytes(info) for info in infos})
    return Tensors(list(infos), store, None if names is None else lambda: names)


# Numbers


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.startswith("float8")])
def test_every_eight_bit_float_is_the_number_torch_says(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(patterns.copy()).view(getattr(torch, dtype)).to(torch.float32).numpy()
    found = tensor(patterns, dtype).numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


def test_every_bfloat16_is_the_number_torch_says() -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(patterns.view(np.int16).copy()).view(torch.bfloat16).to(torch.float32).numpy()
    found = tensor(patterns, "bfloat16").numpy()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_every_half_of_a_complex32_is_exact() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    found = tensor(patterns, "complex32", (128, 256)).numpy()
    assert found.dtype == np.complex64
    assert found.shape == (128, 256)
    np.testing.assert_array_equal(found.view(np.float32).reshape(-1), patterns.view(np.float16).astype("f4"))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_numbers_and_bits_of_its_shape(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    info = capture(dtype=dtype, shape=shape)
    store = ShardStore(written(tmp_path, info))
    found = Tensors(store.captures(), store)[info.key]
    numbers, raw = found.numpy(), found.raw
    assert numbers.shape == shape
    assert raw.shape == ((*shape, 2) if dtype == "complex128" else shape)
    assert raw.dtype.kind == "u"
    assert raw.nbytes == found.nbytes == nbytes_of(dtype, shape)
    np.testing.assert_array_equal(raw.reshape(-1).view(np.uint8), some_bytes(info))
    assert not numbers.flags.writeable
    assert not raw.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        raw.flags.writeable = True  # not even on request
    assert repr(found).startswith("<fc/output/0/0: ")


def test_what_numpy_knows_is_not_copied(tmp_path: Path) -> None:
    info = capture(shape=(50,))
    store = ShardStore(written(tmp_path, info))
    found = Tensors(store.captures(), store)[info.key]
    assert np.shares_memory(found.numpy(), store.read(info.key))
    assert np.shares_memory(np.asarray(found), found.numpy())


def test_numpy_takes_a_captured_tensor_for_an_array() -> None:
    found = tensor(np.array([1.5, -2], dtype="f4"), "float32")
    assert np.asarray(found).tolist() == [1.5, -2]
    assert np.asarray(found, dtype="f8").dtype == np.float64
    copy = np.array(found)
    copy[0] = 7
    assert found.numpy()[0] == 1.5
    np.testing.assert_allclose(found, [1.5, -2])
    with pytest.raises(ValueError, match="copy"):
        np.array(found, dtype="f8", copy=False)


def test_torch_comes_through_the_hook_or_is_said_to_be_missing() -> None:
    info = capture()
    store = MemoryStore({info.key: some_bytes(info)})
    found = Tensors([info], store, to_torch=lambda given: ("torch", given.key))["fc"][0]
    assert found.torch() == ("torch", info.key)
    with pytest.raises(UsageError, match=r"^torch is not at hand here; `.numpy\(\)` has the numbers"):
        CapturedTensor(info, store).torch()


def test_bytes_that_do_not_fit_the_shape_are_damage() -> None:
    info = capture(shape=(3,))
    found = CapturedTensor(info, MemoryStore({info.key: np.zeros(8, dtype=np.uint8)}))
    with pytest.raises(DamagedFile, match=r"^fc/output/0/0 has 8 bytes, not the 12 of f32\[3\]\.$"):
        found.numpy()
    assert repr(found) == "<fc/output/0/0: f32[3]>"


def test_a_tensor_shows_its_shape_and_its_numbers() -> None:
    nan, inf = np.nan, np.inf
    assert repr(tensor(np.array([[1, 3]], dtype="i8"), "int64")) == (
        "<fc/output/0/0: i64[1, 2], 1 … 3, mean 2, std 1.41>"
    )
    assert repr(tensor(np.array([1, nan, inf, -inf], dtype="f4"), "float32")) == (
        "<fc/output/0/0: f32[4], 1, 1 NaN, 2 Inf>"
    )
    assert repr(tensor(np.full(3, nan, dtype="f8"), "float64")).endswith("3 NaN>")
    assert repr(tensor(np.array([True, False]), "bool")).endswith("b8[2], 0 … 1, mean 0.5, std 0.707>")
    assert repr(tensor(np.zeros(0, dtype="f4"), "float32")) == "<fc/output/0/0: f32[0]>"
    assert repr(tensor(np.zeros(2, dtype="c8"), "complex64")) == "<fc/output/0/0: c64[2]>"


def test_a_large_tensor_is_shown_without_being_read() -> None:
    info = capture(shape=(1001, 1000))
    assert repr(CapturedTensor(info, Untouchable())) == "<fc/output/0/0: f32[1001, 1000]>"


def test_a_sample_says_that_it_is_one() -> None:
    info = CaptureInfo("", "fc", "output", 0, 0, "output", "", -1, (10**7,), "float32", whole=False)
    assert repr(CapturedTensor(info, Untouchable())) == "<fc/output/0/0: f32[10000000] (a sample)>"


# Names


ATTENTION = "blocks.0.attn"
RUN = (
    capture(ATTENTION, "q", 0, step="step0", role="spy"),
    capture(ATTENTION, "softmax.int", 0, step="step0", value=7),
    capture(ATTENTION, "output", 0, step="step0"),
    capture(ATTENTION, "output", 0, step="step0", slot=1),
    capture(f"{ATTENTION}.k_proj", "output", 0, step="step0", value=9),
    capture("blocks.10.attn", "q", 0, step="step0", role="spy"),
    capture(ATTENTION, "q", 1, step="step1", role="spy"),
    capture(ATTENTION, "output.grad", 0, step="step1", role="gradient"),
    capture("Net", "output", 0),
    capture("", "loss", 0, role="spy"),
)
VARIABLES = {7: "weights", 9: "k"}


def found_keys(name: str) -> list[str]:
    found = held(*RUN, names=VARIABLES)[name]
    assert isinstance(found, Captures)
    return found.keys()


def test_a_full_key_is_one_tensor() -> None:
    found = held(*RUN)["step0/blocks.0.attn/output/0/1"]
    assert isinstance(found, CapturedTensor)
    assert found.info == RUN[3]
    assert (found.key, found.shape, found.dtype) == (RUN[3].key, (2,), "float32")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("blocks.0.attn.q", [0, 6]),
        ("q", [0, 5, 6]),
        ("blocks.0.attn", [2, 3]),
        ("blocks.0.attn.output", [2, 3]),
        ("blocks.0.attn.softmax.int", [1]),
        ("softmax.int", [1]),
        ("blocks.0.attn.k_proj", [4]),
        ("blocks.0.attn.grad", [7]),
        ("blocks.0.attn.output.grad", [7]),
        ("output", [2, 3, 4, 8]),
        ("Net", [8]),
        ("loss", [9]),
        ("blocks.0.attn.weights", [1]),  # a variable that the result of an op was assigned to
        ("weights", [1]),
        ("blocks.0.attn.k", [4]),  # and one that what a module returned was assigned to
        ("k", [4]),
    ],
)
def test_a_short_name_is_all_of_that_name_in_order(name: str, meant: list[int]) -> None:
    assert found_keys(name) == [RUN[index].key for index in meant]
    assert name in held(*RUN, names=VARIABLES)


def test_the_better_reading_of_a_name_wins() -> None:
    spied, returned, op = capture("a", "b", role="spy"), capture("a.b"), capture("a", "b", 1, role="op")
    assert held(spied, returned)["a.b"].keys() == [spied.key]
    assert held(op, returned)["a.b"].keys() == [returned.key]
    assert held(op)["a.b"].keys() == [op.key]


def test_a_variable_of_what_calls_the_modules_of_a_list() -> None:
    tensors = held(capture("net.layers.3", value=5), names={5: "h"})
    assert len(tensors["net.h"]) == len(tensors["net.layers.h"]) == len(tensors["h"]) == 1


def test_variables_are_asked_for_once_and_only_if_no_name_fits() -> None:
    asked = []

    def names() -> dict[int, str]:
        asked.append(1)
        return VARIABLES

    tensors = Tensors(RUN, Untouchable(), names)
    assert "q" in tensors
    assert len(tensors["blocks.0.attn"]) == 2
    assert not asked
    assert "weights" in tensors
    assert "nothing" not in tensors
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("blocks.0.atn.q", "; did you mean 'blocks.0.attn.q', "),
        ("blocks.1.attn.q", "; did you mean 'blocks.10.attn.q', 'blocks.0.attn.q' or "),
        ("wights", "; did you mean 'weights'?"),
        ("zzzz", "; there are 'blocks.0.attn.q', 'q', 'blocks.0.attn.softmax.int', 'softmax.int', "),
    ],
)
def test_an_unknown_name_is_one_sentence_with_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(KeyError) as error:
        held(*RUN, names=VARIABLES)[name]
    assert isinstance(error.value, NotCaptured)
    assert str(error.value).startswith(f"No tensor was captured as {name!r}{sentence}")


def test_with_nothing_captured_the_sentence_says_how_to() -> None:
    with pytest.raises(NotCaptured, match=r"record with capture=True\.$"):
        held()["q"]
    assert repr(held()) == "<0 captured tensors>"


def test_it_is_a_mapping_in_the_order_of_capture() -> None:
    tensors = held(*RUN)
    assert isinstance(tensors, Mapping)
    assert len(tensors) == len(RUN)
    assert list(tensors) == list(tensors.keys()) == [info.key for info in RUN]
    assert [found.info for found in tensors.values()] == list(RUN)
    assert dict(tensors.items()).keys() == tensors.keys()
    assert tensors.get("nothing") is None
    assert not tensors.__contains__(3)
    assert RUN[0].key in tensors


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("step0/blocks.0.attn/output/0/0", [2]),
        ("step0/blocks.0.attn/output", [2, 3]),
        ("blocks.0.attn/output", [2, 3]),  # without its step
        ("blocks.*.attn", [0, 1, 2, 3, 5, 6, 7]),
        ("blocks.1.attn", []),
        ("blocks.1*.attn", [5]),
        ("blocks.0.attn.*", [4]),
        ("blocks.0.attn.**", [0, 1, 2, 3, 4, 6, 7]),
        ("blocks.0", []),
        ("step1", [6, 7]),
        ("step1/*/q", []),  # a star is one segment
        ("step1/**/q", [6]),
        ("**.attn/q", [0, 5, 6]),
        ("**/q/**", [0, 5, 6]),
        ("*/*/softmax.*", []),
        ("**/softmax.*", [1]),
        ("**/1", [3, 6]),
        ("loss", [9]),
        ("N?t/[o]utput", [8]),
        ("**", list(range(10))),
    ],
)
def test_globs_match_keys_part_by_part_and_segment_by_segment(glob: str, meant: list[int]) -> None:
    tensors = held(*RUN)
    assert list(tensors.keys(glob)) == [RUN[index].key for index in meant]


def test_many_double_stars_cost_no_backtracking() -> None:
    info = capture(".".join("a" * 60))
    assert not KeyPattern(".".join(["**", "a"] * 30 + ["z"]))(info)


@given(st.lists(st.sampled_from(["a", "b", "10", "1"]), min_size=1, max_size=4))
def test_a_path_without_stars_means_itself(path: list[str]) -> None:
    module = ".".join(path)
    assert KeyPattern(module)(capture(module))
    assert not KeyPattern(module)(capture(f"{module}0"))
    assert not KeyPattern(module)(capture(f"{module}.x"))
    assert KeyPattern("**")(capture(module))


def test_where_takes_every_filter() -> None:
    tensors = held(*RUN)

    def meant(**filters: Any) -> list[int]:
        return [RUN.index(found.info) for found in tensors.where(**filters)]

    assert meant() == list(range(10))
    assert meant(module="blocks.0.attn") == [0, 1, 2, 3, 4, 6, 7]  # and what is inside, as everywhere
    assert meant(module="blocks.*.attn", name="q") == [0, 5, 6]
    assert meant(module="blocks.1") == []
    assert meant(step="step1", role="spy") == [6]
    assert meant(step="") == [8, 9]
    assert meant(name="softmax*") == [1]
    assert meant(call=1) == [6]
    with pytest.raises(UsageError, match=r"^role='results' is not a choice; role is one of 'input', "):
        tensors.where(role="results")


def test_captures_are_a_sequence() -> None:
    found = held(*RUN)["q"]
    assert len(found) == 3
    assert isinstance(found[1:], Captures)
    assert found[1:].keys() == found.keys()[1:]
    assert found[-1].info == RUN[6]
    assert found == held(*RUN).where(name="q")
    assert hash(found) == hash(held(*RUN)["q"])
    assert found != found[1:]
    assert found != [1]
    with pytest.raises(IndexError, match="there are 3 captured tensors, none at 5"):
        _ = found[5]
    with pytest.raises(UsageError, match="There are 3 captured tensors here, not one"):
        _ = found.only
    assert held(*RUN)["loss"].only.info == RUN[9]


def test_what_is_shown_reads_nothing() -> None:
    tensors = Tensors(RUN, Untouchable())
    assert repr(tensors) == (
        "<10 captured tensors, 80 B: blocks.0.attn.q, blocks.0.attn.softmax.int, blocks.0.attn.output, "
        "blocks.0.attn.k_proj.output, …>"
    )
    assert repr(tensors["blocks.0.attn"]) == (
        "<2 captured tensors, 16 B>\n"
        "  step0/blocks.0.attn/output/0/0: f32[2]\n"
        "  step0/blocks.0.attn/output/0/1: f32[2]"
    )
    assert repr(tensors.where()).endswith("  … 2 more")
    assert repr(tensors["loss"]).startswith("<1 captured tensor, 8 B>")
    assert tensors["q"][0].nbytes == 8


def test_a_list_of_modules_is_not_offered_as_the_home_of_a_variable() -> None:
    infos = [
        CaptureInfo("", f"blocks.{at}", "output", 0, 0, "output", "", at, (2,), "float32") for at in (0, 1)
    ]
    tensors = held(*infos, names={0: "x", 1: "x"})
    with pytest.raises(NotCaptured) as error:
        tensors["blocks.0.fx"]
    offered = "; did you mean 'blocks.0', 'blocks.1' or 'blocks.0.output'?"
    assert str(error.value) == f"No tensor was captured as 'blocks.0.fx'{offered}"
    assert len(tensors["x"]) == 2
