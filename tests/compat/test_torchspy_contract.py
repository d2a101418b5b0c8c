"""The sentences of torchspy's documents, each a test of its own."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline.compat.torchspy as front_door
from sightline.compat.torchspy import (
    BaseDebugger,
    CallTracer,
    DebugContext,
    TensorSaver,
    get_debug_context,
    spy_save,
)
from tests.compat.spied_models import LINEAR, Head, Stack, run, told

Debugger = Callable[..., Any]
EITHER = pytest.mark.parametrize("kind", [BaseDebugger, TensorSaver, CallTracer], ids=lambda k: k.__name__)


def listed(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def loaded(folder: Path, name: str) -> Tensor:
    tensor: Tensor = torch.load(folder / name, weights_only=True)
    return tensor


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


def test_a_saved_tensor_does_not_change_afterwards(saver: TensorSaver, tmp_path: Path) -> None:
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


def test_saving_does_not_change_the_output_of_the_model(saver: TensorSaver, model: Stack) -> None:
    x = torch.randn(3, 4)
    plain = model(x)
    saver.register_modules(model)
    with DebugContext(saver):
        assert model(x).equal(plain)


# -- log messages --------------------------------------------------------------------------------------------


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
