from __future__ import annotations

import io
import re

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.views.overview import overview
from sightline.views.rendering import width
from tests.builders import TraceBuilder, make_trace
from tests.conftest import Golden
from tests.measured import INFS, NANS, measured
from tests.views.odd_traces import crashed, hostile, nested


def test_a_small_transformer(golden: Golden) -> None:
    golden("overview_transformer", str(overview(make_trace())))


def test_a_run_that_crashed(golden: Golden) -> None:
    golden("overview_crashed", str(overview(crashed())))


def test_it_is_one_screen() -> None:
    for trace in (make_trace(48), nested(), crashed(), hostile()):
        lines = str(overview(trace)).splitlines()
        assert len(lines) <= 40
        assert max(map(width, lines)) <= 100


def test_print_and_str_of_a_trace_are_the_overview() -> None:
    trace = make_trace()
    assert str(trace) == str(overview(trace))


def test_trouble_is_said_in_red() -> None:
    b = TraceBuilder(faults=["KeyError: 3 in after_op"], fault_count=12, exception="ValueError: no")
    b.op("ones", out=(2,))
    view = overview(b.build())
    assert "the recorder failed 12 times" in str(view)
    assert "KeyError: 3 in after_op" in str(view)
    out = io.StringIO()
    view.print(color=True, file=out)
    assert "\x1b[1;31mValueError: no\x1b[0m" in out.getvalue()


def test_external_values_are_counted() -> None:
    b = TraceBuilder()
    b.op("relu", b.value(2, kind="external"), out=(2,))
    assert "1 external" in str(overview(b.build()))
    assert "external" not in str(overview(make_trace()))


def test_repeated_blocks_are_one_row() -> None:
    assert "0 … 47 (Block ×48)" in str(overview(make_trace(48)))


class Parts(nn.Module):
    """A model whose forward calls its parts in turn, each with the result of the one before."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def rows_of_modules(trace: sl.Trace) -> list[str]:
    """The rows of the table of modules, without times: ``fc (Linear)  f32[2, 4] → f32[2, 8]``."""
    lines = str(trace).split("\nmodule ")[1].split("\n\n")[0].splitlines()[2:]
    return [re.sub(r"  +", "  ", re.split(r" +[\d.]+ [mµn]?s ", line)[0].strip()) for line in lines]


def test_layers_of_different_sizes_have_rows_of_their_own() -> None:
    model = Parts(e=nn.Linear(6, 16), m=nn.Linear(16, 16), v=nn.Linear(16, 1))
    with sl.trace(model) as t:
        model(torch.ones(8, 6))
    assert rows_of_modules(t)[1:] == [
        "e (Linear)  f32[8, 6] → f32[8, 16]",
        "m (Linear)  f32[8, 16] → f32[8, 16]",
        "v (Linear)  f32[8, 16] → f32[8, 1]",
    ]
    pools = nn.Sequential(*(nn.MaxPool1d(2) for _ in range(3)))  # no weights: the tensors tell them apart
    tables = nn.Sequential(*(nn.Embedding(size, 4) for size in (9, 5, 2)))  # the same tensors, other weights
    with sl.trace(tables) as t, torch.no_grad():
        [each(torch.zeros(3, dtype=torch.int64)) for each in tables]
        pools(torch.ones(1, 1, 16))
    assert not re.search(r" ×3\)", "\n".join(rows_of_modules(t)))


def test_outermost_modules_of_different_sizes_have_rows_of_their_own() -> None:
    trunk, a, b = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 4)
    with sl.trace() as t:
        h = trunk(torch.ones(8, 6))
        a(h)
        b(h)
    assert [row.split()[0] for row in rows_of_modules(t)] == ["trunk", "a", "b"]


def test_a_row_of_several_modules_lists_names_that_are_no_range() -> None:
    model = Parts(q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), o=nn.Linear(8, 8))
    with sl.trace(model) as t:
        model(torch.ones(4, 8))
    assert rows_of_modules(t)[1:] == ["q, k, v, o (Linear ×4)  f32[4, 8] → f32[4, 8]"]
    model = Parts(layer1=nn.Linear(8, 8), layer2=nn.Linear(8, 8), layer3=nn.Linear(8, 8))
    one, two, three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    with sl.trace() as t:
        three(two(one(model(torch.ones(4, 8)))))
    rows = rows_of_modules(t)
    assert rows[1].startswith("layer1 … layer3 (Linear ×3)")
    assert rows[2].startswith("one, two, three (Linear ×3)")


def test_equal_layers_share_a_row_though_batches_differ_and_some_skip_one() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with sl.trace(model) as t:
        for size in (3, 5, 4):
            for at, layer in enumerate(model):
                if at != size - 3:
                    layer(torch.ones(size, 8))
    assert rows_of_modules(t)[-1] == "0 … 3 (Linear ×4)  f32[3…5, 8] → f32[3…5, 8]"


def test_a_table_that_leaves_out_modules_says_how_many() -> None:
    models = [nn.Linear(size, size + 1) for size in range(1, 21)]
    with sl.trace() as t:
        x = torch.ones(2, 1)
        for model in models:
            x = model(x)
    rows = rows_of_modules(t)
    assert len(rows) == 14
    assert rows[-1].startswith("… 7 more")


def test_an_empty_trace() -> None:
    told = "modules   0 called; none was called, as module(…), on the thread that started the recording"
    assert told in str(overview(TraceBuilder().build()))


def test_hostile_names_stay_text() -> None:
    view = overview(hostile())
    assert "\x1b" not in str(view)
    assert "<script>" not in view._repr_html_()


def fact(view: object, title: str) -> str:
    """The fact under a title, or nothing."""
    lines = [line for line in str(view).splitlines() if line.startswith(title.ljust(10))]
    return lines[0].removeprefix(title).strip() if lines else ""


def test_all_shares_are_of_one_stated_total() -> None:
    text = str(overview(make_trace()))
    parts = "(modules 71.0 µs · other 1.00 µs · backward 43.0 µs · optimizer 1.00 µs)"
    assert fact(text, "host time") == f"116 µs {parts}"
    assert fact(text, "key") == "time: with the backward pass · share: of the host time"
    model = next(line for line in text.splitlines() if line.startswith("Net "))
    heaviest = next(line for line in text.splitlines() if line.startswith("net.py:11"))
    assert "112 µs   97 %" in model  # 112 of 116
    assert "34.0 µs   29 %" in heaviest  # 34 of 116


def test_problems_are_counted() -> None:
    layer, target = torch.nn.Linear(3, 1), torch.ones(5)
    with sl.trace(layer) as t:
        ((layer(torch.ones(5, 3)) - target) ** 2).mean()
    view = overview(t)
    assert fact(view, "problems") == "1 error: t.problems()"
    out = io.StringIO()
    view.print(color=True, file=out)
    assert "\x1b[1;31m1 error\x1b[0m" in out.getvalue()
    with sl.trace() as t:
        torch.ones(2).relu()
    assert fact(overview(t), "problems").startswith("none found; not looked at: the numbers")


def test_in_a_long_run_problems_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fact(overview(make_trace()), "problems")
    monkeypatch.setattr("sightline.views.overview._MANY_OPS", len(make_trace().ops) - 1)
    assert fact(overview(make_trace()), "problems").startswith("not looked for in more than 59 ops")


def test_steps_tensors_statistics_and_checks() -> None:
    model = torch.nn.Linear(3, 2)
    with sl.trace(model, capture=True, stats=True) as t:
        for number in range(2):
            with sl.step(f"step{number}"):
                model(torch.ones(4, 3)).log()
    view = overview(t)
    assert re.fullmatch(r"2, .* at the median, recording included; step=1 shows one", fact(view, "steps"))
    assert fact(view, "tensors") == "2 kept, 64 B"
    assert "values measured" in fact(view, "stats")
    assert not fact(view, "check")
    with sl.trace(check="nonfinite") as t:
        torch.ones(2).relu()
    assert fact(overview(t), "check") == "nonfinite: 2 results · all finite"
    for title in ("steps", "tensors", "stats", "check"):
        assert not fact(overview(make_trace()), title)


def test_values_that_are_not_finite_are_counted() -> None:
    b = TraceBuilder()
    x, y = b.op("log", b.value(4), out=(4,)), b.op("exp", b.value(4), out=(4,))
    view = overview(measured(b.build(), {x: NANS, y: INFS}))
    assert fact(view, "stats") == "2 of 4 values measured · 1 with NaN · 1 with Inf: t.nonfinite()"


def test_what_is_short_is_explained_where_it_appears() -> None:
    assert fact(overview(nested()), "key")
    assert "×N" not in fact(overview(make_trace()), "key")
    assert "×N: N times" in fact(overview(make_trace(48)), "key")


def test_a_recording_that_was_cut_short_says_so() -> None:
    told = "cut short the process ended before the recording did: what it did last may be missing"
    b = TraceBuilder(unfinished=True)
    b.op("relu", b.value(2), out=(2,))
    assert told in str(overview(b.build()))
    assert "cut short" not in str(overview(make_trace()))
    why = "nothing had been written when the process ended"
    assert fact(overview(TraceBuilder(unfinished=True).build()), "empty").endswith(why)


def test_what_ran_in_other_threads_is_not_there_and_that_is_said() -> None:
    b = TraceBuilder()
    b.op("relu", b.value(2), out=(2,))
    told = "0 called; none was called, as module(…), on the thread that started the recording"
    assert fact(overview(b.build()), "modules") == told
    assert "thread" not in str(overview(make_trace()))


def test_compiled_code_calls_no_modules_and_that_is_said() -> None:
    b = TraceBuilder(compilations=2, compile_ns=4_900_000_000)
    with b.api("compiled f", b.value(2), flavour="opaque"):
        pass
    view = overview(b.build())
    assert (
        fact(view, "modules")
        == '0 called; compiled code runs without calling any; compiled="eager" shows them'
    )
    assert fact(view, "compiled") == "2 regions in 4.90 s"
    assert not fact(overview(make_trace()), "compiled")


def test_masks_and_unwritten_memory_get_no_pointer_to_a_view_with_nothing_to_show() -> None:
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
    with sl.trace(attention, stats=True) as t:
        attention(x, x, x, attn_mask=torch.full((4, 4), float("-inf")).triu(1))
    told = fact(overview(t), "stats")
    assert told.endswith("with Inf, as given, meant or allowed")
    assert "given, meant or allowed" in str(t.nonfinite())
    with sl.trace(stats=True) as t:
        torch.zeros(3).log()
    assert fact(overview(t), "stats").endswith("1 with Inf: t.nonfinite()")
    assert str(t.nonfinite()).startswith("log made 3 -Inf")


def test_calls_of_several_shapes_are_explained() -> None:
    model = torch.nn.Bilinear(3, 4, 2)
    one = torch.nn.Identity()
    with sl.trace() as t:
        one(model(torch.ones(5, 3), torch.ones(5, 4)))
        one(torch.ones(3))
    text = str(t)
    assert "+1 other" in text
    assert "+N other: N more kinds of calls" in text
    assert "+N: N more" not in text


def test_one_call_is_not_written_as_several() -> None:
    with sl.trace(model := torch.nn.Linear(2, 2)) as t:
        model(torch.ones(1, 2))
    assert fact(overview(t), "modules") == "1 called, 1 call"


def test_a_module_that_is_made_anew_for_each_call_has_its_name_once() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.nn.ReLU()(x)
            return x

    net = Net()
    with sl.trace(net) as t:
        net(torch.ones(2))
    assert re.search(r"\n  ReLU ×4 +f32\[2\]", str(t))


class OwnLoss(nn.Module):
    """A model that makes its loss anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss()(self.fc(x), y)
        return loss


def test_modules_that_a_forward_makes_anew_stand_apart() -> None:
    model = OwnLoss()
    with sl.trace(model) as t:
        for _ in range(5):
            model(torch.randn(6, 4), torch.randint(0, 3, (6,)))
    besides = "besides CrossEntropyLoss ×5, each called once"
    assert fact(t, "modules") == f"2 called, 10 calls; {besides}"
    assert f"modules     2 · calls 10 · {besides}" in str(t.summary())


def test_modules_called_once_are_counted_where_there_are_no_others() -> None:
    with sl.trace() as t:
        for _ in range(3):
            nn.ReLU()(torch.ones(2))
    assert fact(t, "modules") == "3 called, 3 calls"


def test_time_outside_of_modules_is_no_forward() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with sl.trace(model) as t:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    names = re.findall(r"[(·] ?(\w+) ", fact(t, "host time"))
    assert names == ["modules", "other", "backward"]


def test_memory_that_was_overwritten_is_in_no_summary() -> None:
    with sl.trace(stats=True) as t:
        memory = torch.empty(4)
        memory.fill_(float("nan"))  # as it may be
        memory.copy_(torch.ones(4))
        nn.Linear(4, 2)(memory)
    assert "NaN" not in str(t.summary())


@pytest.mark.parametrize("suffix", ["", "_embeddings", "_embeddings_with_a_long_name"])
def test_a_row_of_several_modules_says_how_many_however_long_their_names_are(suffix: str) -> None:
    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            for name in ("word", "position", "token_type"):
                setattr(self.inner, f"{name}{suffix}", nn.Embedding(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([each(x) for each in self.inner.children()])

    model = nn.Sequential(Embeddings())
    with sl.trace(model) as t:
        model(torch.arange(4))
    row = next(line for line in str(t).splitlines() if line.strip().startswith("word"))
    assert "(Embedding ×3)" in row
    assert "……" not in row
