"""Which parameters were trained: read by the forward, reached by the backward, or cut off in between.

A parameter has a gradient if the recording holds one by its name, or if the backward reached an op it leads
to through values that require gradients: a gradient that was cleared, or handed to ``autograd.grad``, has no
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from sightline.analysis.problems.context import BACKWARD, FORWARD, Mask, ProblemContext
from sightline.analysis.problems.training_loop_events import LoopRecord, parameter_aliases
from sightline.data.trace_data import KINDS, MUTATES, REQUIRES_GRAD

_WEIGHTS: Final = (KINDS.index("parameter"), KINDS.index("buffer"))
#: Ops by which layers are dropped at random.
_DRAWS: Final = frozenset("rand uniform_ bernoulli bernoulli_".split())
_COLLECTION: Final = 4  #: so many siblings that differ only in a number are a collection


@dataclass(frozen=True, slots=True)
class IdleParameter:
    """A trainable parameter that got no gradient."""

    name: str  #: inside its module
    path: str  #: inside the model
    module: int
    values: tuple[int, ...]  #: the tensor and its versions
    used: bool  #: an op of the forward read it


class Training:
    """The parameters of the modules that were called and trained, and whether gradients reached them."""

    def __init__(self, context: ProblemContext) -> None:
        self._context = context
        self._data = context.data

    @cached_property
    def idle(self) -> tuple[IdleParameter, ...]:
        """Trainable parameters without a gradient; none where the recording cannot tell."""
        ops = self._data.ops
        if not (self._context.complete and (self._context.aten & (ops.phase == BACKWARD)).any()):
            return ()
        calls = self._data.calls
        tops = np.unique(calls.module[(calls.parent < 0) & (calls.phase == FORWARD)]).tolist()
        by_path: dict[str, IdleParameter] = {}
        for top in tops:
            below = {top}
            for id, module in enumerate(self._data.modules):  # a parent has a lower id
                if module.parent in below:
                    below.add(id)
            infos = [(id, info) for id in sorted(below) for info in self._data.modules[id].parameters]
            trainable = {
                info.key: (id, info) for id, info in reversed(infos) if info.trainable and not info.buffer
            }
            missing = [(key, *owner) for key, owner in trainable.items() if not self._has_gradient(key)]
            if len(missing) == len(trainable):  # of two models trained in turns, only one is trained here
                missing = [each for each in missing if not self._updated.isdisjoint(self._paths[each[0]])]
            for _, id, info in reversed(missing):
                values = self._values_of(info.key)
                if all(self._context.meta(value).type == "Tensor" for value in values):
                    used = bool(self._reads(values))
                    by_path[info.path] = IdleParameter(info.name, info.path, id, values, used)
        return tuple(by_path.values())

    @cached_property
    def _updated(self) -> frozenset[str]:
        """The parameters of optimizers that stepped and found gradients, though maybe not in these."""
        record = self._context.derived(LoopRecord)
        numbers = {step.optimizer for step in record.steps if step.graded}
        return frozenset().union(*(record.optimizers[number].names for number in numbers))

    # -- parameters as values --------------------------------------------------------------------------

    @cached_property
    def _paths(self) -> dict[int, set[str]]:
        """Every name of every parameter and buffer, by its key: tied ones have several."""
        return parameter_aliases(self._data, buffers=True)

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        """The values of every named parameter: the tensor, its versions, and those of its ``.data``."""
        values, names = self._data.values, self._data.names
        owner = {
            int(id): names[values.name[id]]
            for id in np.flatnonzero((values.kind == KINDS.index("parameter")) & (values.name >= 0))
        }
        base = np.where(values.producer < 0, values.base, -1)
        source = np.where(values.previous >= 0, values.previous, base)
        for id in np.flatnonzero(source >= 0).tolist():  # a version has a higher id than the one before
            if int(source[id]) in owner:
                owner.setdefault(id, owner[int(source[id])])
        by_name: dict[str, list[int]] = {}
        for id, name in owner.items():
            by_name.setdefault(name, []).append(id)
        return by_name

    def _values_of(self, key: int) -> tuple[int, ...]:
        return tuple(sorted({id for path in self._paths[key] for id in self._by_name.get(path, ())}))

    def _uses(self, values: Sequence[int]) -> list[int]:
        return sorted({op for value in values for op in self._context.users(value)})

    def _reads(self, values: Sequence[int]) -> list[int]:
        """The ops that read a parameter to compute with it; not those that wrote or copied it."""
        writers = self._copies.union(self._data.values.producer[list(values)].tolist())
        return [op for op in self._uses(values) if op not in writers]

    @cached_property
    def _copies(self) -> set[int]:
        """Ops outside of modules whose results only overwrite weights.

        So `DistributedDataParallel` makes replicas equal, and so does a moving average of the weights.
        """
        ops, values = self._data.ops, self._data.values
        weights = set(values.storage[np.isin(values.kind, _WEIGHTS) & (values.storage >= 0)].tolist())
        copies: set[int] = set()
        for op in np.flatnonzero(self._context.forward & (ops.call < 0))[::-1].tolist():
            results = self._context.results(op)
            writes = bool(ops.flags[op] & MUTATES)
            if writes and not weights.isdisjoint(values.storage[results].tolist()):
                copies.add(op)
                continue
            readers = {reader for value in results for reader in self._context.index.consumers(value)
                       if reader != op and self._context.aten[reader]}  # fmt: skip
            if readers and readers <= copies:
                copies.add(op)
        return copies

    def uses(self, idle: IdleParameter) -> list[int]:
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
    def _keys(self) -> dict[str, int]:
        """The key of every parameter by each of its names."""
        return {path: key for key, paths in self._paths.items() for path in paths}

    def is_reached(self, name: str) -> bool:
        """Whether a gradient came back to a parameter."""
        return name in self._keys and self._has_gradient(self._keys[name])

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter requires no gradient."""
        return name in self._frozen

    @cached_property
    def _frozen(self) -> set[str]:
        """Every name of every parameter that requires no gradient."""
        infos = [info for module in self._data.modules for info in module.parameters if not info.buffer]
        return {path for info in infos if not info.trainable for path in self._paths.get(info.key, ())}

    def cut_of(self, name: str) -> int:
        """The op after which the branch of a parameter goes on without gradients, or -1: see `cut`."""
        values = self._values_of(self._keys[name]) if name in self._keys else ()
        return self.cut(IdleParameter(name, name, -1, values, used=True))

    @cached_property
    def _reached(self) -> tuple[list[bool], list[bool]]:
        """For every value, whether a gradient came back to it, and whether it led to a backward pass."""
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
                reaches = seen[op] or any(gradient[value] for value in results)
                for value in inputs[offsets[op] : offsets[op + 1]]:
                    leads[value] = True
                    gradient[value] = gradient[value] or (reaches and wants[value])
        return gradient, leads

    @cached_property
    def wants(self) -> Mask:
        """The values that require a gradient.

        A parameter that was initialised within the recording is a version of a tensor that required none.
        """
        wants = (self._data.values.flags & REQUIRES_GRAD).astype(np.bool_)
        for module in self._data.modules:
            for info in module.parameters:
                if info.trainable and not info.buffer:
                    wants[list(self._values_of(info.key))] = True
        return wants

    @property
    def leads(self) -> list[bool]:
        """For every value, whether it led to something a backward pass saw."""
        return self._reached[1]

    def cut(self, idle: IdleParameter) -> int:
        """The op after which a parameter's branch goes on towards the loss without gradients, or -1."""
        floating, leads = self._context.floating, self._reached[1]
        seen, ops = set(idle.values), self._reads(idle.values)
        while ops:
            after: list[int] = []
            for op in ops:
                results = [value for value in self._context.results(op) if floating[value]]
                if any(leads[value] and not self.wants[value] for value in results):
                    return op
                after += (value for value in results if self.wants[value] and value not in seen)
            seen.update(after)
            ops = self._uses(list(dict.fromkeys(after)))
        return -1

    def branch_end(self, idle: IdleParameter) -> tuple[int, bool]:
        """The op at which the branch of a parameter ends, and whether the loss is computed from its result.

        It then has no gradient to pass on, as of whole numbers. Else it is the last op whose result requires
        a gradient, or the last of all. -1 if the parameter is not read.
        """
        ops, seen = self._reads(idle.values), set(idle.values)
        last, wanting = ops[-1] if ops else -1, -1
        while ops:
            last = ops[-1]
            results = [value for op in ops for value in self._context.results(op) if value not in seen]
            for op in ops:
                own = self._context.results(op)
                if own and not any(map(self._floats, own)) and any(self.leads[value] for value in own):
                    return op, True
                wanting = op if any(self.wants[value] for value in own) else wanting
            seen.update(results)
            ops = self._uses([value for value in results if self._floats(value)] or results)
        return (wanting if wanting >= 0 else last), False

    def _floats(self, value: int) -> bool:
        return bool(self._context.floating[value])

    # -- modules ---------------------------------------------------------------------------------------

    @cached_property
    def _ran(self) -> set[int]:
        """Modules that were called, and their parents."""
        ran: set[int] = set()
        for module in np.unique(self._data.calls.module).tolist():
            while module >= 0 and module not in ran:
                ran.add(module)
                module = self._data.modules[module].parent
        return ran

    def not_called(self, module: int) -> list[int]:
        """This module and its parents, as far as neither they nor their submodules were called."""
        missed = []
        while module >= 0 and module not in self._ran:
            missed.append(module)
            module = self._data.modules[module].parent
        return missed

    def is_alternative(self, module: int) -> bool:
        """Whether a module of a list was skipped: its siblings ran, or layers were dropped at random."""
        modules = self._data.modules
        info = modules[module]
        siblings = [id for id, other in enumerate(modules) if other.parent == info.parent and id != module]
        same_type = [id for id in siblings if modules[id].type == info.type]
        stem = info.path.rstrip("0123456789")
        numbered = info.path.rpartition(".")[2].isdigit() or (
            len(same_type) + 1 >= _COLLECTION and all(modules[id].path.startswith(stem) for id in siblings)
        )
        if not numbered or not self._ran.isdisjoint(same_type):
            return numbered
        call = self.nearest_call(info.parent)  # it may draw random numbers in its own code
        drawn = self._context.named(_DRAWS) & (self._data.ops.call == call)
        return call >= 0 and bool(drawn.any())

    def nearest_call(self, module: int) -> int:
        """The first call of a module, or of its nearest parent that was called; else -1."""
        while module >= 0:
            calls = self._context.index.calls_of_module.get(module)
            if calls:
                return calls[0]
            module = self._data.modules[module].parent
        return -1
