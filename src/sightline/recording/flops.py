"""FLOPs of aten ops, worked out from recorded shapes when a trace is built or a batch is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sightline.recording.flop_formulas import FORMULAS, multiplies
from sightline.recording.operations import OP, OPAQUE, OpInfo, is_composite
from sightline.recording.torchapi import DISPATCH_MODES, OpOverload, undisturbed
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.arrays import EMPTY, IntArray, Rows, offsets_of, positions_in
from sightline.trace.assembly.batch import Batch, FlopsOf, Tables
from sightline.trace.data import UNCOUNTED, TensorMeta
from sightline.trace.forms import SLOT, Form, Record, Symbol

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


def flops_of(infos: list[OpInfo], metas: list[TensorMeta], forms: list[Form]) -> FlopsOf:
    """A function that knows the FLOPs of a call by its operation, its forms and what its tensors are."""
    known: dict[tuple[Any, ...], int] = {}

    def find(info: int, form: int, result: int, given: tuple[int, ...], made: tuple[int, ...]) -> int:
        key = (info, form, given, made)
        if key not in known:
            looks = [metas[i] for i in given], [metas[i] for i in made]
            known[key] = undisturbed(partial(_flops, infos[info], forms[form], forms[result], *looks))
        return known[key]

    return find


def has_formula(info: OpInfo) -> bool:
    """Whether the FLOPs of an op may be known."""
    return has_plain_formula(info) or (isinstance(info.function, OpOverload) and is_composite(info.function))


def has_plain_formula(info: OpInfo) -> bool:
    """Whether they are known without taking the op apart, which no thread but the block's own may do."""
    return isinstance(info.function, OpOverload) and _formula(info.function) is not None


def needs_formula(info: OpInfo) -> bool:
    """Whether an op does so much work that it is named where its FLOPs are not known."""
    if info.flavour == OPAQUE:
        return True
    return isinstance(info.function, OpOverload) and multiplies(info.function._schema.name)


class _Formula(NamedTuple):
    """How the FLOPs of an op are worked out: from shapes, or from tensors."""

    count: Callable[..., Any]
    of_shapes: bool


def _formula(function: Any) -> _Formula | None:
    """The formula of an op, or of what it does in place; looked up anew, as one may be registered later."""
    from torch.utils import flop_counter

    name = function._schema.name
    for each in (name, name.removesuffix("_")):
        namespace, _, bare = each.partition("::")
        packet = getattr(getattr(torch.ops, namespace), bare, None)
        registered: Any = flop_counter.flop_registry.get(packet)
        if getattr(registered, "__code__", None) is flop_counter.shape_wrapper(len).__code__:
            # What is under the wrapper takes shapes, and has them without a tensor for each.
            return _Formula(registered.__wrapped__, True)
        if registered is not None:
            return _Formula(registered, False)
        if each in FORMULAS:
            return _Formula(FORMULAS[each], True)
    return None


def _flops(info: OpInfo, form: Form, result: Form, look: list[TensorMeta], made: list[TensorMeta]) -> int:
    try:
        formula = _formula(info.function)
        if formula is not None and formula.of_shapes:
            args, kwargs, out = _arguments(form, result, look, made, _shape)
            return int(formula.count(*args, out_shape=out, **kwargs))
        args, kwargs, out = _arguments(form, result, look, made, _meta_tensor)
        if formula is not None:
            return int(formula.count(*args, **kwargs, out_val=out))
        return _decomposed(info, args, kwargs)
    except Exception:  # a formula that does not know this overload is no reason to lose the trace
        return -1


def _arguments(
    form: Form, result: Form, look: list[TensorMeta], made: list[TensorMeta],
    tensor: Callable[[TensorMeta], Any],
) -> tuple[list[Any], dict[str, Any], Any]:  # fmt: skip
    """What an op was called with, and its result, with something in the place of every tensor."""
    tensors = map(tensor, look)
    args = [_live(item, tensors) for item in form.args]
    kwargs = {key: _live(item, tensors) for key, item in (form.kwargs or {}).items()}
    results = map(tensor, made)
    values = [_live(item, results) for item in result.args]
    return args, kwargs, values[0] if len(values) == 1 else values


def _decomposed(info: OpInfo, args: list[Any], kwargs: dict[str, Any]) -> int:
    counter = _Counter()
    counter.decompose(info.function, args, kwargs)
    if counter.unknown:
        return UNCOUNTED
    return counter.total if counter.total or needs_formula(info) else -1


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of what runs, which is done on meta tensors."""

    total = 0
    unknown = False  #: something ran whose FLOPs are not known

    def decompose(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Take an op apart and count its parts.

        Without the globals that ``with self:`` writes: another thread may be running ops meanwhile.
        """
        try:
            DISPATCH_MODES.push(self)
            return function.decompose(*args, **kwargs)
        finally:
            DISPATCH_MODES.take(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _formula(function)
        if formula is None and is_composite(function):
            return self.decompose(function, args, kwargs)
        result = function(*args, **kwargs)
        if formula is not None and formula.of_shapes:
            shapes = tree_map_only(torch.Tensor, lambda one: one.shape, (args, kwargs, result))
            self.total += int(formula.count(*shapes[0], out_shape=shapes[2], **shapes[1]))
        elif formula is not None:
            self.total += int(formula.count(*args, **kwargs, out_val=result))
        else:
            self.unknown |= multiplies(function._schema.name)
        return result


def _shape(meta: TensorMeta) -> torch.Size:
    return torch.Size(meta.shape)


def _meta_tensor(meta: TensorMeta) -> Any:
    dtype = getattr(torch, meta.dtype)
    if meta.stride is None:
        return torch.empty(meta.shape, dtype=dtype, device="meta")
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")


def _live(item: Any, tensors: Iterator[Any]) -> Any:
    """A recorded argument as one to call with; what is left out of a long list of numbers stays so."""
    if item is SLOT:
        return next(tensors)
    if isinstance(item, list | tuple):
        return type(item)(_live(part, tensors) for part in item)
    if isinstance(item, Symbol):
        name = item.text.removeprefix("torch.")
        return getattr(torch, name) if item.text.startswith("torch.") else torch.device("meta")
    if isinstance(item, Record | dict):
        raise ValueError("not an argument a formula could use")
    return item


class BatchFlops:
    """Remembers what was told, and what the living values look like."""

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._operators: dict[tuple[int, int], str | None] = {}
        self._flops: dict[tuple[Any, ...], int] = {}
        self._counted: list[bool] = []
        self._api: list[bool] = []
        self._ids, self._metas = EMPTY, EMPTY

    def told(self) -> tuple[list[tuple[int, int, str]], list[tuple[Any, ...]]]:
        """Everything that was told."""
        operators = [(*key, symbol) for key, symbol in self._operators.items() if symbol is not None]
        return operators, [(*key, count) for key, count in self._flops.items()]

    def news(
        self, ops: Rows, batch: Batch, tables: Tables
    ) -> tuple[list[tuple[int, int, str]], list[tuple[Any, ...]]]:
        """New in a batch: (stack, operation, operator) and (operation, form, inputs, outputs, FLOPs)."""
        for info in self._session.infos[len(self._counted) :]:
            self._counted.append(has_plain_formula(info))
            self._api.append(info.flavour != OP)
        self._see(batch)
        found = self._new_operators(ops, tables), self._new_flops(ops, tables)
        if batch.alive is not None:
            held = (positions_in(batch.alive, self._ids) >= 0) | (self._ids >= _first(batch))
            self._ids, self._metas = self._ids[held], self._metas[held]
        return found

    def _see(self, batch: Batch) -> None:
        values = Rows(batch.rows.values, row.V_WIDTH)
        fresh = batch.rows.fresh.reshape(-1, row.FRESH_WIDTH)
        ids = np.concatenate([self._ids, values.ids, fresh[:, 0]])
        metas = np.concatenate([self._metas, values.column(row.V_META), fresh[:, 1]])
        order = np.argsort(ids, kind="stable")
        self._ids, self._metas = ids[order], metas[order]

    def _new_operators(self, ops: Rows, tables: Tables) -> list[tuple[int, int, str]]:
        info, stack = ops.column(row.O_INFO), ops.column(row.O_STACK)
        calls = np.array(self._api or [False])[info] & (stack >= 0)
        new = []
        for key in np.unique((stack[calls] << 32) + info[calls]).tolist():
            pair = key >> 32, key & 0xFFFFFFFF
            if pair not in self._operators:
                symbol = self._operators[pair] = tables.operator(*pair)
                if symbol is not None:
                    new.append((*pair, symbol))
        return new

    def _new_flops(self, ops: Rows, tables: Tables) -> list[tuple[Any, ...]]:
        info = ops.column(row.O_INFO)
        wanted = np.flatnonzero(np.array(self._counted or [False])[info])
        if not len(wanted):
            return []
        form, result = ops.column(row.O_FORM), ops.column(row.O_RESULT)
        given = ops.column(row.O_INPUTS)
        looks = self._look(ops.lists(row.O_WIDTH, ops.column(0) - row.O_WIDTH))
        starts = offsets_of(ops.column(0) - row.O_WIDTH)
        new: list[tuple[Any, ...]] = []
        seen: set[tuple[int, int, int, bytes]] = set()
        for op in wanted.tolist():
            part = looks[starts[op] : starts[op + 1]]
            short = (int(info[op]), int(form[op]), int(given[op]), part.tobytes())
            if short in seen:
                continue
            seen.add(short)
            metas = tuple(part.tolist())
            key = (*short[:2], metas[: short[2]], metas[short[2] :])
            if key in self._flops or -1 in metas:
                continue
            made = int(result[op]) if result[op] >= 0 else tables.one_tensor
            self._flops[key] = tables.flops(key[0], key[1], made, key[2], key[3])
            new.append((*key, self._flops[key]))
        return new

    def _look(self, ids: IntArray) -> IntArray:
        at = positions_in(self._ids, ids)
        return np.where(at >= 0, self._metas[at], -1) if len(self._ids) else np.full(len(ids), -1)


def _first(batch: Batch) -> int:
    """The first value of a batch: all of those may be used again."""
    values = Rows(batch.rows.values, row.V_WIDTH).ids
    fresh = batch.rows.fresh.reshape(-1, row.FRESH_WIDTH)[:, 0]
    firsts = [int(ids.min()) for ids in (values, fresh) if len(ids)]
    return min(firsts, default=1 << 62)
