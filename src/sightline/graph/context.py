"""`GraphContext`: the facts about the nodes of a runtime graph beyond the wiring: lines, modules, costs."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np

from sightline.data.index import Index
from sightline.data.trace_data import MUTATES, PHASES, RAISED

_NUMBERED = re.compile(r"_\d+$")
_STATISTICS = ("min", "max", "mean", "std", "l2", "zeros", "nans", "infs")


class GraphContext:
    """Look-ups in one recording for its graph, each derived once."""

    def __init__(self, index: Index) -> None:
        self._index, self._data = index, index.raw
        self._frames: list[int] = index.line_frames[index.op_frames].tolist()
        self._calls: list[int] = index.raw.ops.call.tolist()
        self._call_modules: list[int] = index.raw.calls.module.tolist()
        self._has_statistics = len(index.raw.stats) > 0
        self._sources: dict[int, str] = {-1: ""}
        self._columns: dict[int, list[int]] = {}

    # -- modules ---------------------------------------------------------------------------------

    @cached_property
    def _paths(self) -> list[str]:
        """A path for each module. Where several models ran, each path begins with the class of its model.

        A module that belongs to no model (made inside a forward) goes by its class alone: a number would make
        layers differ that each create their own.
        """
        modules, calls = self._data.modules, self._data.calls
        root_of = np.array([module.root for module in modules], dtype=np.int64)
        # The root modules that were only ever called inside other models.
        strays = {*root_of[calls.module].tolist()} - {*root_of[calls.module[calls.parent < 0]].tolist()}
        roots = sorted({module.root for module in modules} - strays)
        counts: dict[str, int] = {}
        prefixes: dict[int, str] = {}
        for root in roots if len(roots) > 1 else ():
            type = modules[root].type
            count = counts[type] = counts.get(type, -1) + 1
            prefixes[root] = f"{type}_{count}" if count else type
        paths = []
        for module in modules:
            path, prefix = module.path, prefixes.get(module.root, "")
            if module.root in strays:
                first, dot, rest = path.partition(".")
                path = _NUMBERED.sub("", first) + dot + rest
            paths.append(f"{prefix}.{path}" if prefix and path else prefix or path)
        return paths

    def modules(self) -> dict[str, str]:
        """The class of each path."""
        return {path: m.type for path, m in zip(self._paths, self._data.modules, strict=True)}

    def calls(self) -> list[list[Any]]:
        """For each module call its path, the call around it (-1: none), and the line that made it."""
        parents = self._data.calls.parent.tolist()
        return [[self.path_of_call(c), parents[c], self.source_of_call(c)] for c in range(len(parents))]

    def path_of_call(self, call: int) -> str:
        """The path of the module that was called."""
        return self._paths[self._call_modules[call]]

    def path_of_op(self, op: int) -> str:
        """The path of the module an op ran in; empty outside all modules."""
        call = self._calls[op]
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
        """Whether a unit, an op or a module call (numbered after the ops), ran inside a module call."""
        if unit < len(self._calls):
            return self._calls[unit] >= 0
        return int(self._data.calls.parent[unit - len(self._calls)]) >= 0

    def root_results(self) -> list[tuple[int, list[str]]]:
        """The outermost forward calls, each with the paths of the tensors it returned."""
        calls = self._data.calls
        forward = PHASES.index("forward")
        outermost = (calls.parent < 0) & (calls.phase == forward) & (calls.output_form >= 0)
        results = []
        for call in np.flatnonzero(outermost).tolist():
            paths = self._data.forms[int(calls.output_form[call])].slots()
            results.append((call, [path.removeprefix("[0]").removeprefix(".") for path in paths]))
        return results

    @cached_property
    def _input_names(self) -> dict[int, str]:
        """Tensors passed to a model by keyword: ``attention_mask``."""
        calls = self._data.calls
        names: dict[int, str] = {}
        for call in np.flatnonzero((calls.parent < 0) & (calls.input_form >= 0)).tolist():
            paths = self._data.forms[int(calls.input_form[call])].slots()
            # A form out of a damaged file may have more slots than there are tensors.
            for value, path in zip(calls.inputs_of(call), paths, strict=False):
                if not path.startswith("["):
                    names.setdefault(value, path)
        return names

    def input_name(self, value: int) -> str:
        """The keyword a tensor was passed to a model by; empty without one."""
        return self._input_names.get(value, "")

    # -- source lines ------------------------------------------------------------------------------

    def source_of_op(self, op: int) -> str:
        """The user's line of an op: ``net.py:9 in Net.forward``."""
        return self._source(self._frames[op])

    def source_of_call(self, call: int) -> str:
        """The user's line that called a module."""
        return self._source(int(self._index.line_frames[self._data.calls.frame[call]]))

    def _source(self, frame: int) -> str:
        text = self._sources.get(frame)
        if text is None:
            row = self._index.frames[frame]
            text = self._sources[frame] = f"{row.position} in {row.function}"
            if row.columns is not None:
                self._columns[frame] = list(row.columns)
        return text

    # -- costs -----------------------------------------------------------------------------------

    @cached_property
    def _costs(self) -> tuple[list[int], list[int], list[int]]:
        ops = self._data.ops
        return ops.flops.tolist(), ops.duration.tolist(), ops.flags.tolist()

    def op_info(self, op: int, inner: list[int], outputs: list[int]) -> dict[str, Any]:
        """Cost, position and statistics of an op; ``inner`` are the ops inside it."""
        flops, durations, flags = self._costs
        info: dict[str, Any] = {"duration": durations[op]}
        if self._index.device_durations is not None:
            info["device_duration"] = int(self._index.device_durations[op])
        if self._calls[op] >= 0:
            info["call"] = self._calls[op]
        if flops[op] >= 0:
            info["flops"] = flops[op]
        elif inner and (known := [flops[each] for each in inner if flops[each] >= 0]):
            info["flops"] = sum(known)
        columns = self._columns.get(self._frames[op])
        if columns:
            info["columns"] = columns
        if flags[op] & MUTATES:
            info["mutates"] = True
        if flags[op] & RAISED:
            info["raised"] = True
        if self._has_statistics:
            self._add_statistics(info, outputs)
        return info

    def call_info(self, call: int, ops: list[int], outputs: list[int]) -> dict[str, Any]:
        """Cost and statistics of a module call that stands for its ops."""
        calls, (flops, _, _) = self._data.calls, self._costs
        info: dict[str, Any] = {"duration": int(calls.duration[call]), "collapsed": len(ops)}
        if self._index.call_device_durations is not None:
            info["device_duration"] = int(self._index.call_device_durations[call])
        extra = self._data.modules[self._call_modules[call]].extra
        if extra:
            info["extra"] = extra
        if calls.parent[call] >= 0:
            info["call"] = int(calls.parent[call])
        known = [flops[op] for op in ops if flops[op] >= 0]
        if known:
            info["flops"] = sum(known)
        if self._has_statistics:
            self._add_statistics(info, outputs)
        return info

    def _add_statistics(self, info: dict[str, Any], outputs: list[int]) -> None:
        statistics = [self._index.numbers(value) for value in outputs]
        if any(statistics):
            info["statistics"] = [
                {key: getattr(numbers, key) for key in _STATISTICS} if numbers else None
                for numbers in statistics
            ]
