"""The cost of every module: FLOPs, time, activation memory, parameters, and the time spent compiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.module_tree import OUTSIDE, Scopes, op_scopes, scopes_of
from sightline.analysis.select import Mask
from sightline.data.trace_data import FLAVOURS, I32, I64, PHASES, UNCOUNTED, TraceData
from sightline.notation import time_text, times_text

_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER = range(4)
assert PHASES == ("forward", "backward", "recompute", "optimizer")
_OPAQUE: Final = FLAVOURS.index("opaque")
_MAX_NAMED: Final = 6  #: how many ops without FLOPs are listed
#: API calls that only start the backward pass: their time is that of the ops they start.
_LAUNCHERS: Final = ("Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")


#: The columns of times of a tally, with a place for ``device_``.
_TIMES: Final = ("{}time", "backward_{}time", "recompute_{}time")


@dataclass(frozen=True)
class CostTally:
    """The costs of scopes, a column per kind of cost and a row per scope. Times are nanoseconds."""

    flops: I64
    backward_flops: I64
    recompute_flops: I64
    time: I64
    backward_time: I64
    recompute_time: I64
    memory: I64
    device_time: I64
    backward_device_time: I64
    recompute_device_time: I64


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of one or several scopes; each tensor counts once, even if it has several names."""

    own: int = 0
    total: int = 0
    own_new: int = 0  #: of ``own``, those that no earlier scope has
    total_new: int = 0
    trainable: int = 0  #: of ``total``, those that require a gradient
    own_trainable: int = 0
    bytes: int = 0  #: of ``total``; only set where several scopes are counted together
    buffers: int = 0  #: elements of their buffers; likewise


@dataclass(frozen=True)
class Costs:
    """The cost of every scope of a recording."""

    scopes: Scopes
    own: CostTally
    total: CostTally
    parameters: tuple[Parameters, ...]
    optimizer_time: int  #: of the optimizer's ops, which belong to no module
    optimizer_device_time: int

    def time_parts(self, tops: Sequence[int], prefix: str = "") -> list[tuple[str, int]]:
        """The time of scopes by what it was spent on; ``prefix`` is that of a column: ``device_``.

        What runs outside of every module and is no backward pass may be anything: a loss, the loading of
        data, the clipping of gradients.
        """
        columns = {name: getattr(self.total, name.format(prefix)) for name in _TIMES}
        modules = [top for top in tops if self.scopes.rows[top].module != OUTSIDE]
        other = [top for top in tops if self.scopes.rows[top].module == OUTSIDE]
        forward, backward, recompute = columns.values()
        return [
            ("modules", int(forward[modules].sum())), ("other", int(forward[other].sum())),
            ("backward", int(backward[list(tops)].sum())), ("recompute", int(recompute[list(tops)].sum())),
        ]  # fmt: skip


def cost_of(data: TraceData, device: I64 | None = None) -> Costs:
    """The cost of every module of a recording; ``device`` is the device time of each op itself."""
    scopes = scopes_of(data)
    device = np.zeros(len(data.ops), dtype=np.int64) if device is None else device
    own = _own_costs(data, scopes, device)
    ends = np.array([scope.end for scope in scopes.rows], dtype=np.int64)
    total = CostTally(
        **{column.name: _inclusive(getattr(own, column.name), ends) for column in fields(CostTally)}
    )
    optimizer = data.ops.phase == _OPTIMIZER
    return Costs(
        scopes, own, total, _parameters(data, scopes),
        int(data.ops.duration[optimizer & leaf_ops(data)].sum()), int(device[optimizer].sum()),
    )  # fmt: skip


@dataclass(frozen=True)
class NonFiniteCounts:
    """How many elements of op results are NaN or infinite, per scope; own and total as in `Costs`."""

    phase: str
    own: tuple[I64, I64]  #: NaN, then Inf
    total: tuple[I64, I64]

    def in_scopes(self, scopes: Sequence[int], *, own: bool = False) -> tuple[int, int]:
        """NaN and Inf of scopes and those inside them, or of their own part only."""
        nans, infs = self.own if own else self.total
        return int(nans[list(scopes)].sum()), int(infs[list(scopes)].sum())


def nonfinite_counts(data: TraceData, scopes: Scopes, phase: str) -> NonFiniteCounts:
    """How many NaN and Inf are in the measured results of the ops of a phase."""
    stats = data.stats
    producer = data.values.producer[stats.value]
    chosen = producer >= 0
    chosen[chosen] = data.ops.phase[producer[chosen]] == PHASES.index(phase)
    scope = op_scopes(data, scopes)[producer[chosen]]
    nans, infs = (_sum_by(scope, counts[chosen], len(scopes.rows)) for counts in (stats.nans, stats.infs))
    ends = np.array([row.end for row in scopes.rows], dtype=np.int64)
    return NonFiniteCounts(phase, (nans, infs), (_inclusive(nans, ends), _inclusive(infs, ends)))


def leaf_ops(data: TraceData) -> NDArray[np.bool_]:
    """Which ops have no op inside: if only these are counted, nothing is counted twice."""
    leaf = np.ones(len(data.ops), dtype=bool)
    parents = data.ops.parent
    leaf[parents[parents >= 0]] = False
    launchers = [id for id, name in enumerate(data.names) if name in _LAUNCHERS]
    if launchers:
        leaf &= ~(np.isin(data.ops.name, launchers) & (data.ops.level == 0))
    return leaf


def exclusive_times(data: TraceData) -> I64:
    """The host time of each op alone, 0 where it is that of the ops inside: its sum counts nothing twice."""
    return np.where(leaf_ops(data), data.ops.duration, 0).astype(np.int64)


def exclusive_call_times(data: TraceData) -> I64:
    """The time of each module call without the calls inside it."""
    calls = data.calls
    inside = calls.parent >= 0
    inner = _sum_by(calls.parent[inside], calls.duration[inside], len(calls))
    own: I64 = np.maximum(calls.duration - inner, 0)  # rounding must not make it negative
    return own


def uncounted(data: TraceData, scopes: Scopes, tops: Sequence[int]) -> dict[str, int]:
    """How many ops of each name have unknown FLOPs, in some scopes and all inside them.

    In a recording without aten ops no FLOPs are counted, so none are missing.
    """
    ops = data.ops
    if data.info.get("ops") in ("api", "none"):
        return {}
    missed = np.flatnonzero(leaf_ops(data) & (ops.flops == UNCOUNTED))
    scope = op_scopes(data, scopes)[missed]
    inside = np.zeros(len(missed), dtype=bool)
    for top in tops:
        inside |= (scope >= top) & (scope < scopes.rows[top].end)
    counts: dict[str, int] = {}
    only_forward = opaque_in_forward(data)
    for op in missed[inside].tolist():
        name = data.names[ops.name[op]]
        bare = name if ops.flavour[op] == _OPAQUE else name.partition(".")[0]
        bare += " (forward)" * (name in only_forward)
        counts[bare] = counts.get(bare, 0) + 1
    return counts


def uncounted_text(missed: dict[str, int]) -> str:
    """The ops that the FLOPs do not include; empty without any.

    >>> uncounted_text({"_trilinear": 4, "mylib::fused": 1})
    'not counted: _trilinear ×4, mylib::fused'
    """
    names = [times_text(name, count) if count > 1 else name for name, count in missed.items()]
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return f"not counted: {', '.join(names[:_MAX_NAMED] + more)}" if names else ""


def _own_costs(data: TraceData, scopes: Scopes, device: I64) -> CostTally:
    """The costs of each scope itself, without those inside it."""
    ops, count = data.ops, len(scopes.rows)
    scope, leaf = op_scopes(data, scopes), leaf_ops(data)
    every = np.ones(len(ops), dtype=bool)

    def over_ops(amount: I64, phase: int, chosen: NDArray[np.bool_] = leaf) -> I64:
        picked = chosen & (ops.phase == phase)
        return _sum_by(scope[picked], amount[picked], count)

    flops = np.maximum(ops.flops, 0)
    forward = data.calls.phase == _FORWARD
    in_calls = _sum_by(scopes.of_call[forward], exclusive_call_times(data)[forward], count)
    return CostTally(
        flops=over_ops(flops, _FORWARD),
        backward_flops=over_ops(flops, _BACKWARD),
        recompute_flops=over_ops(flops, _RECOMPUTE),
        time=in_calls + over_ops(ops.duration, _FORWARD, leaf & (ops.call < 0)),
        backward_time=over_ops(ops.duration, _BACKWARD),
        recompute_time=over_ops(ops.duration, _RECOMPUTE),
        memory=over_ops(created_bytes(data), _FORWARD, every),
        device_time=over_ops(device, _FORWARD, every),
        backward_device_time=over_ops(device, _BACKWARD, every),
        recompute_device_time=over_ops(device, _RECOMPUTE, every),
    )


def created_bytes(data: TraceData) -> I64:
    """For each op the bytes of the storages it made; a storage counts for its first op."""
    values = data.values
    ids = np.flatnonzero(values.storage >= 0)
    storages, first = np.unique(values.storage[ids], return_index=True)
    producers = values.producer[ids[first]]
    created = producers >= 0  # others are inputs and parameters
    return _sum_by(producers[created], data.storages[storages[created]], len(data.ops))


def _sum_by(keys: I32, amounts: I64, count: int) -> I64:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, keys, amounts)
    return sums


def _inclusive(own: I64, ends: I64) -> I64:
    """Sums over each scope and those inside it, which follow it."""
    before = np.zeros(len(own) + 1, dtype=np.int64)
    np.cumsum(own, out=before[1:])
    return before[ends] - before[:-1]


def _parameters(data: TraceData, scopes: Scopes) -> tuple[Parameters, ...]:
    """Counts for every scope. A tensor is new where it first appears in the order of the rows."""
    sizes: dict[int, tuple[int, int]] = {}
    owned: list[set[int]] = []
    first: dict[int, int] = {}
    for id, scope in enumerate(scopes.rows):
        infos = () if scope.module == OUTSIDE else data.modules[scope.module].parameters
        keys = {info.key for info in infos if not info.buffer}
        sizes |= {info.key: (info.numel, info.numel * info.trainable) for info in infos}
        owned.append(keys)
        for key in keys:
            first.setdefault(key, id)
    below = [set(keys) for keys in owned]
    for id in range(len(owned) - 1, -1, -1):
        if scopes.rows[id].parent >= 0:
            below[scopes.rows[id].parent] |= below[id]
    return tuple(
        Parameters(
            own=sum(sizes[key][0] for key in owned[id]),
            total=sum(sizes[key][0] for key in below[id]),
            own_new=sum(sizes[key][0] for key in owned[id] if first[key] == id),
            total_new=sum(sizes[key][0] for key in below[id] if first[key] >= id),
            trainable=sum(sizes[key][1] for key in below[id]),
            own_trainable=sum(sizes[key][1] for key in owned[id]),
        )
        for id in range(len(owned))
    )


def parameters_in(data: TraceData, scopes: Scopes, tops: Sequence[int]) -> Parameters:
    """The parameters and buffers of several scopes and all inside them, each tensor once."""
    modules = {scope.module for top in tops for scope in scopes.rows[top : scopes.rows[top].end]}
    infos = {info.key: info for id in modules - {OUTSIDE} for info in data.modules[id].parameters}
    weights = [info for info in infos.values() if not info.buffer]
    total = sum(info.numel for info in weights)
    return Parameters(
        own=total, total=total, own_new=total, total_new=total,
        trainable=sum(info.numel for info in weights if info.trainable),
        bytes=sum(info.nbytes for info in weights),
        buffers=sum(info.numel for info in infos.values() if info.buffer),
    )  # fmt: skip


def is_opaque(data: TraceData) -> Mask:
    """Which ops stand for code whose own ops cannot be recorded."""
    mask: Mask = np.asarray(data.ops.flavour == _OPAQUE)
    return mask


def opaque_in_forward(data: TraceData) -> set[str]:
    """The names of opaque ops whose backward ops were recorded, as with the backend ``eager``."""
    ops, opaque = data.ops, is_opaque(data)
    back = np.flatnonzero((ops.phase == _BACKWARD) & (ops.forward >= 0))
    back = back[opaque[ops.forward[back]]]
    seen, unseen = (ops.name[ops.forward[back[of]]].tolist() for of in (~opaque[back], opaque[back]))
    return {data.names[name] for name in set(seen) - set(unseen)}


def foreign_parameters_text(data: TraceData) -> str:
    """How many trained tensors belong to no module, such as parameters of a plain class; empty for none."""
    training = data.info.get("training")
    optimizers = training.get("optimizers") if isinstance(training, dict) else None
    rows = [row for row in optimizers if isinstance(row, dict)] if isinstance(optimizers, list) else []
    counts = [row.get("foreign") for row in rows]
    foreign = sum(count for count in counts if type(count) is int)
    if foreign <= 0:
        return ""
    are = "tensor that is trained belongs" if foreign == 1 else "tensors that are trained belong"
    return f"{foreign:,} {are}"


def compiled_text(data: TraceData) -> str:
    """How many regions were compiled during the recording, and how long it took; empty without any."""
    count, spent = (int(data.info.get(name) or 0) for name in ("compilations", "compile_ns"))
    if not count and not spent:
        return ""
    regions = f"{count:,} region{'s' * (count > 1)}" if count else "backward passes"
    return f"{regions} in {time_text(spent)}"
