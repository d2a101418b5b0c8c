"""Traces with what views must cope with: hostile names, nested inputs, shared modules, raised calls."""

from __future__ import annotations

from sightline.api import Trace
from sightline.data.forms import Record
from sightline.data.trace_data import ParameterInfo
from tests.builders import TraceBuilder

ESCAPE = "\x1b[31mred\x1b[0m"
MARKUP = "[bold]x[/bold]"
SCRIPT = "<script>alert(1)</script>"
REVERSED = "a\u202eb"


def hostile() -> Trace:
    """Module names, classes, settings, functions and ops that try to be more than text."""
    b = TraceBuilder(name=f"{SCRIPT}{ESCAPE}", faults=[f"{ESCAPE} fault {SCRIPT}"], fault_count=1,
                     exception=f"ValueError: {MARKUP} {ESCAPE} {SCRIPT}")  # fmt: skip
    b.module("", f"{MARKUP}{SCRIPT}")
    b.module("evil", f"{ESCAPE}{SCRIPT}", extra=f"mode={ESCAPE}, html={SCRIPT}")
    b.module(REVERSED, MARKUP)
    x = b.value(2, 3)
    with b.at(f"/tmp/{SCRIPT}.py", 3, f"{MARKUP}.forward"), b.call("", x):
        with b.call("evil", x, raised=False, **{SCRIPT: x}):
            b.op("relu", x, out=(2, 3))
        b.op(f"torch.{SCRIPT}", x, ESCAPE, level="api", flavour="function", out=(2, 3))
        with b.call(REVERSED, x):
            b.op("neg", x, out=(2, 3))
    return b.build()


def _parameters(path: str, key: int, trainable: bool, **sizes: int) -> tuple[ParameterInfo, ...]:
    return tuple(
        ParameterInfo(name, f"{path}.{name}", (size,), "float32", size, 4 * size, trainable, False, key + at)
        for at, (name, size) in enumerate(sizes.items())
    )


def nested() -> Trace:
    """Dict, keyword and model-output arguments; tied, frozen and unused parameters; a decoding loop."""
    b = TraceBuilder()
    b.module("", "Decoder")
    b.module("wte", "Embedding", extra="100, 8", parameters=_parameters("wte", 1, True, weight=800))
    b.module("block", "Block")
    b.module(
        "block.norm",
        "LayerNorm",
        extra="(8,), eps=1e-05",
        parameters=_parameters("block.norm", 2, False, w=8),
    )
    b.module("block.fc", "Linear", extra="in_features=8, out_features=8, bias=False", aliases=("tied",),
             parameters=_parameters("block.fc", 3, True, weight=64))  # fmt: skip
    b.module("head", "Linear", parameters=_parameters("head", 1, True, weight=800))
    b.module("pooler", "Linear", parameters=_parameters("pooler", 9, True, weight=64))
    for length in (5, 6, 7):
        ids, mask = b.value(1, length, dtype="int64"), b.value(1, length, dtype="bool")
        with b.call("", {"ids": ids, "mask": mask}, use_cache=True, past=None) as out:
            with b.call("wte", ids):
                h = b.op("embedding", ids, out=(1, length, 8), dtype="float32")
            with b.call("block", h, attention_mask=mask) as returned:
                with b.call("block.norm", h):
                    n = b.op("native_layer_norm", h, out=(1, length, 8))
                for _ in range(2):
                    with b.call("block.fc", n):
                        n = b.op("mm", n, out=(1, length, 8), flops=128 * length, duration=3000)
                with b.api("torch.cat", [h, n], dim=-1):
                    c = b.op("cat", [h, n], -1, out=(1, length, 16))
                with b.api("*", c, 0.5, flavour="operator"):
                    c = b.op("mul.Tensor", c, 0.5, out=(1, length, 16))
                returned += [c, n]
            with b.call("head", c):
                logits = b.op("mm", c, out=(1, length, 100), flops=1600 * length)
            out.append(Record("Output", {"logits": logits, "hidden": (h, n)}))
    return b.build()


def crashed() -> Trace:
    """A run that ended in an exception inside ``fc2``."""
    b = TraceBuilder(exception="RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x8 and 7x4)")
    b.module("fc1", "Linear", extra="in_features=8, out_features=8, bias=True")
    b.module("fc2", "Linear", extra="in_features=7, out_features=4, bias=True")
    x, w = b.value(1, 8), b.value(7, 4, kind="parameter", name="fc2.weight")
    with b.call("", x, raised=True):
        with b.call("fc1", x):
            h = b.op("addmm", x, out=(1, 8))
        with b.at("crash.py", 9, "Net.forward"):
            h = b.op("torch.relu", h, level="api", flavour="function", out=(1, 8))
            b.op("torch.mm", h, w, level="api", flavour="function", raised=True)
        with b.call("fc2", h, raised=True):
            b.op("addmm", h, w, raised=True)
    return b.build()
