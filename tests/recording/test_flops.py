"""FLOPs of the kernels torch's counter passes over, against the same work written as plain products.

What has no formula is named, in memory, on disk, and by both engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import sightline as sl
from sightline.analysis.cost import cost_of, uncounted
from sightline.analysis.problems import gap_texts
from sightline.recording.flop_formulas import FORMULAS, multiplies
from tests.recording.engines import BOTH_ENGINES, needs_native

aten = torch.ops.aten
each_engine = pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "python"])


def by_phase(t: sl.Trace) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass; nothing may be missing from them."""
    assert missed(t) == {}
    sums = {phase: sum(op.flops or 0 for op in t.ops.where(phase=phase)) for phase in ("forward", "backward")}
    return sums["forward"], sums["backward"]


def missed(t: sl.Trace) -> dict[str, int]:
    """What the FLOPs are known to leave out."""
    scopes = cost_of(t.data).scopes
    return uncounted(t.data, scopes, scopes.children(-1))


def counted(run: Callable[[], Tensor], backward: bool = True) -> tuple[int, int]:
    """FLOPs of a run and of its backward pass as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        loss = run()
        forward = counter.get_total_flops()
        if backward:
            loss.backward()
    return forward, counter.get_total_flops() - forward


# -- recurrent layers --------------------------------------------------------------------------------------

RECURRENT: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"bias": False}),
    (nn.LSTM, {"batch_first": True}),
    (nn.LSTM, {"num_layers": 3}),
    (nn.LSTM, {"bidirectional": True}),
    (nn.LSTM, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
    (nn.LSTM, {"proj_size": 5, "num_layers": 2}),
    (nn.GRU, {"bidirectional": True, "num_layers": 2}),
    (nn.RNN, {"num_layers": 2}),
]


def by_hand(layer: nn.RNNBase, x: Tensor, lengths: list[int], states: dict[str, Tensor]) -> Tensor:
    """The products of a recurrent layer, step after step; what is not a product is left out."""
    total = x.new_zeros(())
    steps = x.transpose(0, 1) if layer.batch_first else x
    running = [sum(length > step for length in lengths) for step in range(max(lengths))]
    rows = [steps[step, :many] for step, many in enumerate(running)]
    for depth in range(layer.num_layers):
        sides = []
        for side in ("", "_reverse")[: 1 + layer.bidirectional]:
            weights = {name: getattr(layer, f"weight_{name}_l{depth}{side}") for name in ("ih", "hh")}
            state, made = states[f"{depth}{side}"], []
            for row in reversed(rows) if side else rows:
                gates = row @ weights["ih"].T + state[: len(row)] @ weights["hh"].T
                hidden = gates[:, : layer.hidden_size].tanh()
                if layer.proj_size:
                    hidden = hidden @ getattr(layer, f"weight_hr_l{depth}{side}").T
                state = torch.cat([hidden, state[len(row) :]])
                made.append(hidden)
            sides.append(list(reversed(made)) if side else made)
        rows = [torch.cat(both, dim=1) for both in zip(*sides, strict=True)]
        total = sum((row.sum() for row in rows), total)
    return total


def recurrent(kind: Any, options: dict[str, Any]) -> tuple[nn.RNNBase, dict[str, Tensor], Any]:
    """A layer, the states it begins with by layer and side, and the same as the layer wants them."""
    layer: nn.RNNBase = kind(6, 8, **options)
    width = layer.proj_size or layer.hidden_size
    sides = ("", "_reverse")[: 1 + layer.bidirectional]
    names = [f"{depth}{side}" for depth in range(layer.num_layers) for side in sides]
    states = {name: torch.randn(3, width, requires_grad=True) for name in names}
    hidden = torch.stack(list(states.values()))
    cell = torch.randn(len(names), 3, layer.hidden_size, requires_grad=True)
    return layer, states, (hidden, cell) if kind is nn.LSTM else hidden


@each_engine
@pytest.mark.parametrize(("kind", "options"), RECURRENT, ids=lambda one: getattr(one, "__name__", str(one)))
def test_recurrent_layers_do_the_products_of_their_steps(
    kind: Any, options: dict[str, Any], engine: Any
) -> None:
    layer, states, given = recurrent(kind, options)
    x = torch.randn(*((3, 4) if layer.batch_first else (4, 3)), 6, requires_grad=True)
    with sl.trace(layer, engine=engine) as t:
        layer(x, given)[0].sum().backward()
    assert by_phase(t) == counted(lambda: by_hand(layer, x, [4, 4, 4], states))


@each_engine
@pytest.mark.parametrize(("kind", "options"), RECURRENT, ids=lambda one: getattr(one, "__name__", str(one)))
def test_recurrent_layers_in_inference_mode(kind: Any, options: dict[str, Any], engine: Any) -> None:
    layer, states, given = recurrent(kind, options)
    x = torch.randn(*((3, 4) if layer.batch_first else (4, 3)), 6)
    with torch.inference_mode(), sl.trace(layer, engine=engine) as t:
        layer(x, given)
    assert by_phase(t)[0] == counted(lambda: by_hand(layer, x, [4, 4, 4], states), backward=False)[0]


@each_engine
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_only_do_the_steps_there_are(kind: Any, engine: Any) -> None:
    layer, states, given = recurrent(kind, {"bidirectional": True})
    x, lengths = torch.randn(4, 3, 6, requires_grad=True), [4, 2, 1]
    with sl.trace(layer, engine=engine) as t:
        layer(pack_padded_sequence(x, torch.tensor(lengths)), given)[0].data.sum().backward()
    assert by_phase(t)[0] == counted(lambda: by_hand(layer, x, lengths, states), backward=False)[0]


def test_the_size_of_an_lstm_is_not_lost() -> None:
    layer = nn.LSTM(32, 64, batch_first=True)
    with sl.trace(layer) as t:
        layer(torch.randn(4, 10, 32))
    (layer_op,) = t.ops.where(name="mkldnn_rnn_layer")
    assert layer_op.flops == 2 * 4 * 10 * 4 * 64 * (32 + 64)
    assert "forward 1.97M" in str(t.summary())
    assert "not counted" not in str(t.summary())


# -- attention ---------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_an_encoder_layer_is_the_slow_one(norm_first: bool, engine: Any) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 56, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(3, 7, 32)
    with torch.no_grad(), sl.trace(layer, engine=engine) as t:
        layer(x)
    assert len(t.ops.where(name="_transformer_encoder_layer_fwd")) == 1
    with sdpa_kernel(SDPBackend.MATH):  # with gradients the layer takes the slow path
        slow = counted(lambda: layer(x).sum(), backward=False)
    assert by_phase(t)[0] == slow[0]


@each_engine
def test_the_fast_path_of_attention_is_the_slow_one(engine: Any) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(3, 7, 32)
    with torch.no_grad(), sl.trace(layer, engine=engine) as t:
        layer(x, x, x)
    assert len(t.ops.where(name="_native_multi_head_attention")) == 1
    assert by_phase(t)[0] == counted(lambda: layer(x, x, x)[0].mean(0).sum(), backward=False)[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padded_batch_in_a_nested_tensor_has_no_shape_and_is_named() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 56, batch_first=True), 2).eval()
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 4:] = True
    with torch.no_grad(), sl.trace(encoder) as t:
        encoder(torch.randn(3, 7, 32), src_key_padding_mask=mask)
    assert missed(t) == {"_transformer_encoder_layer_fwd": 2}


@each_engine
def test_fused_attention_and_its_backward_are_those_of_the_products(engine: Any) -> None:
    q, k, v = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (5, 9, 9))
    with sl.trace(engine=engine) as t:
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    def products() -> Tensor:
        return ((q @ k.mT).softmax(-1) @ v).sum()

    forward, backward = counted(products)
    assert by_phase(t) == (forward, backward + forward // 2)  # the fused kernel makes the scores once more


# -- kernels of other devices, on tensors without numbers --------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cudnn(layer: nn.RNNBase, x: Tensor) -> tuple[Any, ...]:
    """The arguments of cuDNN's kernel."""
    weights = list(layer.parameters())
    states = meta(layer.num_layers * (1 + layer.bidirectional), 3, layer.hidden_size)
    each = len(weights) // (layer.num_layers * (1 + layer.bidirectional))
    return (
        x, weights, each, None, states, states, 2, layer.hidden_size, layer.proj_size, layer.num_layers,
        False, 0.0, True, layer.bidirectional, [], None,
    )  # fmt: skip


def test_all_layers_in_one_kernel_are_the_layers_one_by_one() -> None:
    layer = nn.LSTM(6, 8, num_layers=2, bidirectional=True, device="meta")
    states = {f"{depth}{side}": meta(3, 8) for depth in range(2) for side in ("", "_reverse")}
    x = meta(4, 3, 6)
    with sl.trace() as t, torch.no_grad():
        aten._cudnn_rnn(*cudnn(layer, x))
    expected = counted(lambda: by_hand(layer, x, [4, 4, 4], states), backward=False)[0]
    assert by_phase(t)[0] == expected
    shapes = [one.shape for one in layer.parameters()]
    after = [None] * 17
    backward = FORMULAS["aten::_cudnn_rnn_backward"]
    for wanted, times in ((True, 2), (False, 1)):
        mask = [True, True, True, wanted]
        assert backward(x.shape, shapes, *after, None, mask, out_shape=None) == times * expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("kind", "options"), RECURRENT, ids=lambda one: getattr(one, "__name__", str(one)))
def test_recurrent_layers_on_cuda(kind: Any, options: dict[str, Any]) -> None:
    layer, states, given = recurrent(kind, options)
    x = torch.randn(*((3, 4) if layer.batch_first else (4, 3)), 6, requires_grad=True)
    expected = counted(lambda: by_hand(layer, x, [4, 4, 4], states))
    layer, far = layer.cuda(), x.detach().cuda().requires_grad_()
    there = tuple(one.detach().cuda() for one in given) if kind is nn.LSTM else given.detach().cuda()
    with sl.trace(layer) as t:
        layer(far, there)[0].sum().backward()
    assert len(t.ops.where(name="_cudnn_rnn")) == 1
    assert by_phase(t) == expected


PRODUCTS: dict[str, tuple[Callable[[], Any], int]] = {
    "_int_mm": (lambda: torch._int_mm(meta(32, 16, dtype=torch.int8), meta(16, 8, dtype=torch.int8)), 8192),
    "_grouped_mm rows": (
        lambda: aten._grouped_mm(
            meta(32, 16, dtype=torch.bfloat16), meta(4, 16, 8, dtype=torch.bfloat16),
            meta(4, dtype=torch.int32)),
        2 * 32 * 16 * 8,
    ),
    "_grouped_mm batches": (
        lambda: aten._grouped_mm(
            meta(4, 32, 16, dtype=torch.bfloat16), meta(4, 16, 8, dtype=torch.bfloat16)),
        4 * 2 * 32 * 16 * 8,
    ),
    "_scaled_mm": (
        lambda: aten._scaled_mm(
            meta(32, 16, dtype=torch.float8_e4m3fn), meta(32, 16, dtype=torch.float8_e4m3fn).t(),
            meta(), meta(), out_dtype=torch.bfloat16),
        2 * 32 * 16 * 32,
    ),
    "mv": (lambda: torch.mv(meta(3, 4), meta(4)), 24),
    "dot": (lambda: torch.dot(meta(4), meta(4)), 8),
    "addmv": (lambda: torch.addmv(meta(3), meta(3, 4), meta(4)), 24),
    "addr": (lambda: torch.addr(meta(3, 4), meta(3), meta(4)), 24),
    "addbmm": (lambda: torch.addbmm(meta(3, 5), meta(2, 3, 4), meta(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "addmm_": (lambda: meta(3, 5).addmm_(meta(3, 4), meta(4, 5)), 2 * 3 * 4 * 5),
    "_addmm_activation": (
        lambda: torch._addmm_activation(meta(5), meta(3, 4), meta(4, 5)), 2 * 3 * 4 * 5),
    "overrideable": (
        lambda: aten._scaled_dot_product_fused_attention_overrideable(
            *(meta(2, 4, 6, 8) for _ in range(3))),
        2 * 2 * 2 * 4 * 6 * 6 * 8,
    ),
}  # fmt: skip


@each_engine
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_by_other_names(name: str, engine: Any) -> None:
    run, expected = PRODUCTS[name]
    try:
        run()
    except (NotImplementedError, RuntimeError) as error:  # this torch has no such kernel
        pytest.skip(str(error))
    with sl.trace(engine=engine) as t:
        run()
    assert by_phase(t) == (expected, 0)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions_of_other_back_ends_count_like_torch(kind: Any) -> None:
    names = {nn.Conv2d: "mkldnn_convolution", nn.ConvTranspose2d: "cudnn_convolution_transpose"}
    x = torch.randn(2, 4, 9, 9, requires_grad=True)
    for groups in (1, 2):
        layer = kind(4, 6, 3, stride=2, groups=groups)
        forward, backward = counted(partial(lambda layer: layer(x).sum(), layer))
        shapes, out = (x.shape, layer.weight.shape), layer(x).shape
        assert FORMULAS[f"aten::{names[kind]}"](*shapes, out_shape=out) == forward
        if groups == 1:  # torch counts the gradient of the weight as if there were one group
            args = (out, *shapes, None, None, None, layer.transposed, None, groups, [True, True, True])
            assert FORMULAS["aten::convolution_backward_overrideable"](*args, out_shape=None) == backward


GROUPED: list[tuple[Any, tuple[int, ...], dict[str, Any], tuple[int, ...], int]] = [
    # Each result of a convolution takes a product for each element of the kernel and channel of its group.
    (nn.Conv2d, (16, 16, 3), {"padding": 1, "groups": 16}, (4, 16, 8, 8), 4 * 16 * 8 * 8 * 9 * 1),
    (nn.Conv2d, (16, 32, 3), {"stride": 2, "groups": 4}, (4, 16, 9, 9), 4 * 32 * 4 * 4 * 9 * 4),
    (nn.Conv1d, (8, 8, 5), {"groups": 2, "dilation": 2}, (3, 8, 20), 3 * 8 * 12 * 5 * 4),
    (nn.Conv2d, (4, 6, 3), {}, (2, 4, 9, 9), 2 * 6 * 7 * 7 * 9 * 4),
    # Each input of a transposed one takes a product for each element of the kernel and output of its group.
    (nn.ConvTranspose2d, (8, 12, 3), {"stride": 2, "groups": 4}, (2, 8, 5, 5), 2 * 8 * 5 * 5 * 9 * 3),
]  # fmt: skip


@each_engine
@pytest.mark.parametrize(("kind", "sizes", "options", "shape", "products"), GROUPED)
def test_both_gradients_of_a_convolution_take_the_products_of_its_forward(
    kind: Any, sizes: Any, options: Any, shape: Any, products: int, engine: Any
) -> None:
    layer, x = kind(*sizes, **options), torch.randn(shape, requires_grad=True)
    with sl.trace(layer, engine=engine) as t:
        layer(x).sum().backward()
    assert by_phase(t) == (2 * products, 2 * 2 * products)
    with sl.trace(layer, engine=engine) as t:
        layer(x.detach()).sum().backward()
    assert by_phase(t) == (2 * products, 2 * products)  # the input has no gradient


def test_a_formula_of_the_program_wins_over_both() -> None:
    own = flop_registry[aten.convolution_backward]
    layer = nn.Conv2d(4, 4, 3, groups=4)
    try:
        flop_registry[aten.convolution_backward] = lambda *args, **kwargs: 17
        with sl.trace(layer) as t:
            layer(torch.randn(1, 4, 8, 8)).sum().backward()
        assert by_phase(t)[1] == 17
    finally:
        flop_registry[aten.convolution_backward] = own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="this torch has no quantized kernels")
def test_dynamic_quantization_counts_its_products() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 5)), {nn.Linear})
    with sl.trace(model) as t, torch.no_grad():
        model(torch.randn(3, 8))
    assert by_phase(t)[0] == 2 * 3 * 8 * 5


# -- what has none -----------------------------------------------------------------------------------------


def test_every_op_with_a_formula_is_one_that_needs_it() -> None:
    known = [packet._qualified_op_name for packet in flop_registry if hasattr(packet, "_qualified_op_name")]
    assert [name for name in (*FORMULAS, *known) if not multiplies(name)] == []


@pytest.mark.parametrize(
    "name",
    """mm addmm_ bmm matmul linear mv dot einsum _sparse_mm _trilinear conv2d slow_conv3d mkldnn_convolution
    miopen_rnn quantized_lstm gru _flash_attention_forward_no_dropout_inplace linalg_svd linalg_solve_ex
    _fft_r2c _cdist_forward linalg_matrix_exp""".split(),
)
def test_what_multiplies(name: str) -> None:
    assert multiplies(f"aten::{name}")


@pytest.mark.parametrize(
    "name",
    """add mul addcmul relu softmax _softmax sum cumsum dropout embedding_bag _thnn_fused_lstm_cell
    _thnn_fused_gru_cell_backward upsample_bilinear2d upsample_linear1d _cudnn_rnn_flatten_weight
    linalg_vector_norm linalg_cross slice_inverse lu_unpack convert_element_type _convert_weight_to_int4pack
    mkldnn_reorder_conv2d_weight digamma erfinv gelu glu leaky_relu detach addcdiv native_layer_norm outer
    command random_ _amp_update_scale_ sort topk""".split(),
)
def test_what_does_a_few_steps_per_element(name: str) -> None:
    assert not multiplies(f"aten::{name}")
    assert multiplies(f"mylib::{name}")  # nobody knows what is behind such a name


@pytest.fixture
def fused() -> Iterator[Any]:
    """A custom op, whose work nobody can see."""

    def fused_layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu()

    with torch.library._scoped_library("sightline_test", "FRAGMENT"):
        op = torch.library.custom_op("sightline_test::fused_layer", fused_layer, mutates_args=())
        yield op
        flop_registry.pop(torch.ops.sightline_test.fused_layer, None)


class Mixed(nn.Module):
    """A layer whose FLOPs are known beside one whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(4, 4)
        self.unknown = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.known(x)
        made: Tensor = self.unknown(y, self.unknown(y, y)[:, :1].expand(-1, 4))
        return made


@each_engine
@pytest.mark.parametrize("kept", ["memory", "path", "last"])
def test_what_is_not_counted_is_named(kept: str, engine: Any, tmp_path: Path) -> None:
    model, path = Mixed(), tmp_path / "run.sight"
    every: dict[str, dict[str, Any]] = {"memory": {}, "path": {"path": path}, "last": {"last": 1000}}
    with sl.trace(model, engine=engine, **every[kept]) as t:
        model(torch.randn(2, 4)).sum().backward()
    if kept == "path":
        t = sl.load(path)
    assert missed(t)["_trilinear"] >= 4
    told = f"not counted: _trilinear ×{missed(t)['_trilinear']}"
    assert told in str(t.summary())
    assert told in str(t)
    assert told in str(t.summary(module="unknown"))
    assert "not counted" not in str(t.summary(module="known"))
    assert all(op.flops is None for op in t.ops.where(name="_trilinear"))


def test_where_nothing_is_missed_nothing_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Dropout())
    with sl.trace(model) as t:
        model(torch.randn(2, 4)).sum().backward()
    assert missed(t) == {}
    assert "not counted" not in str(t.summary()) + str(t)


def test_custom_ops_are_named_until_they_have_a_formula(fused: Any) -> None:
    x, weight = torch.randn(2, 3), torch.randn(3, 4)
    with sl.trace() as t:
        fused(x, weight)
    assert missed(t) == {"sightline_test::fused_layer": 1}

    @register_flop_formula(torch.ops.sightline_test.fused_layer)
    def _flops(a: Any, b: Any, *, out_shape: Any = None, **_: Any) -> int:
        return int(2 * a[0] * a[1] * b[1])

    with sl.trace() as t:
        fused(x, weight)
    assert by_phase(t) == (48, 0)


@each_engine
def test_compiled_code_is_named(engine: Any) -> None:
    def layer(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).relu()

    fast = torch.compile(layer, backend="eager")
    fast(torch.randn(2, 3), torch.randn(3, 4))
    with sl.trace(engine=engine) as t:
        fast(torch.randn(2, 3), torch.randn(3, 4))
    opaque = [op.name for op in t.ops if op.flavour == "opaque"]
    assert list(missed(t)) == opaque
    assert all("layer" in name for name in opaque)
    torch.compiler.reset()


@each_engine
def test_an_op_that_raised_did_nothing_that_is_missed(engine: Any) -> None:
    with pytest.raises(RuntimeError), sl.trace(engine=engine) as t:
        torch.mm(torch.randn(2, 3), torch.randn(2, 3))
    assert missed(t) == {}


def test_without_aten_ops_nothing_is_counted_and_nothing_missed() -> None:
    layer = nn.Bilinear(4, 4, 3)
    with sl.trace(layer, ops="api") as t:
        layer(torch.randn(2, 4), torch.randn(2, 4))
    assert missed(t) == {}
    assert "FLOPs" not in str(t.summary())


@BOTH_ENGINES
def test_a_checkpoint_that_stops_early_does_no_more_products(engine: Any) -> None:
    """Its last op raises before its kernel, so that nothing of it is computed."""
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        checkpoint(block, x, use_reentrant=False).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with sl.trace(block, engine=engine) as t:
        step()
    assert sum(op.flops or 0 for op in t.ops) == counter.get_total_flops()
    assert not any("parameters without a gradient" in gap for gap in gap_texts(t.index))
