"""The two engines check each other, and torch's own profiler checks the native one.

On every architecture both engines record one training step. What the user wrote, in which module and on which
line, must be the same; what reaches the dispatcher must be the same but for what a dispatch mode changes by
being there, which is written down here.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sightline as sl
from tests.recording.architecture_runs import forget_tables, pristine
from tests.recording.architectures import ZOO, Architecture
from tests.recording.engine_parity import UNDER_A_MODE
from tests.recording.engines import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore")]

#: Architectures where a mode takes torch another way altogether: a kernel for inference, another scan.
OTHER_WAYS = {"canine": "max_pool1d without gradients has a kernel of its own, which a mode does not see"}
#: API calls that the observer cannot see: they run no op.
WITHOUT_OPS = {"Tensor.contiguous", "Tensor.requires_grad_", "Tensor.data"}
#: Calls whose arguments come from elsewhere: sizes that are spread from a `torch.Size` arrive as one list.
SPREAD = {"Tensor.view", "Tensor.reshape", "Tensor.new", "Tensor.expand", "Tensor.permute"}
#: What comes back is put together in Python; of the op alone the observer knows.
COMPOSED = {"F.multi_head_attention_forward", "Tensor.unique"}


@pytest.fixture(autouse=True, scope="module")
def transformers_is_ready() -> None:
    """Building its first model, transformers adds a method to torch's Module."""
    pristine(ZOO[0])


def step(architecture: Architecture, engine: str) -> sl.Trace:
    """One training step, recorded."""
    model, inputs = copy.deepcopy(pristine(architecture))
    forget_tables(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(4)
    with sl.trace(model, engine=engine) as t:  # type: ignore[arg-type]
        loss = loss_of(model(**inputs))
        loss.backward()
        optimizer.step()
    return t


def loss_of(output: Any) -> Any:
    if getattr(output, "loss", None) is not None:
        return output.loss
    found = [one for one in output.values() if isinstance(one, torch.Tensor) and one.requires_grad]
    return found[0].sum()


def line_of(op: Any) -> str:
    """The user's line: engines see different frames of torch's own below it."""
    frame = op.frame
    while frame is not None and "/site-packages/torch/" in frame.file:
        frame = frame.parent
    return f"{frame.file}:{frame.line}" if frame is not None else "-"


def written(t: sl.Trace) -> list[str]:
    """API calls of the forward pass as the user wrote them."""
    found = []
    for op in t.ops.where(level="api"):
        if op.phase != "forward" or op.name in WITHOUT_OPS or op.name in COMPOSED:
            continue
        args = "" if op.name in SPREAD else re.sub(r"\$\d+", "$", str(op.args))
        module = op.module.label if op.module is not None else "-"
        found.append(f"{op.name}({args}) in {module} at {line_of(op)}")
    return found


def dispatched(t: sl.Trace, phase: str) -> Counter[str]:
    names = (UNDER_A_MODE.get(op.name, op.name) for op in t.ops.where(level="aten") if op.phase == phase)
    return Counter(name for name in names if name)


@pytest.mark.parametrize("architecture", [one for one in ZOO if not one.trains_only], ids=str)
def test_both_engines_record_the_same_step(architecture: Architecture) -> None:
    plain, native = step(architecture, "python"), step(architecture, "native")
    assert (plain.info["engine"], native.info["engine"]) == ("python", "native")
    assert native.validate().external == 0
    assert written(native) == written(plain)
    calls = [
        [
            (call.module.label, call.index, call.phase, *map(look, (call.inputs, call.outputs)))
            for call in t.module_calls
        ]
        for t in (plain, native)
    ]
    assert calls[1] == calls[0]
    if architecture.name not in OTHER_WAYS:
        for phase in ("forward", "optimizer"):
            assert dispatched(native, phase) == dispatched(plain, phase)
    assert unlinked(native) == []


def look(values: Any) -> list[str]:
    return [re.sub(r"\$\d+", "$", str(value)) for value in values]


def unlinked(t: sl.Trace) -> list[str]:
    """Backward ops that belong to no forward op, though their node has one."""
    return [op.name for op in t.ops if op.level == "aten" and op.phase == "backward" and op.forward is None]


# -- against torch's own profiler ------------------------------------------------------------------------


def profiled(run: Callable[[], Any]) -> list[str]:
    """Dispatcher ops of a run without a trace, by torch's profiler: those inside a leaf are its own."""
    names = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    with torch.profiler.profile(experimental_config=names) as profile:
        run()
    found: list[str] = []

    def walk(event: Any) -> None:
        name = event.name + (f".{event.overload_name}" if event.overload_name else "")
        if event.name.startswith("aten::") and not _is_composite(name) and name != "aten::detach_":
            found.append(name.removeprefix("aten::"))
            return
        for child in sorted(event.cpu_children, key=lambda one: one.time_range.start):
            walk(child)

    events = [event for event in profile.events() if event.cpu_parent is None]
    for event in sorted(events, key=lambda one: one.time_range.start):
        walk(event)
    return found


def _is_composite(name: str) -> bool:
    """Whether an op is written in terms of other ops, and has no kernel of its own on a CPU."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, torch._C.DispatchKey.CompositeImplicitAutograd) and not has(
        name, torch._C.DispatchKey.CPU
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "bert", "t5", "vit", "resnet", "whisper"])
def test_the_profiler_of_the_plain_run_saw_the_same_ops(name: str) -> None:
    architecture = next(one for one in ZOO if one.name == name)
    model, inputs = copy.deepcopy(pristine(architecture))

    def run() -> None:
        torch.manual_seed(4)
        loss_of(model(**inputs)).backward()

    run()  # gradients are there from now on, and tables that models keep
    seen = Counter(profiled(run))
    with sl.trace(model, engine="native") as t:
        run()
    recorded = Counter(op.name for op in t.ops.where(level="aten"))
    # Copying Python data into a new tensor is torch's own business, and is left out of recordings.
    data = {"empty.memory_format", "lift_fresh", "copy_", "_to_copy"}
    names = (seen.keys() | recorded.keys()) - data
    assert {name: recorded[name] for name in names} == {name: seen[name] for name in names}
