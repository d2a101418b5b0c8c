"""The argument names and defaults of torch functions and methods.

A recording has the schema of every op that has just one. This table has what documentation calls the
arguments of common functions, and those of functions that can be called in several ways: ``sum``, ``view``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from sightline.trace.forms import Symbol

REQUIRED: Final = object()  #: stands where an argument has no default
_MOST_TEXT: Final = 200  #: characters of a default: it may come out of a file

#: One line each: the names of functions that agree, then their arguments. ``*dims``: all that is left.
_TABLE: Final = """
linear : input weight bias=None
bilinear : input1 input2 weight bias=None
conv1d conv2d conv3d : input weight bias=None stride=1 padding=0 dilation=1 groups=1
conv_transpose1d conv_transpose2d conv_transpose3d : input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1
embedding : input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False
layer_norm : input normalized_shape weight=None bias=None eps=1e-05
rms_norm : input normalized_shape weight=None eps=None
group_norm : input num_groups weight=None bias=None eps=1e-05
batch_norm : input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05
instance_norm : input running_mean=None running_var=None weight=None bias=None use_input_stats=True momentum=0.1 eps=1e-05
normalize : input p=2.0 dim=1 eps=1e-12
dropout dropout1d dropout2d dropout3d alpha_dropout : input p=0.5 training=True inplace=False
relu relu6 silu mish hardswish hardsigmoid : input inplace=False
gelu : input approximate='none'
elu celu : input alpha=1.0 inplace=False
leaky_relu : input negative_slope=0.01 inplace=False
glu : input dim=-1
softplus : input beta=1.0 threshold=20.0
sigmoid tanh exp log sqrt rsqrt abs neg sin cos erf floor ceil round sign reciprocal square log1p expm1 : input
softmax log_softmax softmin : input dim=None
max_pool1d max_pool2d max_pool3d : input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False
avg_pool1d avg_pool2d avg_pool3d : input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d : input output_size
interpolate : input size=None scale_factor=None mode='nearest' align_corners=None
pad : input pad mode='constant' value=None
one_hot : tensor num_classes=-1
scaled_dot_product_attention : query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False
cross_entropy : input target weight=None size_average=None ignore_index=-100 reduce=None reduction='mean' label_smoothing=0.0
nll_loss : input target weight=None size_average=None ignore_index=-100 reduce=None reduction='mean'
mse_loss l1_loss smooth_l1_loss huber_loss : input target
binary_cross_entropy binary_cross_entropy_with_logits : input target weight=None
cat concat concatenate stack : tensors dim=0
hstack vstack dstack : tensors
where : condition input other
einsum : equation *operands
matmul mm bmm mv dot outer : input other
addmm : input mat1 mat2 beta=1 alpha=1
baddbmm : input batch1 batch2 beta=1 alpha=1
add sub : input other alpha=1
mul div true_divide floor_divide pow remainder fmod maximum minimum eq ne lt le gt ge logical_and logical_or bitwise_and bitwise_or atan2 : input other
clamp clip : input min=None max=None
sum mean prod amax amin any all : input dim=None keepdim=False
max min median argmax argmin : input dim=None keepdim=False
std var : input dim=None unbiased=True keepdim=False
norm : input p='fro' dim=None keepdim=False
topk : input k dim=-1 largest=True sorted=True
sort argsort : input dim=-1 descending=False
cumsum cumprod : input dim
tril triu : input diagonal=0
masked_fill masked_fill_ : input mask value
masked_select : input mask
gather : input dim index
scatter scatter_ : input dim index src
scatter_add scatter_add_ index_add index_add_ : input dim index src
index_select : input dim index
select : input dim index
narrow : input dim start length
view reshape : input *shape
view_as reshape_as expand_as type_as : input other
permute : input *dims
expand : input *sizes
repeat : input *repeats
transpose swapaxes swapdims : input dim0 dim1
t T mT contiguous detach clone cpu cuda float double half bfloat16 long int bool numpy item : input
flatten : input start_dim=0 end_dim=-1
unflatten : input dim sizes
unsqueeze : input dim
squeeze : input dim=None
split : input split_size dim=0
chunk : input chunks dim=0
unbind : input dim=0
roll : input shifts dims=None
flip : input dims
to : input *to
copy_ : input src
add_ sub_ : input other alpha=1
mul_ div_ : input other
getitem : input index
setitem : input index value
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell : input hx w_ih w_hh b_ih=None b_hh=None
new_zeros new_ones new_empty : input *size
arange : start end=None step=1
zeros ones empty rand randn : *size
full : size fill_value
zeros_like ones_like empty_like rand_like randn_like : input
full_like : input fill_value
tensor as_tensor : data
"""  # noqa: E501  # one line for each group that agrees


def signature(name: str) -> tuple[tuple[str, Any], ...]:
    """The arguments of a function by its bare name, each with its default or ``REQUIRED``; () if unknown.

    >>> [name for name, default in signature("linear")]
    ['input', 'weight', 'bias']
    """
    return _signatures().get(name, ())


def read_arguments(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Arguments as a recording has them from the schema of an op, each with its default or ``REQUIRED``.

    >>> read_arguments(["self", "alpha=1", "dtype=torch.float32"])[1:]
    (('alpha', 1), ('dtype', torch.float32))
    """
    return tuple(map(_argument, texts))


@cache
def _signatures() -> dict[str, tuple[tuple[str, Any], ...]]:
    found: dict[str, tuple[tuple[str, Any], ...]] = {}
    for line in _TABLE.strip().splitlines():
        names, _, arguments = line.partition(" : ")
        read = read_arguments(arguments.split())
        found.update(dict.fromkeys(names.split(), read))
    return found


def _argument(text: str) -> tuple[str, Any]:
    name, given, default = text.partition("=")
    return name, _default(default) if given else REQUIRED


def _default(text: str) -> Any:
    try:
        return ast.literal_eval(text) if len(text) <= _MOST_TEXT else Symbol(text[:_MOST_TEXT])
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):  # no plain data
        return Symbol(text)
