"""Exceptions keep their type and gain a note; bad input is one sentence; faults never reach the run."""

from __future__ import annotations

import re
import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.recording.arguments import Arguments
from sightline.recording.native.session import NativeSession
from tests.recording.engines import BOTH_ENGINES, NATIVE
from tests.recording.nets import Net, aten

X = torch.ones(1, 4)


def notes_of(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_a_shape_error_explains_its_tensors() -> None:
    net = Net(width=7)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, sl.trace(net) as t:
        net(X)
    note = notes_of(caught.value)
    assert re.search(r"addmm failed at \S*nets\.py:\d+ in Net\.forward \(fc2\)", note)
    assert re.search(r"mat1 f32\[1, 8\] = relu, \S*nets\.py:\d+ in Net\.forward \(Net\)", note)
    assert "mat2 f32[7, 2] = parameter fc2.weight" in note
    assert t.ops[-1].raised
    assert [call.raised for call in t.module_calls] == [True, False, True]
    assert t.info["exception"].startswith("RuntimeError: mat1 and mat2")
    assert "raised" in str(t)


def test_at_api_level_too() -> None:
    net = Net(width=7)
    with pytest.raises(RuntimeError) as caught, sl.trace(net, ops="api"):
        net(X)
    assert "F.linear failed at" in notes_of(caught.value)
    assert "f32[2, 7] = parameter fc2.weight" in notes_of(caught.value)


def test_an_exception_of_the_user_s_own_names_the_module() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.relu()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught, sl.trace(model := Fails()):
        model(X)
    assert re.fullmatch(
        r"sightline: raised at \S*test_errors\.py:\d+ in \S+Fails\.forward \(Fails\), no op failed",
        notes_of(caught.value),
    )


def test_an_exception_raised_from_the_op_s_own_is_explained() -> None:
    net = Net(width=7)

    def wrapping() -> None:
        try:
            net(X)
        except RuntimeError as error:
            raise ValueError("wrapped") from error

    with pytest.raises(ValueError, match="wrapped") as caught, sl.trace(net):
        wrapping()
    assert "addmm failed" in notes_of(caught.value)


def test_a_caught_exception_leaves_the_recording_usable() -> None:
    net = Net(width=7)
    with sl.trace(net) as t:
        with pytest.raises(RuntimeError):
            net(X)
        net.fc1(X)
    assert [(call.module.label, call.raised) for call in t.module_calls] == [
        ("Net", True), ("fc1", False), ("fc2", True), ("fc1", False),
    ]  # fmt: skip
    assert t.module_calls[-1].parent is None
    assert t.info["exception"] is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_closes_what_it_passed(kind: type[BaseException]) -> None:
    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.relu()
            raise kind

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stops()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    outer, net = Outer(), Net()
    with sl.trace(outer) as t:
        with pytest.raises(kind):
            outer(X)
        net(X)
    assert [(call.module.type, call.raised, call.depth) for call in t.module_calls[:3]] == [
        ("Outer", True, 0), ("Stops", True, 1), ("Net", False, 0),
    ]  # fmt: skip
    with pytest.raises(kind), sl.trace(outer) as t:
        outer(X)
    assert all(call.unfinished for call in t.module_calls)
    assert aten(t) == ["relu"]


def test_an_error_in_the_backward_pass_is_explained() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] @ torch.ones(9, 9)

    x = torch.ones(1, 4, requires_grad=True)
    with pytest.raises(RuntimeError) as caught, sl.trace():
        Fails.apply(x).sum().backward()
    assert "mm failed at" in notes_of(caught.value)
    assert "test_errors.py" in notes_of(caught.value)


def test_bad_input_is_one_sentence_and_installs_nothing() -> None:
    with pytest.raises(sl.UsageError, match=r"takes a torch\.nn\.Module or nothing, not str; leave it out"):
        sl.trace("x")
    with pytest.raises(
        sl.UsageError, match=r"ops='all' is not a choice; ops is one of 'none', 'api', 'aten'"
    ):
        sl.trace(ops="all")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(
        sl.UsageError, match=r"live='video' is not a choice; live is one of None, 'code', 'log'"
    ):
        sl.trace(live="video")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(sl.UsageError, match="has not been started; call start"):
        sl.trace().stop()
    with pytest.raises(sl.UsageError, match="decorates a function, not int"):
        sl.trace()(3)  # type: ignore[arg-type]  # that is the point


def test_a_filter_that_matches_nothing_is_one_sentence() -> None:
    net = Net()
    with sl.trace(net) as t:
        net(X)
    for view in (t.code, t.log, t.call_order, t.summary, t.source):
        with pytest.raises(sl.UsageError, match=r"module='fc9' matches no module.*did you mean 'fc1'"):
            view(module="fc9")
    with pytest.raises(
        sl.UsageError, match=r"op='adm' matches no aten op of this trace; did you mean 'addmm'"
    ):
        t.code(op="adm")


@pytest.mark.faults
def test_a_fault_in_the_recorder_is_counted_and_shown_and_never_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net()
    plain = net(X)
    broken = 0

    def failing(self: Any, *args: Any) -> int:
        nonlocal broken
        broken += 1
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Arguments, "form", failing)
    monkeypatch.setattr(NativeSession, "new_form", failing)
    with sl.trace(net) as t:
        traced = net(X)
        traced.sum().backward()
    monkeypatch.undo()
    assert torch.equal(plain, traced)
    assert t.info["fault_count"] == broken > 0
    assert "ZeroDivisionError: ours" in t.info["faults"][0]
    assert "fault" in str(t)


def test_small_mistakes_get_an_answer() -> None:
    net = Net()
    with sl.trace(net) as t:
        net(X)
    assert repr(t) == f"<Trace Net: {9 - NATIVE} ops, 3 module calls>"  # a mode also sees a detach
    with pytest.raises(AttributeError, match=r"write `with sl\.trace\(model\) as t:`, then t\.code"):
        sl.trace(net).code  # noqa: B018  # that is the point
    with pytest.raises(IndexError, match=r"there are \d Op rows, none at 99"):
        t.ops[99]
    with pytest.raises(sl.UsageError, match=r"Op rows have no property 'nam'; did you mean 'name'\?"):
        t.ops.where(nam="mm")


def test_a_model_met_in_the_block_is_named_without_a_trace_of_it() -> None:
    net = Net()
    net(X).sum().backward()
    with sl.trace() as t:
        net(X)
        net.zero_grad()
    assert {op.name for op in t.ops if op.level == "api"} == {"F.linear", "torch.relu"}


def test_an_interrupt_in_a_fast_path_does_not_silence_what_follows() -> None:
    class Interrupting(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    attention, net = Interrupting(4, 2).eval(), Net()
    with sl.trace() as t, torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            attention(X, X, X)
        net(X)
        torch.cat([X, X])
    assert [op.name for op in t.ops if op.level == "api"][-1] == "torch.cat"


@pytest.mark.faults
def test_a_failing_live_view_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from sightline.views.live import LogWatcher

    def broken(self: LogWatcher, event: object) -> None:
        raise OSError("the terminal is gone")

    monkeypatch.setattr(LogWatcher, "enter", broken)
    net = Net()
    with sl.trace(net, live="log") as t:
        net(X)
    assert [(call.module.label, call.unfinished) for call in t.module_calls] == [
        ("Net", False), ("fc1", False), ("fc2", False),
    ]  # fmt: skip
    assert t.info["fault_count"] == 3


@pytest.mark.parametrize("ops", ["none", "api", "aten", "both"])
def test_no_frame_of_the_recorder_is_in_the_traceback(ops: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())

    def frames(**options: Any) -> list[str]:
        with pytest.raises(RuntimeError) as caught, sl.trace(net, **options) if options else nullcontext():
            net(torch.ones(2, 4))
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        return [name for name in names if name != "inner"]  # torch's own way to call a module with hooks

    assert frames(ops=ops) == frames()


class Nested(nn.Module):
    """A module in a module, and so on."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if self.inner is None else self.inner(x)


@BOTH_ENGINES
def test_a_recursion_that_is_too_deep_says_what_recording_adds(engine: Any) -> None:
    with pytest.raises(RecursionError) as caught, sl.trace(engine=engine) as t:
        Nested(240)(torch.ones(2))
    assert re.search(
        r"one more function .* every module call;\n.*setrecursionlimit\(\d+\)", notes_of(caught.value)
    )
    assert t.validate().external == 0
    deep = Nested(150)
    with sl.trace(engine=engine) as t:  # at most a fifth of the depth
        deep(torch.ones(2))
    assert len(t.module_calls) == 151
