"""The common filters: their matches, and their errors when they match nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sightline.analysis.select import Mask, Selection
from sightline.api import Trace
from sightline.data.index import Index
from sightline.errors import NothingMatched, UsageError
from sightline.patterns import path_matches
from tests.builders import TraceBuilder, make_trace


def select_ops(index: Index, *, level: str | None = None, **filters: Any) -> Mask:
    return Selection(**filters).ops(index, level)


def select_calls(index: Index, **filters: Any) -> Mask:
    return Selection(**filters).calls(index)


def names(trace: Trace, **filters: Any) -> list[str]:
    return [trace.ops[int(id)].name for id in np.flatnonzero(select_ops(trace.index, **filters))]


def paths(trace: Trace, **filters: Any) -> list[str]:
    ids = np.flatnonzero(select_calls(trace.index, **filters))
    return [trace.module_calls[int(id)].module.label for id in ids]


@pytest.mark.parametrize(
    ("pattern", "path", "meant"),
    [
        ("layers.1", "layers.1", True),
        ("layers.1", "layers.10", False),
        ("layers.1", "layers.1.fc", True),
        ("layers", "layers.10.fc", True),
        ("layers.*", "layers", False),
        ("layers.*", "layers.10", True),
        ("*", "layers", True),
        ("*", "", False),
        ("*.attn", "blocks.0.attn", False),
        ("blocks.*.attn", "blocks.0.attn.qkv", True),
        ("blocks.*.attn", "blocks.0.mlp", False),
        ("**.attn", "attn", True),
        ("**.attn", "a.b.c.attn.d", True),
        ("**.attn", "a.attention", False),
        ("a.**.z", "a.z", True),
        ("a.**.z", "a.b.c.z", True),
        ("a.**.z", "b.z", False),
        ("**", "", True),
        ("", "anything.at.all", True),
        ("h.[01].ln_?", "h.1.ln_2", True),
        ("h.[01].ln_?", "h.2.ln_2", False),
        ("a.b", "a", False),
        ("A", "a", False),
    ],
)
def test_paths_match_by_segments(pattern: str, path: str, meant: bool) -> None:
    assert path_matches(pattern, path) is meant


def test_many_double_stars_cost_no_backtracking() -> None:
    assert not path_matches(".".join(["**", "a"] * 30 + ["z"]), ".".join(["a"] * 60))


def test_a_module_brings_everything_inside_it() -> None:
    t = make_trace(backward=False)
    assert paths(t, module="blocks.1") == ["blocks.1", "blocks.1.norm", "blocks.1.attn.qkv", "blocks.1.fc"]
    assert paths(t, module="blocks.*.attn") == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]
    assert names(t, module="blocks.*.attn", level="aten") == ["t", "mm", "t", "mm"]


def test_the_model_itself_is_named_by_its_class_or_nothing() -> None:
    t = make_trace()
    assert paths(t, module="Net") == paths(t, module="") == paths(t)


def test_a_backward_op_belongs_to_the_module_of_its_forward_op() -> None:
    assert names(make_trace(), module="embed", phase="backward") == ["embedding_dense_backward"]


def test_a_function_called_by_a_module_outside_its_path_is_inside_it() -> None:
    b = TraceBuilder()
    x = b.value(2)
    with b.call("a", x), b.call("shared", x):
        b.op("relu", x, out=(2,))
    assert names(b.build(), module="a") == ["relu"]


def test_a_shared_module_matches_under_every_name() -> None:
    b = TraceBuilder()
    x = b.value(2)
    b.module("head", aliases=("tail.last",))
    with b.call("head", x):
        b.op("relu", x, out=(2,))
    assert names(b.build(), module="tail.*") == ["relu"]


def test_op_names_match_with_and_without_overload_and_namespace() -> None:
    t = make_trace(1, backward=False)
    assert names(t, op="add", level="aten") == ["add.Tensor"]
    assert names(t, op="*mm", level="aten") == ["mm", "bmm", "bmm", "mm"]
    assert names(t, op="linear", level="api") == ["F.linear", "F.linear"]
    assert names(t, op="Tensor.*", level="api") == ["Tensor.chunk", "Tensor.transpose", "Tensor.sum"]


def test_an_opaque_op_is_there_at_every_level() -> None:
    b = TraceBuilder()
    b.op("compiled f", b.value(2), out=(2,), level="api", flavour="opaque")
    b.op("relu", b.value(2), out=(2,))
    assert names(b.build(), level="aten") == ["compiled f", "relu"]
    assert names(b.build(), level="api") == ["compiled f"]
    assert names(b.build(), level="aten", op="compiled*") == ["compiled f"]


def test_phase_depth_and_tail() -> None:
    t = make_trace()
    assert names(t, phase="optimizer") == ["_foreach_add_"]
    assert names(t, tail=2) == ["embedding_dense_backward", "_foreach_add_"]
    assert set(paths(t, depth=1)) == {"Net", "embed"}
    assert names(t, depth=1, phase="forward", level="aten") == ["embedding", "sum"]
    assert paths(t, tail=1) == ["blocks.1.fc"]


def test_calls_by_op_are_those_it_ran_in() -> None:
    t = make_trace(1, backward=False)
    assert paths(t, op="native_layer_norm") == ["Net", "blocks.0", "blocks.0.norm"]


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        (
            {"module": "blocks.*.atn"},
            "module='blocks.*.atn' matches no module of this trace; did you mean 'blocks.0.attn', 'blocks.1.",
        ),
        (
            {"module": "layers.1"},
            "module='layers.1' matches no module of this trace; did you mean 'blocks.1'",
        ),
        ({"op": "bnm", "level": "aten"}, "op='bnm' matches no aten op of this trace; did you mean 'bmm'"),
        ({"op": "zzzzzzzz"}, "op='zzzzzzzz' matches no op of this trace; it has '"),
        (
            {"phase": "recompute"},
            "phase='recompute' matches no op of this trace; it has 'forward', 'backward', ",
        ),
        (
            {"module": "embed", "op": "bmm"},
            "The combination module='embed', op='bmm' matches no op of this trace.",
        ),
    ],
)
def test_nothing_matched_names_the_filter_and_what_is_near(filters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NothingMatched) as error:
        select_ops(make_trace().index, **filters)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"phase": "sideways"}, "phase='sideways' is no phase; choose 'forward', 'backward', 'recompute' or"),
        ({"tail": 0}, "tail=0 must be a whole number from 1 up."),
        ({"depth": -1}, "depth=-1 must be a whole number from 0 up."),
        ({"tail": True}, "tail=True must be a whole number from 1 up."),
        ({"module": 3}, "module=3 must be a string."),
    ],
)
def test_a_filter_that_means_nothing_is_a_usage_error(filters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        Selection(**filters)
    assert str(error.value).startswith(sentence)


def test_an_empty_trace_is_no_error_until_something_is_asked_of_it() -> None:
    index = TraceBuilder().build().index
    assert not select_ops(index).any()
    assert not select_calls(index).any()
    with pytest.raises(NothingMatched, match="this trace has no recorded ops"):
        select_ops(index, op="mm")
    with pytest.raises(NothingMatched, match="this trace has no module calls"):
        select_calls(index, module="a")
