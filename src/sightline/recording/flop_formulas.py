"""FLOPs of the kernels that torch's own counter has no formula for, or a wrong one, and which ops need one.

A formula takes the arguments of an op with the shape of every tensor instead of the tensor, and
``out_shape``, the shape of its result. As in torch, a multiplication and an addition are two FLOPs, only
products are counted (not biases, softmaxes and activations), and an attention mask saves nothing.

`multiplies` says which ops do more than a few steps per element: where FLOPs are summed up, one of these
without a formula is reported instead of counted as zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from typing import Any, Final

Shape = Sequence[int]
Formula = Callable[..., int]


# -- products ----------------------------------------------------------------------------------------------


def _product(a: Shape, b: Shape, *rest: Any, out_shape: Any) -> int:
    """``[m, k] @ [k, n]``, also in batches; of groups, those that share the rows of one matrix."""
    batches = prod(a[:-2]) if len(a) == len(b) == 3 else 1
    if not (len(a) in (2, 3) and len(b) in (2, 3) and a[-1] == b[-2]):
        raise ValueError("no matrices that fit")
    return 2 * batches * a[-2] * a[-1] * b[-1]


def _added_product(added: Shape, a: Shape, b: Shape, *rest: Any, out_shape: Any, **more: Any) -> int:
    return _product(a, b, out_shape=out_shape)


def _products(many: Sequence[Shape], others: Sequence[Shape], *, out_shape: Any) -> int:
    return sum(_product(a, b, out_shape=None) for a, b in zip(many, others, strict=True))


def _matrix_vector(matrix: Shape, vector: Shape, *, out_shape: Any) -> int:
    return 2 * prod(matrix)


def _added_matrix_vector(added: Shape, matrix: Shape, vector: Shape, *, out_shape: Any, **more: Any) -> int:
    return 2 * prod(matrix)


def _outer(added: Shape, a: Shape, b: Shape, *, out_shape: Any, **more: Any) -> int:
    return 2 * prod(a) * prod(b)


def _linear(x: Shape, *rest: Any, out_shape: Shape, **more: Any) -> int:
    """A layer whose weight is packed: its result alone has the number of columns."""
    if not x:
        raise ValueError("no layer works on a scalar")
    return 2 * prod(x) * out_shape[-1]


def _linear_backward(
    x: Shape, grad: Shape, weight: Shape, mask: Sequence[bool], *, out_shape: Any
) -> int:  # fmt: skip
    return 2 * prod(x) * grad[-1] * sum(mask[:2])


def _distances(a: Shape, b: Shape, *, out_shape: Shape) -> int:
    return 2 * prod(out_shape) * a[-1]


# -- convolutions ------------------------------------------------------------------------------------------


def _convolution(x: Shape, weight: Shape, *rest: Any, out_shape: Shape, **more: Any) -> int:
    return 2 * prod(out_shape) * prod(weight[1:])


def _transposed_convolution(x: Shape, weight: Shape, *rest: Any, out_shape: Shape, **more: Any) -> int:
    return 2 * prod(x) * prod(weight[1:])


def _time_convolution(x: Shape, weight: Shape, *rest: Any, out_shape: Shape) -> int:
    return 2 * prod(out_shape) * prod(weight[:2])


def _convolution_backward(grad: Shape, x: Shape, weight: Shape, *rest: Any, out_shape: Any) -> int:
    """Each gradient takes the products of the forward: a weight holds only the channels of its group."""
    transposed, _, _, mask = rest[-4:]
    return 2 * prod(x if transposed else grad) * prod(weight[1:]) * int(sum(mask[:2]))


# -- attention ---------------------------------------------------------------------------------------------


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, out_shape: Any, **more: Any) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


def _attention_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, out_shape: Any, **more: Any
) -> int:
    """The scores once more, and two products for each of the two of the forward."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (3 * width + 2 * value[-1])


def _heads_inside(formula: Formula, tensors: int) -> Formula:
    """The same where tensors are ``[batch, sequence, heads, width]``."""

    def of(*args: Any, out_shape: Any, **more: Any) -> int:
        transposed = [(one[0], one[2], one[1], one[3]) for one in args[:tensors]]
        return formula(*transposed, out_shape=out_shape, **more)

    return of


def _self_attention_layer(
    query: Shape, key: Shape, value: Shape, width: int, heads: int, *rest: Any, out_shape: Any, **more: Any
) -> int:
    """Three projections, attention and a projection: all heads together are as wide as the layer."""
    batch, queries, _ = query
    projected = prod(query[:2]) + prod(key[:2]) + prod(value[:2]) + prod(query[:2])
    return 2 * width * width * projected + 4 * batch * queries * key[1] * width


def _encoder_layer(
    x: Shape, width: int, heads: int, qkv: Shape, qkv_bias: Shape, projection: Shape,
    projection_bias: Shape, gelu: bool, norm_first: bool, eps: float, scale_1: Shape, shift_1: Shape,
    scale_2: Shape, shift_2: Shape, ffn_1: Shape, ffn_bias_1: Shape, ffn_2: Shape, *rest: Any, out_shape: Any,
    **more: Any,
) -> int:  # fmt: skip
    batch, length, _ = x
    weights = sum(map(prod, (qkv, projection, ffn_1, ffn_2)))
    return 2 * batch * length * weights + 4 * batch * length * length * width


# -- recurrent layers --------------------------------------------------------------------------------------


def _recurrent(x: Shape, weights: Sequence[Shape]) -> int:
    """Every step of every sequence is multiplied with every matrix once, those of a projection included."""
    if len(x) < 2:
        raise ValueError("no sequence of vectors")
    return 2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


def _recurrent_layer(x: Shape, *rest: Any, out_shape: Any) -> int:
    return _recurrent(x, rest[:2])


def _recurrent_layer_backward(x: Shape, *rest: Any, out_shape: Any) -> int:
    return 2 * _recurrent(x, rest[:2])


def _recurrent_layers(x: Shape, weights: Sequence[Shape], *rest: Any, out_shape: Any) -> int:
    return _recurrent(x, weights)


def _recurrent_layers_backward(x: Shape, weights: Sequence[Shape], *rest: Any, out_shape: Any) -> int:
    """The last argument says whether the gradients of the weights are computed; the others always are."""
    return _recurrent(x, weights) * (1 + bool(rest[-1][3]))


def _states_first(x: Shape, states: Any, weights: Sequence[Shape], *rest: Any, out_shape: Any) -> int:
    return _recurrent(x, weights)


#: By the name of the op, for all its overloads and its in-place form.
FORMULAS: Final[dict[str, Formula]] = {
    **dict.fromkeys(
        ("aten::_int_mm", "aten::_scaled_mm_v2", "aten::_grouped_mm", "aten::_scaled_grouped_mm",
         "aten::_scaled_grouped_mm_v2"), _product),
    **dict.fromkeys(("aten::_addmm_activation", "aten::addbmm"), _added_product),
    "aten::_foreach_mm": _products,
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), _matrix_vector),
    "aten::addmv": _added_matrix_vector,
    "aten::addr": _outer,
    **dict.fromkeys(
        ("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu",
         "aten::_weight_int4pack_mm_with_scales_and_zeros", "aten::_dyn_quant_matmul_4bit",
         "aten::_mixed_dtypes_linear", "aten::mkldnn_linear", "quantized::linear", "quantized::linear_relu",
         "quantized::linear_dynamic", "quantized::linear_relu_dynamic", "quantized::linear_dynamic_fp16",
         "quantized::linear_relu_dynamic_fp16"), _linear),
    **dict.fromkeys(("aten::linear_backward", "aten::mkldnn_linear_backward"), _linear_backward),
    "aten::_euclidean_dist": _distances,
    **dict.fromkeys(
        ("aten::mkldnn_convolution", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu",
         "aten::miopen_convolution", "aten::miopen_convolution_relu", "aten::miopen_depthwise_convolution",
         "aten::_mps_convolution", "aten::_conv_depthwise2d", "aten::conv_depthwise3d",
         "aten::slow_conv3d_forward", "aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d",
         "aten::_nnpack_spatial_convolution"), _convolution),
    **dict.fromkeys(
        ("aten::cudnn_convolution_transpose", "aten::miopen_convolution_transpose",
         "aten::_mps_convolution_transpose", "aten::slow_conv_transpose2d", "aten::slow_conv_transpose3d"),
        _transposed_convolution),
    "aten::conv_tbc": _time_convolution,
    **dict.fromkeys(
        ("aten::convolution_backward", "aten::convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_triton_scaled_dot_attention",
         "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_cudnn_attention_forward",
         "aten::_scaled_dot_product_attention_math_for_mps"), _attention),
    **dict.fromkeys(
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_cudnn_attention_backward",
         "aten::_scaled_dot_product_fused_attention_overrideable_backward"), _attention_backward),
    "flash_attn::_flash_attn_forward": _heads_inside(_attention, 3),
    "flash_attn::_flash_attn_backward": _heads_inside(_attention_backward, 4),
    **dict.fromkeys(
        ("aten::_native_multi_head_attention", "aten::_triton_multi_head_attention"), _self_attention_layer),
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    **dict.fromkeys(("aten::_cudnn_rnn", "aten::miopen_rnn"), _recurrent_layers),
    **dict.fromkeys(("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward"), _recurrent_layers_backward),
    "aten::_lstm_mps": _states_first,
}  # fmt: skip

#: Ops for which these formulas replace torch's own: for grouped convolutions torch counts the gradient of the
#: weight as if there were one group.
REPLACED: Final = frozenset({"aten::convolution_backward"})


# -- which ops need one ------------------------------------------------------------------------------------

#: Words in the names of ops that do more than a few steps per element.
_WORDS: Final = re.compile(
    r".*mm|mv|addmv|v?dot|vecdot|tensordot|addr|matmul|einsum|q?linear|bilinear|trilinear|[cp]dist|euclidean"
    r"|q?conv([123]d|olution)?|attention|attn|transformer|rnn|lstm|gru|c2c|r2c|c2r"
    r"|cholesky|svd|eigh?|eigvalsh?|qr|geqrf|orgqr|ormqr|householder|lu|ldl|solve|spsolve|lstsq|inv|det|slogdet"
)
#: Ops that have such a word in their name, and only move or combine earlier products.
_OTHERS: Final = (
    "*pack", "*prepack_*", "*unpack*", "*_pack_*", "*reorder*", "*flatten_weight", "_thnn_*",
    "*quantize_weight",
)  # fmt: skip
#: Namespaces of torch itself; the name of an op from elsewhere does not show its work.
_OWN: Final = frozenset(
    "aten prim prims rngprims quantized _quantized quantization quantized_decomposed sparse mkl mkldnn "
    "mkldnn_prepacked onednn inductor inductor_prims profiler c10d symm_mem fsdp _c10d_functional "
    "_c10d_functional_autograd static_runtime debugprims debug_mode_ops export _dtensor _native".split()
)


@cache
def multiplies(name: str) -> bool:
    """Whether an op, ``aten::addmm_``, does more than a few steps per element, or may do so.

    >>> multiplies("aten::addmm_"), multiplies("aten::linalg_qr"), multiplies("aten::add")
    (True, True, False)
    >>> multiplies("mylib::fused_layer")
    True
    """
    namespace, _, bare = name.rpartition("::")
    if namespace not in _OWN:
        return True
    if any(fnmatchcase(bare, glob) for glob in _OTHERS):
        return False
    return "matrix_exp" in bare or any(map(_WORDS.fullmatch, bare.split("_")))
