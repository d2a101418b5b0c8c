"""What a runtime graph says about its nodes beyond the wiring: places, modules, costs, statistics."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np

from sightline.trace.data import MUTATES, PHASES, RAISED
from sightline.trace.index import Index

_NUMBERED = re.compile(r"_\d+$")
_STATISTICS = ("min", "max", "mean", "std", "l2", "zeros", "nans", "infs")


class GraphContext:
    """Answers about one recording, each worked out once."""

    def __init__(self, index: Index) -> None:
        self._index, self._data = index, index.raw
        self._frame: list[int] = index.line_frames[index.op_frames].tolist()
        self._call: list[int] = index.raw.ops.call.tolist()
        self._own_call: list[int] = index.raw.calls.module.tolist()
        self._measured = len(index.raw.stats) > 0
        self._texts: dict[int, str] = {-1: ""}
        self._columns: dict[int, list[int]] = {}

    # -- modules ---------------------------------------------------------------------------------

    @cached_property
    def _paths(self) -> list[str]:
        """A path for each module. Where several models ran, each has its class in front.

        A module that belongs to none (made inside a forward) is called by its class: which one it is of many
        says nothing, and would keep layers that each make their own from being alike.
        """
        modules = self._data.modules
        strays = self._strays
        roots = sorted({module.root for module in modules} - strays)
        taken: dict[str, int] = {}
        fronts: dict[int, str] = {}
        for root in roots if len(roots) > 1 else ():
            type = modules[root].type
            count = taken[type] = taken.get(type, -1) + 1
            fronts[root] = f"{type}_{count}" if count else type
        found = []
        for module in modules:
            path, front = module.path, fronts.get(module.root, "")
            if module.root in strays:
                first, dot, rest = path.partition(".")
                path = _NUMBERED.sub("", first) + dot + rest
            found.append(f"{front}.{path}" if front and path else front or path)
        return found

    @cached_property
    def _strays(self) -> set[int]:
        """The modules around which there is no other, and which were only ever called inside others."""
        calls, root = self._data.calls, np.array([m.root for m in self._data.modules], dtype=np.int64)
        called, outside = root[calls.module], root[calls.module[calls.parent < 0]]
        return set(called.tolist()) - set(outside.tolist())

    def modules(self) -> dict[str, str]:
        """The class of each path."""
        return {path: m.type for path, m in zip(self._paths, self._data.modules, strict=True)}

    def calls(self) -> list[list[Any]]:
        """For each module call its path, the call it was made in (-1: none), and the line that made it."""
        parents = self._data.calls.parent.tolist()
        return [[self.path_of_call(c), parents[c], self.source_of_call(c)] for c in range(len(parents))]

    def path_of_call(self, call: int) -> str:
        return self._paths[self._own_call[call]]

    def path_of_op(self, op: int) -> str:
        call = self._call[op]
        return self.path_of_call(call) if call >= 0 else ""

    @cached_property
    def _owners(self) -> dict[str, str]:
        return {
            parameter.path: path
            for path, module in zip(self._paths, self._data.modules, strict=True)
            for parameter in module.parameters
        }

    def owner(self, name: str) -> str:
        """The path of the module that owns a parameter."""
        return self._owners.get(name, name.rpartition(".")[0])

    def in_call(self, unit: int) -> bool:
        """Whether an op ran in a module call; a unit that is a module call is itself in one."""
        if unit < len(self._call):
            return self._call[unit] >= 0
        return int(self._data.calls.parent[unit - len(self._call)]) >= 0

    def root_results(self) -> list[tuple[int, list[str]]]:
        """The outermost forward calls, each with the paths of the tensors it returned."""
        calls = self._data.calls
        found = []
        forward = PHASES.index("forward")
        for call in range(len(calls)):
            if calls.parent[call] < 0 and calls.phase[call] == forward and calls.output_form[call] >= 0:
                paths = self._data.forms[int(calls.output_form[call])].slots()
                found.append((call, [path.removeprefix("[0]").removeprefix(".") for path in paths]))
        return found

    @cached_property
    def _input_names(self) -> dict[int, str]:
        """Tensors handed to a model by name: ``attention_mask``."""
        calls = self._data.calls
        found: dict[int, str] = {}
        for call in range(len(calls)):
            if calls.parent[call] >= 0 or calls.input_form[call] < 0:
                continue
            paths = self._data.forms[int(calls.input_form[call])].slots()
            start = int(calls.input_offsets[call])
            for at, path in enumerate(paths):
                if start + at < calls.input_offsets[call + 1] and not path.startswith("["):
                    found.setdefault(int(calls.inputs[start + at]), path)
        return found

    def input_name(self, value: int) -> str:
        return self._input_names.get(value, "")

    # -- places ----------------------------------------------------------------------------------

    def source_of_op(self, op: int) -> str:
        return self._source(self._frame[op])

    def source_of_call(self, call: int) -> str:
        return self._source(int(self._index.line_frames[self._data.calls.frame[call]]))

    def _source(self, frame: int) -> str:
        text = self._texts.get(frame)
        if text is None:
            row = self._index.frames[frame]
            text = self._texts[frame] = f"{row.position} in {row.function}"
            if row.columns is not None:
                self._columns[frame] = list(row.columns)
        return text

    # -- costs -----------------------------------------------------------------------------------

    @cached_property
    def _costs(self) -> tuple[list[int], list[int], list[int]]:
        ops = self._data.ops
        return ops.flops.tolist(), ops.duration.tolist(), ops.flags.tolist()

    def op_info(self, op: int, inner: list[int], outputs: list[int]) -> dict[str, Any]:
        """Plain facts about an op and those inside it."""
        flops, durations, flags = self._costs
        info: dict[str, Any] = {"duration": durations[op]}
        if self._index.device_durations is not None:
            info["device_duration"] = int(self._index.device_durations[op])
        if self._call[op] >= 0:
            info["call"] = self._call[op]
        if flops[op] >= 0:
            info["flops"] = flops[op]
        elif inner and (known := [flops[each] for each in inner if flops[each] >= 0]):
            info["flops"] = sum(known)
        columns = self._columns.get(self._frame[op])
        if columns:
            info["columns"] = columns
        if flags[op] & MUTATES:
            info["mutates"] = True
        if flags[op] & RAISED:
            info["raised"] = True
        if self._measured:
            self._add_statistics(info, outputs)
        return info

    def call_info(self, call: int, ops: list[int], outputs: list[int]) -> dict[str, Any]:
        """Plain facts about a module call that stands for its ops."""
        calls, (flops, _, _) = self._data.calls, self._costs
        info: dict[str, Any] = {"duration": int(calls.duration[call]), "collapsed": len(ops)}
        if self._index.call_device_durations is not None:
            info["device_duration"] = int(self._index.call_device_durations[call])
        extra = self._data.modules[self._own_call[call]].extra
        if extra:
            info["extra"] = extra
        if calls.parent[call] >= 0:
            info["call"] = int(calls.parent[call])
        known = [flops[op] for op in ops if flops[op] >= 0]
        if known:
            info["flops"] = sum(known)
        if self._measured:
            self._add_statistics(info, outputs)
        return info

    def _add_statistics(self, info: dict[str, Any], outputs: list[int]) -> None:
        taken = [self._index.numbers(value) for value in outputs]
        if any(taken):
            info["statistics"] = [
                {key: getattr(numbers, key) for key in _STATISTICS} if numbers else None for numbers in taken
            ]
