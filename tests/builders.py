"""What tests build traces with: `TraceBuilder` by hand, `make_trace` for a ready small transformer."""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.api import Trace
from sightline.data import trace_data as d
from tests.tracebuilder import TORCH, Ref, TraceBuilder

__all__ = ["NET", "TORCH", "Ref", "TraceBuilder", "make_trace"]

NET = """\
class Block(nn.Module):
    def __init__(self, dim):
        self.norm = nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.attn.qkv(h).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        h = torch.softmax(scores, dim=-1) @ v
        return x + F.gelu(self.fc(h))


class Net(nn.Module):
    def unused(self, x):
        return x

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def train(model, tokens):
    loss = model(tokens).sum()
    loss.backward()
    optimizer.step()


train(model, tokens)
"""


def make_trace(blocks: int = 2, *, backward: bool = True, file: str = "net.py", write: bool = True) -> Trace:
    """A small transformer: embedding, ``blocks`` equal blocks, a sum; with its backward and one update.

    Its source is ``NET``, invented under the name ``file``; give a real file that holds it to have one.
    """
    b = TraceBuilder()
    if write:
        b.source(file, NET)
    params = _parameters(b, blocks)
    tokens = b.value(2, 8, dtype="int64")
    with b.at(file, 32, "<module>", "train(model, tokens)"):
        with (
            b.at(file, 27, "train", "model(tokens)"),
            b.call("", tokens),
        ):
            x, embedded, steps = _forward(b, tokens, params, blocks, file)
        with b.at(file, 27, "train", "model(tokens).sum()"), b.api("Tensor.sum", x, flavour="method"):
            loss = b.op("sum", x, out=())
        if backward:
            with b.at(file, 28, "train", "loss.backward()"), b.phase("backward"):
                _backward(b, loss, x, embedded, steps, params)
            with b.at(file, 29, "train", "optimizer.step()"), b.phase("optimizer"):
                b.op(
                    "_foreach_add_",
                    [params["embed"]],
                    [b.value(16, 4, kind="gradient", name="embed.weight.grad")],
                    alpha=-0.1,
                )
    return b.build()


def _parameters(b: TraceBuilder, blocks: int) -> dict[str, Ref]:
    made: dict[str, Ref] = {}

    def own(path: str, type: str, **shapes: tuple[int, ...]) -> None:
        infos = []
        for name, shape in shapes.items():
            full = f"{path}.{name}"
            made[full] = b.value(*shape, kind="parameter", name=full, requires_grad=True)
            numel = int(np.prod(shape))
            infos.append(
                d.ParameterInfo(name, full, shape, "float32", numel, 4 * numel, True, False, len(made))
            )
        b.module(path, type, type_module="torch.nn", parameters=tuple(infos))

    own("embed", "Embedding", weight=(16, 4))
    for i in range(blocks):
        b.module(f"blocks.{i}", "Block")
        own(f"blocks.{i}.norm", "LayerNorm", weight=(4,), bias=(4,))
        b.module(f"blocks.{i}.attn", "Attention")
        own(f"blocks.{i}.attn.qkv", "Linear", weight=(12, 4))
        own(f"blocks.{i}.fc", "Linear", weight=(4, 4))
    made["embed"] = made["embed.weight"]
    return made


def _forward(b: TraceBuilder, tokens: Ref, params: dict[str, Ref], blocks: int, file: str) -> Any:
    with b.at(file, 20, "Net.forward", "self.embed(tokens)"), b.call("embed", tokens):
        with b.api("F.embedding", params["embed"], tokens):
            x = embedded = b.op("embedding", params["embed"], tokens, out=(2, 8, 4))
    steps = []
    for i in range(blocks):
        with b.at(file, 22, "Net.forward", "block(x)"):
            with b.call(f"blocks.{i}", x):
                step = _block(b, x, f"blocks.{i}", params, file)
        steps.append(step)
        x = step["y"]
    return x, embedded, steps


def _block(b: TraceBuilder, x: Ref, path: str, params: dict[str, Ref], file: str) -> dict[str, Any]:
    weight, bias = params[f"{path}.norm.weight"], params[f"{path}.norm.bias"]

    def at(line: int, expr: str) -> Any:
        return b.at(file, line, "Block.forward", expr)

    with at(8, "self.norm(x)"), b.call(f"{path}.norm", x) as out:
        with b.api("F.layer_norm", x, (4,), weight, bias, 1e-05) as returned:
            h = b.op("native_layer_norm", x, [4], weight, bias, 1e-05, out=[(2, 8, 4), (2, 8, 1), (2, 8, 1)])
            returned.append(h[0])
        out.append(h[0])
    with at(9, "self.attn.qkv(h)"), b.call(f"{path}.attn.qkv", h[0]):
        with b.at(TORCH, 134, "Linear.forward"), b.api("F.linear", h[0], params[f"{path}.attn.qkv.weight"]):
            wt = b.op("t", params[f"{path}.attn.qkv.weight"], out=(4, 12))
            qkv = b.op("mm", h[0], wt, out=(2, 8, 12), flops=1536, duration=9000)
    with at(9, "self.attn.qkv(h).chunk(3, dim=-1)"), b.api("Tensor.chunk", qkv, 3, dim=-1, flavour="method"):
        q, k, v = b.op("split.Tensor", qkv, 4, -1, out=[(2, 8, 4)] * 3)
    with at(10, "k.transpose(-2, -1)"), b.api("Tensor.transpose", k, -2, -1, flavour="method"):
        kt = b.op("transpose.int", k, -2, -1, out=(2, 4, 8))
    with at(10, "q @ k.transpose(-2, -1)"), b.api("@", q, kt, flavour="operator"):
        scores = b.op("bmm", q, kt, out=(2, 8, 8), flops=1024, duration=7000)
    with at(11, "torch.softmax(scores, dim=-1)"), b.api("torch.softmax", scores, dim=-1):
        p = b.op("_softmax", scores, -1, False, out=(2, 8, 8))
    with at(11, "torch.softmax(scores, dim=-1) @ v"), b.api("@", p, v, flavour="operator"):
        a = b.op("bmm", p, v, out=(2, 8, 4), flops=1024, duration=7000)
    with at(12, "self.fc(h)"), b.call(f"{path}.fc", a), b.at(TORCH, 134, "Linear.forward"):
        with b.api("F.linear", a, params[f"{path}.fc.weight"]):
            f = b.op("mm", a, params[f"{path}.fc.weight"], out=(2, 8, 4), flops=512, duration=5000)
    with at(12, "F.gelu(self.fc(h))"), b.api("F.gelu", f):
        g = b.op("gelu", f, out=(2, 8, 4))
    with at(12, "x + F.gelu(self.fc(h))"), b.api("+", x, g, flavour="operator"):
        y = b.op("add.Tensor", x, g, out=(2, 8, 4))
    return {"h": h[0], "p": p, "a": a, "f": f, "g": g, "y": y, "v": v}


def _backward(b: TraceBuilder, loss: Ref, x: Ref, embedded: Ref, steps: list[Any], params: Any) -> None:
    g = b.op("expand", b.op("ones_like", loss, out=()), [2, 8, 4], out=(2, 8, 4), forward=loss)
    for i, step in reversed(list(enumerate(steps))):
        weight = params[f"blocks.{i}.fc.weight"]
        d_f = b.op("gelu_backward", g, step["f"], out=(2, 8, 4), forward=step["g"])
        d_a = b.op("mm", d_f, weight, out=(2, 8, 4), forward=step["f"], duration=9000)
        d_p = b.op("bmm", d_a, step["v"], out=(2, 8, 8), forward=step["a"], duration=8000)
        b.op("_softmax_backward_data", d_p, step["p"], -1, out=(2, 8, 8), forward=step["p"])
        g = b.op("add.Tensor", g, d_a, out=(2, 8, 4), forward=step["h"])
    b.op("embedding_dense_backward", g, 16, -1, False, out=(16, 4), forward=embedded)
