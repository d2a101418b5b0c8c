"""Starts, stops, threads, processes, interrupts under the native engine: nothing breaks, nothing is left."""

# mypy: disable-error-code="no-any-return"
# torch's stubs know less of torch than these tests call.

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.recording.engine_choice import engine_status
from tests.recording.native.comparison import aten, prints

if engine_status(build=True).engine != "native":
    pytest.skip("the native engine cannot be built here", allow_module_level=True)

X = torch.ones(2, 4)


def native(model: Any = None, **options: Any) -> Any:
    return sl.trace(model, engine="native", **options)


def sound(t: sl.Trace) -> list[str]:
    """The aten ops of a trace that has no fault and no contradiction."""
    assert t.info["engine"] == "native"
    assert t.info["fault_count"] == 0, t.info["faults"]
    t.validate()
    return aten(t)


def assert_a_trace_works() -> None:
    with native() as t:
        torch.ones(2) + 1
    assert sound(t) == ["ones", "add.Tensor"]


def test_traces_overlap_and_stop_in_any_order() -> None:
    a, b, c = native(), native(), native()
    a.start(), X + 1, b.start(), X * 2, c.start(), X / 3
    first, _, third, _, second = a.stop(), X - 1, c.stop(), X.sin(), b.stop()
    assert sound(first) == ["add.Tensor", "mul.Tensor", "div.Tensor"]
    assert sound(second) == ["mul.Tensor", "div.Tensor", "sub.Tensor", "sin"]
    assert sound(third) == ["div.Tensor", "sub.Tensor"]


@pytest.mark.parametrize("where", ["forward", "forward hook", "backward hook", "function"])
def test_a_trace_stops_from_the_inside(where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    tracer = native(model)
    found: list[sl.Trace] = []

    def stop(*given: Any) -> None:
        found.append(tracer.stop())

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "function":
                stop()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            if where == "forward":
                stop()
            return y + 1

    tracer.start()
    handle = model[0].register_forward_hook(stop) if where == "forward hook" else None
    y = Function.apply(Net()(X))
    if where == "backward hook":
        y.register_hook(stop)
    y.sum().backward()
    if handle is not None:
        handle.remove()
    ops = sound(found[0])
    assert ops[:2] == ["t", "addmm"]
    assert ("relu" in ops) == (where != "forward hook")
    assert ("sum" in ops) == (where == "backward hook")
    assert_a_trace_works()


def test_a_trace_starts_inside_a_forward() -> None:
    tracer = native()

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tracer.start()
            return x + 1

    Net()(X) * 2
    assert sound(tracer.stop()) == ["add.Tensor", "mul.Tensor"]


def test_a_generator_may_hold_a_trace() -> None:
    def hold() -> Any:
        with native() as t:
            torch.ones(2)
            yield t
            torch.ones(2)

    generator = hold()
    t = next(generator)
    torch.eye(2)
    del generator
    gc.collect()
    torch.eye(2)
    assert sound(t) == ["ones", "eye"]


def test_threads_have_their_own_traces() -> None:
    found: list[tuple[int, list[str], int]] = []

    def work(number: int) -> None:
        for _ in range(10):
            with native() as t:
                (torch.ones(number + 1) + number).sum()
                nn.ReLU()(torch.ones(1, 2))
            found.append((number, sound(t), len(t.module_calls)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(one[1:] == (["ones", "add.Tensor", "sum", "ones", "relu"], 1) for one in found)


def test_threads_that_call_modules_stand_in_nobodys_way() -> None:
    going = threading.Event()
    model = nn.Linear(2, 2)

    def work() -> None:
        while not going.is_set():
            model(torch.ones(1, 2))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for at in range(5):
            with native() as t:
                for size in range(1, 10):
                    nn.Linear(size, 3)(torch.ones(at + 1, size))
            assert sound(t).count("addmm") == len(t.module_calls) == 9
    finally:
        going.set()
        for thread in threads:
            thread.join()


def test_a_thread_may_end_before_its_trace() -> None:
    tracer = native()
    thread = threading.Thread(target=lambda: (tracer.start(), torch.ones(2) + 1))
    thread.start()
    thread.join()
    torch.ones(2) * 2
    assert sound(tracer.stop()) == ["ones", "add.Tensor"]
    assert_a_trace_works()


def test_a_forked_process_records_nothing_and_can_record() -> None:
    with native() as t:
        X + 1
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                nn.Linear(4, 2)(X)
                assert_a_trace_works()
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        X * 2
    assert sound(t) == ["add.Tensor", "mul.Tensor"]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((2,), float(at)) * 2


def test_workers_of_a_loader() -> None:
    with native() as t:
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
        found = [float(batch.sum()) for batch in loader]
    assert found == [4.0, 20.0, 36.0, 52.0]
    assert "mul.Tensor" not in sound(t)
    assert t.info["external"] == 0


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import atexit; atexit.register(lambda: x + 1)",
    ],
)
def test_a_program_ends_quietly_with_a_trace_open(end: str) -> None:
    code = "tracer = sl.trace(engine='native'); tracer.start(); x = torch.ones(2); nn.ReLU()(x + 1)\n"
    assert prints(code + end) == []


def test_a_profiler_sees_what_it_saw() -> None:
    def work() -> list[str]:
        with torch.profiler.profile(acc_events=True) as profile:
            x = torch.ones(3, requires_grad=True)
            (x * 2).sin().sum().backward()
            nn.Linear(3, 3)(x)
        return [event.name for event in profile.events()]

    plain = work()
    with native() as t:
        assert work() == plain
    assert {"mul.Tensor", "sin", "addmm"} <= set(sound(t))


def test_modules_at_one_address_are_told_apart() -> None:
    with native() as t:
        for _ in range(200):
            nn.ReLU()(X)
    assert sound(t) == ["relu"] * 200
    assert len(t.modules) == 200


INTERRUPTED = """
import random, signal
from tests import leftovers
class Stop(BaseException): pass
def stop(*given):
    global fired; fired = True; raise {kind}
signal.signal(signal.SIGALRM, stop)
random.seed(0)
with sl.trace(engine="native"):  # torch imports some things late, and keeps exceptions there to itself
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
before, lost = leftovers.state(), 0
for number in range(120):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fired = raised = False
    torch.set_grad_enabled(True)  # torch itself loses it, once in a while
    tracer = sl.trace(model, engine="native")
    tracer.start()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.random() * 0.012 + 1e-5)
            for k in range(6):
                exec(f"x * {{k}}", {{"x": torch.ones(3)}})
                model(torch.ones(1 + k % 3, 4)).sum().backward()
                optimizer.step()
        finally:  # it may come as late as here
            signal.setitimer(signal.ITIMER_REAL, 0)
    except {kind}:
        raised = True
    lost += fired and not raised
    torch.set_grad_enabled(True)
    tracer.stop().validate()
assert not leftovers.leftovers(before, leftovers.state())
with sl.trace(engine="native") as t:
    torch.ones(2) + 1
exec("0")  # Python ends by SIGINT where the last code given to exec was interrupted, though that was caught
print(lost < 4, len(t.ops))  # of 120: code of torch and Python loses one, once in a while
"""


def test_an_interrupt_is_never_lost() -> None:
    assert prints(INTERRUPTED.format(kind="KeyboardInterrupt")) == ["True 4"]


@pytest.mark.parametrize("kind", ["TimeoutError", "Stop"])
def test_no_exception_of_a_signal_handler_is_lost(kind: str) -> None:
    assert prints(INTERRUPTED.format(kind=kind)) == ["True 4"]


def test_as_many_as_the_engine_has_room_for() -> None:
    tracers = [native() for _ in range(8)]
    for tracer in tracers:
        tracer.start()
    X + 1
    assert [sound(tracer.stop()) for tracer in tracers] == [["add.Tensor"]] * 8


def test_a_ninth_trace_is_recorded_by_the_other_engine() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(native())
        with pytest.raises(sl.SightlineError, match="native engine"):
            stack.enter_context(native())
        t = stack.enter_context(sl.trace(engine="auto"))
        X + 1
    assert t.info["engine"] == "python"
