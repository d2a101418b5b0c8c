"""Where a NaN or an infinity came from, read off the statistics of a recording.

It is decided here alone: `Trace.nonfinite`, `Trace.problems` and the live check name the first of `findings`,
in the same words.

The culprit is an op that has a NaN in a result while no input has one, or an infinity while no input has an
infinity or a NaN. What only hands memory on (views), what never wrote its memory (``empty``) and what was
told to make infinities (``masked_fill`` with ``-inf``) is none. A value that was not measured is taken for
finite, unless it came from one that was not: otherwise the op after an unmeasured view would be blamed. A
check alone keeps no numbers of what is finite: there a result without any is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from sightline.analysis.cost import leaf_ops
from sightline.analysis.lineage import Lineage, lineage_of
from sightline.notation import value_text
from sightline.patterns import op_matches, path_matches
from sightline.trace.data import FLAVOURS, KINDS, MUTATES, RAISED, UNFINISHED
from sightline.trace.forms import Form
from sightline.trace.index import Index, ModuleCall, Op, Value
from sightline.trace.user_frames import (
    api_call_of,
    argument_names,
    backward_suffix,
    location_text,
    origin_text,
    statistics_text,
    with_location,
)

NAN, INF = 1, 2
_PARAMETER: Final = KINDS.index("parameter")
_OUTSIDE: Final = ("input", "parameter", "buffer")
_GARBAGE: Final = 4  #: memory that was never written: whatever is in it, no op made it
_LINEAGE_DEPTH: Final = 4
_HALF: Final = "float16 ends at 65,504: compute this in float32, or use bfloat16"
_COMPILED: Final = 'its ops are compiled and were not seen: compiled="eager" shows which it was'

#: What holds garbage until it is written.
_UNWRITTEN: Final = ("empty*", "new_empty*", "_empty*", "resize_*", "set_*")
#: What writes only a part of the memory it changes.
_PARTIAL: Final = ("index_*_", "scatter*_", "masked_*_", "put_", "fill_diagonal_", "[[]]=")
#: What gives out what it was given, from memory the recording may not have seen.
_RELABELS: Final = ("lift", "lift_fresh*", "detach", "detach_", "alias", "clone")


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor the op was given: ``self f32[2, 4] = relu, net.py:8 in Net.forward; -1.2 … 3.4, mean 0.1``."""

    name: str  #: the argument it was passed as
    value: Value
    origin: str

    def __str__(self) -> str:
        numbers = statistics_text(self.value)
        if not numbers and _holds_floats(self.value.dtype) and measured_all(self.value._data):
            numbers = "not measured"
        return f"{self.name} {self.value} = {self.origin}" + (f"; {numbers}" if numbers else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """An op that made a NaN or an infinity."""

    op: Op
    value: Value  #: the first of its results that holds one

    @property
    def nans(self) -> int:
        numbers = self.value.stats
        return numbers.nans if numbers else 0

    @property
    def infs(self) -> int:
        numbers = self.value.stats
        return numbers.infs if numbers else 0

    @property
    def counts(self) -> str:
        """``3 NaN of 8``; also ``1 NaN and 2 Inf of 8``."""
        return counts_text(self.value)

    @property
    def module(self) -> str:
        """Label of the module it ran in, of a backward op that of its forward op; empty outside all."""
        module = self.op.module
        return module.label if module is not None else ""

    @property
    def place(self) -> str:
        """``net.py:9 in Net.forward (fc1)``; of a backward op, where its forward op is written."""
        return location_text(self.op)

    @property
    def inputs(self) -> list[Given]:
        """The tensors it was given, in order."""
        given = zip(argument_names(self.op), self.op.inputs, strict=False)
        return [Given(name, value, origin_text(value, self.op)) for name, value in given]

    @property
    def lineage(self) -> Lineage:
        """Where its inputs came from, a few ops back."""
        return lineage_of(self.value._data, self.value.id, depth=_LINEAGE_DEPTH)

    @property
    def proven(self) -> bool:
        """Whether what it was given was measured, as far as the run has made it; else it may be older."""
        return not measured_all(self.value._data) or not any(map(_unmeasured, self.op.inputs))

    def sentence(self) -> str:
        """What it did: ``log made 3 NaN of 8 in f32[2, 4]``; or that its result is the first measured."""
        did, more = ("made", "") if self.proven else ("returned", ", the first that was measured")
        return f"{self.op.name}{backward_suffix(self.op)} {did} {self.counts} in {self.value}{more}"

    def headline(self) -> str:
        """With its place: ``log made 3 NaN of 8 in f32[2, 4], net.py:9 in Net.forward (fc1)``."""
        return with_location(self.sentence(), self.op)

    @property
    def hint(self) -> str:
        """What helps with it: the end of float16, or how to see into compiled code; else empty."""
        if self.op.flavour != "opaque":
            return _HALF if self.infs and not self.nans and self.value.dtype == "float16" else ""
        value = self.value
        returned = value.requires_grad or value.id in value._data.raw.calls.outputs
        # What is first seen after compiled code has run is taken for a result of it.
        return _COMPILED if returned else f"{_COMPILED}, or that it came from outside"

    def text(self) -> str:
        """The sentence, a line for each input, and what would tell more."""
        lines = [*(str(given) for given in self.inputs), *([self.hint] if self.hint else [])]
        return "\n".join([self.headline(), *(f"  {line}" for line in lines)])


def counts_text(value: Value) -> str:
    """How many elements of a value are not finite: ``3 NaN of 8``."""
    numbers = value.stats
    pairs = [(numbers.nans, "NaN"), (numbers.infs, "Inf")] if numbers else []
    told = [f"{count:,} {name}" for count, name in pairs if count]
    parts = 2 if value.dtype.startswith("complex") else 1  # real and imaginary ones are counted
    return f"{' and '.join(told) or '0 NaN'} of {parts * value.meta.numel:,}"


def first_nonfinite(index: Index, allow: Sequence[str] = ()) -> Finding | None:
    """The first op that made a NaN or an infinity, if any was measured."""
    return next(_culprits(_Search(index, _globs(index, allow))), None)


def findings(index: Index, allow: Sequence[str] = ()) -> list[Finding]:
    """Every op that made a NaN or an infinity out of inputs that had none, in the order they ran.

    ``allow`` are globs on op names, with or without their overload or namespace, and on module paths; without
    any, those that the recording's own check allowed.
    """
    return list(_culprits(_Search(index, _globs(index, allow))))


def lasting(index: Index) -> tuple[list[Finding], list[Finding]]:
    """All findings, and those of which something is left when the run ends.

    A result that nothing more is made of is an end. What a softmax, a ``where`` or a cast to integers has
    taken away since is not left.
    """
    search = _Search(index, _globs(index, ()))
    found = list(_culprits(search))
    return found, [each for each in found if search.is_left(each.value.id)]


def _globs(index: Index, allow: Sequence[str]) -> tuple[str, ...]:
    return tuple(allow) or tuple(index.raw.info.get("allow") or ())


def _culprits(search: _Search) -> Iterator[Finding]:
    index = search.index
    if not ((index.raw.stats.nans > 0) | (index.raw.stats.infs > 0)).any():
        return
    for op, leaf in enumerate(leaf_ops(index.raw).tolist()):
        found = search.step(op)
        if leaf and found >= 0:
            yield Finding(index.ops[op], index.values[found])


class _Search:
    """One walk over the ops, in order, that knows of each value what may be in it."""

    def __init__(self, index: Index, allow: Sequence[str]) -> None:
        self.index = index
        self._data = index.raw
        self._allow = tuple(allow)
        self._all = measured_all(index)
        self._checked = not self._all and bool(index.raw.info.get("check"))
        values, ops = index.raw.values, index.raw.ops
        self._outputs, self._output_starts = ops.outputs.tolist(), ops.output_offsets.tolist()
        self._measured = measured_states(index)
        self._bases, self._previous = values.base.tolist(), values.previous.tolist()
        self._floating = _floating(index)
        self._inputs, self._input_starts = ops.inputs.tolist(), ops.input_offsets.tolist()
        self._mutates = (ops.flags & MUTATES).astype(bool).tolist()
        order = np.argsort(values.producer, kind="stable")
        self._made: list[int] = order.tolist()
        self._starts: list[int] = np.searchsorted(values.producer[order], np.arange(len(ops) + 1)).tolist()
        self._opaque = (ops.flavour == FLAVOURS.index("opaque")).tolist()
        self._returned = set(index.raw.calls.outputs.tolist())
        self._kinds = values.kind.tolist()
        self._finite: set[int] = set()  # what a check has looked at, and keeps no numbers of
        self._states: dict[int, int] = {}
        for value in self._made[: self._starts[0]]:  # what was there before
            self._states[value] = self._derived(value, 0, keeps=True)

    def step(self, op: int) -> int:
        """What an op leaves in its results; the first of them it is to blame for, or -1."""
        given = 0
        for value in self._inputs[self._input_starts[op] : self._input_starts[op + 1]]:
            given |= self._states.get(value, 0) & (NAN | INF)
        known_for = self._named[int(self._data.ops.name[op])]
        looked_at = self._looked_at(op)
        blamed = -1
        for value in self._made[self._starts[op] : self._starts[op + 1]]:
            if known_for == "unwritten":
                self._states[value] = _GARBAGE
                continue
            view = self._bases[value] >= 0 and not self._mutates[op]
            if value in looked_at and not view and value not in self._measured:
                self._states[value] = 0
                self._finite.add(value)
                continue
            state = self._derived(value, given, keeps=view or known_for == "partial")
            self._states[value] = state
            # Whatever is in a view was there before.
            if blamed < 0 and state & (NAN | INF) and not view and known_for != "relabels":
                if self._to_blame(op, value, given):
                    blamed = value
        return blamed

    def _looked_at(self, op: int) -> list[int]:
        """The results whose numbers would be there if they were not finite: where a check alone has run."""
        if not self._checked or self._opaque[op]:
            return []
        found: list[int] = self._outputs[self._output_starts[op] : self._output_starts[op + 1]]
        return found

    def is_left(self, value: int) -> bool:
        """Whether it is there at the end, or something not finite that was made of it; after all steps."""
        front, seen = [value], {value}
        while front:
            each = front.pop()
            users = [op for op in self.index.consumers(each) if self._leaf[op] and not self._only_looks[op]]
            if not users and each not in self._beside:
                return True
            made = {one for op in users for one in self._made[self._starts[op] : self._starts[op + 1]]}
            bad = [one for one in made - seen if self._states.get(one, 0) & (NAN | INF)]
            seen.update(bad)
            front += bad
        return False

    @cached_property
    def _beside(self) -> set[int]:
        """What ops return beside their first result: where nothing reads it, it was kept for the backward."""
        firsts = {self._outputs[start] for start, end in pairwise(self._output_starts) if start < end}
        return set(self._outputs) - firsts

    @cached_property
    def _only_looks(self) -> list[bool]:
        """Ops that read the shape of what they are given, and not its numbers: ``ones_like``."""
        looks = np.array(
            [fnmatchcase(name, "*_like*") for name in self._data.names] or [False], dtype=np.bool_
        )
        found: list[bool] = looks[self._data.ops.name].tolist()
        return found

    @cached_property
    def _leaf(self) -> list[bool]:
        ended = (self._data.ops.flags & (RAISED | UNFINISHED)) == 0
        found: list[bool] = (leaf_ops(self._data) & ended).tolist()
        return found

    def _derived(self, value: int, given: int, *, keeps: bool) -> int:
        """What is in a value: as measured, else what is in the memory it shares, else what went into it.

        ``keeps`` says that memory may be left as it was: what is found there, nobody may have written.
        """
        base, previous = self._bases[value], self._previous[value]
        shared = self._states.get(base, 0) | self._states.get(previous, 0)
        measured = self._measured.get(value)
        if measured is not None:
            return (measured & given) | _GARBAGE if measured and keeps and shared & _GARBAGE else measured
        if not self._floating[value]:
            return 0
        return shared if base >= 0 else given | shared

    def _to_blame(self, op: int, value: int, given: int) -> bool:
        made = self._measured.get(value, 0)
        if self._opaque[op] and value not in self._returned:
            made &= NAN  # it may be a mask that was there before, and is first seen now
        if self._was_unknown(self._previous[value]):
            made &= NAN  # what was changed in place may have held infinities: nobody has looked
        new = 0 if given & NAN else made & NAN if given & INF else made
        return bool(new & ~self._on_purpose(op)) and not self._allowed(op)

    def _was_unknown(self, before: int) -> bool:
        """Whether nobody has looked at what an op changed in place; parameters are no masks."""
        if before < 0 or before in self._measured or self._kinds[before] == _PARAMETER:
            return False
        return not self._checked or before not in self._finite

    def _on_purpose(self, op: int) -> int:
        """What an op was told to make: an infinity or a NaN among its plain arguments."""
        ops = self._data.ops
        told = 0
        for each in (
            op,
            int(ops.parent[op]),
        ):  # the call the user wrote may hold it where the aten op does not
            if each >= 0:
                told |= _plain_states(self._data.forms[int(ops.form[each])])
        return told

    @cached_property
    def _named(self) -> list[str]:
        """For each name of the trace, what an op of that name is known for."""
        kinds = []
        for name in self._data.names:
            bare = {name.partition(".")[0], name.rpartition(".")[2]}
            known = (("unwritten", _UNWRITTEN), ("partial", _PARTIAL), ("relabels", _RELABELS))
            fits = (kind for kind, globs in known if any(fnmatchcase(n, g) for n in bare for g in globs))
            kinds.append(next(fits, ""))
        return kinds

    def _allowed(self, op: int) -> bool:
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
class Brought:
    """A parameter, a buffer or an input that held a NaN before any op ran."""

    value: Value
    seen: Value  #: itself, or the view of it that was measured

    def __str__(self) -> str:
        name = self.value.name or value_text(self.value.id)
        return f"{self.value.kind} {name} came with {counts_text(self.seen)} in {self.seen}"


def brought(index: Index) -> list[Brought]:
    """What held a NaN before any op ran."""
    stats = index.raw.stats
    found: dict[int, Brought] = {}
    for id in stats.value[stats.nans > 0].tolist():
        seen = root = index.values[id]
        while root.base is not None and root.previous is None:
            root = root.base
        own = root.id == id or root.stats is None
        if own and root.producer is None and root.previous is None and root.kind in _OUTSIDE:
            found.setdefault(root.id, Brought(root, seen))
    return list(found.values())


def call_text(call: ModuleCall, value: Value) -> str:
    """``blocks.0 returned 3 NaN of 4 in f32[4], out of inputs without``; see `first_call`."""
    return f"{call.module.label} returned {counts_text(value)} in {value}, out of inputs without"


def first_call(index: Index) -> tuple[ModuleCall, Value] | None:
    """The first module call, and its result, that gave back a NaN or an infinity that no recorded op made.

    For recordings without ops, and for what runs where they are not seen.
    """
    states, values, calls = measured_states(index), index.raw.values, index.raw.calls
    bad = {value for value, state in states.items() if state and values.producer[value] < 0}
    if not bad:
        return None
    for id in np.argsort(calls.order, kind="stable").tolist():
        call = index.module_calls[id]
        given = any(states.get(value.id, 0) for value in call.inputs)
        returned = next((value for value in call.outputs if value.id in bad), None)
        if returned is not None and not given:
            return call, returned
    return None


def reached_from(index: Index, value: int) -> set[int]:
    """Every value that a value went into, directly or through others."""
    ops, values = index.raw.ops, index.raw.values
    reached = {value}
    order = np.argsort(values.producer, kind="stable")
    made, starts = order.tolist(), np.searchsorted(values.producer[order], np.arange(len(ops) + 1)).tolist()
    inputs, bounds = ops.inputs.tolist(), ops.input_offsets.tolist()
    for op in range(int(values.producer[value]) + 1, len(ops)):
        if starts[op] < starts[op + 1] and not reached.isdisjoint(inputs[bounds[op] : bounds[op + 1]]):
            reached.update(made[starts[op] : starts[op + 1]])
    reached.discard(value)
    return reached


def measured_all(index: Index) -> bool:
    """Whether what is finite was measured, too: a check alone keeps only what is not, and what led to it."""
    stats, info = index.raw.stats, index.raw.info
    if info.get("check") and "stats" not in (info.get("asked") or ("stats",)):
        return False
    return bool(((stats.nans == 0) & (stats.infs == 0)).any())


def measured_states(index: Index) -> dict[int, int]:
    """For each value that was measured, whether it held a NaN or an infinity."""
    stats = index.raw.stats
    states = (stats.nans > 0) * NAN + (stats.infs > 0) * INF
    return dict(zip(stats.value.tolist(), states.tolist(), strict=True))


def _unmeasured(value: Value) -> bool:
    """Whether the run has made a value, and nobody knows what is in it or in what it is a view of."""
    if not _holds_floats(value.dtype) or value.producer is None or value.stats is not None:
        return False
    return value.base is None or _unmeasured(value.base)


def _floating(index: Index) -> list[bool]:
    metas = [_holds_floats(meta.dtype) for meta in index.raw.metas]
    return [metas[meta] for meta in index.raw.values.meta.tolist()]


def _holds_floats(dtype: str) -> bool:
    return dtype.removeprefix("torch.").startswith(("float", "bfloat", "complex"))


def _plain_states(form: Form) -> int:
    """The numbers among the plain arguments of a call that are not finite."""
    found = 0
    for _, item in form.leaves():
        if isinstance(item, float | complex):
            parts = (item.real, item.imag)
            found |= NAN * any(map(math.isnan, parts)) | INF * any(map(math.isinf, parts))
    return found
