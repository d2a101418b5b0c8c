"""Who was trained: which parameters the forward read, which the backward reached, what cut the others off.

A parameter has a gradient if the recording holds one by its name, or if the backward reached an op it leads
to through values that require gradients: a gradient that was cleared, or handed to ``autograd.grad``, has no
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from sightline.analysis.problems.context import BACKWARD, FORWARD, Mask, ProblemContext
from sightline.trace.data import KINDS, REQUIRES_GRAD

#: How layers are chosen by chance.
_DRAWS: Final = frozenset("rand uniform_ bernoulli bernoulli_".split())
_COLLECTION: Final = 4  #: so many modules that differ only in a number, and no others, are a collection


@dataclass(frozen=True, slots=True)
class Idle:
    """A trainable parameter that got no gradient."""

    name: str  #: inside its module
    path: str  #: inside the model
    module: int
    values: tuple[int, ...]  #: the tensor and its versions
    used: bool  #: an op of the forward read it


class Training:
    """The parameters of the modules that were called and trained, and what became of them."""

    def __init__(self, context: ProblemContext) -> None:
        self._context = context
        self._data = context.data

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Trainable parameters without a gradient; none where the recording cannot tell."""
        ops = self._data.ops
        if not (self._context.complete and (self._context.aten & (ops.phase == BACKWARD)).any()):
            return ()
        found = {idle.path: idle for top in self._tops() for idle in self._idle_in(top)}
        return tuple(found.values())

    def _tops(self) -> list[int]:
        """The modules that were called from outside every module."""
        calls = self._data.calls
        found: list[int] = np.unique(calls.module[(calls.parent < 0) & (calls.phase == FORWARD)]).tolist()
        return found

    def _idle_in(self, top: int) -> Iterator[Idle]:
        """Those below a module, if it was trained at all: the other half of a pair is not, in its turn."""
        held = [(id, info) for id in self._below(top) for info in self._data.modules[id].parameters]
        wanted = {info.key: (id, info) for id, info in reversed(held) if info.trainable and not info.buffer}
        missing = {key: held for key, held in wanted.items() if not self._has_gradient(key)}
        if len(missing) == len(wanted):
            return
        for module, info in reversed(missing.values()):
            values = self._values_of(info.key)
            if all(self._context.meta(value).type == "Tensor" for value in values):
                yield Idle(info.name, info.path, module, values, bool(self._reads(values)))

    def _below(self, top: int) -> list[int]:
        """A module and all inside it."""
        modules = self._data.modules
        found = {top}
        for id, info in enumerate(modules):  # a module is known after the one that holds it
            if info.parent in found:
                found.add(id)
        return sorted(found)

    # -- parameters as values --------------------------------------------------------------------------

    @cached_property
    def _paths(self) -> dict[int, set[str]]:
        """Every name of every parameter, by its key: of tied ones there are several."""
        found: dict[int, set[str]] = {}
        for module in self._data.modules:
            for info in module.parameters:
                names = found.setdefault(info.key, {info.path})
                names.update(f"{alias}.{info.name}" if alias else info.name for alias in module.aliases)
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        """The values of every named parameter: the tensor, its versions, and what was taken by ``.data``."""
        values, names = self._data.values, self._data.names
        owner = {
            int(id): names[values.name[id]]
            for id in np.flatnonzero((values.kind == KINDS.index("parameter")) & (values.name >= 0))
        }
        shown = np.where(values.producer < 0, values.base, -1)
        source = np.where(values.previous >= 0, values.previous, shown)
        for id in np.flatnonzero(source >= 0).tolist():  # a version comes after the one it replaces
            if int(source[id]) in owner:
                owner.setdefault(id, owner[int(source[id])])
        found: dict[str, list[int]] = {}
        for id, name in owner.items():
            found.setdefault(name, []).append(id)
        return found

    def _values_of(self, key: int) -> tuple[int, ...]:
        return tuple(sorted({id for path in self._paths[key] for id in self._by_name.get(path, ())}))

    def _uses(self, values: Sequence[int]) -> list[int]:
        return sorted({op for value in values for op in self._context.users(value)})

    def _reads(self, values: Sequence[int]) -> list[int]:
        """The ops that read a parameter; not those that gave it a new value, as its initialisation did."""
        made = set(self._data.values.producer[list(values)].tolist())
        return [op for op in self._uses(values) if op not in made]

    def uses(self, idle: Idle) -> list[int]:
        """The forward ops that read a parameter."""
        return self._reads(idle.values)

    # -- gradients -------------------------------------------------------------------------------------

    @cached_property
    def _gradients(self) -> set[str]:
        values = self._data.values
        named = (values.kind == KINDS.index("gradient")) & (values.name >= 0)
        return {self._data.names[name].removesuffix(".grad") for name in values.name[named].tolist()}

    def _has_gradient(self, key: int) -> bool:
        if not self._gradients.isdisjoint(self._paths[key]):
            return True
        return any(self._reached[0][value] for value in self._values_of(key))

    @cached_property
    def _reached(self) -> tuple[list[bool], list[bool]]:
        """Of every value: whether a gradient came back to it, and whether it led to what the backward saw."""
        ops, values = self._data.ops, self._data.values
        backward = ops.forward[self._context.aten & (ops.phase == BACKWARD)]
        visited = np.zeros(len(ops), dtype=np.bool_)
        visited[backward[backward >= 0]] = True
        wants = self.wants.tolist()
        seen = visited.tolist()
        gradient, leads = [False] * len(values), [False] * len(values)
        offsets, inputs = ops.input_offsets.tolist(), ops.inputs.tolist()
        for op in np.flatnonzero(self._context.aten & (ops.phase != BACKWARD))[::-1].tolist():
            results = self._context.results(op)
            if seen[op] or any(leads[value] for value in results):
                back = seen[op] or any(gradient[value] for value in results)
                for value in inputs[offsets[op] : offsets[op + 1]]:
                    leads[value] = True
                    gradient[value] = gradient[value] or (back and wants[value])
        return gradient, leads

    @cached_property
    def wants(self) -> Mask:
        """The values that require a gradient."""
        return (self._data.values.flags & REQUIRES_GRAD).astype(np.bool_)

    @property
    def leads(self) -> list[bool]:
        """Of every value: whether it led to what a backward pass saw."""
        return self._reached[1]

    def cut(self, idle: Idle) -> int:
        """The op behind which a parameter's branch goes on towards the loss without gradients, or -1."""
        floating, leads = self._context.floating, self._reached[1]
        seen, ops = set(idle.values), self._reads(idle.values)
        while ops:
            after: list[int] = []
            for op in ops:
                made = [value for value in self._context.results(op) if floating[value]]
                if any(leads[value] and not self.wants[value] for value in made):
                    return op
                after += (value for value in made if self.wants[value] and value not in seen)
            seen.update(after)
            ops = self._uses(list(dict.fromkeys(after)))
        return -1

    def branch_end(self, idle: Idle) -> str:
        """Where what a parameter computes comes to an end: read by nothing, or by what has no gradient."""
        front, seen = self._reads(idle.values), set(idle.values)
        last = front[-1] if front else -1
        while front:
            last = front[-1]
            made = [value for op in front for value in self._context.results(op) if value not in seen]
            flat = [op for op in front if made and not any(map(self._floats, self._context.results(op)))]
            if flat:
                at = self._context.place(int(self._context.frames[flat[0]]))
                return f"{self._context.written(flat[0])} at {at} has none to pass on"
            seen.update(made)
            front = self._uses([value for value in made if self._floats(value)] or made)
        if last < 0:
            return ""
        at = self._context.place(int(self._context.frames[last]))
        return f"the result of {self._context.written(last)} at {at} is read by nothing"

    def _floats(self, value: int) -> bool:
        return bool(self._context.floating[value])

    # -- modules ---------------------------------------------------------------------------------------

    @cached_property
    def _ran(self) -> set[int]:
        """Modules that were called, and those that hold one that was."""
        found: set[int] = set()
        for module in np.unique(self._data.calls.module).tolist():
            while module >= 0 and module not in found:
                found.add(module)
                module = self._data.modules[module].parent
        return found

    def not_called(self, module: int) -> list[int]:
        """This module and those around it, as far as neither they nor anything in them was called."""
        found = []
        while module >= 0 and module not in self._ran:
            found.append(module)
            module = self._data.modules[module].parent
        return found

    def is_alternative(self, module: int) -> bool:
        """Whether a module of a list was passed over: others of it ran, or layers were dropped by chance."""
        modules = self._data.modules
        info = modules[module]
        beside = [id for id, other in enumerate(modules) if other.parent == info.parent and id != module]
        alike = [id for id in beside if modules[id].type == info.type]
        stem = info.path.rstrip("0123456789")
        numbered = info.path.rpartition(".")[2].isdigit() or (
            len(alike) + 1 >= _COLLECTION and all(modules[id].path.startswith(stem) for id in beside)
        )
        return numbered and (not self._ran.isdisjoint(alike) or self._draws(info.parent))

    def _draws(self, module: int) -> bool:
        """Whether the call around a module drew random numbers in its own code."""
        call = self.nearest_call(module)
        own = self._context.named(_DRAWS) & (self._data.ops.call == call)
        return call >= 0 and bool(own.any())

    def nearest_call(self, module: int) -> int:
        """The first call of a module, or of the nearest one around it that was called; else -1."""
        while module >= 0:
            calls = self._context.index.calls_of_module.get(module)
            if calls:
                return calls[0]
            module = self._data.modules[module].parent
        return -1
