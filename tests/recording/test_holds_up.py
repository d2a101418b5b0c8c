"""Real code: modes, transforms, custom ops, odd tensors. The run is the same run, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import sightline as sl
from tests.leftovers import same_rng
from tests.recording.engines import NATIVE
from tests.recording.nets import Net, api, aten


def twice(run: Callable[[], Any], **options: Any) -> tuple[Any, Any, sl.Trace]:
    """The results of a run without and with a trace, from the same seed."""
    torch.manual_seed(0)
    plain = run()
    torch.manual_seed(0)
    with sl.trace(**options) as t:
        traced = run()
    return plain, traced, t


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7)) and one.stride() == other.stride()
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def gradients(run: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    def both() -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    return both


class Square(torch.autograd.Function):
    """A custom autograd function."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        a: Tensor = ctx.saved_tensors[0]
        return 2 * a * grads[0]


NET = Net()
DROPPING = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

RUNS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": NET,
    "dropout": DROPPING,
    "checkpoint": lambda x: checkpoint(DROPPING, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(DROPPING, x, use_reentrant=True),
    "custom function": Square.apply,
    "in-place chain": lambda x: (x * 2).add_(1).mul_(3)[1:].sub_(1).relu_(),
    "indexing": lambda x: x[torch.tensor([0, 2])][:, 1::2] * x[x > -2].sum(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x).softmax(-1),
    "complex": lambda x: torch.fft.fft(x).abs(),
    "double backward": lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0],
}


@pytest.mark.parametrize("level", ["none", "api", "aten", "both"])
@pytest.mark.parametrize("name", RUNS)
def test_results_and_gradients_are_the_same_bits(name: str, level: str) -> None:
    plain, traced, t = twice(gradients(RUNS[name]), ops=level)
    assert same_bits(plain, traced)
    if level in ("aten", "both"):
        backward = t.ops.where(level="aten", phase="backward")
        assert backward
        assert not [op.name for op in backward if op.forward is None]
        assert t.info["external"] == 0


def test_the_random_state_is_that_of_the_untraced_run() -> None:
    x = torch.ones(3, 4)
    torch.manual_seed(1)
    DROPPING(x)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    with sl.trace(DROPPING):
        DROPPING(x)
    assert torch.equal(torch.get_rng_state(), after)
    with same_rng(), sl.trace(DROPPING) as t:
        pass
    with same_rng():
        str(t)
        t.validate()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_s_second_forward_is_its_own_phase(reentrant: bool) -> None:
    x = torch.ones(3, 4, requires_grad=True)
    with sl.trace(NET) as t:
        checkpoint(NET, x, use_reentrant=reentrant).sum().backward()
    assert "addmm" in aten(t, phase="recompute")
    assert [call.phase for call in t.module_calls] == ["forward"] * 3 + ["recompute"] * 3
    again = t.ops.where(level="aten", phase="recompute", name="addmm")[0]
    assert again.module is not None
    assert again.module.path == "fc1"


def test_grad_modes_and_autocast() -> None:
    x = torch.ones(3, 4)
    with torch.no_grad(), sl.trace(NET) as t:
        NET(x)
    assert not any(op.outputs[0].requires_grad for op in t.ops)
    with torch.inference_mode(), sl.trace(NET) as t:
        NET(x).reshape(-1)
    # Without autograd a mode sees composite ops whole; the observer sees what they come to.
    seen = ["t", "addmm", "relu", "t", "addmm", "view"] if NATIVE else ["linear", "relu", "linear", "reshape"]
    assert aten(t) == seen
    flops = [op.flops for op in t.ops.where(level="aten") if op.flops is not None]
    assert flops == [2 * 3 * 4 * 8, 2 * 3 * 8 * 2]
    with torch.autocast("cpu", dtype=torch.bfloat16), sl.trace(NET) as t:
        NET(x)
    assert "bf16[3, 2]" in str(t.ops[-1])
    assert torch.is_grad_enabled()


def test_functorch_transforms() -> None:
    def loss(w: Tensor) -> Tensor:
        return (w**3).sin().sum()

    def run() -> Any:
        x = torch.linspace(0, 1, 3)
        return (
            torch.vmap(lambda a: (a * 2).sin())(x),
            torch.func.grad(loss)(x),
            torch.func.jvp(loss, (x,), (x,)),
            torch.func.hessian(loss)(x),
            torch.func.jacrev(torch.sin)(x),
        )

    plain, traced, t = twice(run)
    assert same_bits(plain, traced)
    assert t.info["external"] == 0


def test_custom_ops_of_torch_library() -> None:
    @torch.library.custom_op("sightline_test::twice", mutates_args=())
    def doubled(a: Tensor) -> Tensor:
        return a * 2

    @torch.library.custom_op("sightline_test::bump", mutates_args={"a"})
    def bump(a: Tensor) -> None:
        a.add_(1)

    with sl.trace() as t:
        y = doubled(torch.ones(2))
        bump(y)
        y.sum()
    # From torch 2.15 on the dispatcher runs such an op without an event, as torch's profiler shows.
    with torch.profiler.profile() as profile:
        doubled(torch.ones(2))
    events = [event.name for event in profile.events()]
    if "sightline_test::twice" in events or t.info["engine"] == "python":
        assert aten(t) == ["ones", "sightline_test::twice", "sightline_test::bump", "sum"]
    else:
        assert aten(t) == ["ones", "mul.Tensor", "add_.Tensor", "sum"]
    bumped = t.ops.where(level="aten")[2]
    assert bumped.mutates
    assert t.ops[-1].inputs[0].producer == bumped


def test_parametrized_modules() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with sl.trace(layer) as t:
        layer(torch.ones(1, 4)).sum().backward()
    assert "parametrizations.weight.original0" in {value.name for value in t.values}
    assert t.info["external"] == 0


def test_meta_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with sl.trace() as t:
        torch.empty(3, 3, device="meta") @ torch.empty(3, 3, device="meta")
        with FakeTensorMode():
            torch.randn(3, 3).relu()
    assert "f32[3, 3]@meta" in str(t.ops.where(name="mm")[0])
    assert t.ops[-1].outputs[0].meta.type == "FakeTensor"


@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:Sparse CSR.*", "ignore:.*torch.ao.*")
def test_sparse_nested_and_quantized_tensors() -> None:
    x = torch.eye(3)
    with sl.trace() as t:
        (x.to_sparse() * 2).to_dense()
        x.to_sparse_csr()
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]) * 2
        (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged) * 2).values()
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    layouts = {value.meta.layout for value in t.values}
    assert {"strided", "sparse_coo", "sparse_csr", "nested"} <= layouts
    assert "qint8[3, 3]" in {str(value) for value in t.values}


class Counting(Tensor):
    """A subclass that counts what passes its own torch function."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_sees_only_the_run_s_own_calls() -> None:
    x = torch.ones(2, 2).as_subclass(Counting)
    Counting.seen = []
    (x + 1).relu().sum()
    alone = Counting.seen
    Counting.seen = []
    with sl.trace():
        (x + 1).relu().sum()
    assert Counting.seen == alone


def test_a_function_mode_of_the_user_s_sees_only_the_run_s_own_calls() -> None:
    class Noting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def run() -> None:
        NET(torch.ones(1, 4)).sum().backward()

    with Noting() as alone:
        run()
    with Noting() as outside, sl.trace(NET):
        run()
    with sl.trace(NET), Noting() as inside:
        run()
    assert outside.seen == alone.seen
    assert inside.seen == alone.seen


def test_the_encoder_keeps_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.linspace(-1, 1, 80).reshape(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 3:] = True
    with torch.no_grad():
        plain, traced, t = twice(lambda: encoder(x, src_key_padding_mask=padding), model=encoder)
    assert torch.equal(plain, traced)
    assert "_transformer_encoder_layer_fwd" in aten(t)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        plain, traced, t = twice(lambda: attention(x, x, x), model=attention)
    assert same_bits(plain, traced)
    assert "_native_multi_head_attention" in aten(t)
    encoder.train()
    plain, traced, t = twice(lambda: encoder(x).sum(), model=encoder)
    assert torch.equal(plain, traced)
    assert "F.linear" in api(t)


def test_an_encoder_without_its_fast_path_shows_its_api_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.linspace(-1, 1, 80).reshape(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 3:] = True
    with torch.no_grad():
        plain, traced, t = twice(lambda: encoder(x, src_key_padding_mask=padding), model=encoder)
    assert torch.equal(plain, traced)
    assert "F.multi_head_attention_forward" in api(t)


def test_a_scripted_function_shows_its_aten_ops() -> None:
    def plain(a: Tensor) -> Tensor:
        return (a + 1).relu()

    scripted = torch.jit.script(plain)
    with sl.trace() as t:
        scripted(torch.ones(2))
    assert aten(t) == ["ones", "add.Scalar", "relu"]
    assert api(t) == ["torch.ones"]


def test_data_loader_workers_record_nothing() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    with sl.trace(NET) as t:
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1):
            NET(batch)
    assert len(t.module_calls) == 6
    assert t.info["external"] == 0


def test_packed_and_recurrent_modules() -> None:
    lstm = nn.LSTM(4, 4, batch_first=True)
    with sl.trace(lstm) as t:
        out, (hidden, cell) = lstm(torch.ones(2, 3, 4))
        (out.sum() + hidden.sum() + cell.sum()).backward()
    assert t.module_calls[0].output_form.slots() == ["[0][0]", "[0][1][0]", "[0][1][1]"]
    assert t.info["external"] == 0


def test_the_variables_of_who_starts_a_recording_die_with_it() -> None:
    recording = sl.trace(name="started elsewhere")
    watched: list[weakref.ref[Tensor]] = []

    def prepare() -> None:
        large = torch.ones(1000)
        watched.append(weakref.ref(large))
        recording.start()

    def begin() -> None:
        batch = torch.ones(1000)
        watched.append(weakref.ref(batch))
        prepare()

    begin()
    assert [one() for one in watched] == [None, None]
    recording.stop()
