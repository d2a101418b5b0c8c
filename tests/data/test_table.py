"""What ``where`` understands, and what it refuses instead of giving an empty table."""

from __future__ import annotations

import pytest
import torch

import sightline as sl
from sightline.api import Trace
from sightline.errors import NothingMatched, UsageError
from tests.builders import make_trace
from tests.recording.nets import Net


def recorded() -> Trace:
    model = Net()
    with sl.trace(model) as t:
        model(torch.ones(2, 4)).sum().backward()
    return t


def test_values_by_the_module_that_made_them() -> None:
    t = make_trace()
    made = t.values.where(module="blocks.0.attn")
    assert len(made)
    modules = [value.producer.module for value in made if value.producer]
    assert {module.path for module in modules if module} == {"blocks.0.attn.qkv"}
    assert [value.id for value in t.values.where(module="blocks.*.attn", kind="activation")] == [
        value.id
        for value in t.values
        if value.producer is not None
        and value.producer.phase == "forward"
        and value.producer.module is not None
        and value.producer.module.path.endswith("attn.qkv")
    ]


def test_a_module_is_meant_by_whole_segments() -> None:
    t = make_trace(11)
    assert len(t.values.where(module="blocks.1")) == len(t.values.where(module="blocks.10"))


def test_a_parameter_is_in_the_module_that_owns_it() -> None:
    t = make_trace()
    assert [value.name for value in t.values.where(module="blocks.0.norm", kind="parameter")] == [
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
    ]


def test_the_model_itself_by_its_class() -> None:
    t = recorded()
    assert len(t.ops.where(module="Net")) == len(t.ops.where(module="")) > 0


def test_ops_and_calls_take_a_module_the_same_way() -> None:
    t = recorded()
    assert {op.module.path for op in t.ops.where(module="fc*") if op.module} == {"fc1", "fc2"}
    assert [call.module.path for call in t.module_calls.where(module="fc1")] == ["fc1"]
    (fc1,) = t.modules.where(path="fc1")
    assert len(t.ops.where(module=fc1))


def test_values_by_name_or_glob() -> None:
    t = recorded()
    assert [value.name for value in t.values.where(name="fc1.weight")] == ["fc1.weight"]
    assert {value.name for value in t.values.where(name="*.weight")} == {"fc1.weight", "fc2.weight"}
    assert {value.name for value in t.values.where(name="fc1.*", kind="parameter")} == {
        "fc1.weight",
        "fc1.bias",
    }
    assert {op.name for op in t.ops.where(name="add*")} == {"addmm"}
    assert all(value.name for value in t.values.where(name="*"))


@pytest.mark.parametrize("shape", [(2, 8), [2, 8], "[2, 8]", "f32[2, 8]", " f32[2,8] ", "float32[2, 8]"])
def test_values_by_shape(shape: object) -> None:
    found = recorded().values.where(shape=shape)
    assert len(found)
    assert {value.shape for value in found} == {(2, 8)}


def test_a_shape_with_another_dtype_or_device_is_another() -> None:
    t = recorded()
    assert len(t.values.where(shape="f64[2, 8]")) == 0
    assert len(t.values.where(shape="f32[2, 8]@cuda:0")) == 0
    assert len(t.values.where(shape=())) == len(t.values.where(shape="f32[]")) > 0


@pytest.mark.parametrize("dtype", ["f32", "float32", "torch.float32", torch.float32])
def test_a_dtype_by_any_of_its_names(dtype: object) -> None:
    t = recorded()
    assert len(t.values.where(dtype=dtype)) == len(t.values)


@pytest.mark.parametrize("shape", ["2x8", 8, (2, "8"), "f32(2, 8)", None, (True, 2)])
def test_what_is_no_shape(shape: object) -> None:
    with pytest.raises(UsageError, match=r"is no shape; write \(2, 8\), \[2, 8\] or \"f32\[2, 8\]\""):
        make_trace().values.where(shape=shape)


@pytest.mark.parametrize(
    ("table", "wrong", "sentence"),
    [
        ("ops", {"phase": "forwrad"}, r"phase='forwrad' is no phase; choose 'forward', .* or 'optimizer'\."),
        ("ops", {"level": 1}, r"level=1 is no level; choose 'api' or 'aten'\."),
        (
            "ops",
            {"flavour": "Method"},
            r"flavour='Method' is no flavour; choose 'function', .* or 'opaque'\.",
        ),
        (
            "values",
            {"kind": "weight"},
            r"kind='weight' is no kind; choose 'input', 'parameter', .*'evicted'\.",
        ),
        ("module_calls", {"phase": ""}, r"phase='' is no phase; choose"),
        ("values", {"knd": "input"}, r"Value rows have no property 'knd'; did you mean 'kind'\?"),
        ("frames", {"module": "fc"}, r"Frame rows have no property 'module'"),
        (
            "values",
            {"module": "blocks.0.atn"},
            r"matches no module of this trace; did you mean 'blocks.0.attn'",
        ),
        (
            "ops",
            {"module": "zzz"},
            r"module='zzz' matches no module of this trace; it has 'embed', ",
        ),
    ],
)
def test_what_can_never_match_is_one_sentence(table: str, wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        getattr(make_trace(), table).where(**wrong)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, NothingMatched) == ("module" in wrong and table != "frames")


def test_a_choice_that_is_not_there_is_an_empty_table() -> None:
    assert len(make_trace(backward=False).ops.where(phase="backward")) == 0


def test_a_test_of_ones_own_goes_with_the_rest() -> None:
    t = make_trace()
    long = t.ops.where(lambda op: op.duration > 5000, level="aten", name="mm")
    assert {op.name for op in long} == {"mm"}
    assert all(op.duration > 5000 for op in long)


def test_a_table_of_a_trace_without_modules() -> None:
    with sl.trace() as t:
        torch.ones(2)
    with pytest.raises(NothingMatched, match=r"module='fc' matches no module of this trace\."):
        t.values.where(module="fc")
