"""One plain name for ops that do the same (``add_.Tensor``, ``torch.add`` and ``+``), and kinds of ops."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from sightline.data.op_groups import UNINITIALIZED

_ALIASES: Final = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "@": "matmul", "**": "pow", "//": "floor_divide",
    "%": "remainder", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
    "&": "bitwise_and",
    "|": "bitwise_or", "^": "bitwise_xor", "~": "bitwise_not", "[]": "index", "unary -": "neg",
    "_unsafe_view": "view", "_reshape_alias": "view", "reshape": "view", "view_as": "view", "flatten": "view",
    "unflatten": "view", "reshape_as": "view", "expand_as": "expand", "t": "transpose", "T": "transpose",
    "mT": "transpose", "swapaxes": "transpose", "movedim": "permute", "_softmax": "softmax",
    "_log_softmax": "log_softmax", "native_layer_norm": "layer_norm", "native_group_norm": "group_norm",
    "_fused_rms_norm": "rms_norm", "native_batch_norm": "batch_norm", "cudnn_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm", "_native_batch_norm_legit_no_training": "batch_norm",
    "_batch_norm_impl_index": "batch_norm", "miopen_batch_norm": "batch_norm", "native_dropout": "dropout",
    "_to_copy": "to", "type": "to", "float": "to", "half": "to", "bfloat16": "to",
    "double": "to", "type_as": "to", "cuda": "to", "cpu": "to", "_convolution": "convolution",
    "conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution",
    "mkldnn_convolution": "convolution", "cudnn_convolution": "convolution",
    "_unsafe_index": "index", "true_divide": "div", "divide": "div",
    "multiply": "mul", "subtract": "sub", "concat": "cat", "concatenate": "cat", "split_with_sizes": "split",
    "tensor_split": "split", "chunk": "split", "unsafe_chunk": "split", "unsafe_split": "split",
    "clamp_min": "clamp", "clamp_max": "clamp", "scalar_tensor": "full", "where": "where",
}  # fmt: skip
#: Ops that return the elements of their first input: as a view, copied, cast or unchanged.
LAYOUT: Final = frozenset(
    "view transpose permute expand unsqueeze squeeze slice select split unbind narrow contiguous clone alias "
    "detach as_strided to lift_fresh lift view_as_real view_as_complex diagonal unfold _conj resolve_conj "
    "resolve_neg _unsafe_view real imag squeeze_ identity copy_to".split()
)
#: Those of them that keep the order of the elements.
KEEPS_ORDER: Final = frozenset(
    "view unsqueeze squeeze contiguous clone alias detach to lift_fresh lift identity".split()
)
#: Ops whose result their inputs do not determine.
RANDOM: Final = frozenset(
    "dropout rand rand_like randn randn_like randint randperm normal uniform exponential multinomial "
    "bernoulli random rrelu_with_noise geometric log_normal cauchy poisson".split()
)
#: Ops that make a tensor from numbers alone.
FACTORIES: Final = frozenset(
    "zeros ones empty full arange linspace eye zeros_like ones_like empty_like full_like new_zeros new_ones "
    "new_full new_empty empty_strided tensor fill zero scalar_tensor".split()
)
#: Ops that return uninitialised memory.
UNINITIALIZED_RESULTS: Final = frozenset(name.removesuffix("_") for name in UNINITIALIZED)
#: Ops whose further results only serve the backward pass; a mean near zero consists of rounding errors.
ONE_RESULT: Final = frozenset(
    "layer_norm group_norm batch_norm rms_norm scaled_dot_product_attention dropout instance_norm "
    "nll_loss_forward nll_loss2d_forward".split()
)
#: Ops with a discrete result, which a rounding error may flip.
DISCRETE: Final = frozenset(
    "topk argmax argmin sort argsort max min gt ge lt le eq ne nonzero unique searchsorted bucketize round "
    "floor ceil sign multinomial kthvalue median mode".split()
)

#: Ops for which the order of their inputs matters. Matrix products are left out: A·B is (Bᵀ·Aᵀ)ᵀ.
ORDERED: Final = frozenset("cat stack sub div pow where addcdiv lerp scaled_dot_product_attention".split())
#: Matrix products and convolutions, which may be computed in a coarser precision than their results have.
PRODUCTS: Final = frozenset(
    "mm bmm addmm baddbmm addbmm addmv mv dot matmul linear einsum convolution scaled_dot_product_attention "
    "_grouped_mm convolution_backward".split()
)
#: Ops through which a factor passes unchanged.
LINEAR: Final = frozenset(
    "mul div neg mm bmm addmm baddbmm matmul linear einsum convolution sum mean".split()
)
#: Ops whose result grows with each of their inputs by the same factor.
SCALING: Final = frozenset("mul div neg mm bmm matmul einsum".split())
#: The function at the heart of an activation, fused or written as its parts.
_ACTIVATIONS: Final = {
    "gelu": "erf", "erf": "erf", "tanh": "tanh", "silu": "sigmoid", "sigmoid": "sigmoid",
    "hardswish": "hardsigmoid", "hardsigmoid": "hardsigmoid", "relu": "relu", "leaky_relu": "leaky relu",
    "elu": "elu", "mish": "tanh", "softplus": "softplus", "softmax": "softmax", "sin": "sin", "cos": "cos",
    "scaled_dot_product_attention": "softmax",
}  # fmt: skip
_EXPONENTIALS: Final = frozenset("exp exp2 expm1 log log1p log2 log_softmax".split())


def activations(names: Iterable[str]) -> frozenset[str] | None:
    """The functions at the heart of the activations among ops; None where exponentials may hide one.

    >>> sorted(activations(["mul", "silu"])), activations(["neg", "exp", "add", "div"])
    (['sigmoid'], None)
    """
    names = set(names)
    if not names.isdisjoint(_EXPONENTIALS):
        return None
    return frozenset(_ACTIVATIONS[name] for name in names if name in _ACTIVATIONS)


@lru_cache(maxsize=65536)
def plain_name(name: str) -> str:
    """The name of an op without namespace, overload and in-place mark; aliases have one name.

    >>> [plain_name(name) for name in ("add_.Tensor", "torch.add", "+", "_unsafe_view")]
    ['add', 'add', 'add', 'view']
    """
    if name in _ALIASES:
        return _ALIASES[name]
    bare = name
    for prefix in ("torch.", "Tensor.", "F.", "nn.functional.", "aten::", "aten."):
        bare = bare.removeprefix(prefix)
    bare = bare.split(".")[0] if not bare.startswith(".") else bare
    if "scaled_dot_product" in bare and "backward" not in bare:
        return "scaled_dot_product_attention"
    if bare.endswith("_") and not bare.endswith("__"):
        bare = bare[:-1]
    if bare.startswith("__") and bare.endswith("__"):
        bare = bare.strip("_").removeprefix("i")
    return _ALIASES.get(bare, bare)
