"""The two engines side by side: what both record of a run, and the differences docs/limits.md explains.

Each constant here is one such difference, and stands for the sentence of docs/limits.md that it quotes.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

import sightline as sl

TORCH: Final = tuple(map(int, torch.__version__.split(".")[:2]))
#: "Under any mode autograd adds gradients with `add` where the plain run uses `add_`, …": what both sides are
#: compared as; "" is left out.
UNDER_A_MODE: Final = {
    "detach": "", "add.Tensor": "add", "add_.Tensor": "add", "view": "view", "_reshape_alias": "view",
    "clone": "", "_ctc_loss.Tensor": "_ctc_loss", "index_put": "index_put", "index_put_": "index_put",
    "scatter.value": "scatter", "scatter_.value": "scatter", "scatter_add": "scatter",
    "scatter_add_": "scatter",
    "zeros": "zeros", "zero_": "", "new_zeros": "zeros", "_local_scalar_dense": "", "alias": "",
}  # fmt: skip
#: "A call that runs no op, such as `x.contiguous()` of a contiguous tensor, is not seen" natively.
WITHOUT_OPS: Final = frozenset(
    """Tensor.contiguous Tensor.requires_grad_ Tensor.data Tensor.to Tensor.float Tensor.type_as""".split()
)
#: "Torch calls no function mode before …": only the native engine sees these.
NOT_OVERRIDABLE: Final = frozenset("torch.from_numpy Tensor.set_ Tensor.as_subclass Tensor.__repr__".split())
#: "From torch 2.15 on, the plain engine sees a call of `Tensor.view_as` …".
OF_FUNCTIONS: Final = frozenset({"Tensor.view_as"} if TORCH >= (2, 15) else ())
#: "… the ops of printing": the plain engine sees none of them.
PRINTING: Final = "Tensor.__repr__"


@dataclass(frozen=True)
class Recorded:
    """What is compared of a recording."""

    api: list[str]  #: API calls in order: phase, name, module, the user's line
    aten: dict[str, Counter[str]]  #: dispatcher ops of each phase
    calls: list[str]  #: module calls in order: phase, module, how often called before, inputs and outputs


def record(run: Callable[[], Any], engine: str, model: Any = None, **options: Any) -> sl.Trace:
    """The recording of a run, without a fault or a contradiction."""
    torch.manual_seed(0)
    with sl.trace(model, engine=engine, **options) as t:  # type: ignore[arg-type]
        run()
    assert t.info["engine"] == engine
    assert t.info["fault_count"] == 0, t.info["faults"]
    t.validate()
    return t


def line_of(op: Any) -> str:
    """The line outside torch that made a call: engines see different frames of torch's own below it."""
    frame = op.frame
    while frame is not None and "/site-packages/torch/" in frame.file:
        frame = frame.parent
    return f"{frame.file.rpartition('/')[2]}:{frame.line}" if frame is not None else "-"


def shapes(values: Any) -> str:
    return " ".join(re.sub(r"\$\d+ ", "", str(value)) for value in values)


def recorded(t: sl.Trace) -> Recorded:
    api = [
        f"{op.phase} {op.name} in {op.module.path if op.module is not None else '-'} at {line_of(op)}"
        for op in t.ops.where(level="api")
        if op.name not in WITHOUT_OPS | NOT_OVERRIDABLE | OF_FUNCTIONS
    ]
    aten: dict[str, Counter[str]] = {}
    for op in t.ops.where(level="aten"):
        name = UNDER_A_MODE.get(op.name, op.name)
        is_printing = op.parent is not None and op.parent.name == PRINTING
        # "An op that raised before its kernel ran …" and "the ops of a communication backend's threads".
        if name and not op.raised and op.frame is not None and not is_printing:
            aten.setdefault(op.phase, Counter())[name] += 1
    calls = [
        f"{call.phase} {call.module.label} {call.index}: {shapes(call.inputs)} -> {shapes(call.outputs)}"
        for call in t.module_calls
    ]
    return Recorded(api, aten, calls)


def differences(plain: sl.Trace, native: sl.Trace) -> list[str]:
    """What the engines recorded differently, as a diff from the plain to the native one."""
    one, other = recorded(plain), recorded(native)
    found = []
    for name in ("api", "calls"):
        lines = difflib.unified_diff(getattr(one, name), getattr(other, name), name, name, lineterm="", n=0)
        found += [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    for phase in sorted(one.aten.keys() | other.aten.keys()):
        ours, theirs = one.aten.get(phase, Counter()), other.aten.get(phase, Counter())
        for name in sorted(ours.keys() | theirs.keys()):
            if ours[name] != theirs[name]:
                found.append(
                    f"{phase} {name}: {ours[name]} in the plain engine, {theirs[name]} in the native"
                )
    return found


def assert_parity(run: Callable[[], Any], model: Any = None, **options: Any) -> sl.Trace:
    """Record a run with both engines; the native recording, once both agree."""
    plain = record(run, "python", model, **options)
    native = record(run, "native", model, **options)
    found = differences(plain, native)
    assert not found, "\n".join(found)
    return native
