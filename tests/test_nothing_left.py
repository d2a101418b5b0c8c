"""The fixture that proves nothing is left must see each kind of leftover, or it proves nothing."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.modules.module as module_hooks
import torch.utils._python_dispatch as dispatch
from torch import nn
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.growth import calls_of
from tests.leftovers import Namespaces, leftovers, same_model, same_rng, state

Leak = AbstractContextManager[Any]


@contextmanager
def _handle(register: Callable[[], Any]) -> Iterator[None]:
    handle = register()
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _set(setter: Callable[[Any], Any], value: Any, old: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(old)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


LEAKS: dict[str, Callable[[], Leak]] = {
    "the dispatch mode stack": TorchDispatchMode,
    "the function mode stack": TorchFunctionMode,
    "_is_in_torch_dispatch_mode": lambda: _set(
        lambda flag: setattr(dispatch, "_is_in_torch_dispatch_mode", flag), True, False
    ),
    "_global_forward_pre_hooks": lambda: _handle(
        lambda: module_hooks.register_module_forward_pre_hook(_nothing)
    ),
    "_global_forward_hooks": lambda: _handle(lambda: module_hooks.register_module_forward_hook(_nothing)),
    "_global_forward_hooks_always_called": lambda: _handle(
        lambda: module_hooks.register_module_forward_hook(_nothing, always_call=True)
    ),
    "_global_backward_hooks": lambda: _handle(
        lambda: module_hooks.register_module_full_backward_hook(_nothing)
    ),
    "_global_backward_pre_hooks": lambda: _handle(
        lambda: module_hooks.register_module_full_backward_pre_hook(_nothing)
    ),
    "_global_optimizer_pre_hooks": lambda: _handle(lambda: register_optimizer_step_pre_hook(_nothing)),
    "_global_optimizer_post_hooks": lambda: _handle(lambda: register_optimizer_step_post_hook(_nothing)),
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "anomaly mode": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu"),
    "torch functions being overridable": torch._C.DisableTorchFunction,
    "the saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "autograd's threads": lambda: torch.autograd.set_multithreading_enabled(False),
    "the default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "the guard-complete hook": lambda: _set(set_guard_complete_hook, lambda *_: True, None),
    "sys.gettrace": lambda: _set(sys.settrace, _nothing, sys.gettrace()),
    "sys.getprofile": lambda: _set(sys.setprofile, _nothing, sys.getprofile()),
    "gc.isenabled": lambda: _set(lambda on: gc.enable() if on else gc.disable(), False, True),
}


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_leak_is_seen_and_its_end_too(name: str) -> None:
    before = state()
    with ExitStack() as stack:
        stack.enter_context(LEAKS[name]())
        leaked = state()
    assert any(line.startswith(f"{name} was") for line in leftovers(before, leaked))
    assert leftovers(before, state()) == []


@pytest.mark.parametrize("name", ["the dispatch mode stack", "_global_forward_hooks", "grad mode"])
def test_a_test_that_imports_torch_itself_is_held_to_a_clean_process(name: str) -> None:
    assert not any(line.startswith(f"{name} was") for line in leftovers({}, state()))
    with LEAKS[name]():
        leaked = state()
    assert any(line.startswith(f"{name} was") for line in leftovers({}, leaked))


@pytest.mark.parametrize(
    ("owner", "attribute"),
    [
        (torch.Tensor, "backward"),
        (torch.nn.Module, "__call__"),
        (torch, "cat"),
        (torch.nn.functional, "linear"),
    ],
)
def test_a_patch_is_seen_even_when_it_looks_like_the_original(
    owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    namespaces = Namespaces()
    assert namespaces.look() == []
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, patched)
        assert any(f".{attribute} was replaced" in line for line in namespaces.look())
    namespaces.look()
    assert namespaces.look() == []


def test_a_new_and_a_lost_attribute_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    namespaces = Namespaces()
    namespaces.look()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sightline", 1, raising=False)
        assert namespaces.look() == ["torch.Tensor.sightline is new: 1."]
    assert namespaces.look() == ["torch.Tensor.sightline is gone."]


def test_the_fixture_fails_the_test_that_leaks(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text("utf-8"))
    pytester.makepyfile(
        """
        import torch

        def test_leaks():
            torch.set_default_dtype(torch.float64)

        def test_after_it_is_judged_alone():
            assert torch.ones(1).dtype == torch.float64
        """
    )
    root = str(Path(__file__).parent.parent)
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-o", f"pythonpath={root}")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*the default dtype was 'torch.float32', is 'torch.float64'.*"])


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torch", lambda: torch.rand(1)),
        ("numpy.random", np.random.rand),
        ("random", random.random),
    ],
)
def test_same_rng_sees_a_draw(name: str, draw: Callable[[], Any]) -> None:
    with same_rng():
        torch.ones(2).relu()
    with pytest.raises(AssertionError, match=name), same_rng():
        draw()


def test_same_model_sees_what_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with same_model(model):
        model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(AssertionError, match=r"1\.training"), same_model(model):
        model[1].eval()
    with pytest.raises(AssertionError, match=r"0\._forward_hooks"), same_model(model):
        model[0].register_forward_hook(_nothing)
    with pytest.raises(AssertionError, match=r"0\.weight"), same_model(model):
        model[0].weight.requires_grad_(False)
    with pytest.raises(AssertionError, match="the attributes of 0"), same_model(model):
        setattr(model[0], "seen", True)  # noqa: B010 — a type checker would refuse the plain form


def test_looking_is_cheap() -> None:
    namespaces = Namespaces()
    namespaces.look()

    def look() -> None:
        state()
        namespaces.look()

    assert calls_of(look) < 2000  # it is done twice for each test
