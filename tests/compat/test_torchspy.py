"""torchspy's uses through `sightline.compat.torchspy`: files, counters, contexts and call traces."""

from __future__ import annotations

import gc
import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
import sightline.compat.torchspy
from sightline.compat.torchspy import (
    BaseDebugger,
    CallTracer,
    DebugContext,
    TensorSaver,
    get_debug_context,
    spy_save,
)
from sightline.compat.torchspy import trace_graph as tg


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        spy_save("hidden", hidden, self)
        return torch.relu(hidden)


class Whole(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half() for _ in range(depth))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.fixture
def as_torchspy() -> Iterator[None]:
    sys.modules["torchspy"] = sightline.compat.torchspy
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchspy"]:
        del sys.modules[name]


# -- the documents' uses ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_torchspy")
def test_saving_as_in_the_document(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"folder": tmp_path / "tensors", "model": Whole(), "Half": Half}
    exec(
        "import torch\n"
        "from torchspy import DebugContext, TensorSaver\n"
        "from torchspy.saver import spy_save\n"
        "keeper = TensorSaver(folder)\n"
        "keeper.register_modules(model, target_classes=(Half,))\n"
        "with DebugContext(keeper, prefix='step0'):\n"
        "    model(torch.ones(2, 4))\n",
        scope,
    )
    assert scope["spy_save"] is spy_save
    assert files(tmp_path / "tensors") == [
        "step0.layers.0.hidden.call0.pt",
        "step0.layers.1.hidden.call0.pt",
    ]


@pytest.mark.usefixtures("as_torchspy")
def test_tracing_as_in_the_document(tmp_path: Path) -> None:
    model = Whole()
    scope: dict[str, Any] = {"folder": tmp_path, "model": model, "nn": nn, "x": torch.ones(2, 4)}
    exec(
        "from torchspy import CallTracer\n"
        "calls = CallTracer(folder)\n"
        "calls.register_hooks(model, target_classes=(nn.Linear,))\n"
        "y = model(x)\n"
        "written = calls.save_trace('forward.txt')\n",
        scope,
    )
    scope["calls"].remove_hooks()
    assert scope["written"] == tmp_path / "forward.txt"
    assert scope["written"].read_bytes() == b"layers.0.inner\nlayers.1.inner\nhead"
    assert model(scope["x"]).equal(scope["y"])


def test_names_are_lazy_and_others_are_refused() -> None:
    assert set(dir(sightline.compat.torchspy)) >= {"BaseDebugger", "CallTracer", "spy_save"}
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sightline.compat.torchspy.nonsense  # type: ignore[attr-defined]
    script = "import sys, sightline.compat.torchspy; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.usefixtures("as_torchspy")
def test_every_submodule_holds_the_same_objects() -> None:
    scope: dict[str, Any] = {}
    exec(
        "import torchspy.saver, torchspy.tracer, torchspy.context, torchspy.trace_graph, torchspy._base\n"
        "from torchspy import saver\n"
        "found = [saver.TensorSaver, torchspy.tracer.CallTracer, torchspy.context.get_debug_context,\n"
        "         torchspy.context.DebugContext, torchspy._base.BaseDebugger, torchspy.trace_graph.Node]\n",
        scope,
    )
    assert scope["found"] == [
        TensorSaver, CallTracer, get_debug_context, DebugContext, BaseDebugger, tg.Node,
    ]  # fmt: skip


def test_the_arguments_have_the_other_tool_s_names_and_defaults() -> None:
    filters = {"target_classes": (nn.Module,), "target_names": None, "exclude_names": None}
    for function, wanted in (
        (BaseDebugger, {"enabled": True}),
        (TensorSaver, {"enabled": True}),
        (CallTracer, {"enabled": True}),
        (TensorSaver.register_modules, filters),
        (CallTracer.register_hooks, filters),
        (CallTracer.save_trace, {"filename": "call_trace.txt"}),
        (TensorSaver.save, {"call_idx": None, "norm_only": False}),
        (DebugContext, {"prefix": "", "module_path_override": None}),
        (spy_save, {"module": None}),
        (tg.construct_graph, {"show_repetition": True, "prune_leaves_flag": True, "squash_name": False}),
    ):
        found = inspect.signature(function).parameters.values()
        assert {one.name: one.default for one in found if one.default is not one.empty} == wanted


# -- the saver -------------------------------------------------------------------------------------------


def test_two_epochs_of_training_with_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, saver = Whole(), TensorSaver(tmp_path)
    saver.register_modules(model, target_names=["layers"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    watched = model.get_submodule("layers.1.inner")
    handle = watched.register_forward_hook(lambda _module, _args, out: seen.append(out.detach().clone()))
    for epoch in range(2):
        for step in range(3):
            with DebugContext(saver, prefix=f"epoch{epoch}.step{step}"):
                loss = model(torch.randn(5, 4)).square().mean()
                spy_save("loss", loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    handle.remove()
    assert len(files(tmp_path)) == 2 * 3 * 3
    for number, kept in enumerate(seen):
        epoch, step = divmod(number, 3)
        assert read(tmp_path / f"epoch{epoch}.step{step}.layers.1.hidden.call0.pt").equal(kept)
        assert read(tmp_path / f"epoch{epoch}.step{step}.manual.loss.call0.pt").shape == ()


def test_one_counter_per_name_across_contexts_until_reset(tmp_path: Path) -> None:
    saver = TensorSaver(tmp_path)
    for value in range(2):
        with DebugContext(saver):
            spy_save("x", torch.tensor([value]))
    saver.save("manual.x", torch.tensor([9]), call_idx=42)
    assert saver.call_counts["manual.x"] == 2
    assert files(tmp_path) == ["manual.x.call0.pt", "manual.x.call1.pt", "manual.x.call42.pt"]
    saver.reset_counts()
    saver.save("manual.x", torch.tensor([7]))
    assert read(tmp_path / "manual.x.call0.pt").item() == 7


def test_a_saved_tensor_is_a_detached_compact_copy(tmp_path: Path) -> None:
    saver = TensorSaver(tmp_path)
    big = torch.zeros(1000, 1000, requires_grad=True)
    path = saver.save("slice", big[0, :3])
    assert path is not None
    assert path.stat().st_size < 10_000
    assert not read(path).requires_grad
    norms = saver.save("n", torch.ones(2, 3, 4, dtype=torch.bfloat16), norm_only=True)
    assert norms is not None
    torch.testing.assert_close(read(norms), torch.full((2,), 12.0).sqrt())
    flat = saver.save("n", torch.tensor([3, -4]), norm_only=True)
    assert flat is not None
    assert read(flat).tolist() == [3, 4]


def test_containers_and_odd_names(tmp_path: Path) -> None:
    saver = TensorSaver(tmp_path)
    x = torch.ones(2)
    both = saver.save("pair", (x, {"y": [x, None]}))
    assert both is not None
    assert read(both)[1]["y"][0].equal(x)
    for name in ("a/b", "a~b", "../up", "q:k", "x" * 400):
        path = saver.save(name, x)
        assert path is not None
        assert path.parent == tmp_path.resolve()
    assert len(files(tmp_path)) == 6
    with pytest.raises(TypeError, match="object cannot be saved"):
        saver.save("thing", object())
    assert len(files(tmp_path)) == 6


def test_two_savers_on_one_folder_keep_both(tmp_path: Path) -> None:
    first, second = TensorSaver(tmp_path), TensorSaver(tmp_path)
    first.save("x", torch.tensor(1))
    second.save("x", torch.tensor(2))
    first.save("x", torch.tensor(3))
    assert [read(tmp_path / name).item() for name in files(tmp_path)] == [1, 2, 3]
    del first, second
    gc.collect()
    TensorSaver(tmp_path).save("x", torch.tensor(4))  # a run again
    assert read(tmp_path / "x.call0.pt").item() == 4


def test_nothing_is_saved_outside_or_disabled(tmp_path: Path) -> None:
    spy_save("x", torch.ones(1))
    saver = TensorSaver(tmp_path / "new" / "folder", enabled=False)
    with DebugContext(saver) as context:
        assert get_debug_context() is context
        assert context.debugger is saver
        spy_save("x", torch.ones(1))
    assert get_debug_context() is None
    assert files(tmp_path / "new" / "folder") == []


def test_paths_override_unknown_and_nested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver, model = TensorSaver(tmp_path), Whole()
    saver.register_modules(model, exclude_names=["layers.1"])
    assert saver.get_module_path(model) == "root"
    assert saver.get_module_path(model.layers[1]) == "unknown"
    x = torch.ones(1)
    with DebugContext(saver, "outer"), caplog.at_level(logging.WARNING):
        with DebugContext(saver, "inner", module_path_override="here"):
            spy_save("x", x, model.layers[1])
        spy_save("x", x, model.layers[1])
        spy_save("x", x, model)
    assert "Module path unknown" in caplog.text
    assert files(tmp_path) == ["inner.here.x.call0.pt", "outer.root.x.call0.pt"]


def test_a_context_is_its_thread_s_own_and_ends_with_an_exception(tmp_path: Path) -> None:
    saver, x = TensorSaver(tmp_path), torch.ones(1)
    with DebugContext(saver), ThreadPoolExecutor(1) as pool:
        pool.submit(spy_save, "elsewhere", x).result()
        assert pool.submit(get_debug_context).result() is None
        spy_save("here", x)
    with pytest.raises(KeyError), DebugContext(saver):
        raise KeyError("x")
    assert get_debug_context() is None
    spy_save("after", x)
    assert files(tmp_path) == ["manual.here.call0.pt"]


def test_a_saver_hooks_nothing_and_forgets_modules_that_are_gone(tmp_path: Path) -> None:
    saver, model = TensorSaver(tmp_path), Whole()
    saver.register_modules(model, target_classes=(Half,))
    assert saver.module_paths == {id(half): f"layers.{i}" for i, half in enumerate(model.layers)}
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    number = id(model.layers[0])
    stranger = nn.ReLU()
    del model
    gc.collect()
    saver.module_paths[id(stranger)] = saver.module_paths[number]  # as if the number were given out again
    saver._refs[id(stranger)] = saver._refs[number]
    assert saver.get_module_path(stranger) == "unknown"


def test_saving_is_not_part_of_a_recording(tmp_path: Path) -> None:
    model, saver = Whole(), TensorSaver(tmp_path)
    saver.register_modules(model)
    with sl.trace(model) as plain:
        model(torch.ones(1, 4))
    with sl.trace(model) as saved, DebugContext(saver):
        model(torch.ones(1, 4))
    assert [op.name for op in saved.ops] == [op.name for op in plain.ops]
    assert saved.info["faults"] == plain.info["faults"]


def test_compiled_code_saves_too_and_is_whole_without_a_context(tmp_path: Path) -> None:
    layer, saver = Half(), TensorSaver(tmp_path)
    saver.register_modules(layer)
    x = torch.ones(1, 4)
    torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert files(tmp_path) == []
    compiled = torch.compile(layer, backend="eager")
    with DebugContext(saver, "step"):
        compiled(x)
        compiled(x)
    compiled(x)
    assert files(tmp_path) == ["step.root.hidden.call0.pt", "step.root.hidden.call1.pt"]
    torch._dynamo.reset()


# -- the call tracer -------------------------------------------------------------------------------------


def test_children_are_done_before_parents(tracer: CallTracer) -> None:
    model = Whole()
    tracer.register_hooks(model)
    tracer.register_hooks(model)  # twice is once
    model(torch.ones(1, 4))
    once = ["layers.0.inner", "layers.0", "layers.1.inner", "layers.1", "head", "root"]
    assert tracer.call_trace == once
    copy = tracer.get_trace()
    copy.append("more")
    model(torch.ones(1, 4))
    assert tracer.call_trace == once * 2
    tracer.reset_trace()
    assert tracer.call_trace == []
    model(torch.ones(1, 4))
    tracer.remove_hooks()
    model(torch.ones(1, 4))
    assert tracer.call_trace == once
    assert tracer.hooks == []
    assert tracer.save_trace() == tracer.output_dir / "call_trace.txt"
    assert tracer.save_trace("in/it.txt").read_text() == "\n".join(once)


def test_filters(tracer: CallTracer) -> None:
    model = Whole(depth=11)
    saver = TensorSaver(tracer.output_dir)
    saver.register_modules(model, nn.Linear, exclude_names=["layers.1"])
    assert [path for path in saver.module_paths.values() if "1" in path] == ["layers.10.inner"]
    tracer.register_hooks(model, (nn.Linear,), ["layers.1", "head", "layers.0"], ["ers.0"])
    assert len(tracer.hooks) == 2
    assert sorted(tracer.module_paths.values()) == ["head", "layers.1.inner"]
    model(torch.ones(1, 4))
    assert tracer.call_trace == ["layers.1.inner", "head"]
    tracer.hooks[0].remove()
    model(torch.ones(1, 4))
    assert tracer.call_trace == ["layers.1.inner", "head", "head"]


def test_a_block_enables_resets_and_ends(tmp_path: Path) -> None:
    model, tracer = Whole(), CallTracer(tmp_path, enabled=False)
    tracer.register_hooks(model, (nn.Linear,))
    model(torch.ones(1, 4))
    assert tracer.call_trace == []
    for _ in range(2):
        with tracer:
            model(torch.ones(1, 4))
        model(torch.ones(1, 4))
        assert tracer.call_trace == ["layers.0.inner", "layers.1.inner", "head"]
        assert tracer.hooks == []
    assert not tracer.enabled


def test_it_may_be_switched_off_and_on(tracer: CallTracer) -> None:
    model = Whole()
    tracer.register_hooks(model, target_names=["head"])
    model(torch.ones(1, 4))
    tracer.enabled = False
    model(torch.ones(1, 4))
    tracer.enabled = True
    model(torch.ones(1, 4))
    assert tracer.call_trace == ["head", "head"]


def test_a_shared_module_has_the_name_it_was_called_by(tracer: CallTracer) -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(nn.Linear(4, 4), shared), shared)
    tracer.register_hooks(model, (nn.ReLU,))
    model(torch.ones(1, 4))
    assert tracer.call_trace == ["1", "2.1", "3"]


def test_two_models_a_wrapper_and_a_failure(tracer: CallTracer) -> None:
    first, second = Whole(), nn.Sequential(nn.Linear(1, 1))
    tracer.register_hooks(first, target_names=["head"])
    tracer.register_hooks(second)
    both = nn.Sequential(first, second)
    both(torch.ones(1, 4))
    assert tracer.call_trace == ["head", "0", "root"]
    with pytest.raises(RuntimeError, match="shapes"):
        second(torch.ones(1, 3))
    assert tracer.call_trace == ["head", "0", "root"]


def test_a_tracer_that_is_forgotten_ends_its_recording(tmp_path: Path) -> None:
    model = Whole()
    CallTracer(tmp_path).register_hooks(model)
    gc.collect()
    model(torch.ones(1, 4))  # that nothing is left installed is checked after every test


def test_a_trace_that_is_read_at_every_step_is_a_list_that_grows(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.ReLU() for _ in range(100)])
    tracer = CallTracer(tmp_path)
    tracer.register_hooks(model)
    held = tracer.call_trace
    for step in range(1, 201):
        model(torch.ones(1))
        assert len(tracer.call_trace) == 101 * step
    assert tracer.call_trace is held  # nothing is made anew, however long it is
    tracer.remove_hooks()
    assert held[-101:] == [*map(str, range(100)), "root"]


def test_a_trace_can_be_added_to_and_set(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU())
    tracer = CallTracer(tmp_path)
    tracer.register_hooks(model)
    model(torch.ones(1))
    tracer.call_trace.append("--- step 1 ---")
    model(torch.ones(1))
    assert tracer.call_trace == ["0", "root", "--- step 1 ---", "0", "root"]
    tracer.call_trace = ["mine"]
    model(torch.ones(1))
    assert tracer.get_trace() == ["mine", "0", "root"]
    assert tracer.save_trace().read_text() == "mine\n0\nroot"
    tracer.remove_hooks()
    assert tracer.call_trace == ["mine", "0", "root"]


def test_a_call_is_in_the_trace_as_soon_as_it_is_done(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(watching.get_trace())
            return x

    model = nn.Sequential(nn.ReLU(), Looking())
    watching = CallTracer(tmp_path)
    watching.register_hooks(model)
    with watching:
        model(torch.ones(1))
    assert seen == [["0"]]
