"""What torchspy's documents say, sentence by sentence, each a test of its own."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline.compat.torchspy as front_door
from sightline.compat import FUSED_HINT
from sightline.compat.torchspy import (
    BaseDebugger,
    CallTracer,
    DebugContext,
    TensorSaver,
    get_debug_context,
    spy_save,
)
from sightline.compat.torchspy import trace_graph as tg

Debugger = Callable[..., Any]
EITHER = pytest.mark.parametrize("kind", [BaseDebugger, TensorSaver, CallTracer], ids=lambda k: k.__name__)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.q(x), self.k(x)
        spy_save("query", query, self)
        return torch.sigmoid(query * key)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(2))
        self.out = nn.Sequential(nn.Linear(4, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for head in self.heads:
            x = head(x)
        return self.out(x)  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Stack:
    return Stack()


@pytest.fixture
def saver(tmp_path: Path) -> TensorSaver:
    return TensorSaver(tmp_path)


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[CallTracer]:
    tracer = CallTracer(tmp_path)
    yield tracer
    tracer.remove_hooks()


def run(model: nn.Module) -> None:
    model(torch.ones(1, 4))


def listed(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def loaded(folder: Path, name: str) -> Tensor:
    tensor: Tensor = torch.load(folder / name, weights_only=True)
    return tensor


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    return [(one.name, one.levelname, one.getMessage()) for one in caplog.records]


# -- BaseDebugger --------------------------------------------------------------------------------------------


@EITHER
def test_the_folder_is_made_with_its_parents(kind: Debugger, tmp_path: Path) -> None:
    kind(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@EITHER
def test_a_folder_that_exists_keeps_its_files(kind: Debugger, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("x")
    kind(tmp_path)
    assert listed(tmp_path) == {"old.txt"}


@EITHER
def test_the_folder_may_be_a_string_and_is_a_path(kind: Debugger, tmp_path: Path) -> None:
    assert kind(str(tmp_path)).output_dir == tmp_path


@EITHER
def test_it_is_enabled_unless_it_is_switched_off(kind: Debugger, tmp_path: Path) -> None:
    assert kind(tmp_path).enabled
    assert not kind(tmp_path, enabled=False).enabled


@EITHER
def test_no_module_is_known_at_first(kind: Debugger, tmp_path: Path) -> None:
    debugger = kind(tmp_path)
    assert debugger.module_paths == {}
    assert debugger.get_module_path(nn.ReLU()) == "unknown"


def test_saver_and_tracer_are_debuggers() -> None:
    assert issubclass(TensorSaver, BaseDebugger)
    assert issubclass(CallTracer, BaseDebugger)


# -- filters, of both ----------------------------------------------------------------------------------------


def paths_of(kind: Debugger, folder: Path, model: nn.Module, *filters: Any, **named: Any) -> set[str]:
    debugger = kind(folder)
    if kind is CallTracer:
        debugger.register_hooks(model, *filters, **named)
        debugger.remove_hooks()
    else:
        debugger.register_modules(model, *filters, **named)
    return set(debugger.module_paths.values())


BOTH = pytest.mark.parametrize("kind", [TensorSaver, CallTracer], ids=lambda k: k.__name__)
LINEAR = {"heads.0.q", "heads.0.k", "heads.1.q", "heads.1.k", "out.0"}


@BOTH
def test_without_filters_every_module_is_registered(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    wanted = LINEAR | {"root", "heads", "heads.0", "heads.1", "out", "out.1"}
    assert paths_of(kind, tmp_path, model) == wanted


@BOTH
def test_the_root_has_the_path_root(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, (Stack,)) == {"root"}


@BOTH
def test_one_class(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, target_classes=(nn.Linear,)) == LINEAR


@BOTH
def test_several_classes_are_alternatives(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, (nn.Linear, nn.Tanh)) == LINEAR | {"out.1"}


@BOTH
def test_a_base_class_takes_its_subclasses(kind: Debugger, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.ReLU())
    assert paths_of(kind, tmp_path, model, (nn.modules.conv._ConvNd,)) == {"0", "1"}


@BOTH
def test_one_name_is_part_of_a_path(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, target_names=["out"]) == {"out", "out.0", "out.1"}


@BOTH
def test_several_names_are_alternatives(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, target_names=[".q", ".1"]) == {
        "heads.0.q", "heads.1", "heads.1.q", "heads.1.k", "out.1",
    }  # fmt: skip


@BOTH
def test_excluded_names_go_before_wanted_ones(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    found = paths_of(kind, tmp_path, model, target_names=["heads.0"], exclude_names=["k"])
    assert found == {"heads.0", "heads.0.q"}


@BOTH
def test_class_and_names_hold_together(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, (nn.Linear,), ["heads.1"], [".k"]) == {"heads.1.q"}


@BOTH
def test_a_filter_that_nothing_passes_registers_nothing(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    assert paths_of(kind, tmp_path, model, (nn.LSTM,)) == set()


@BOTH
def test_paths_are_found_by_module(kind: Debugger, tmp_path: Path, model: Stack) -> None:
    debugger = kind(tmp_path)
    (debugger.register_hooks if kind is CallTracer else debugger.register_modules)(model)
    assert debugger.get_module_path(model.out[1]) == "out.1"
    assert debugger.module_paths[id(model.heads[1])] == "heads.1"
    if kind is CallTracer:
        debugger.remove_hooks()


# -- TensorSaver.save ----------------------------------------------------------------------------------------


def test_a_file_is_named_by_name_and_call(saver: TensorSaver, tmp_path: Path) -> None:
    saver.save("attn.q", torch.ones(2))
    assert listed(tmp_path) == {"attn.q.call0.pt"}


def test_the_same_values_shape_and_dtype_come_back(saver: TensorSaver, tmp_path: Path) -> None:
    x = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    saver.save("x", x)
    back = loaded(tmp_path, "x.call0.pt")
    assert (back.dtype, back.shape) == (torch.int16, (2, 3))
    assert back.equal(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_every_dtype_can_be_saved(saver: TensorSaver, tmp_path: Path, dtype: torch.dtype) -> None:
    saver.save("x", torch.ones(3, dtype=dtype))
    assert loaded(tmp_path, "x.call0.pt").equal(torch.ones(3, dtype=dtype))


def test_what_is_saved_does_not_change_afterwards(saver: TensorSaver, tmp_path: Path) -> None:
    x = torch.zeros(2)
    saver.save("x", x)
    x.add_(1)
    assert loaded(tmp_path, "x.call0.pt").tolist() == [0, 0]


def test_a_tensor_in_a_graph_is_detached_and_stays_in_it(saver: TensorSaver, tmp_path: Path) -> None:
    w = torch.ones(2, requires_grad=True)
    y = w * 2
    saver.save("y", y)
    y.sum().backward()
    assert w.grad is not None
    assert not loaded(tmp_path, "y.call0.pt").requires_grad


def test_calls_are_counted_from_zero(saver: TensorSaver, tmp_path: Path) -> None:
    for _ in range(3):
        saver.save("x", torch.ones(1))
    assert listed(tmp_path) == {"x.call0.pt", "x.call1.pt", "x.call2.pt"}


def test_each_name_has_a_counter_of_its_own(saver: TensorSaver) -> None:
    saver.save("a", torch.ones(1))
    saver.save("a", torch.ones(1))
    saver.save("b", torch.ones(1))
    assert dict(saver.call_counts) == {"a": 2, "b": 1}


def test_an_explicit_number_leaves_the_counter_alone(saver: TensorSaver, tmp_path: Path) -> None:
    saver.save("x", torch.ones(1), call_idx=7)
    saver.save("x", torch.ones(1))
    assert listed(tmp_path) == {"x.call7.pt", "x.call0.pt"}


def test_counters_start_again_after_a_reset(saver: TensorSaver) -> None:
    saver.save("x", torch.ones(1))
    saver.reset_counts()
    assert dict(saver.call_counts) == {}


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 5)])
def test_a_norm_for_each_row_of_the_batch(saver: TensorSaver, tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    saver.save("x", x, norm_only=True)
    torch.testing.assert_close(loaded(tmp_path, "x.call0.pt"), x.reshape(3, -1).norm(dim=1))


def test_a_saver_that_is_switched_off_writes_and_counts_nothing(tmp_path: Path) -> None:
    saver = TensorSaver(tmp_path, enabled=False)
    saver.save("x", torch.ones(1))
    assert (listed(tmp_path), dict(saver.call_counts)) == (set(), {})
    saver.enabled = True
    saver.save("x", torch.ones(1))
    assert listed(tmp_path) == {"x.call0.pt"}


# -- DebugContext and spy_save -------------------------------------------------------------------------------


def test_outside_there_is_no_context() -> None:
    assert get_debug_context() is None


def test_inside_it_is_the_context_and_afterwards_the_one_before(saver: TensorSaver) -> None:
    with DebugContext(saver) as outer:
        with DebugContext(saver) as inner:
            assert get_debug_context() is inner
        assert get_debug_context() is outer
    assert get_debug_context() is None


def test_a_context_knows_its_saver_under_two_names(saver: TensorSaver) -> None:
    context = DebugContext(saver, "p", "o")
    assert (context.saver, context.debugger) == (saver, saver)
    assert (context.prefix, context.module_path_override) == ("p", "o")


def test_a_context_can_be_used_again(saver: TensorSaver, tmp_path: Path) -> None:
    context = DebugContext(saver, "s")
    for _ in range(2):
        with context:
            spy_save("x", torch.ones(1))
    assert listed(tmp_path) == {"s.manual.x.call0.pt", "s.manual.x.call1.pt"}


def test_the_prefix_comes_first(saver: TensorSaver, tmp_path: Path, model: Stack) -> None:
    saver.register_modules(model, (Head,))
    with DebugContext(saver, prefix="batch3"):
        run(model)
    assert listed(tmp_path) == {"batch3.heads.0.query.call0.pt", "batch3.heads.1.query.call0.pt"}


def test_without_a_prefix_there_is_no_leading_dot(saver: TensorSaver, tmp_path: Path, model: Stack) -> None:
    saver.register_modules(model, (Head,), ["heads.0"])
    with DebugContext(saver):
        spy_save("x", torch.ones(1), model.heads[0])
    assert listed(tmp_path) == {"heads.0.x.call0.pt"}


def test_without_a_module_the_path_is_manual(saver: TensorSaver, tmp_path: Path) -> None:
    with DebugContext(saver, "s"):
        spy_save("x", torch.ones(1))
    assert listed(tmp_path) == {"s.manual.x.call0.pt"}


@pytest.mark.parametrize("given", [True, False])
def test_an_override_goes_before_everything(saver: TensorSaver, tmp_path: Path, given: bool) -> None:
    module = nn.ReLU()
    saver.register_modules(module)
    with DebugContext(saver, "s", module_path_override="there"):
        spy_save("x", torch.ones(1), module if given else None)
    assert listed(tmp_path) == {"s.there.x.call0.pt"}


def test_a_module_that_is_not_registered_is_skipped_with_a_warning(
    saver: TensorSaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DebugContext(saver):
        spy_save("x", torch.ones(1), nn.ReLU())
    assert listed(tmp_path) == set()
    [(name, level, text)] = told(caplog)
    assert (name, level) == ("torchspy.context", "WARNING")
    assert text.startswith("Module path unknown for tensor 'x'")


def test_saving_does_not_change_what_the_model_returns(saver: TensorSaver, model: Stack) -> None:
    x = torch.randn(3, 4)
    plain = model(x)
    saver.register_modules(model)
    with DebugContext(saver):
        assert model(x).equal(plain)


# -- CallTracer ----------------------------------------------------------------------------------------------

ORDER = [
    "heads.0.q", "heads.0.k", "heads.0", "heads.1.q", "heads.1.k", "heads.1", "out.0", "out.1", "out", "root",
]  # fmt: skip


def test_nothing_is_traced_before_a_forward_pass(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model)
    assert tracer.call_trace == []


def test_calls_in_the_order_in_which_they_end(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model)
    run(model)
    assert tracer.call_trace == ORDER


def test_every_registered_module_has_a_hook(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (nn.Linear,))
    assert len(tracer.hooks) == len(LINEAR)


def test_each_forward_pass_adds_its_calls(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (nn.Tanh,))
    for _ in range(3):
        run(model)
    assert tracer.call_trace == ["out.1"] * 3


def test_a_module_that_runs_twice_is_there_twice(tracer: CallTracer) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))  # type: ignore[no-any-return]

    model = Twice()
    tracer.register_hooks(model)
    run(model)
    assert tracer.call_trace == ["layer", "layer", "root"]


def test_a_module_that_does_not_run_is_not_there(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model)
    model.out(torch.ones(1, 4))
    assert tracer.call_trace == ["out.0", "out.1", "out"]


def test_get_trace_is_a_copy(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (Head,))
    run(model)
    copy = tracer.get_trace()
    copy.clear()
    assert tracer.call_trace == ["heads.0", "heads.1"]


def test_a_reset_forgets_the_calls_and_keeps_the_hooks(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (Head,))
    run(model)
    tracer.reset_trace()
    assert tracer.call_trace == []
    run(model)
    assert tracer.call_trace == ["heads.0", "heads.1"]


def test_removed_hooks_report_nothing_and_keep_the_trace(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (Head,))
    run(model)
    tracer.remove_hooks()
    tracer.remove_hooks()  # twice is harmless
    run(model)
    assert (tracer.hooks, tracer.call_trace) == ([], ["heads.0", "heads.1"])


def test_the_trace_is_saved_one_path_per_line(tracer: CallTracer, model: Stack, tmp_path: Path) -> None:
    tracer.register_hooks(model, (Head,))
    run(model)
    assert tracer.save_trace("t.txt") == tmp_path / "t.txt"
    assert (tmp_path / "t.txt").read_bytes() == b"heads.0\nheads.1"


def test_the_usual_name_of_a_trace(tracer: CallTracer, tmp_path: Path) -> None:
    assert tracer.save_trace() == tmp_path / "call_trace.txt"
    assert (tmp_path / "call_trace.txt").read_text() == ""


def test_a_tracer_that_is_switched_off_reports_nothing(tmp_path: Path, model: Stack) -> None:
    tracer = CallTracer(tmp_path, enabled=False)
    tracer.register_hooks(model)
    run(model)
    assert tracer.call_trace == []
    tracer.remove_hooks()


def test_a_block_switches_it_on_and_begins_anew(tmp_path: Path, model: Stack) -> None:
    tracer = CallTracer(tmp_path, enabled=False)
    tracer.register_hooks(model, (nn.Tanh,))
    for _ in range(2):
        with tracer as entered:
            assert entered is tracer
            assert tracer.enabled
            run(model)
        assert tracer.call_trace == ["out.1"]


def test_gradients_and_results_are_those_of_the_plain_run(tracer: CallTracer, model: Stack) -> None:
    x = torch.randn(3, 4)
    plain = model(x)
    plain.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    tracer.register_hooks(model)
    traced = model(x)
    traced.sum().backward()
    assert traced.equal(plain)
    assert all(
        p.grad is not None and p.grad.equal(g) for p, g in zip(model.parameters(), gradients, strict=True)
    )


def test_calls_of_other_threads_are_reported(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (Head,))
    thread = Thread(target=run, args=(model,))
    thread.start()
    thread.join()
    assert tracer.call_trace == ["heads.0", "heads.1"]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_code_reports_from_inside_and_stays_whole(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model.out)
    compiled = torch.compile(model.out, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(1, 4))
    assert tracer.call_trace == ["0", "1", "root"] * 2
    tracer.remove_hooks()
    compiled(torch.ones(1, 4))
    torch._dynamo.reset()


def test_nothing_is_attached_to_a_layer_that_torch_would_not_fuse_then(tracer: CallTracer) -> None:
    model = encoder()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        plain = model(x)
        tracer.register_hooks(model)
        assert model(x).equal(plain)  # the fused op rounds otherwise
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_only_what_is_reported_is_hooked(tracer: CallTracer, model: Stack) -> None:
    tracer.register_hooks(model, (nn.Tanh,))
    assert [path for path, one in model.named_modules() if one._forward_hooks] == ["out.1"]
    tracer.remove_hooks()
    assert not any(one._forward_hooks for one in model.modules())


class Shared(nn.Module):
    """Two owners of one module, and a call that fails before."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.first = nn.Sequential(nn.Linear(4, 4), self.act)
        self.second = nn.Sequential(self.act)

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes"):
            self.first(torch.ones(1, 3))
        return self.act(self.second(self.first(x)))  # type: ignore[no-any-return]


def test_a_shared_module_is_named_by_its_caller_also_after_a_failure(tracer: CallTracer) -> None:
    model = Shared()
    tracer.register_hooks(model)
    try:
        raise KeyError("handled while the model runs")
    except KeyError:
        run(model)
    assert tracer.call_trace == ["first.0", "first.1", "first", "second.0", "second", "act", "root"]


def test_a_module_that_replaces_a_registered_one_is_not_taken_for_it(
    tracer: CallTracer, model: Stack
) -> None:
    tracer.register_hooks(model, (nn.Linear,), ["out"])
    for _ in range(50):  # numbers of modules are given out again
        model.out[0] = nn.Linear(4, 2)
        run(model)
    assert tracer.call_trace == []


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def test_a_fused_encoder_says_so_in_one_line(tracer: CallTracer, caplog: pytest.LogCaptureFixture) -> None:
    model = encoder()
    tracer.register_hooks(model)
    with torch.no_grad():
        model(torch.ones(1, 3, 8))
        model(torch.ones(1, 3, 8))
    assert tracer.call_trace == ["layers.0", "layers.1", "root"] * 2
    assert told(caplog) == [
        (
            "torchspy.tracer",
            "WARNING",
            f"No calls inside layers.0: {FUSED_HINT}.",
        )
    ]


def test_an_encoder_that_is_not_fused_says_nothing(
    tracer: CallTracer, caplog: pytest.LogCaptureFixture
) -> None:
    model = encoder()
    tracer.register_hooks(model, target_names=["layers.1"])
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            model(torch.ones(1, 3, 8))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert len(tracer.call_trace) == 9
    assert tracer.call_trace[-1] == "layers.1"
    assert told(caplog) == []


def test_a_fused_encoder_of_which_only_layers_are_asked_for_says_nothing(
    tracer: CallTracer, caplog: pytest.LogCaptureFixture
) -> None:
    model = encoder()
    tracer.register_hooks(model, (nn.TransformerEncoderLayer,))
    with torch.no_grad():
        model(torch.ones(1, 3, 8))
    assert (tracer.call_trace, told(caplog)) == (["layers.0", "layers.1"], [])


# -- what is logged ------------------------------------------------------------------------------------------


def test_the_saver_s_lines(saver: TensorSaver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="torchspy"):
        saver.register_modules(nn.Sequential(nn.ReLU()))
        saver.save("x", torch.ones(1))
    assert told(caplog) == [
        ("torchspy.saver", "INFO", "Registered module path: root"),
        ("torchspy.saver", "INFO", "Registered module path: 0"),
        ("torchspy.saver", "DEBUG", f"Saved tensor: {tmp_path.resolve() / 'x.call0.pt'}"),
    ]


def test_the_tracer_s_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.ReLU())
    with caplog.at_level(logging.INFO, logger="torchspy"):
        tracer = CallTracer(tmp_path)
        tracer.register_hooks(model, (nn.ReLU,))
        run(model)
        tracer.save_trace()
        tracer.remove_hooks()
    assert told(caplog) == [
        ("torchspy.tracer", "INFO", "Registered hook on: 0"),
        ("torchspy.tracer", "INFO", f"Saved call trace to: {tmp_path / 'call_trace.txt'} (1 calls)"),
        ("torchspy.tracer", "INFO", "Removed all hooks"),
    ]


def test_nothing_is_logged_unless_it_is_asked_for(
    saver: TensorSaver, model: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    saver.register_modules(model)
    with DebugContext(saver):
        run(model)
    assert told(caplog) == []


# -- the package ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", front_door.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(front_door, name).__name__ == name
    assert name in dir(front_door)


@pytest.mark.parametrize("name", ["saver", "tracer", "context", "trace_graph", "_base"])
def test_every_submodule_can_be_imported_by_the_old_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "torchspy", front_door)
    module = importlib.import_module(f"torchspy.{name}")
    assert all(hasattr(module, one) for one in module.__all__)
    for new in set(sys.modules) - before:
        if new.startswith("torchspy"):
            monkeypatch.delitem(sys.modules, new)


# -- trace_graph ---------------------------------------------------------------------------------------------


def test_a_trace_file_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("  a.b \n\nroot\n")
    assert tg.parse_trace(str(tmp_path / "t")) == ["a.b", "root"]


def test_a_segment_is_a_node_below_the_one_before() -> None:
    tree = tg.build_tree(["a.b.c"])
    assert tree.name == "root"
    assert list(tree.children["a"].children["b"].children) == ["c"]


def test_numbers_are_indices_of_the_name_before() -> None:
    layers = tg.build_tree(["layers.0.fc", "layers.1.fc", "layers.1.fc"]).children["layers"]
    assert (layers.indices, layers.count, list(layers.children)) == ({"0", "1"}, 2, ["fc"])


def test_a_number_in_front_is_a_name() -> None:
    tree = tg.build_tree(["0.fc", "1.fc"])
    assert [(one.name, one.indices, one.count) for one in tree.children.values()] == [
        ("0", set(), 1),
        ("1", set(), 1),
    ]


def test_nodes_remember_where_they_were_first_seen_and_below_what() -> None:
    tree = tg.build_tree(["a.x", "b.y", "a.z"])
    assert [tree.children[name].first_seen for name in "ab"] == [0, 1]
    assert tree.children["a"].children["z"].first_seen == 2
    assert tree.children["a"].parents == [tree]


def test_a_node_has_the_fields_and_defaults_of_the_original() -> None:
    node = tg.Node("n")
    found = (node.name, node.children, node.count, node.first_seen, node.parents, node.indices)
    assert found == ("n", {}, 1, 0, [], set())
    assert {node: 1}[node] == 1


def test_pruning_takes_the_last_name_of_each_path_and_keeps_indices() -> None:
    pruned = tg.prune_leaves(tg.build_tree(["a.layers.0.fc", "a.layers.1.fc", "alone"]))
    layers = pruned.children["a"].children["layers"]
    assert (layers.indices, layers.count, layers.children) == ({"0", "1"}, 2, {})
    assert "alone" in pruned.children


@pytest.mark.parametrize(("shown", "label"), [(True, '"layers x 2"'), (False, "layers")])
def test_repetition_is_shown_or_not(shown: bool, label: str) -> None:
    tree = tg.build_tree(["layers.0.fc", "layers.1.fc"])
    assert f"label={label}]" in tg.construct_graph(tree, show_repetition=shown).source


def test_one_index_met_twice_is_no_repetition() -> None:
    tree = tg.build_tree(["layers.3.a", "layers.3.b"])
    assert "label=layers]" in tg.construct_graph(tree).source


@pytest.mark.parametrize(("squash", "times"), [(False, 2), (True, 1)])
def test_equal_names_are_drawn_once_where_that_is_asked_for(squash: bool, times: int) -> None:
    tree = tg.build_tree(["a.mlp.0.x", "b.mlp.1.x"])
    source = tg.construct_graph(tree, squash_name=squash).source
    assert source.count("mlp") == times
    assert ("mlp x 2" in source) == squash


def test_leaves_are_drawn_where_they_are_not_pruned() -> None:
    tree = tg.build_tree(["a.leaf"])
    assert "leaf" not in tg.construct_graph(tree).source
    assert "leaf" in tg.construct_graph(tree, prune_leaves_flag=False).source


def test_nodes_are_drawn_in_the_order_of_the_trace() -> None:
    source = tg.construct_graph(tg.build_tree(["z.x", "a.x", "m.x"])).source
    assert [source.index(f"n{i} [label={name}]") for i, name in enumerate("zam")] == sorted(
        source.index(f"n{i} [") for i in range(3)
    )


def test_render_graph_is_both_steps_in_one() -> None:
    tree = tg.build_tree(["a.x", "b.x"])
    dot = tg.construct_graph(tree, False, False, True)
    tg.apply_graph_render_options(dot, dpi=99, figwidth=6.0, figheight=4.0)
    assert 'ratio=fill size="6.0,4.0!"' in dot.source
    options: dict[str, Any] = {"dpi": 99, "figwidth": 6.0, "figheight": 4.0}
    assert tg.render_graph(tree, False, False, True, **options).source == dot.source
