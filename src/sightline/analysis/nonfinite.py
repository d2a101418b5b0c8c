"""Where a NaN or an infinity came from, derived from the statistics of a recording.

This module alone decides: `Trace.nonfinite`, `Trace.problems` and the check of a running block report the
first of `findings`, in the same words.

An op is to blame if a result has a NaN and no input has one, or an infinity and all inputs are finite. Views,
memory that was never written (``empty``) and infinities that were requested (``masked_fill`` with ``-inf``)
are not blamed. A value without statistics counts as finite unless its inputs are not: otherwise the op after
an unmeasured view would be blamed. Where only a check ran, statistics of finite results are not stored: a
result without statistics is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.cost import leaf_ops
from sightline.analysis.lineage import Lineage, lineage_of
from sightline.analysis.op_text import (
    api_call_of,
    argument_names,
    backward_suffix,
    location_text,
    origin_text,
    statistics_text,
    with_location,
)
from sightline.data.index import Index, ModuleCall, Op, Value
from sightline.data.nonfinite_rule import INF, NAN, argument_states, new_states
from sightline.data.op_groups import UNINITIALIZED
from sightline.data.trace_data import (
    FLAVOURS,
    KINDS,
    MUTATES,
    RAISED,
    REQUIRES_GRAD,
    UNFINISHED,
    TraceData,
)
from sightline.hints import Hint
from sightline.notation import value_text
from sightline.patterns import op_matches, path_matches

_PARAMETER: Final = KINDS.index("parameter")
_EXTERNAL_KINDS: Final = ("input", "parameter", "buffer")
_GARBAGE: Final = 4  #: a further bit of a state: memory that no op has written
_LINEAGE_DEPTH: Final = 4
#: Ops whose only infinity out of finite numbers is the negative one: the statistics do not count signs.
_LOGARITHMS: Final = frozenset("log log_ log2 log2_ log10 log10_".split())
_FLOAT16_HINT: Final = "float16 ends at 65,504: compute this in float32, or use bfloat16"

#: Globs on the names of ops that read the shape of a tensor, and none of its numbers.
_SHAPE_ONLY: Final = ("*_like", "new_zeros", "new_ones", "new_full", "new_empty*", "backward")
#: Globs on op names, by how an op treats memory. ``set_`` takes over memory the recording may not know.
_UNWRITTEN, _PARTIAL, _COPY = "unwritten", "partial", "copy"
_MEMORY_GLOBS: Final = {
    _UNWRITTEN: (*UNINITIALIZED, "set_"),
    _PARTIAL: ("index_*_", "scatter*_", "masked_*_", "put_", "fill_diagonal_", "[[]]="),
    _COPY: ("lift", "lift_fresh*", "detach", "detach_", "alias", "clone"),
}


@dataclass(frozen=True, slots=True)
class InputNote:
    """An input of the op: ``self f32[2, 4] = relu, net.py:8 in Net.forward; -1.2 … 3.4, mean 0.1``."""

    name: str  #: the argument it was passed as
    value: Value
    origin: str

    def __str__(self) -> str:
        statistics = statistics_text(self.value)
        if not statistics and _holds_floats(self.value.dtype) and measured_all(self.value._data):
            statistics = "not measured"
        return f"{self.name} {self.value} = {self.origin}" + (f"; {statistics}" if statistics else "")


@dataclass(frozen=True, slots=True)
class NonFiniteOp:
    """An op that made a NaN or an infinity."""

    op: Op
    value: Value  #: the first of its results that holds one

    @property
    def nans(self) -> int:
        return self.value.stats.nans if self.value.stats else 0

    @property
    def infs(self) -> int:
        return self.value.stats.infs if self.value.stats else 0

    @property
    def counts(self) -> str:
        """``3 NaN of 8``, ``1 NaN and 2 Inf of 8``; for a logarithm ``2 -Inf of 8``."""
        return counts_text(self.value, "-Inf" if self.op.name.partition(".")[0] in _LOGARITHMS else "Inf")

    @property
    def module(self) -> str:
        """Label of the module it ran in (for a backward op, its forward op's); empty outside modules."""
        module = self.op.module
        return module.label if module is not None else ""

    @property
    def place(self) -> str:
        """``net.py:9 in Net.forward (fc1)``; for a backward op, the line of its forward op."""
        return location_text(self.op)

    @property
    def inputs(self) -> list[InputNote]:
        """Its input tensors, in order."""
        inputs = zip(argument_names(self.op), self.op.inputs, strict=False)
        return [InputNote(name, value, origin_text(value, self.op)) for name, value in inputs]

    @property
    def lineage(self) -> Lineage:
        """Where its inputs came from, a few ops back."""
        return lineage_of(self.value._data, self.value.id, depth=_LINEAGE_DEPTH)

    @property
    def proven(self) -> bool:
        """Whether all inputs that the run computed were measured; if not, the fault may be older."""
        return not measured_all(self.value._data) or not any(map(_unmeasured, self.op.inputs))

    def sentence(self) -> str:
        """``log made 3 NaN of 8 in f32[2, 4]``; if not `proven`, that its result is the first measured."""
        verb, more = ("made", "") if self.proven else ("returned", ", the first that was measured")
        return f"{self.op.name}{backward_suffix(self.op)} {verb} {self.counts} in {self.value}{more}"

    def headline(self) -> str:
        """With its place: ``log made 3 NaN of 8 in f32[2, 4], net.py:9 in Net.forward (fc1)``."""
        return with_location(self.sentence(), self.op)

    @property
    def hint(self) -> str:
        """A way out: the range of float16, or how to see into compiled code; else empty."""
        if self.op.flavour != "opaque":
            overflow = self.infs and not self.nans and self.value.dtype == "float16"
            return _FLOAT16_HINT if overflow else ""
        value = self.value
        returned = value.requires_grad or value.id in value._data.raw.calls.outputs
        # A tensor first seen after compiled code has run counts as a result of it.
        hint = f"{Hint.recording('compiled', 'eager')} shows which it was"
        outside = "" if returned else ", or that it came from outside"
        return f"its ops are compiled and were not seen: {hint}{outside}"

    def text(self) -> str:
        """The headline, a line for each input, and the hint."""
        lines = [*map(str, self.inputs), *([self.hint] if self.hint else [])]
        return "\n".join([self.headline(), *(f"  {line}" for line in lines)])


def counts_text(value: Value, infinity: str = "Inf") -> str:
    """How many elements of a value are not finite: ``3 NaN of 8``."""
    stats = value.stats
    pairs = [(stats.nans, "NaN"), (stats.infs, infinity)] if stats else []
    counts = [f"{count:,} {name}" for count, name in pairs if count]
    parts = 2 if value.dtype.startswith("complex") else 1  # real and imaginary parts are counted
    return f"{' and '.join(counts) or '0 NaN'} of {parts * value.meta.numel:,}"


def first_nonfinite(index: Index, allow: Sequence[str] = ()) -> NonFiniteOp | None:
    """The first op that made a NaN or an infinity, if any was measured."""
    return next(_Search(index, allow).run(), None)


def findings(index: Index, allow: Sequence[str] = ()) -> list[NonFiniteOp]:
    """Every op that made a NaN or an infinity out of inputs that had none, in the order they ran.

    ``allow`` are globs on op names, with or without their overload or namespace, and on module paths; without
    any, those that the recording's own check allowed.
    """
    return list(_Search(index, allow).run())


def serious_findings(index: Index) -> tuple[bool, list[NonFiniteOp]]:
    """Whether any op made a NaN or an infinity, and those to report as a problem: at most three.

    It is a problem if a check was on, or if a NaN or an infinity that came from one is left at the end of
    the run: a softmax, a ``where`` or a cast to integers may have removed all of it. A loss scaler handles
    those in gradients, unless a weight has one of them. Reported are the first of all, the first that lasts,
    and the first NaN that does.
    """
    search = _Search(index, ())
    every = list(search.run())
    if index.raw.info.get("check"):
        lasting = every
    else:
        scaled = any("_amp_" in name.partition(".")[0] for name in index.raw.names)
        handled = search.in_gradients(every) if scaled else set()
        lasting = [each for each in every if each.op.id not in handled and search.lasts(each.value.id)]
    if not lasting:
        return bool(every), []
    first_nan = next((each for each in lasting if each.nans), lasting[0])
    chosen = {each.op.id: each for each in (every[0], lasting[0], first_nan)}
    return True, [chosen[op] for op in sorted(chosen)]


def carriers(index: Index, value: int) -> set[int]:
    """The values whose NaN or infinity was computed from that of a value, and the value itself."""
    search = _Search(index, ())
    for _ in search.run():
        pass
    return search.carriers(value)


class _Search:
    """One walk over the ops, in order, that keeps the state of each value: the bits NAN, INF and garbage."""

    def __init__(self, index: Index, allow: Sequence[str]) -> None:
        self.index = index
        self._data = index.raw
        self._allow = tuple(allow) or tuple(index.raw.info.get("allow") or ())
        self._only_checked = not measured_all(index) and bool(index.raw.info.get("check"))
        values, ops = index.raw.values, index.raw.ops
        self._outputs, self._output_starts = ops.outputs.tolist(), ops.output_offsets.tolist()
        self._measured = measured_states(index)
        self._bases, self._previous = values.base.tolist(), values.previous.tolist()
        self._floating = _floating(index)
        self._inputs, self._input_starts = ops.inputs.tolist(), ops.input_offsets.tolist()
        self._mutates = (ops.flags & MUTATES).astype(bool).tolist()
        order = np.argsort(values.producer, kind="stable")
        self._produced: list[int] = order.tolist()  # values by the op that produced them
        self._starts: list[int] = np.searchsorted(values.producer[order], np.arange(len(ops) + 1)).tolist()
        self._opaque = (ops.flavour == FLAVOURS.index("opaque")).tolist()
        self._returned = set(index.raw.calls.outputs.tolist())
        self._kinds = values.kind.tolist()
        self._checked_values: set[int] = set()  # checked and finite, without statistics
        self._states: dict[int, int] = {}
        for value in self._produced[: self._starts[0]]:  # values that no op produced
            self._states[value] = self._state(value, 0, keeps=True)

    def run(self) -> Iterator[NonFiniteOp]:
        """The ops to blame, in the order they ran."""
        stats = self._data.stats
        if not ((stats.nans > 0) | (stats.infs > 0)).any():
            return
        for op, leaf in enumerate(leaf_ops(self._data).tolist()):
            value = self._step(op)
            if leaf and value >= 0:
                yield NonFiniteOp(self.index.ops[op], self.index.values[value])

    def lasts(self, value: int) -> bool:
        """After `run`: whether a value, or something not finite computed from it, is left at the end."""
        return any(each not in self._side_outputs and not self._users(each) for each in self._carriers(value))

    def carriers(self, value: int) -> set[int]:
        """After `run`: the values whose NaN or infinity was computed from that of a value, and itself.

        Only an op that reads the numbers of its input passes them on: the gradient of a loss begins with
        ``ones_like(loss)``, which is finite whatever the loss is.
        """
        return set(self._carriers(value))

    def in_gradients(self, findings: Sequence[NonFiniteOp]) -> set[int]:
        """After `run`: the ops of findings in gradients, or in numbers made of them, as clipping makes NaN.

        None if a weight holds one: its step was taken.
        """
        own = [each for each in findings if each.op.phase != "forward"]
        reached = set(self._carriers(*(each.value.id for each in own)))
        values = self._data.values
        weights = set(values.storage[(values.kind == _PARAMETER) & (values.storage >= 0)].tolist())
        if any(self._measured.get(each) and int(values.storage[each]) in weights for each in reached):
            return set()
        ops = {each.op.id for each in own}
        for each in findings:
            bad = {value.id for value in each.op.inputs if self._states.get(value.id, 0) & (NAN | INF)}
            if bad and bad <= reached:
                ops.add(each.op.id)
        return ops

    def _carriers(self, *values: int) -> Iterator[int]:
        stack, seen = list(values), set(values)
        while stack:
            each = stack.pop()
            yield each
            results = {one for op in self._users(each) for one in self._results(op)}
            bad = [one for one in results - seen if self._states.get(one, 0) & (NAN | INF)]
            seen.update(bad)
            stack += bad

    def _users(self, value: int) -> list[int]:
        """The ops that read the numbers of a value."""
        return [op for op in self.index.consumers(value) if self._leaf[op] and not self._shape_only[op]]

    def _step(self, op: int) -> int:
        """Set the states of an op's results; the first one it is to blame for, or -1."""
        inputs = 0
        for value in self._inputs[self._input_starts[op] : self._input_starts[op + 1]]:
            inputs |= self._states.get(value, 0) & (NAN | INF)
        memory = self._memory[int(self._data.ops.name[op])]
        # Where only a check ran, a result that it saw would have statistics if it were not finite.
        checked: list[int] = []
        if self._only_checked and not self._opaque[op]:
            checked = self._outputs[self._output_starts[op] : self._output_starts[op + 1]]
        blamed = -1
        for value in self._results(op):
            if memory == _UNWRITTEN:
                self._states[value] = _GARBAGE
                continue
            view = self._bases[value] >= 0 and not self._mutates[op]
            if value in checked and not view and value not in self._measured:
                self._states[value] = 0
                self._checked_values.add(value)
                continue
            state = self._state(value, inputs, keeps=view or memory == _PARTIAL)
            self._states[value] = state
            # A view holds a NaN that its base already held.
            if blamed < 0 and state & (NAN | INF) and not view and memory != _COPY:
                if self._to_blame(op, value, inputs):
                    blamed = value
        return blamed

    def _results(self, op: int) -> list[int]:
        return self._produced[self._starts[op] : self._starts[op + 1]]

    @cached_property
    def _side_outputs(self) -> set[int]:
        """All but the first output of each op: one that nothing reads was saved for the backward pass."""
        firsts = {self._outputs[start] for start, end in pairwise(self._output_starts) if start < end}
        return set(self._outputs) - firsts

    @cached_property
    def _shape_only(self) -> list[bool]:
        """Whether an op reads only the shape of its input: ``ones_like``, and ``backward`` of a loss."""
        bare = [(name.partition(".")[0], name.rpartition(".")[2]) for name in self._data.names]
        names = [any(fnmatchcase(one, glob) for one in each for glob in _SHAPE_ONLY) for each in bare]
        names = names or [False]
        mask: list[bool] = np.array(names, dtype=np.bool_)[self._data.ops.name].tolist()
        return mask

    @cached_property
    def _leaf(self) -> list[bool]:
        ended = (self._data.ops.flags & (RAISED | UNFINISHED)) == 0
        mask: list[bool] = (leaf_ops(self._data) & ended).tolist()
        return mask

    def _state(self, value: int, inputs: int, *, keeps: bool) -> int:
        """The state of a value: as measured, else of the memory it shares, else of its inputs.

        ``keeps`` says that the op may leave parts of that memory as they were, which may be garbage.
        """
        base, previous = self._bases[value], self._previous[value]
        shared = self._states.get(base, 0) | self._states.get(previous, 0)
        measured = self._measured.get(value)
        if measured is not None:
            return (measured & inputs) | _GARBAGE if measured and keeps and shared & _GARBAGE else measured
        if not self._floating[value]:
            return 0
        return shared if base >= 0 else inputs | shared

    def _to_blame(self, op: int, value: int, inputs: int) -> bool:
        """Whether an op made the NaN or infinity of a result: no input has one, and it was not requested."""
        outputs, previous = self._measured.get(value, 0), self._previous[value]
        if self._opaque[op] and value not in self._returned:
            outputs &= NAN  # it may be an older mask that is only seen now
        if previous >= 0 and previous not in self._measured and self._kinds[previous] != _PARAMETER:
            # The unmeasured tensor it changed in place may have held infinities; parameters are never masks.
            if not self._only_checked or previous not in self._checked_values:
                outputs &= NAN
        ops = self._data.ops
        requested = 0  # by a plain argument of the op, or of the API call around it
        for each in (op, int(ops.parent[op])):
            if each >= 0:
                form = self._data.forms[int(ops.form[each])]
                requested |= argument_states((form.args, form.kwargs or {}))
        return bool(new_states(outputs, inputs, requested)) and not self._allowed(op)

    @cached_property
    def _memory(self) -> list[str]:
        """For each name of the recording, the key of `_MEMORY_GLOBS` that fits, or an empty string."""
        kinds = []
        for name in self._data.names:
            bare = {name.partition(".")[0], name.rpartition(".")[2]}
            fits = (
                kind
                for kind, globs in _MEMORY_GLOBS.items()
                if any(fnmatchcase(one, glob) for one in bare for glob in globs)
            )
            kinds.append(next(fits, ""))
        return kinds

    def _allowed(self, op: int) -> bool:
        """Whether a glob of the check allows an op, its API call or its module."""
        if not self._allow:
            return False
        row = self.index.ops[op]
        rows = (row, api_call_of(row))
        module = row.module
        paths = () if module is None else module.aliases or (module.path,)
        return any(
            any(op_matches(glob, each.name, each.level) for each in rows)
            or any(path_matches(glob, path) for path in paths if path)
            or (module is not None and module.label == glob)
            for glob in self._allow
        )


@dataclass(frozen=True, slots=True)
class NonFiniteSource:
    """A parameter, a buffer or an input that held a NaN before any op ran."""

    value: Value
    measured: Value  #: itself, or the view of it that was measured

    def __str__(self) -> str:
        name = self.value.name or value_text(self.value.id)
        return f"{self.value.kind} {name} came with {counts_text(self.measured)} in {self.measured}"


def _used(data: TraceData) -> NDArray[np.bool_]:
    """The values that an op or a module call reads or returns; others are only held meanwhile."""
    used = np.zeros(len(data.values), dtype=np.bool_)
    for rows in (data.ops, data.calls):
        for ids in (rows.inputs, rows.outputs):
            used[ids[ids >= 0]] = True
    return used


def nonfinite_sources(index: Index) -> list[NonFiniteSource]:
    """The values that held a NaN before any op ran, and that an op or a module reads.

    In the recording of one step, gradients of the step before may only be held until they are cleared.
    """
    stats, used = index.raw.stats, _used(index.raw)
    sources: dict[int, NonFiniteSource] = {}
    for id in stats.value[stats.nans > 0].tolist():
        measured = root = index.values[id]
        while root.base is not None and root.previous is None:
            root = root.base
        own = root.id == id or root.stats is None
        before = root.producer is None and root.previous is None and root.kind in _EXTERNAL_KINDS
        if own and before and (used[id] or used[root.id]):
            sources.setdefault(root.id, NonFiniteSource(root, measured))
    return list(sources.values())


def call_text(call: ModuleCall, value: Value) -> str:
    """``blocks.0 returned 3 NaN of 4 in f32[4], out of inputs without``; see `first_call`."""
    return f"{call.module.label} returned {counts_text(value)} in {value}, out of inputs without"


def first_call(index: Index) -> tuple[ModuleCall, Value] | None:
    """The first module call that returned a NaN or an infinity no recorded op made, and that result.

    For recordings without ops, and for modules whose ops were not seen.
    """
    states, values, calls = measured_states(index), index.raw.values, index.raw.calls
    bad = {value for value, state in states.items() if state and values.producer[value] < 0}
    if not bad:
        return None
    for id in np.argsort(calls.order, kind="stable").tolist():
        call = index.module_calls[id]
        had_bad_input = any(states.get(value.id, 0) for value in call.inputs)
        returned = next((value for value in call.outputs if value.id in bad), None)
        if returned is not None and not had_bad_input:
            return call, returned
    return None


def nonfinite_reported(index: Index) -> bool:
    """Whether a NaN or an infinity is worth a look: something made one, or a loss or a gradient holds one.

    Masks are not, nor memory that was overwritten before it was read, nor one that an op such as ``where``
    has left out of all that was computed from it.
    """
    stats, values = index.raw.stats, index.raw.values
    bad = stats.value[((stats.nans > 0) | (stats.infs > 0)) & _used(index.raw)[stats.value]]
    single = np.array([meta.numel == 1 for meta in index.raw.metas], dtype=np.bool_)[values.meta[bad]]
    losses = single & ((values.flags[bad] & REQUIRES_GRAD) != 0)
    gradients = (values.kind[bad] == KINDS.index("gradient")) & (values.name[bad] >= 0)
    if (losses | gradients).any():
        return True
    any_op, serious = serious_findings(index)
    return bool(serious or nonfinite_sources(index) or (not any_op and first_call(index)))


def measured_all(index: Index) -> bool:
    """Whether finite values were measured too: a check alone stores only the others and their inputs."""
    stats, info = index.raw.stats, index.raw.info
    if info.get("check") and "stats" not in (info.get("asked") or ("stats",)):
        return False
    return bool(((stats.nans == 0) & (stats.infs == 0)).any())


def measured_states(index: Index) -> dict[int, int]:
    """The state of each measured value: the bits NAN and INF."""
    stats = index.raw.stats
    states = (stats.nans > 0) * NAN + (stats.infs > 0) * INF
    return dict(zip(stats.value.tolist(), states.tolist(), strict=True))


def _unmeasured(value: Value) -> bool:
    """Whether an op produced a value, and neither it nor the tensor it is a view of was measured."""
    if not _holds_floats(value.dtype) or value.producer is None or value.stats is not None:
        return False
    return value.base is None or _unmeasured(value.base)


def _floating(index: Index) -> list[bool]:
    metas = [_holds_floats(meta.dtype) for meta in index.raw.metas]
    return [metas[meta] for meta in index.raw.values.meta.tolist()]


def _holds_floats(dtype: str) -> bool:
    return dtype.removeprefix("torch.").startswith(("float", "bfloat", "complex"))
