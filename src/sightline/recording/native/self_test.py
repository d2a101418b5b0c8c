"""The self-test of a native engine: it records a small program, whose every op is known.

An engine that was built elsewhere, or for another torch, may load and still read memory at the wrong place.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any, Final

import torch

from sightline.data.index import Index
from sightline.recording import torchapi
from sightline.recording.native.session import NativeSession
from sightline.recording.snapshot import build
from sightline.threads import start_thread

#: Compiled under a name of its own: frames of this package are left out of stacks. It calls methods alone: a
#: program may have replaced functions of `torch` by its own.
_FILE: Final = "<self-test>"
_PROGRAM: Final = """
def program(x):
    y = x * 2.0
    z = x.addcmul(x, y, value=0.5)
    return z.sum(dim=0)
"""
#: Every op of the program: its level, its text and its line.
_EXPECTED: Final = [
    ("api", "*(f32[2, 3], 2.0) -> f32[2, 3]", 3),
    ("aten", "mul.Tensor(f32[2, 3], 2.0) -> f32[2, 3]", 3),
    ("api", "Tensor.addcmul(f32[2, 3], f32[2, 3], f32[2, 3], value=0.5) -> f32[2, 3]", 4),
    ("aten", "addcmul(f32[2, 3], f32[2, 3], f32[2, 3], value=0.5) -> f32[2, 3]", 4),
    ("api", "Tensor.sum(f32[2, 3], dim=0) -> f32[3]", 5),
    ("aten", "sum.dim_IntList(f32[2, 3], [0]) -> f32[3]", 5),
]


def failed_check(observer: ModuleType) -> str:
    """The first op that an engine records wrongly, in a few words; empty if all is right.

    The program runs on a thread of its own: no mode and no profiler of the calling thread sees it.
    """
    failed: list[str] = []

    def run() -> None:
        try:
            failed.append(_failed_check(observer))
        except Exception as error:
            failed.append(f"it raised {type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="sightline-self-test", daemon=True)
    start_thread(thread)
    thread.join()
    return failed[0]


def _failed_check(observer: ModuleType) -> str:
    scope: dict[str, Any] = {}
    exec(compile(_PROGRAM, _FILE, "exec"), scope)  # noqa: S102 — a constant of this file
    x = torchapi.VARIABLE_FUNCTIONS.full((2, 3), 1.5, dtype=torch.float32, device="cpu")
    session = NativeSession(observer, None, "self-test", "both", sys._getframe(), outer_frames=False)
    try:
        session.start()
        result = scope["program"](x)
    finally:
        session.halt()
        session.finish()
        session.release()
    index = Index(build(session))
    recorded = [(op.level, str(op), op.frame.line if op.frame is not None else -1) for op in index.ops]
    for expected, found in zip(_EXPECTED, recorded, strict=False):
        if expected != found:
            wrong, right = (f"{text!r} at line {line}" for _, text, line in (found, expected))
            return f"it recorded {wrong} in place of {right}"
    if len(recorded) != len(_EXPECTED):
        return f"it recorded {len(recorded)} ops in place of {len(_EXPECTED)}"
    aten = [op for op in index.ops if op.level == "aten"]
    if [op.inputs[-1].producer for op in aten[1:]] != aten[:-1]:
        return "it did not recognise a tensor that it had seen"
    return "" if result.shape == (3,) else "the program has another result"
