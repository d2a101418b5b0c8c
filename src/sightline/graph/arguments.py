"""The arguments of an op or a module call by name: bound to torch's signatures, tensors as `Ref`.

The signatures are written down here: most of torch's functions are written in C and tell Python none, and a
recording can be drawn where torch is not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

from sightline.data.forms import SLOT, Form, Record, Symbol
from sightline.graph.graph import Ref
from sightline.graph.node_names import base_name

REQUIRED: Final = object()  #: stands for the default of an argument that has none
_MAX_DEFAULT: Final = 200  #: characters of a default, which may come from a file

#: Each line has functions with the same arguments, then these. ``*dims`` takes all remaining ones.
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
"""  # noqa: E501  # one line for each group of functions


def signature(name: str) -> tuple[tuple[str, Any], ...]:
    """The arguments of a function by its bare name, each with its default or ``REQUIRED``; () if unknown.

    >>> [name for name, default in signature("linear")]
    ['input', 'weight', 'bias']
    """
    return _signatures().get(name, ())


def read_arguments(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """The arguments of an op's schema, as recorded, each with its default or ``REQUIRED``.

    >>> read_arguments(["self", "alpha=1", "dtype=torch.float32"])[1:]
    (('alpha', 1), ('dtype', torch.float32))
    """
    parameters: list[tuple[str, Any]] = []
    for text in texts:
        name, sign, default = text.partition("=")
        value: Any = REQUIRED
        if sign:
            try:
                value = (
                    ast.literal_eval(default)
                    if len(default) <= _MAX_DEFAULT
                    else Symbol(default[:_MAX_DEFAULT])
                )
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):  # not a literal
                value = Symbol(default)
        parameters.append((name, value))
    return tuple(parameters)


@cache
def _signatures() -> dict[str, tuple[tuple[str, Any], ...]]:
    signatures: dict[str, tuple[tuple[str, Any], ...]] = {}
    for line in _TABLE.strip().splitlines():
        names, _, arguments = line.partition(" : ")
        signatures.update(dict.fromkeys(names.split(), read_arguments(arguments.split())))
    return signatures


#: Calls whose first argument is the tensor itself.
_HAS_SELF: Final = ("method", "operator", "property")


@dataclass(frozen=True)
class Arguments:
    """The named arguments of a form, filled in for every call of that form."""

    form: Form
    names: tuple[str, ...]  #: of the positional arguments
    rest: str = ""  #: the name of the variadic argument: ``shape`` in ``view(2, 3)``
    defaults: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The argument each tensor goes into, in order: ``self``, ``tensors[0]``."""
        paths: list[str] = []
        _fill(self._bound, paths.append)
        return tuple(paths)

    @cached_property
    def _bound(self) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        args = self.form.args
        for position, item in enumerate(args):
            if position >= len(self.names) and self.rest:
                left = args[position:]
                whole = len(left) == 1 and isinstance(left[0], list | tuple)
                bound[self.rest] = left[0] if whole else tuple(left)
                break
            bound[self.names[position] if position < len(self.names) else f"arg{position}"] = item
        bound |= self.form.kwargs or {}
        for key, default in self.defaults:
            bound.setdefault(key, default)
        return bound

    @cached_property
    def _plain(self) -> bool:
        """Whether no tensor is nested in a list or dict, which is cheap to fill."""
        return sum(item is SLOT for item in self._bound.values()) == len(self.paths)

    def fill(self, refs: Sequence[Ref]) -> dict[str, Any]:
        """The arguments with ``refs`` for the tensors; None where a damaged file has too few of them."""
        remaining = iter(refs)
        if self._plain:
            return {key: next(remaining, None) if item is SLOT else item for key, item in self._bound.items()}
        filled: dict[str, Any] = _fill(self._bound, lambda _path: next(remaining, None))
        return filled


def op_arguments(name: str, level: str, flavour: str, form: Form, schema: Sequence[str]) -> Arguments:
    """The arguments of an op: by its schema (aten), or by the table of signatures (API)."""
    parameters = read_arguments(schema)
    if level == "api":
        function = name if flavour == "operator" else name.rpartition(".")[2]
        parameters = signature(base_name(function, level)) or parameters
    names = [key for key, _ in parameters if not key.startswith("*")]
    rest = next((key[1:] for key, _ in parameters if key.startswith("*")), "")
    if flavour in _HAS_SELF:
        names = ["self", *(names[1:] or (["other"] if flavour == "operator" else []))]
    passed = {*names[: len(form.args)], *(form.kwargs or {})}
    # Defaults are listed only where the function was called as it is documented.
    exact = len(form.args) <= len(names) or bool(rest)
    if not exact or flavour in ("operator", "property"):
        return Arguments(form, tuple(names), rest)
    defaults = [(key, value) for key, value in parameters if value is not REQUIRED and key not in passed]
    return Arguments(form, tuple(names), rest, tuple(defaults))


def call_arguments(form: Form) -> Arguments:
    """The arguments of a module call; the names of positional ones are not recorded."""
    count = len(form.args)
    return Arguments(form, ("input",) if count == 1 else tuple(f"input{at}" for at in range(count)))


def _fill(item: Any, put: Callable[[str], Any], path: str = "") -> Any:
    """An argument with ``put(path)`` in place of every tensor."""
    if item is SLOT:
        return put(path)
    if isinstance(item, list | tuple):
        return type(item)(_fill(part, put, f"{path}[{at}]") for at, part in enumerate(item))
    if isinstance(item, dict | Record):
        parts = item.items() if isinstance(item, dict) else item.fields.items()
        return {key: _fill(part, put, f"{path}.{key}" if path else str(key)) for key, part in parts}
    return item
