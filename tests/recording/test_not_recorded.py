"""Compiled code and modules on other threads are not recorded, and every view says so in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.compat.torch_code_tracing import TracingMode
from sightline.compat.tracy_nn import Tracer
from tests.recording.engines import BOTH_ENGINES

pytestmark = pytest.mark.filterwarnings("ignore")

COMPILED = 'compiled code ran as 2 opaque ops (compiled Net): compiled="eager" shows what runs inside'
THREADS = "3 module calls on other threads (Net first) were not recorded: start a recording on those threads"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(x).relu())
        return hidden


@pytest.fixture
def compiled() -> Iterator[Any]:
    """A compiled model that has run before."""
    torch.compiler.reset()
    model = torch.compile(Net(), backend="eager")
    model(torch.ones(2, 3))
    yield model
    torch.compiler.reset()


def elsewhere(run: Callable[[], Any]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def twice(model: Any) -> None:
    model(torch.ones(2, 3))
    model(torch.ones(2, 3)).sum()


@BOTH_ENGINES
@pytest.mark.parametrize("live", ["code", "log"])
def test_live_output_shows_compiled_code(
    compiled: Any, engine: Any, live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with sl.trace(compiled, engine=engine, live=live):
        twice(compiled)
    out = capsys.readouterr().out
    calls = {"code": "│ # compiled Net(f32[2, 3]);", "log": "● compiled Net() @ [twice]"}
    assert out.count(calls[live]) == 2
    assert out.splitlines()[-1].endswith(COMPILED)
    assert "Output: None" not in out


def _ops(lines: list[str]) -> list[str]:
    """The lines of ops, without the source lines above them, which those of a test runner may be among."""
    return [text for line in lines if (text := line.strip("│ ")).startswith("# ") and text.endswith(";")]


@BOTH_ENGINES
def test_live_output_shows_a_compiled_backward_pass(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    model = torch.compile(Net(), backend="aot_eager")
    model(torch.ones(2, 3)).sum().backward()
    with sl.trace(model, engine=engine, live="code") as t:
        model(torch.ones(2, 3)).sum().backward()
    *out, note = capsys.readouterr().out.splitlines()
    assert _ops(out) == _ops(str(t.code()).splitlines())
    assert sum("compiled backward()" in line for line in out) == 1
    assert note.startswith("# compiled code ran as 2 opaque ops (compiled Net, compiled backward):")
    torch.compiler.reset()


@BOTH_ENGINES
def test_finished_views_say_that_code_was_compiled(compiled: Any, engine: Any, tmp_path: Path) -> None:
    with sl.trace(compiled, engine=engine) as t:
        twice(compiled)
    t.save(tmp_path / "run.sight")
    for each in (t, sl.load(tmp_path / "run.sight")):
        assert str(each.call_order()).splitlines() == ["Net #0…#1 ×2", f"# {COMPILED}"]
        assert 'its ops are not seen; compiled="eager" shows them' in str(each)


@BOTH_ENGINES
@pytest.mark.parametrize("trained", [False, True])
def test_the_first_screen_says_that_a_backward_of_compiled_code_was_seen(engine: Any, trained: bool) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 3), Net())
    model[1].compile(backend="eager")  # which leaves the backward pass to autograd
    with sl.trace(model, engine=engine) as t:
        result = model(torch.ones(2, 3)).sum()
        if trained:
            result.backward()
    seen = any(op.phase == "backward" and op.level == "aten" and op.forward is not None
               and op.forward.flavour == "opaque" and op.flavour == "op" for op in t.ops)  # fmt: skip
    assert seen is trained
    screen = str(t)
    assert ("in its forward its ops are not seen" in screen) is trained
    assert ("compiled Net (forward)" in screen) is trained
    assert ("compiled Net (forward)" in str(t.summary())) is trained
    torch.compiler.reset()


@BOTH_ENGINES
def test_the_summary_of_a_model_that_is_compiled_as_a_whole(engine: Any) -> None:
    torch.compiler.reset()
    model = Net()
    model.compile(backend="eager")
    with sl.trace(model, engine=engine) as t:
        twice(model)
    summary = str(t.summary())
    assert summary.count("in compiled code") == 3
    assert "not called" not in summary
    assert "modules     none called\n" in summary
    assert str(t.log()).splitlines()[0] == f"# {COMPILED}"
    torch.compiler.reset()


@BOTH_ENGINES
@pytest.mark.parametrize("live", ["code", "log"])
def test_live_output_says_that_modules_ran_on_another_thread(
    engine: Any, live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    with sl.trace(model, engine=engine, live=live):
        elsewhere(lambda: model(torch.ones(2, 3)))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(THREADS)


@BOTH_ENGINES
@pytest.mark.parametrize("ops", ["both", "none"])
def test_every_view_says_that_modules_ran_on_another_thread(engine: Any, ops: Any, tmp_path: Path) -> None:
    model = Net()
    with sl.trace(model, engine=engine, ops=ops, path=tmp_path / "run.sight") as t:
        elsewhere(lambda: model(torch.ones(2, 3)))
    for each in (t, sl.load(tmp_path / "run.sight")):
        for text in view_texts(each):
            assert THREADS in text
    with sl.trace(model, engine=engine, ops=ops, stats=True if ops == "both" else None) as t:
        model(torch.ones(2, 3)).sum().backward()
        elsewhere(lambda: model(torch.ones(2, 3)))
    for text in view_texts(t):
        assert THREADS in text


def view_texts(t: sl.Trace) -> list[str]:
    """The text of every view of a whole run, in one line each."""
    views = [t, t.code(), t.log(), t.call_order(), t.summary(), t.source(), t.memory(), t.problems()]
    views += [t.nonfinite(), t.graph(), t.graph(level="module", depth=1, fold=False, prune="views")]
    return [" ".join(str(view).replace("# ", "").split()) for view in views]


@BOTH_ENGINES
def test_a_thread_with_its_own_recording_misses_nothing(engine: Any) -> None:
    model, traces = Net(), []

    def run() -> None:
        with sl.trace(model, engine=engine) as inner:
            model(torch.ones(2, 3))
        traces.append(inner)

    with sl.trace(model, engine=engine) as outer:
        elsewhere(run)
        model(torch.ones(2, 3))
    for t in (outer, *traces):
        assert len(t.module_calls) == 3
        assert "other threads" not in str(t)


@BOTH_ENGINES
def test_modules_that_a_backward_pass_calls_are_recorded(engine: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Net()
    with sl.trace(model, engine=engine) as t:
        checkpoint(model, torch.ones(2, 3), use_reentrant=False).sum().backward()
    assert "thread" not in str(t)


def test_a_tracing_mode_shows_compiled_code_and_other_threads(
    compiled: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    with TracingMode(color=False) as mode:
        twice(compiled)
        elsewhere(lambda: model(torch.ones(2, 3)))
    printed = capsys.readouterr().out
    assert [trace.op_str for trace in mode.traces if "compiled" in trace.op_str] == [
        "compiled Net(f32[2, 3]) -> f32[2, 2]"
    ] * 2
    for text in (printed, mode.format() + "\n"):
        assert text.endswith(f"# {COMPILED}\n# {THREADS}\n")


def test_a_tracer_shows_compiled_code_and_other_threads(
    compiled: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tracer = Net(), Tracer("Net")
    with tracer.trace(compiled):
        twice(compiled)
        elsewhere(lambda: model(torch.ones(2, 3)))
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    assert lines.count("● compiled Net() @ [twice]") == 2
    assert [line for line in lines if line][-3:] == [
        f"● {COMPILED}",
        f"● {THREADS}",
        "● TRACING Net COMPLETE",
    ]


@BOTH_ENGINES
def test_a_live_result_that_nobody_keeps_is_shown(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with sl.trace(engine=engine, live="log"):
        torch.ones(2, 2).sum()
        torch.ones(3)
    assert "Output: Tensor [] @ cpu" in capsys.readouterr().out
