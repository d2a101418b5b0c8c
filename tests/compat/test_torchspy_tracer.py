"""`CallTracer` as torchspy's documents describe it, and where the original would fail."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from sightline.compat import FUSED_HINT
from sightline.compat.torchspy import (
    CallTracer,
)
from tests.compat.spied_models import LINEAR, Head, Stack, run, told

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


def test_only_reported_modules_are_hooked(tracer: CallTracer, model: Stack) -> None:
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
