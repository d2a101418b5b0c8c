"""Tensors that are more than a dense block of floats, and weights that are sharded."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sightline as sl
from tests.recording.exotic.comparison import Record, X, grads_of, mlp, program


@program
def jagged(record: Record) -> Any:
    layer = nn.Linear(4, 4)
    with record(layer):
        nested = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
        y = sl.spy("y", layer(nested)).relu() * 2
        y.values().sum().backward()
        return y, y.sum(-1), grads_of(layer), y + y


@program
def jagged_with_gradient(record: Record) -> Any:
    parts = [X.clone().requires_grad_(), X[:1].clone().requires_grad_()]
    with record():
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        (nested.sin() * 2).values().sum().backward()
    return [one.grad for one in parts]


@program
def jagged_attention(record: Record) -> Any:
    with record():
        nested = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
        q = nested.unflatten(-1, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


@program
def nested(record: Record) -> Any:
    layer = nn.Linear(4, 4)
    with record(layer):
        y = layer(torch.nested.nested_tensor([X, X[:2]]))
        return sl.spy("y", y).relu(), torch.nested.to_padded_tensor(y, 0.0)


@program
def mkldnn(record: Record) -> Any:
    layer = nn.Linear(4, 4)
    x = X.to_mkldnn()
    with torch.no_grad(), record(layer):
        y = sl.spy("y", x).relu()
        z = sl.spy("z", X.to_mkldnn())
        return y, (z + y).to_dense(), nn.Identity()(y)


@program
def sparse(record: Record) -> Any:
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    with record(model):
        model(torch.tensor([1, 2, 1])).sum().backward()
        gradient = model.weight.grad
        optimizer.step()
        one = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, 5.0]), (2, 3))
        sl.spy("one", one)
        return gradient, model.weight.detach(), one @ X[:3], one.to_sparse_csr(), one.coalesce() * 2


@program
def sparse_layouts(record: Record) -> Any:
    dense = torch.eye(4)
    with record():
        layouts = [
            dense.to_sparse_csr(),
            dense.to_sparse_csc(),
            dense.to_sparse_bsr((2, 2)),
            dense.to_sparse(),
        ]
        for one in layouts:
            sl.spy("layout", one)
            nn.Identity()(one)
        return layouts, layouts[0] @ X.T[:4]


@program
def quantized(record: Record) -> Any:
    with record():
        q = torch.quantize_per_tensor(X, 0.1, 3, torch.quint8)
        by_channel = torch.quantize_per_channel(X, torch.ones(3) / 9, torch.zeros(3), 0, torch.qint8)
        sl.spy("q", q)
        nn.Identity()(by_channel)
        return q, by_channel, q.dequantize(), q[1:], torch.fake_quantize_per_tensor_affine(X, 0.1, 0, 0, 255)


@program
def quantized_modules(record: Record) -> Any:

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, torch.qint8)
    with torch.no_grad(), record(model):
        return model(X)


@program
def complex_numbers(record: Record) -> Any:
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    x = torch.complex(X, X + 1)
    with record(layer):
        y = layer(x)
        conjugate, negative = sl.spy("c", y.conj()), y.imag.neg()
        z = torch.fft.fft(conjugate) + torch.view_as_complex(torch.view_as_real(y))
        z.abs().sum().backward()
        half = torch.ones(2, dtype=torch.complex32)
        sl.spy("half", half.conj())
        return z, negative, y.conj().imag, nn.Identity()(x.conj().imag), grads_of(layer), half


@program
def small_floats(record: Record) -> Any:
    names = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
    identity = nn.Identity()
    with record(identity):
        made = [identity(sl.spy(name, (X + 1).to(getattr(torch, name)))) for name in names]
        packed = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        identity(sl.spy("packed", packed))
        return made, [one.float() for one in made], packed.view(torch.uint8), made[0].t()


@program
def odd_integers(record: Record) -> Any:
    identity = nn.Identity()
    with record(identity):
        made = [identity(sl.spy("x", torch.arange(4).to(dtype))) for dtype in (
            torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.int8)]  # fmt: skip
        return made, identity(torch.empty(0)), identity(torch.empty(3, 0, 2)), identity(torch.tensor(3))


@program
def meta(record: Record) -> Any:
    model = mlp().to("meta")
    with record(model):
        y = sl.spy("y", model(X.to("meta")))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(0.5)
        return y, model(X)


@program
def fake(record: Record) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    with record(model):
        with FakeTensorMode() as mode:
            ghost = mlp()
            y = sl.spy("y", ghost(torch.ones(3, 4)))
            y.sum().backward()
            z = ghost(mode.from_tensor(torch.ones(5, 4)))
        return [tuple(one.shape) for one in (y, z)], model(X)


@program
def fake_with_symbols(record: Record) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with record():
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        one = mode.from_tensor(X, static_shapes=False)
        with mode:
            y = sl.spy("y", one * 2)
            nn.Identity()(y)
    assert mode.shape_env is not None
    return str(y.shape), len(mode.shape_env.guards)


@program
def zero_tensors(record: Record) -> Any:
    with record():
        zero = torch._efficientzerotensor(3)
        sl.spy("zero", zero)
        nn.Identity()(zero)
        return zero + 1, zero


class Doubled(torch.Tensor):
    """A subclass that only overrides functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def subclassed(record: Record) -> Any:
    model = mlp()
    with record(model):
        y = sl.spy("y", model(X.as_subclass(Doubled)))
        y.sum().backward()
    return type(y).__name__, y, grads_of(model)


@program
def wrapped(record: Record) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(4, 4)
    with record(model):
        y = sl.spy("y", model(TwoTensor(X, X + 1)))
        y.sum().backward()
    return y.a, y.b, model.weight.grad is not None


@program
def masked(record: Record) -> Any:

    from torch.masked import masked_tensor

    with warnings.catch_warnings(), record():
        warnings.simplefilter("ignore")
        one = masked_tensor(X, X > 1)
        sl.spy("one", one)
        nn.Identity()(one)
        total: Any = (one * 2).sum()
        return total.get_data()


@program
def numpy_and_shared(record: Record) -> Any:
    import numpy as np

    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    model = mlp()
    with record(model):
        y = model(torch.from_numpy(array))
        array[0] = 5
        z = model(torch.from_numpy(array))
        shared = torch.ones(3, 4).share_memory_()
        read_only = torch.from_numpy(np.broadcast_to(np.float32(1), (3, 4)).copy())
        return (
            y,
            z,
            model(shared),
            model(read_only),
            model(X.expand(2, 3, 4)),
            torch.empty_strided((3, 4), (0, 0)).fill_(1),
        )


@program
def fully_sharded(record: Record) -> Any:
    """FSDP2 on one process: parameters are views of a storage that is freed and allocated again."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hook = sys.excepthook
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = mlp()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        y = X
        with record(model):
            for _ in range(2):
                y = sl.spy("y", model(X))
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = [one.detach().to_local() for one in model.parameters()]  # type: ignore[attr-defined]
        return y.detach(), weights
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch leaves its own behind
