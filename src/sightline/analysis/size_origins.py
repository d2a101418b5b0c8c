"""Where the size of a dimension comes from: followed back through the ops that are known to hand it on.

A number alone says nothing: a weight may have the size of a batch by chance. So each op says which dimension
of which input a dimension of its result is; where an op is not known, the way ends at it.
"""

from __future__ import annotations

import math
from typing import Final

from sightline.analysis.op_text import api_call_of
from sightline.data.op_groups import CONVOLUTIONS
from sightline.data.rows import Op, Value

_FARTHEST: Final = 400  #: ops that a size is followed back
Place = tuple[Value, int]  #: a tensor and one of its dimensions

_LASTING: Final = ("parameter", "buffer", "state")
_RESHAPES: Final = frozenset(
    "view _unsafe_view reshape _reshape_alias flatten unflatten view_as reshape_as".split()
)
_LINEAR: Final = frozenset("linear".split())
_EMBEDDINGS: Final = frozenset("embedding".split())
#: Ops that broadcast their inputs against each other.
_BROADCASTS: Final = frozenset(
    "add sub mul div pow where maximum minimum lerp addcmul addcdiv + - * / ** eq ne lt le gt ge".split()
)
#: Ops whose result has the shape of their first input.
_SAME_SHAPE: Final = frozenset(
    "relu gelu silu sigmoid tanh exp log sqrt rsqrt neg abs clamp dropout native_dropout softmax _softmax "
    "log_softmax _log_softmax layer_norm native_layer_norm group_norm native_group_norm batch_norm "
    "native_batch_norm _native_batch_norm_legit rms_norm _fused_rms_norm clone contiguous detach alias "
    "_to_copy to float half bfloat16 double masked_fill leaky_relu elu hardtanh softplus erf sin cos "
    "bernoulli cumsum flip roll fill zero copy triu tril scaled_dot_product_attention lift lift_fresh "
    "lift_fresh_copy zeros_like ones_like full_like empty_like rand_like randn_like".split()
)
#: Ops that take parts, or add and remove dimensions.
_PARTS: Final = frozenset("slice narrow split chunk cat concat expand select unsqueeze squeeze".split())
#: Of two matrices, by the number of each among the inputs.
_PRODUCTS: Final = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "matmul": (0, 1),
    "@": (0, 1),
}


def size_origin(value: Value, dimension: int) -> tuple[Value, int, Op | None]:
    """The tensor and the dimension that a size comes from, and the op that made it there.

    Without an op, it came from outside or is the size of a weight.
    """
    path, dimension, maker = size_path(value, dimension)
    return path[-1], dimension, maker


def size_path(value: Value, dimension: int) -> tuple[list[Value], int, Op | None]:
    """The tensors that hand a size on, back to the first, with its dimension and the op that made it."""
    path = [value]
    while len(path) < _FARTHEST:
        value = path[-1]
        if value.kind in _LASTING:
            return path, dimension, None
        maker = value.producer
        before: Place | None = None
        if maker is None:  # an earlier version has the same dimension, or the tensor it is a view of
            if value.previous is not None and value.previous.shape == value.shape:
                before = value.previous, dimension
            elif value.base is not None and (at := _reshaped(value.base, value, dimension)) >= 0:
                before = value.base, at
        else:
            call = api_call_of(maker)  # it says more than its ops: ``linear`` flattens, and back again
            if call.id != maker.id and any(each.id == value.id for each in call.outputs):
                before = _source(call, value, dimension)
            before = before or _source(maker, value, dimension)
            if before is None and value.previous is not None and value.previous.shape == value.shape:
                before = value.previous, dimension  # changed in place, as an optimizer changes many at once
        if before is None:
            return path, dimension, maker
        path.append(before[0])
        dimension = before[1]
    return path, dimension, path[-1].producer


def makes_size(op: Op, size: int) -> bool:
    """Whether no input of an op has a size: one that it has may be kept by an op that is not known."""
    ops = {each.id: each for each in (op, api_call_of(op))}
    return not any(size in value.shape for each in ops.values() for value in each.inputs
                   if value.kind not in _LASTING)  # fmt: skip


def _source(op: Op, value: Value, dimension: int) -> Place | None:
    """Which dimension of which input a dimension of a result is; None where the op makes its size."""
    inputs = [each for each in op.inputs if each.id != value.id]
    if not inputs:
        return None
    name = op.name.partition(".")[0] if op.level == "aten" else op.name.rpartition(".")[2]
    name = name if name.startswith("__") or len(name) < 2 else name.rstrip("_") or name
    if op.name == "[]":
        name = "[]"
    place = _known_source(name, op, inputs, value, dimension)
    if place is None:
        return None
    source, at = place
    fits = 0 <= at < len(source.shape) and source.shape[at] == value.shape[dimension]
    return (source, at) if fits else None


def _known_source(name: str, op: Op, inputs: list[Value], value: Value, dimension: int) -> Place | None:
    """The source of a dimension as an op of this name hands it on; None where that is not known."""
    rank, first = len(value.shape), inputs[0]
    if name in _PRODUCTS and len(inputs) > _PRODUCTS[name][1]:
        left, right = (inputs[at] for at in _PRODUCTS[name])
        if dimension == rank - 1 and len(right.shape) > 1:
            return right, len(right.shape) - 1
        return left, dimension + len(left.shape) - rank
    if name in _LINEAR and len(inputs) > 1:
        return (inputs[1], 0) if dimension == rank - 1 else (first, dimension)
    if name in _EMBEDDINGS and len(inputs) > 1:
        return (first, 1) if dimension == rank - 1 else (inputs[1], dimension)
    if name in CONVOLUTIONS and len(inputs) > 1:
        if dimension == rank - (len(inputs[1].shape) - 1):
            return None if op.args.get("transposed") is True else (inputs[1], 0)
        return first, dimension
    if name in _BROADCASTS or name in _SAME_SHAPE:
        inputs = inputs if name in _BROADCASTS else inputs[:1]
        places = [(each, dimension + len(each.shape) - rank) for each in inputs]
        fitting = [(each, at) for each, at in places if at >= 0 and each.shape[at] == value.shape[dimension]]
        return min(fitting, key=lambda place: place[0].kind in _LASTING, default=None)
    if name in _RESHAPES:
        return first, _reshaped(first, value, dimension)
    if name in ("t", "T", "mT", "transpose", "swapaxes", "permute"):
        return first, _permuted(name, op, len(first.shape), dimension)
    if name == "unfold":
        return (first, dimension) if dimension not in (rank - 1, *_numbers(op)[:1]) else None
    if name == "[]":
        return (first, _kept("slice", op, first, value, dimension)) if len(first.shape) == rank else None
    if name in _PARTS:
        return first, _kept(name, op, first, value, dimension)
    return None


def _reshaped(source: Value, value: Value, dimension: int) -> int:
    """The dimension of a tensor that has as many elements before it, and the same size; -1 without one."""
    before = math.prod(value.shape[:dimension])
    for at, size in enumerate(source.shape):
        if size == value.shape[dimension] and math.prod(source.shape[:at]) == before:
            return at
    return -1


def _permuted(name: str, op: Op, rank: int, dimension: int) -> int:
    """The dimension of the input that a transposition moved to another; -1 if that is not known."""
    if name in ("t", "T", "mT"):
        last = {rank - 1: rank - 2, rank - 2: rank - 1}
        return last.get(dimension, dimension) if rank > 1 else dimension
    numbers = [each for each in _numbers(op) if -rank <= each < rank]
    if name == "permute":
        return numbers[dimension] % rank if len(numbers) == rank else -1
    if len(numbers) != 2:
        return -1
    one, other = (each % rank for each in numbers)
    return {one: other, other: one}.get(dimension, dimension)


def _kept(name: str, op: Op, source: Value, value: Value, dimension: int) -> int:
    """The dimension of the input of an op that takes a part of it, or adds or removes dimensions."""
    changed = [
        at for at, size in enumerate(source.shape) if at >= len(value.shape) or value.shape[at] != size
    ]
    if name in ("select", "squeeze", "unsqueeze"):
        numbers = _numbers(op)
        removed = numbers[0] if numbers else None
        if removed is None:
            return -1
        if name == "unsqueeze":
            at = removed % len(value.shape)
            return dimension - (dimension > at) if dimension != at else -1
        if len(source.shape) == len(value.shape):
            return dimension
        return dimension + (dimension >= removed % len(source.shape))
    if name == "expand":
        return dimension + len(source.shape) - len(value.shape)
    return dimension if dimension not in changed else -1


def _numbers(op: Op) -> list[int]:
    """The whole numbers among the arguments of an op, those of lists one by one."""
    numbers: list[int] = []
    for each in op.args.values():
        items = each if isinstance(each, list | tuple) else [each]
        numbers += [item for item in items if type(item) is int]
    return numbers
