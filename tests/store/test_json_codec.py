"""Arguments of every kind come back exactly as they were, and nothing else comes back at all."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.data import trace_data as d
from sightline.data.forms import SLOT, Elided, Form, Record, Symbol
from sightline.store import json_codec as plain
from sightline.store import json_codec as records
from sightline.store.damage import Damage

TEXT = st.text(st.characters(), max_size=20)  # lone surrogates, control and escape characters included
NUMBERS = st.integers() | st.floats() | st.complex_numbers() | st.booleans() | st.just(1 << 5000)
LEAVES = (
    st.none() | NUMBERS | TEXT | st.just(SLOT) | st.builds(Symbol, TEXT)
    | st.builds(Elided, st.integers(0, 1 << 40))
)  # fmt: skip
ITEMS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT | st.integers(), inner, max_size=4)
        | st.builds(Record, TEXT, st.dictionaries(TEXT, inner, max_size=3))
    ),
    max_leaves=20,
)
FORMS = st.builds(
    Form, st.lists(ITEMS, max_size=4).map(tuple), st.none() | st.dictionaries(TEXT, ITEMS, max_size=3)
)


def exactly(item: Any) -> Any:
    """An item such that two are equal only if nothing tells them apart: types, signs, bits of a NaN."""
    if isinstance(item, float):
        return "float", struct.pack(">d", item)
    if isinstance(item, complex):
        return "complex", exactly(item.real), exactly(item.imag)
    if isinstance(item, list | tuple):
        return type(item).__name__, [exactly(part) for part in item]
    if isinstance(item, dict):
        return "dict", [(exactly(key), exactly(part)) for key, part in item.items()]
    if isinstance(item, Record):
        return "Record", item.type, exactly(item.fields)
    return type(item).__name__, item


@given(ITEMS)
def test_any_item(item: Any) -> None:
    text = plain.dumps(item)
    assert text.isascii()
    assert exactly(plain.loads(text)) == exactly(item)


@given(FORMS)
def test_any_form(form: Form) -> None:
    found = plain.load_form(plain.dump_form(form))
    assert exactly((found.args, found.kwargs)) == exactly((form.args, form.kwargs))
    assert found.slots() == form.slots()


def test_the_bits_of_a_nan_are_kept() -> None:
    (odd,) = struct.unpack(">d", bytes.fromhex("7ff8000000001234"))
    assert math.isnan(odd)
    assert exactly(plain.loads(plain.dumps(odd))) == exactly(odd)


def test_what_is_no_plain_data_is_kept_as_its_text() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    assert plain.loads(plain.dumps([b"x", Odd()])) == [Symbol("b'x'"), Symbol("<Odd>")]


def test_what_is_nested_too_deep_is_cut() -> None:
    item: Any = 1
    for _ in range(500):
        item = [item]
    found = plain.loads(plain.dumps(item))
    for _ in range(64):
        (found,) = found
    assert found == Symbol("…")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("tdyercfix"), inner, max_size=2)
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_json_is_read_or_refused(item: Any) -> None:
    for reader in (plain.loads, plain.load_form, *(_row(kind) for kind in (d.ModuleInfo, d.TensorMeta))):
        with contextlib.suppress(Damage):
            reader(json.dumps(item))


def _row(kind: type) -> Any:
    return lambda text: records.load(kind, text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "1" * 10_000, '{"i":"x"}', '{"f":"00"}', '{"c":[1]}', '{"t":1}', '{"z":1}',
     '{"d":[[[],1]]}', '{"d":[[1,1],[1,2]]}', '{"r":["a",[[1,2]]]}', '{"y":1}', '{"e":"a"}',
     '{"t":[],"d":[]}', f"{99 << 70}", "[" * 80 + "]" * 80],
)  # fmt: skip
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(Damage):
        plain.loads(text)


def test_rows_keep_every_field() -> None:
    parameter = d.ParameterInfo("w", "fc.w", (2, 3), "float32", 6, 24, True, False, 1)
    module = d.ModuleInfo("fc", ("fc", "tied"), "Linear", "torch.nn", 0, "x=1", True, 0, (parameter,))
    for row in (
        module,
        d.TensorMeta((), None, "f", "cpu"),
        d.TensorMeta((1,), (1,), "f", "cuda:0", "s", 8, "T"),
    ):
        assert records.load(type(row), records.dump(row)) == row
    assert records.load(d.TensorMeta, '[[1],null,"float32","cpu"]') == d.TensorMeta(
        (1,), None, "float32", "cpu"
    )


@pytest.mark.parametrize(
    "text", ["1", "[]", '[[1],null,"f"]', '[[true],null,"f","cpu"]', '[[1.0],null,"f","cpu"]',
             '[[1],null,1,"cpu"]', f'[[{1 << 63}],null,"f","cpu"]', '[[1],null,"f","cpu","s",4,"T",1,2]']
)  # fmt: skip
def test_rows_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(Damage):
        records.load(d.TensorMeta, text)
