"""What programs use to watch torch themselves: tracers, modes, profilers, debuggers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sightline as sl
from tests.recording.exotic.comparison import Record, X, grads_of, mlp, program


class Counting(TorchDispatchMode):
    """Counts what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class CountingFunctions(TorchFunctionMode):
    """Counts the functions that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


@program
def jit_traced(record: Record) -> Any:
    model = mlp()
    with record(model):
        traced = torch.jit.trace(model, X)
        sl.spy("result", traced(X))
    return str(traced.graph), traced(X)


@program
def jit_traced_function(record: Record) -> Any:
    def function(x: Any) -> Any:
        y = sl.spy("y", x * 2)
        return (y.t() @ x).softmax(-1)[:2], y.view(-1)[1:]

    with record():
        traced = torch.jit.trace(function, X)
        return str(traced.graph), traced(X)


@program
def jit_traced_training(record: Record) -> Any:
    model = mlp()
    with record(model):
        traced = torch.jit.trace(model, X)
        traced(X).square().mean().backward()
    return str(traced.graph), grads_of(model)


@program
def scripted(record: Record) -> Any:
    model = torch.jit.script(mlp())
    with record(model):
        return model(X), model[0](X)


@program
def scripted_inside(record: Record) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(mlp(), X))
    with record(model):
        y = model(X)
        y.sum().backward()
    return y, grads_of(model)


@program
def scripted_and_frozen(record: Record) -> Any:
    frozen = torch.jit.freeze(torch.jit.script(mlp().eval()))
    model = nn.Sequential(nn.Linear(4, 4), frozen)
    with record(model):
        return model(X), frozen(X)


@program
def without_a_mode(record: Record) -> Any:
    model = mlp()
    del model.__dict__["training"]
    with record(model):
        return model(X)


@program
def scripted_while_recorded(record: Record) -> Any:
    model = mlp()
    with record(model):
        quick = torch.jit.script(model)
        y = quick(X)
        y.sum().backward()
    return y, grads_of(model)


@program
def symbolically_traced(record: Record) -> Any:
    model = mlp()
    with record(model):
        module = torch.fx.symbolic_trace(model)
        return str(module.graph), module(X)


@program
def proxy_traced(record: Record) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = mlp()
    with record(model):
        return make_fx(lambda x: sl.spy("y", model(x)).t())(X).code.strip()


@program
def exported(record: Record) -> Any:
    model = mlp()
    with record(model):
        program_ = torch.export.export(model, (X,))
        return str(program_.graph), program_.module()(X)


@program
def exported_strictly(record: Record) -> Any:
    """Dynamo reads the program, and would read hooks of modules too."""
    model = mlp()
    with record(model):
        first = model(X)
        program_ = torch.export.export(model, (X,), strict=True)
        return str(program_.graph), program_.module()(X), first, model(X)


@program
def exported_strictly_with_a_hook(record: Record) -> Any:
    """Dynamo refuses a global hook that is the program's own, recorded or not."""
    model = mlp()
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, given: None)
    try:
        with record(model):
            return torch.export.export(model, (X,), strict=True)
    finally:
        hook.remove()


@program
def counted_by_modes(record: Record) -> Any:
    model = mlp()
    with record(model), CountingFunctions() as functions, Counting() as ops:
        y = sl.spy("y", model(X)).square()
        y.sum().backward()
    return functions.seen, ops.seen, y, grads_of(model)


@program
def counted_outside(record: Record) -> Any:
    model = mlp()
    with CountingFunctions() as functions, Counting() as ops:
        with record(model):
            y = sl.spy("y", model(X)).square()
            y.sum().backward()
    return [one for one in ops.seen if "detach" not in one], len(functions.seen) > 0, y, grads_of(model)


@program
def counted_flops(record: Record) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    model = mlp()
    with record(model), FlopCounterMode(display=False) as flops:
        y = model(X)
        y.sum().backward()
    return flops.get_total_flops(), y, grads_of(model)


def _profiled(record: Record, **options: Any) -> Any:
    model = mlp()
    with record(model), torch.profiler.profile(**options) as profile:
        y = sl.spy("y", model(X))
        y.sum().backward()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("aten::")}
    return counts, y, grads_of(model)


@program
def profiled(record: Record) -> Any:
    return _profiled(record)


@program
def profiled_with_stacks(record: Record) -> Any:
    return _profiled(record, with_stack=True, with_modules=True, profile_memory=True, record_shapes=True)


@program
def profiled_outside(record: Record) -> Any:
    model = mlp()
    model(X).sum().backward()
    model.zero_grad()
    with torch.profiler.profile(with_stack=True), record(model):
        y = model(X)
        y.sum().backward()
    return y, grads_of(model)


@program
def default_device_and_dtype(record: Record) -> Any:
    model = mlp()
    with record(model), torch.device("meta"):
        ghost = torch.ones(3) + 1
    with record(model), torch.device("cpu"):
        y = model(X) + torch.ones(4)
    return ghost, y


@program
def packed_for_backward(record: Record) -> Any:
    packed = []

    def pack(tensor: Any) -> Any:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    model = mlp()
    with record(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = sl.spy("y", model(X))
        y.sum().backward()
    return packed, y, grads_of(model)


@program
def anomaly_mode(record: Record) -> Any:
    model = mlp()
    with record(model), torch.autograd.detect_anomaly(check_nan=True):
        model(X).sum().backward()
    return grads_of(model)


@program
def inference_mode(record: Record) -> Any:
    model = mlp()
    with record(model), torch.inference_mode():
        y = sl.spy("y", model(X))
        y.add_(1)
    return y, y.is_inference()


@program
def autocast(record: Record) -> Any:
    model = mlp()
    with record(model), torch.autocast("cpu", torch.bfloat16):
        y = sl.spy("y", model(X))
    y.float().sum().backward()
    return y, grads_of(model)


@program
def traced_by_a_debugger(record: Record) -> Any:
    lines: set[tuple[str, int]] = set()

    def follow(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            lines.add((frame.f_code.co_name, frame.f_lineno))
        return follow

    model = mlp()
    before = sys.gettrace()
    with record(model):
        sys.settrace(follow)
        try:
            y = _step(model)
        finally:
            sys.settrace(before)
    return y, grads_of(model), sorted(lines)


@program
def observed_by_an_execution_trace(record: Record) -> Any:
    """An observer of ops that is no profiler."""
    model = mlp()
    observer = torch.profiler.ExecutionTraceObserver()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        observer.register_callback(str(file))
        try:
            with record(model):
                observer.start()
                y = sl.spy("y", model(X))
                y.sum().backward()
                observer.stop()
        finally:
            observer.unregister_callback()
        names = [node["name"] for node in json.loads(file.read_text())["nodes"]]
    return y, grads_of(model), sorted(name for name in names if name.startswith("aten"))


def _lines_followed(run: Callable[[], Any]) -> tuple[Any, list[tuple[str, int]]]:
    """The result of a function, and the lines of this file that a trace function sees meanwhile."""
    lines: set[tuple[str, int]] = set()

    def follow(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            return None
        lines.add((frame.f_code.co_name, frame.f_lineno))
        return follow

    before, of_threads = sys.gettrace(), threading.gettrace()
    threading.settrace(follow)
    sys.settrace(follow)
    try:
        result = run()
        assert sys.gettrace() is follow
        assert threading.gettrace() is follow
    finally:
        sys.settrace(before)
        threading.settrace(of_threads)
    return result, sorted(lines)


@program
def traced_from_before_the_block(record: Record) -> Any:
    """As coverage.py does it up to Python 3.11: its trace function sees the whole recording too."""
    model = mlp()

    def run() -> Any:
        with record(model):
            return _step(model)

    y, lines = _lines_followed(run)
    assert lines
    return y, grads_of(model), lines


def covered(record: Record) -> Any:
    """Under coverage.py itself, where it is installed."""
    model = mlp()
    measured = import_module("coverage").Coverage(data_file=None, include=[__file__])
    measured.start()
    try:
        with record(model):
            y = _step(model)
    finally:
        measured.stop()
    lines = measured.get_data().lines(__file__)
    assert lines
    return y, grads_of(model), sorted(lines)


if find_spec("coverage"):
    program(covered)


@program
def profiled_by_python(record: Record) -> Any:
    calls: list[str] = []

    def follow(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            calls.append(frame.f_code.co_name)

    model = mlp()
    before = sys.getprofile()
    with record(model):
        sys.setprofile(follow)
        try:
            y = _step(model)
        finally:
            sys.setprofile(before)
    return y, grads_of(model), calls


def monitored(record: Record) -> Any:
    """As coverage.py does it from Python 3.12 on."""
    lines: set[int] = set()
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = monitoring.COVERAGE_ID

    def line(code: Any, number: int) -> Any:
        if code.co_filename == __file__:
            lines.add(number)
        return None if code.co_filename == __file__ else monitoring.DISABLE

    model = mlp()
    monitoring.use_tool_id(tool, "a coverage tool")
    try:
        monitoring.register_callback(tool, monitoring.events.LINE, line)
        monitoring.set_events(tool, monitoring.events.LINE | monitoring.events.PY_START)
        with record(model):
            y = _step(model)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.LINE, None)
        monitoring.free_tool_id(tool)
    return y, grads_of(model)


if sys.version_info >= (3, 12):
    program(monitored)


def _step(model: nn.Module) -> Any:
    y = sl.spy("y", model(X))
    y = y[:, :2] @ y[:, 2:].T
    y.sum().backward()
    return y
