"""Programs that crash, hang or go silent under the native engine: each runs in a process of its own."""

# mypy: disable-error-code="arg-type"
# torch's stubs know less of torch than these tests call.

from __future__ import annotations

import pytest

from sightline.recording.engine_choice import engine_status
from tests.recording.native.comparison import POISON, prints, program

if engine_status(build=True).engine != "native":
    pytest.skip("the native engine cannot be built here", allow_module_level=True)

STOPPED_BY_PYTHON = """
x = torch.ones(3)
asked = "new_op new_code new_form first_sight plain_metadata new_site new_callable new_api_form".split()
for name in asked * 5:
    tracer = sl.trace(engine="native")
    def stop(frame, event, given):
        if event == "call" and frame.f_code.co_name == name:
            sys.setprofile(None)
            tracer.stop()
    tracer.start()
    sys.setprofile(stop)
    (torch.cat([x, x * 3]) + 1).sin()
    sys.setprofile(None)
    tracer.stop().validate()
"""
STOPPED_BY_A_THREAD = """
import random, threading, time
sys.setswitchinterval(1e-6)
x = torch.ones(3)
for i in range(150):
    tracer, going = sl.trace(engine="native"), threading.Event()
    def work():
        tracer.start(); going.set()
        for k in range(40):
            exec(f"torch.cat([x] * {k + 2}) * {k + 1000 * i}")
    thread = threading.Thread(target=work)
    thread.start()
    going.wait(); time.sleep(random.random() * 0.01)
    tracer.stop()
    thread.join()
"""


@pytest.mark.parametrize("code", [STOPPED_BY_PYTHON, STOPPED_BY_A_THREAD], ids=["profile function", "thread"])
def test_a_stop_while_the_engine_asks_python(code: str) -> None:
    assert prints(code, **POISON) == []


def test_a_stop_by_another_thread_in_the_middle_of_an_op() -> None:
    code = """
import threading
a = torch.randn(1500, 1500)
tracer = sl.trace(engine="native")
timer = threading.Timer(0.05, tracer.stop)
tracer.start(); timer.start()
while timer.is_alive(): a @ a
with sl.trace(engine="native") as t: torch.ones(2) + 1
with torch.autograd.profiler.profile() as p: torch.ones(2) + 1
print(len(t.ops), len(p.function_events) > 0)
"""
    assert program(code).stdout == "4 True\n"  # the profiler writes to stderr, on some machines


def test_a_list_of_tensors_that_another_thread_changes() -> None:
    code = """
import contextlib, threading, time
sys.setswitchinterval(1e-5)
shared, end = [], time.time() + 15
def change():
    while time.time() < end:
        shared[:] = [torch.ones(2) for _ in range(50)]
        shared[:] = []
        shared.extend(torch.ones(2) for _ in range(3))
thread = threading.Thread(target=change); thread.start()
with sl.trace(engine="native"):
    while time.time() < end:
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            torch.cat(shared)
thread.join()
"""
    assert prints(code, **POISON) == []


def test_a_spread_of_one_thing_or_another() -> None:
    code = """
class Two(bytes):
    def __iter__(self): return iter((2, 3))
def zeros(flag): return torch.zeros(*(Two(50_000_000) if flag else (2, 3)))
with sl.trace(engine="native") as t: zeros(True)
print(len(t.ops))
"""
    assert prints(code) == ["2"]


OPTIONS = ('dispatch_sizes_strides_policy="sizes"', "dispatch_layout=True")
COLLECTED = """
import gc
class Cycle:
    def __init__(self): self.me = self
    def __del__(self): torch.ones(2) + 1
held = []
class Net(nn.Module):
    def forward(self, x):
        gc.disable(); gc.collect(0)
        Cycle()
        for _ in range(2100): held.append((x,))  # no tuple is left to be used again
        gc.set_threshold(gc.get_count()[0] + self.more, 10000, 10000)
        gc.enable()
        return x
net = Net()
with sl.trace(engine="native") as t:
    for net.more in range(60):
        net(torch.ones(2))
t.validate()
print(len(t.module_calls))
"""
SIZES_ASKED = """
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, {option})
    def __init__(self, inner): self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = args[0].inner
        inner + 1
        if "size" in func.__name__: return tuple(inner.shape)
        if "stride" in func.__name__: return inner.stride()
        if "offset" in func.__name__: return 0
        if "layout" in func.__name__: return inner.layout
        return cls(func(*[getattr(a, "inner", a) for a in args]))
with sl.trace(engine="native") as t: print(Wrapper(torch.ones(2, 3)).mul(3).inner.sum().item())
t.validate()
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (COLLECTED, "60"),
        *((SIZES_ASKED.format(option=one), "18.0") for one in OPTIONS),
    ],
    ids=["a finalizer", "sizes of a subclass", "layout of a subclass"],
)
def test_python_code_that_runs_in_between(code: str, printed: str) -> None:
    assert prints("import faulthandler; faulthandler.dump_traceback_later(50, exit=True)\n" + code) == [
        printed
    ]


def test_the_programs_above_are_sound_without_a_trace() -> None:
    for code, printed in ((COLLECTED, "60"), *((SIZES_ASKED.format(option=one), "18.0") for one in OPTIONS)):
        plain = code.replace('sl.trace(engine="native") as t', "contextlib.nullcontext()")
        plain = plain.replace("t.validate()", "").replace("len(t.module_calls)", "60")
        assert prints("import contextlib\n" + plain) == [printed]
