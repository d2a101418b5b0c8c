"""Odd tensors and real code under the native engine: the run is the same run, and the recording is sound."""

# mypy: disable-error-code="arg-type,attr-defined,call-overload,index"
# torch's stubs know less of torch than these tests call.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from sightline.recording.engine_choice import engine_status
from tests.recording.native.comparison import aten, prints, record, unchanged

if engine_status(build=True).engine != "native":
    pytest.skip("the native engine cannot be built here", allow_module_level=True)

LINEAR = nn.Linear(4, 4)
X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """torch calls nested tensors and torch.jit by names that are none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def nested() -> Any:
    n = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    return n * 2, torch.nested.to_padded_tensor(n + n, 0.0), F.linear(n, torch.ones(5, 3))


def jagged() -> Any:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    n = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    y = F.linear((n * 2).sin(), torch.ones(5, 3))
    y.values().sum().backward()
    assert n.grad is not None
    return y.values(), y.offsets(), n.grad.values()


def sparse() -> Any:
    a = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0]), (2, 2))
    rows = a.to_sparse_csr()
    return a, a + a, a.to_dense(), torch.sparse.mm(a, torch.ones(2, 3)), rows, rows @ torch.ones(2, 2)


def quantized() -> Any:
    q = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.quint8)
    return q.dequantize(), q.int_repr(), q[0].dequantize()


def meta() -> Any:
    a = torch.empty(3, 4, device="meta")
    return a @ a.t(), torch.cat([a, a]), a.sum(0)


def conjugated() -> Any:
    a = torch.randn(2, 3, dtype=torch.complex64)
    b = a.conj()
    return (
        b * 2,
        b.imag,
        b @ b.t(),
        torch._neg_view(torch.ones(3)) + 1,
        b.resolve_conj(),
        torch.view_as_real(a),
    )


def small() -> Any:
    a, b = torch.tensor(3.0), torch.empty(0, 3)
    return a + 1, 5 - a, 2**a, a.item(), b.sum(), b.mean(0), torch.cat([b, b]), torch.arange(4) // 2


def many() -> Any:
    tensors = [torch.ones(1) * at for at in range(200)]
    return torch.cat(tensors), torch.stack(tensors), torch._foreach_mul(tensors, tensors)


def views() -> Any:
    a = torch.arange(12.0).reshape(3, 4)
    a[1].add_(5)
    a.t()[2].mul_(2)
    a[0, 1:3] = 7
    a[a > 5] = 0
    a.view(-1)[::2] += 1
    torch.as_strided(a, (2, 2), (1, 2)).zero_()
    return a, a.unbind(0), a.split(2), a.chunk(2)


def replaced() -> Any:
    a = torch.ones(2)
    a.set_(torch.ones(5))
    b = a + 1
    a.resize_(2, 2).fill_(1.0)
    d = torch.ones(3)
    d.data.add_(1)
    return b, a * 2, d + 1


def outs() -> Any:
    o, v, at = torch.empty(3), torch.empty(1), torch.empty(1, dtype=torch.long)
    torch.add(torch.ones(3), 1, out=o)
    torch.max(torch.arange(3.0).view(1, 3), 1, out=(v, at))
    return o, v, at


def dtypes() -> Any:
    names = "float8_e4m3fn float8_e5m2 bfloat16 float16 complex128 uint16 uint64 int8 bool bits8".split()
    return [str(torch.zeros(2).to(getattr(torch, n)).dtype) for n in names[:-1]], torch.empty(
        2, dtype=torch.bits8
    ).shape


def transforms() -> Any:
    x = torch.randn(3)
    cube = lambda v: (v**3).sum()  # noqa: E731
    sine = lambda v: v.sin()  # noqa: E731
    func = torch.func
    return (
        func.grad(cube)(x), func.jacrev(sine)(x), func.jacfwd(sine)(x), func.hessian(cube)(x),
        func.jvp(cube, (x,), (x,)), torch.vmap(torch.dot)(torch.ones(3, 4), torch.ones(3, 4)),
        torch.vmap(func.grad(cube))(torch.randn(2, 3)),
    )  # fmt: skip


def functional() -> Any:
    parameters = dict(LINEAR.named_parameters())
    loss = lambda p, x: torch.func.functional_call(LINEAR, p, (x,)).sum()  # noqa: E731
    return torch.func.grad(loss)(parameters, X), torch.vmap(torch.func.grad(loss), (None, 0))(
        parameters, X[:, None]
    )


def autocast() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = LINEAR(X)
        z = (y @ y.t()).softmax(-1)
    return y, z, torch.autograd.grad(z.float().sum(), list(LINEAR.parameters()))


def inference() -> Any:
    with torch.inference_mode():
        y = LINEAR(X)
        y.add_(1)
        return (y * 2).clone()


def second_derivative() -> Any:
    a = torch.randn(3, requires_grad=True)
    (g,) = torch.autograd.grad((a**3).sum() * a.prod(), a, create_graph=True)
    g.sum().backward(retain_graph=True)
    g.sum().backward()
    return g, a.grad


def hooked() -> Any:
    a = torch.randn(2, 4, requires_grad=True)
    b = a * 2
    b.register_hook(lambda g: g * 3)
    handles = [
        LINEAR.register_full_backward_hook(lambda m, into, out: (into[0] * 2,)),
        LINEAR.register_forward_hook(lambda m, given, made: made + 1),
    ]
    (g,) = torch.autograd.grad(LINEAR(b).sum(), a)
    for handle in handles:
        handle.remove()
    return g


class Tripled(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


class Inner(torch.autograd.Function):
    """Runs a backward pass of its own, in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.given = x.detach().requires_grad_()
            ctx.made = Tripled.apply(ctx.given**2).sum()
        made: Tensor = ctx.made.detach()
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.made.backward()
        return ctx.given.grad * grads[0]


def custom_functions() -> Any:
    a = torch.randn(3, requires_grad=True)
    y = Tripled.apply(a * 1)
    Inner.apply(y).backward()
    return a.grad, y


def checkpointed(reentrant: bool) -> Callable[[], Any]:
    def run() -> Any:
        a = torch.randn(2, 4, requires_grad=True)
        y = checkpoint(nn.Sequential(LINEAR, nn.ReLU(), nn.Dropout(0.5)), a, use_reentrant=reentrant)
        y.sum().backward()
        LINEAR.zero_grad()
        return a.grad, y

    return run


def deep_backward() -> Any:
    """More backward passes in one another than autograd runs on one thread."""
    a = torch.randn(2, requires_grad=True)

    def level(at: int, x: Tensor) -> Tensor:
        return x * 1.01 if at == 0 else checkpoint(lambda x: level(at - 1, x) * 1.0, x, use_reentrant=True)

    level(70, a).sum().backward()
    return a.grad


def scripted() -> Any:
    traced = torch.jit.trace(lambda x: (x @ x.t()).relu() * 2, X)
    return [traced(X) for _ in range(3)]


def optimizers() -> Any:
    found = []
    for way in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        for kind in (torch.optim.Adam, torch.optim.SGD):
            model = nn.Linear(3, 2)
            optimizer = kind(model.parameters(), lr=0.1, **way)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            found += list(model.parameters())
    return found


def parametrized() -> Any:
    kinds = nn.utils.parametrizations
    models = [
        kinds.weight_norm(nn.Linear(3, 3)),
        kinds.spectral_norm(nn.Linear(3, 3)),
        kinds.orthogonal(nn.Linear(3, 3)),
    ]
    loss = sum(model(torch.ones(1, 3)).sum() for model in models)
    loss.backward()
    return loss, [p.grad for model in models for p in model.parameters()]


def recurrent() -> Any:
    model = nn.LSTM(4, 5, 2, bidirectional=True)
    y, state = model(torch.ones(3, 2, 4))
    y.sum().backward()
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    return y, state, model.weight_ih_l0.grad, model(packed)[1]


def conditional() -> Any:
    return torch.cond(X.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (X,))


def errors() -> Any:
    found = []
    for run in (lambda: torch.empty(2**60), lambda: torch.ones(2) @ torch.ones(3)):
        try:
            run()
        except RuntimeError as error:
            error.add_note("a note")
            found.append((str(error), error.__notes__))
    return found


RUNS = [
    nested, jagged, sparse, quantized, meta, conjugated, small, many, views, replaced, outs, dtypes,
    transforms, functional, autocast, inference, second_derivative, hooked, custom_functions, deep_backward,
    scripted,
    optimizers, parametrized, recurrent, conditional, errors,
]  # fmt: skip


@pytest.mark.parametrize(
    "run", [*RUNS, checkpointed(True), checkpointed(False)], ids=lambda run: run.__qualname__
)
def test_the_run_is_the_same_bit_for_bit(run: Callable[[], Any]) -> None:
    t = unchanged(run)
    assert t.info["external"] == 0


def test_the_fast_path_of_a_transformer_is_taken_with_a_mask() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    mask = torch.tensor([[False, False, True], [False, True, True]])

    def run() -> Any:
        with torch.no_grad():
            return encoder(torch.ones(2, 3, 8), src_key_padding_mask=mask), encoder(torch.ones(2, 3, 8))

    assert aten(unchanged(run)).count("_transformer_encoder_layer_fwd") == 4


def test_symbolic_sizes_gain_no_guard() -> None:
    def run() -> Any:
        env = ShapeEnv()
        with FakeTensorMode(shape_env=env) as mode:
            a = mode.from_tensor(torch.ones(5, 7), static_shapes=False)
            b = torch.cat([(a @ a.t()).relu()] * 2).view(-1)[1:]
        return str(a.shape), str(b.shape), str(env.guards), str(env.replacements)

    unchanged(run)


def test_tensors_go_when_they_would_without_a_trace() -> None:
    gone: list[int] = []

    class Noisy(Tensor):
        def __del__(self) -> None:
            gone.append(1)

    def run() -> Any:
        a = torch.ones(2).as_subclass(Noisy)
        b = a * 2
        del b
        return len(gone)

    gone.clear()
    torch.manual_seed(0)
    assert record(run)[0] == [1]


GROWTH = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
import contextlib
with {block}:
    before = resident()
    for size in (2_000_000, 1_000_000, 1_500_000):
        for _ in range(60):
            x = torch.ones(size)
            x = x * 2
    print(int(resident() - before))
"""


def test_memory_on_the_cpu_does_not_grow() -> None:
    plain = int(prints(GROWTH.format(block="contextlib.nullcontext()"))[0])
    traced = int(prints(GROWTH.format(block="sl.trace(engine='native')"))[0])
    assert traced < plain + 400  # megabytes; it was thousands where every dead tensor was remembered


def test_tensors_can_be_swapped() -> None:
    def run() -> Any:
        a, b = torch.ones(2), torch.zeros(3)
        c = a + 1, b + 1
        torch.utils.swap_tensors(a, b)
        return a, b, c, a + 1

    unchanged(run)
