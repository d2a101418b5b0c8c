"""Recordings that nest, overlap and stop in any order; and what is left when they have stopped."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sightline as sl
from tests.recording.nets import Net, aten

X = torch.ones(1, 4)


def test_an_inner_trace_sees_its_part_and_the_outer_one_all() -> None:
    net = Net()
    with sl.trace(net) as outer:
        net(X)
        with sl.trace(net, ops="aten") as inner:
            net(X)
    assert len(outer.module_calls) == 6
    assert len(inner.module_calls) == 3
    assert aten(outer) == aten(inner) * 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_traces_stop_in_any_order(order: tuple[int, ...]) -> None:
    net = Net()
    traces = [sl.trace(net), sl.trace(net, ops="aten"), sl.trace(net, ops="api")]
    for trace in traces:
        trace.start()
        net(X)
    done = {}
    for number in order:
        done[number] = traces[number].stop()
        net(X)
    counts = [len(done[number].module_calls) // 3 for number in range(3)]
    assert counts == [3 - number + order.index(number) for number in range(3)]


def test_other_modes_keep_their_place() -> None:
    class Noting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Noting.seen += 1
            return func(*args, **(kwargs or {}))

    trace = sl.trace()
    trace.start()
    with Noting():
        torch.ones(1)
        t = trace.stop()
        torch.ones(1)
    assert Noting.seen == 2
    assert aten(t) == ["ones"]


def test_threads_do_not_see_each_other() -> None:
    net = Net()
    done: dict[int, sl.Trace] = {}
    together = threading.Barrier(3)

    def work(number: int) -> None:
        together.wait()
        with sl.trace(net) as t:
            for _ in range(number + 1):
                net(X).sum().backward()
        done[number] = t

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(done[number].module_calls) // 3 for number in range(3)] == [1, 2, 3]


def test_a_trace_may_start_and_stop_inside_hooks() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trace = sl.trace(net)
    found: list[sl.Trace] = []
    begin = net[0].register_forward_pre_hook(lambda module, args: setattr(net, "trace_so_far", trace.start()))
    end = net[1].register_forward_hook(lambda module, args, result: found.append(trace.stop()))
    net(X)
    begin.remove()
    end.remove()
    (t,) = found
    assert [call.module.path for call in t.module_calls] == ["1"]
    assert aten(t)


def test_stopping_inside_the_traced_backward_leaves_nothing_for_long() -> None:
    x = torch.ones(2, requires_grad=True)
    trace = sl.trace()
    trace.start()
    y = x * 2
    stopped: list[sl.Trace] = []
    y.register_hook(lambda grad: stopped.append(trace.stop()))
    y.sum().backward()
    torch.ones(1)
    assert "expand" in aten(trace.stop())
    with sl.trace() as t:  # what torch had put back is swept now
        torch.ones(1)
    assert aten(t) == ["ones"]


def test_entering_the_same_trace_twice_is_one_sentence() -> None:
    trace = sl.trace()
    with trace, pytest.raises(sl.UsageError, match=r"already recording; make a second one"), trace:
        pass


def test_a_trace_can_be_used_again() -> None:
    trace = sl.trace()
    with trace as first:
        torch.ones(1)
    with trace as second:
        torch.ones(1).relu()
    assert aten(first) == ["ones"]
    assert aten(second) == ["ones", "relu"]


def test_as_a_decorator() -> None:
    @sl.trace()
    def run(x: Tensor) -> Tensor:
        return x.relu()

    assert run(X).shape == (1, 4)
    assert aten(run.trace) == ["relu"]  # type: ignore[attr-defined]  # what the decorator adds
    assert run.__name__ == "run"


def test_a_recording_keeps_no_tensor_and_no_model_alive() -> None:
    net = Net()
    tensor = torch.ones(1, 4)
    seen = weakref.ref(tensor)
    with sl.trace(net) as t:
        net(tensor)
        del tensor
        gc.collect()
        assert seen() is None
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert t.module_calls[1].module.path == "fc1"
    assert t.module_calls[1].module.extra == "in_features=4, out_features=8, bias=True"


def test_traces_do_not_add_up(every_trace_is_valid: list[object]) -> None:
    net = Net()

    def record() -> None:
        with sl.trace(net) as t:
            net(X)
        t.validate()
        every_trace_is_valid.clear()

    for _ in range(3):
        record()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        record()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
