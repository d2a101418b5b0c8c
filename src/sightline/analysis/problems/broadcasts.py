"""Tensors that are broadcast by accident: one number per row applied to the columns, a loss of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, RANDOM, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.data.file_owners import torch_file
from sightline.data.trace_data import REQUIRES_GRAD

_ARITHMETIC: Final = frozenset("add sub mul div rsub".split())
_REDUCTIONS: Final = frozenset(
    "sum mean norm linalg_vector_norm amax amin max min std var logsumexp prod argmax median".split()
)
_SELECTS: Final = frozenset({"squeeze", "select"})
#: Ops on each element by itself.
_ELEMENTWISE: Final = frozenset(
    "add sub mul div rsub sqrt rsqrt clamp clamp_min reciprocal exp log sigmoid tanh relu abs neg pow "
    "detach clone _to_copy softplus silu gelu alias".split()
)
_MAX_OPS: Final = 12  #: how many ops a value is followed back for
_LOSSES: Final = frozenset("mse_loss smooth_l1_loss huber_loss".split())
#: Those that torch writes in Python, from other ops.
_PYTHON_LOSSES: Final = frozenset({"l1_loss", "gaussian_nll_loss", "poisson_nll_loss"})
#: Ops that choose a part of a tensor, with as many dimensions.
_PARTS: Final = frozenset("slice narrow split split_with_sizes chunk gather index_select".split())
_CHOICES: Final = _PARTS | frozenset({"select"})
#: Ops after which a tensor holds the same numbers.
_VIEWS: Final = frozenset("view reshape _unsafe_view _reshape_alias".split())
_RESHAPES: Final = _VIEWS | frozenset(
    "unsqueeze squeeze expand t transpose permute detach alias clone _to_copy flatten".split()
)
#: Ops between a difference and the loss computed from it.
_TOWARDS_LOSS: Final = (
    _ARITHMETIC | _LOSSES | frozenset("pow abs neg exp log log1p sqrt square mean sum".split())
)
_MAX_LOSS_OPS: Final = 24  #: how many ops a value is followed for, forward or back

Shape = tuple[int, ...]


@check(
    "broadcast",
    Severity.ERROR,
    "It runs only because both sizes are equal. Keep the last dimension of what is one number for each row: "
    "keepdim=True, or .unsqueeze(-1).",
)
def rows_against_columns(context: ProblemContext) -> Iterator[Finding]:
    """``[N, M]`` meets an ``[N]`` that was reduced from rows, and N is M by chance."""
    for op in np.flatnonzero(context.forward & context.named(_ARITHMETIC)).tolist():
        inputs = context.inputs(op)
        if len(inputs) != 2:
            continue
        wide, narrow = sorted(inputs, key=lambda value: -len(context.meta(value).shape))
        shape, other = context.meta(wide).shape, context.meta(narrow).shape
        if len(shape) != 2 or len(other) != 1 or shape[0] != shape[1] or shape[1] != other[0] or other[0] < 2:
            continue
        reduction = _row_reduction(context, narrow)
        if reduction < 0:
            continue
        if not (_same_origin(context, context.inputs(reduction)[0], wide) or _has_features(context, wide)):
            continue
        # At the line that lost the dimension, or at the op's if that is a line of a library.
        at = op if context.own_place(int(context.frames[reduction])) else reduction
        names = {each: context.written(each).rpartition(".")[2] for each in (reduction, op)}
        dropped, applied = (
            name if context.line(each) == context.line(at) else context.at_line(each)
            for each, name in names.items()
        )
        title = (
            f"{dropped} drops the last dimension of {context.meta(context.inputs(reduction)[0])}: "
            f"{applied} of {context.meta(wide)} and {context.meta(narrow)} then applies the number of "
            "each row to a column"
        )
        repairs = {"squeeze": "Drop the squeeze", "select": "Index with a range (x[:, 2:3] for x[:, 2])"}
        how = repairs.get(context.name(reduction), f"Give {names[reduction]} keepdim=True")
        rows = context.meta(context.outputs(reduction)[0]).shape[0]
        why = f"It runs only because there are as many rows as columns. {how}, so that it stays [{rows}, 1]."
        yield context.finding(title, at, narrow, why)


def _row_reduction(context: ProblemContext, value: int) -> int:
    """The op that reduced the last dimension of a matrix to make a vector; -1 if it was made otherwise."""
    for _ in range(_MAX_OPS):
        producer = context.producer(value)
        if producer < 0:
            return -1
        name = context.name(producer)
        source = next(iter(context.inputs(producer)), -1)
        if source < 0:
            return -1
        before, after = context.meta(source).shape, context.meta(value).shape
        if len(before) == 2 and len(after) == 1 and (name in _REDUCTIONS or name in _SELECTS):
            dims: list[int] = []
            for arg in context.args(producer):
                items = arg if isinstance(arg, list | tuple) else [arg]
                dims += [item for item in items if type(item) is int]
            if name == "select":
                dims = dims[:1]
            last = any(dim in (-1, 1) for dim in dims) and 0 not in dims
            if name == "squeeze" and not dims:
                last = before[1] == 1
            return producer if last else -1
        if name not in _ELEMENTWISE:
            return -1
        same_shape = [value for value in context.inputs(producer) if context.meta(value).shape == after]
        if len(same_shape) != 1:
            return -1
        value = same_shape[0]
    return -1


def _same_origin(context: ProblemContext, source: int, wide: int) -> bool:
    """Whether one of two matrices was computed from the other elementwise, or both are the same."""
    for start, goal in ((wide, source), (source, wide)):
        value = start
        for _ in range(_MAX_OPS):
            if value == goal:
                return True
            producer = context.producer(value)
            if producer < 0 or context.name(producer) not in _ELEMENTWISE:
                break
            shape = context.meta(value).shape
            same_shape = [each for each in context.inputs(producer) if context.meta(each).shape == shape]
            if not same_shape:
                break
            value = same_shape[0]
    return False


def _has_features(context: ProblemContext, value: int) -> bool:
    """Whether the last dimension of a matrix is that of a layer's features: a matmul with weights made it."""
    values = context.data.values
    for _ in range(_MAX_OPS):
        producer = context.producer(value)
        if producer < 0:
            return False
        inputs = context.inputs(producer)
        if context.name(producer) in MATMULS:
            bases = [int(values.base[each]) for each in inputs[1:]]
            sources = [*inputs[1:], *(base for base in bases if base >= 0)]
            return any(context.kind(source) == "parameter" for source in sources)
        if context.name(producer) not in _ELEMENTWISE or not inputs:
            return False
        value = inputs[0]
    return False


@check(
    "broadcast",
    Severity.ERROR,
    "Every row is compared with every other row instead of its own, so the loss runs but does not measure "
    "the error; give both operands the same shape.",
)
def broadcast_in_a_loss(context: ProblemContext) -> Iterator[Finding]:
    """``[B, 1]`` meets ``[B]``, gives ``[B, B]``, and that is reduced to one number.

    In outer products and pairwise distances the column is made by ``None``, ``unsqueeze``, ``view`` or
    ``keepdim``, and the matrix is used as one. Here the column comes straight from a layer or the data, or
    is a model's prediction and the row its target, and the matrix is only averaged.
    """
    for op in _unequal_ranks(context):
        pair = [_before_expand(context, op, value) for value in context.inputs(op)[:2]]
        column, row = sorted(pair, key=lambda value: -len(context.meta(value).shape))
        broadcast = _broadcast_shape(context.meta(column).shape, context.meta(row).shape)
        if broadcast is None or not _becomes_loss(context, op):
            continue
        if not _is_accidental(context, op, column, row):
            continue
        operands = " and ".join(str(context.meta(value)) for value in pair)
        wide, narrow = context.meta(column), context.meta(row)
        at = next(
            at for at, size in enumerate(wide.shape) if size == 1 and _without(wide.shape, at) == narrow.shape
        )
        dim = -1 if at == len(narrow.shape) else at
        why = (
            "Every row is compared with every other row, and the loss does not measure the error. Give both "
            f"one shape: .squeeze({dim}) on the {wide}, or .unsqueeze({dim}) on the {narrow}."
        )
        title = (
            f"{context.written(op)} of {operands} broadcasts both to {list(broadcast)}, which becomes a loss"
        )
        yield context.finding(title, op, column, why)


def _without(shape: Shape, at: int) -> Shape:
    """A shape without one of its sizes."""
    return shape[:at] + shape[at + 1 :]


def _unequal_ranks(context: ProblemContext) -> list[int]:
    """Arithmetic on two tensors of unequal ranks, or that were made equal by expanding both."""
    ops, values = context.data.ops, context.data.values
    binary = context.forward & context.named(_ARITHMETIC | _LOSSES) & (np.diff(ops.input_offsets) >= 2)
    chosen = np.flatnonzero(binary)
    one, other = (ops.inputs[ops.input_offsets[chosen] + at] for at in (0, 1))
    ranks = np.array([len(meta.shape) for meta in context.data.metas] or [0])[values.meta]
    expands = np.append(context.named(frozenset({"expand"})), False)  # producer -1 reads the appended entry
    expanded = expands[values.producer[one]] & expands[values.producer[other]]
    unequal: list[int] = chosen[(ranks[one] != ranks[other]) | expanded].tolist()
    return unequal


def _broadcast_shape(column: Shape, row: Shape) -> Shape | None:
    """The shape that two broadcast to, if one has an extra size 1 and both grow.

    >>> [_broadcast_shape((8, 1), row) for row in ((8,), (8, 1), ())], _broadcast_shape((1, 8), (8,))
    ([(8, 8), None, None], None)
    """
    if len(column) != len(row) + 1 or not row:
        return None
    if not any(size == 1 and _without(column, at) == row for at, size in enumerate(column)):
        return None
    padded = (1, *row)
    broadcast = tuple(max(pair) for pair in zip(column, padded, strict=True))
    return broadcast if broadcast != column and broadcast != padded else None


def _before_expand(context: ProblemContext, op: int, value: int) -> int:
    """The tensor as the user gave it: torch's own losses expand both operands before they subtract."""
    producer = context.producer(value)
    if producer < 0 or context.name(producer) != "expand":
        return value
    data, parents = context.data, context.data.ops.parent
    if parents[op] >= 0:
        together = bool(parents[producer] == parents[op])
    else:
        frame = int(data.ops.frame[producer])
        together = frame >= 0 and torch_file(data.codes[int(data.frames.code[frame])].file)
    return context.inputs(producer)[0] if together else value


def _is_accidental(context: ProblemContext, op: int, column: int, row: int) -> bool:
    """Whether nothing shows that a matrix of all pairs is meant.

    torch's own losses never mean one. Parts of one tensor, ``x[:, :1] - x[:, 0]``, are a distance of all
    pairs. A difference that compares trained numbers with others is meant if its column was made by ``None``
    or ``unsqueeze``, as in the energy distance of two samples, and not if a view made it.
    """
    data, frame, losses = context.data, int(context.data.ops.frame[op]), _LOSSES | _PYTHON_LOSSES
    if context.name(op) in _LOSSES or context.written(op).rpartition(".")[2] in losses:
        return True
    code = data.codes[int(data.frames.code[frame])] if frame >= 0 else None
    if code is not None and torch_file(code.file) and code.function in losses:
        return True
    (start, ops), (end, _) = (_reshaped_from(context, value) for value in (column, row))
    if _is_plain_column(context, column) and (start != end or ops.isdisjoint(_CHOICES)):
        return True
    flags = data.values.flags
    trained = [bool(flags[value] & REQUIRES_GRAD) for value in (column, row)]
    if context.name(op) not in ("sub", "rsub") or trained[0] == trained[1]:
        return False
    return start != end and bool(ops & _VIEWS) and "unsqueeze" not in ops


def _is_plain_column(context: ProblemContext, value: int) -> bool:
    """Whether a tensor has its size 1 from a layer or from the data, not from a reshape."""
    for _ in range(_MAX_LOSS_OPS):
        producer, shape = context.producer(value), context.meta(value).shape
        if producer < 0:
            return context.kind(value) == "input"
        name = context.name(producer)
        if name in MATMULS | RANDOM:
            return True
        sources = context.inputs(producer)
        same = [source for source in sources if context.meta(source).shape == shape]
        before = context.meta(sources[0]).shape if sources else ()
        if name in _PARTS and sources and len(before) == len(shape):
            return True  # a column of several: x[:, :1], or the chosen one of each row
        # A view may only drop dimensions, as from ``[8, 1, 1, 1]`` to ``[8, 1]``.
        flattens = (
            len(before) > len(shape) and before[: len(shape)] == shape and np.prod(before) == np.prod(shape)
        )
        if name in _PARTS and flattens:
            return True
        if not same and not flattens:
            return False
        value = same[0] if same else sources[0]
    return False


def _reshaped_from(context: ProblemContext, value: int) -> tuple[int, set[str]]:
    """The tensor that a value has its numbers from, and the ops that chose and reshaped them."""
    ops: set[str] = set()
    for _ in range(_MAX_LOSS_OPS):
        producer = context.producer(value)
        if producer < 0 or context.name(producer) not in _RESHAPES | _CHOICES:
            break
        ops.add(context.name(producer))
        value = context.inputs(producer)[0]
    return value, ops


def _becomes_loss(context: ProblemContext, op: int) -> bool:
    """Whether the result goes through elementwise ops and is reduced to one number."""
    front = [op]
    for _ in range(_MAX_LOSS_OPS):
        outputs = [value for each in front for value in context.outputs(each)]
        if any(not context.meta(value).shape for value in outputs):
            return True
        front = list(dict.fromkeys(user for value in outputs for user in context.users(value)))
        front = [user for user in front if context.name(user).removesuffix("_") in _TOWARDS_LOSS]
    return False
