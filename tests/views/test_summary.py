from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.api import Trace
from sightline.data.trace_data import ParameterInfo, TensorMeta
from sightline.errors import NothingMatched, UsageError
from sightline.views.inputs_outputs import FULL, SHORT, SHORTEST, Exchange, Item
from sightline.views.rendering import width
from sightline.views.summary import summary
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.measured import NANS, measured
from tests.views.odd_traces import crashed, hostile, nested


def rows(text: str) -> dict[str, str]:
    """The rows of the table by the first word after the tree."""
    return {line.lstrip("│├└ ").partition(" ")[0]: line for line in text.splitlines() if line}


def test_a_small_transformer(golden: Golden) -> None:
    golden("summary_transformer", str(summary(make_trace())))


def test_nested_inputs_shared_frozen_and_unused_modules(golden: Golden) -> None:
    golden("summary_nested", str(summary(nested(), width=None)))


def test_a_run_that_crashed(golden: Golden) -> None:
    golden("summary_crashed", str(summary(crashed())))


@pytest.mark.parametrize("make", [make_trace, nested, crashed])
def test_it_fits_a_hundred_columns(make: Callable[[], Trace]) -> None:
    assert max(map(width, str(summary(make())).splitlines())) <= 100


def test_columns_that_would_be_empty_are_left_out() -> None:
    head = str(summary(make_trace(backward=False))).splitlines()[0]
    assert "time" in head
    assert "bwd" not in head
    assert "trainable" not in head


def test_calls_have_a_column_where_a_module_was_called_more_than_once() -> None:
    assert "each called once" in str(summary(make_trace()))
    text = str(summary(nested()))
    assert " calls " in text.splitlines()[0]
    assert " 6 " in rows(text)["fc"]


def test_ops_between_modules_have_their_row() -> None:
    text = str(summary(make_trace(1), width=None))
    assert "· chunk, transpose, @ ×2, softmax, gelu, +" in text
    assert "· outside: sum" in text


def test_a_tied_weight_stands_in_parentheses_where_it_was_counted_before() -> None:
    text = str(summary(nested()))
    assert "(800)" in rows(text)["head"]
    assert "parameters  936 (3.66 KiB) · trainable 928 · not trainable 8" in text


def test_a_call_that_raised_says_so() -> None:
    assert "f32[1, 8] → raised" in rows(str(summary(crashed())))["fc2"]


def test_depth_takes_what_is_deeper_into_the_last_row() -> None:
    text = str(summary(make_trace(), depth=1))
    assert "norm" not in text
    assert "8.19k" in rows(text)["blocks"]
    assert rows(text)["total"].split() == rows(str(summary(make_trace())))["total"].split()


def test_module_and_phase() -> None:
    text = str(summary(make_trace(), module="blocks.*.fc", phase="backward"))
    assert list(rows(text))[1:4] == ["─" * len(text.splitlines()[1]), "blocks.0.fc", "blocks.1.fc"]
    assert "18.0 µs" in rows(text)["total"]
    assert "FLOPs" not in text.splitlines()[0]


def test_a_filter_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(NothingMatched, match=r"module='block' matches no module of this trace; did you mean"):
        summary(make_trace(), module="block")
    with pytest.raises(UsageError, match="phase='sideways' is no phase"):
        summary(make_trace(), phase="sideways")


def test_another_device_is_said_once() -> None:
    b = TraceBuilder()
    x = b.value(2, 3, device="cuda:0")
    with b.call("fc", x) as out:
        out.append(b.value(2, 3, device="cuda:0", producer=-1))
        b.op("relu_", x, inplace=x)
    trace = b.build()
    trace.data.metas[:] = [TensorMeta((2, 3), None, "float32", "cuda:0") for _ in trace.data.metas]
    assert "f32[2, 3] → f32[2, 3] " in str(summary(trace))


def test_hostile_names_stay_text() -> None:
    view = summary(hostile(), width=None)
    assert "\x1b" not in str(view)
    assert "\u202e" not in str(view)
    assert "[bold]x[/bold]" in str(view)
    assert "<script>" not in view._repr_html_()


def test_an_empty_trace_has_no_table() -> None:
    assert str(summary(TraceBuilder().build())) == "(nothing was recorded)"


def deep() -> Trace:
    """Long names, six levels deep, forward and backward, with more inputs than have room."""
    b = TraceBuilder()
    x, mask = b.value(12, 512, 1024), b.value(12, 16, 512, 512, dtype="bool")
    path, made = "", []
    with ExitStack() as stack:
        stack.enter_context(b.call("", x, attention_mask=mask))
        for key, name in enumerate(("encoder", "layers", "0", "self_attention", "output_projection_layer")):
            path = f"{path}.{name}".lstrip(".")
            weight = ParameterInfo("w", f"{path}.w", (9,), "float32", 10**6, 4 * 10**6, True, False, key)
            b.module(path, f"{name.title()}WithAVeryLongClassName", parameters=(weight,))
            stack.enter_context(b.call(path, x, attention_mask=mask))
            made.append(b.op("addmm", x, out=(12, 512, 4096), flops=10**9, duration=123_456))
    with b.phase("backward"):
        for y in made:
            b.op("mm", y, out=(12, 512, 1024), forward=y, flops=2 * 10**9, duration=234_567)
    return b.build()


@pytest.mark.parametrize("depth", [None, 2, 4, 5])
@pytest.mark.parametrize("stats", [False, True])
def test_a_deep_model_fits_and_shows_what_came_out(depth: int | None, stats: bool) -> None:
    t = deep()
    if stats:
        made = t.values.where(lambda value: value.producer is not None)
        t = measured(t, {value.id: NANS for value in made})
    text = str(summary(t, depth=depth))
    assert max(map(width, text.splitlines())) <= 100
    table = text.partition("\n\n")[0].splitlines()[1:]
    assert all("4096]" in line for line in table if "→" in line)
    assert ("no room for backward FLOPs" in text) == (stats or depth is None or depth > 4)


def test_what_had_no_room_is_there_without_a_limit() -> None:
    text = str(summary(deep(), width=None))
    assert "no room for" not in text
    assert "(Output_Projection_LayerWithAVeryLongClassName)" in text


def test_names_go_on_without_their_class_where_room_is_short() -> None:
    text = str(summary(deep()))
    assert "output_projection_la" in text
    assert "WithAVery…" not in text


def test_a_wide_table_has_every_column() -> None:
    head = str(summary(deep(), width=200)).splitlines()[0].split()
    assert head[-6:] == ["params", "FLOPs", "bwd", "time", "bwd", "memory"]


def test_the_key_explains_what_appears_and_nothing_else() -> None:
    assert str(summary(make_trace())).splitlines()[-1] == "key         +N: N more · same: as the input"
    assert "key" not in str(summary(crashed(), width=None))
    assert "(N): counted above" in str(summary(nested(), width=None))


def test_a_result_of_lower_rank_is_written_in_full() -> None:
    pooled = Exchange((Item("", "f32", ("4", "16", "32"), ""),), (Item("", "f32", ("4", "32"), ""),))
    assert [pooled.text(brevity) for brevity in (FULL, SHORT, SHORTEST)] == [
        "f32[4, 16, 32] → f32[4, 32]", "f32[4, 16, 32] → [4, 32]", "f32[4, 16, 32] → [4, 32]",
    ]  # fmt: skip


def test_layers_that_look_alike_share_their_rows() -> None:
    together = str(summary(make_trace(5), width=None))
    assert together.count("(Block)") == 1
    assert "0…4 (Block)" in together
    assert str(summary(make_trace(5), width=None, fold=False)).count("(Block)") == 5


def test_shared_rows_have_the_sums_of_all() -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))
    with sl.trace(model) as t:
        model(torch.ones(2, 8)).sum().backward()
    lines = str(t.summary(width=None)).splitlines()
    (several,) = [text for text in lines if "0…3 (Sequential)" in text]
    assert "288" in several.split()  # parameters of four times 8 × 8 + 8
    assert "1.02k" in several.split()  # forward FLOPs of four products
    inner = lines[lines.index(several) + 1]
    assert "0 (Linear)" in inner
    assert "288" in inner.split()
    assert sum("(Linear)" in text for text in lines) == 2
    assert "0…N: layers that look alike, their sums" in lines[-1]


@pytest.mark.parametrize("change", ["width", "mode", "calls"])
def test_layers_that_differ_have_rows_of_their_own(change: str) -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Dropout(0.1) if change == "mode" else torch.nn.Linear(8, 8) for _ in range(4)]
    if change == "width":
        layers[2] = torch.nn.Linear(8, 8, bias=False)
    if change == "mode":
        layers[2] = torch.nn.Dropout(0.2)
    model = torch.nn.Sequential(*layers)
    with sl.trace(model) as t:
        x = model(torch.ones(2, 8))
        if change == "calls":
            layers[2](x)
    text = str(t.summary(width=None))
    assert "…" not in "".join(name for name in rows(text))


def test_the_ops_of_layers_that_share_a_row_are_summed_like_its_calls() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.fc(x)
            return x.view(4, 4).view(2, 8).relu()

    model, rounds = torch.nn.Sequential(*(Layer() for _ in range(4))), 3
    with sl.trace(model) as t:
        for _ in range(rounds):
            model(torch.ones(2, 8))
    folded, unfolded = str(t.summary()), str(t.summary(fold=False))
    assert f"· view ×{4 * 2 * rounds}, relu ×{4 * rounds}" in folded
    assert f" {4 * rounds} " in rows(folded)["0…3"], "calls"
    assert unfolded.count(f"· view ×{2 * rounds}, relu ×{rounds}") == 4


def test_layers_that_ran_once_each_have_no_column_of_calls() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with sl.trace(model) as t:
        model(torch.ones(2, 4))
    text = str(t.summary())
    assert "0…2 (Linear)" in text
    assert "4, each called once" in text
    assert "calls" not in text.splitlines()[0]
    with sl.trace(model) as t:
        model(model(torch.ones(2, 4)))
    assert "calls" in str(t.summary()).splitlines()[0]


def test_layers_share_rows_only_where_none_between_them_is_left_out() -> None:
    class Skipping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at in (0, 2, 4, 5, 6, 7):
                x = self.layers[at](x)
            return x

    model = Skipping()
    with sl.trace(model) as t:
        model(torch.ones(2, 4))
    names = re.findall(r"(\S+) \(Linear\)", str(t.summary()))
    assert names == ["0", "2", "4…7", "1", "3"]
