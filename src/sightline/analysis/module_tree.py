"""The module tree as it ran: every module below every module that called it.

The module tree (which module contains which) and the call tree (which called which) differ for a
`ModuleList`, which is never called, and for a shared module, which several modules call. A *scope* is a
module at one position of the call tree, with the uncalled containers between it and its caller inserted, so
that the costs of the children add up to that of the parent. Scopes are numbered depth first, in the order
they first ran: the scopes inside scope ``i`` are ``i + 1 … end - 1``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.data.trace_data import I32, PHASES, ModuleInfo, TraceData

if TYPE_CHECKING:
    from sightline.analysis.cost import Costs

#: The module of the scope that holds the ops outside every module.
OUTSIDE: Final = -1
_FORWARD: Final = PHASES.index("forward")
_NEVER: Final = 2**62


@dataclass(frozen=True, slots=True)
class Scope:
    """A module at one position of the call tree."""

    module: int  #: into ``TraceData.modules``, or ``OUTSIDE``
    parent: int
    depth: int
    end: int  #: the scopes inside it are those after it and before this one
    calls: tuple[int, ...]  #: its forward calls; none for a container and for a module that never ran
    backward_calls: int  #: how often it was called in backward passes: by a checkpoint, or an adjoint
    position: tuple[int, int]  #: the op it began at, to sort it among its parent's own ops


@dataclass(frozen=True, slots=True)
class Scopes:
    """All scopes of a recording, depth first, and the scope of every module call."""

    rows: tuple[Scope, ...]
    of_call: I32

    def children(self, scope: int) -> list[int]:
        """The scopes directly inside one; -1 gives the outermost."""
        at = scope + 1
        end = self.rows[scope].end if scope >= 0 else len(self.rows)
        children = []
        while at < end:
            children.append(at)
            at = self.rows[at].end
        return children


def scopes_of(data: TraceData) -> Scopes:
    """The scopes of a recording."""
    tree = _ScopeTree(data.modules)
    calls = data.calls
    first_op, phase = calls.first_op.tolist(), calls.phase.tolist()
    nodes: list[int] = []
    for call, (module, parent) in enumerate(zip(calls.module.tolist(), calls.parent.tolist(), strict=True)):
        node = tree.enter(nodes[parent] if parent >= 0 else -1, module, (first_op[call], call))
        if phase[call] == _FORWARD:
            tree.calls[node].append(call)
        else:
            tree.backward_calls[node] += 1
        nodes.append(node)
    tree.add_uncalled()
    if bool((data.ops.call < 0).any()):
        tree.node(-1, OUTSIDE, (_NEVER, _NEVER))
    return tree.to_scopes(nodes)


def brief_modules(data: TraceData) -> dict[str, list[int]]:
    """Modules that no model contains, without weights, of one class, called once each at one line; by class.

    A forward that writes ``nn.CrossEntropyLoss()(…)`` makes one in each call. Empty if no others were called.
    """
    calls, frames = data.calls, data.frames
    modules, counts = np.unique(calls.module, return_counts=True)
    once = set(modules[counts == 1].tolist())
    owners = {module.root for id, module in enumerate(data.modules) if module.root != id or module.parameters}
    groups: dict[tuple[str, int, int], list[int]] = {}
    for module, frame in zip(calls.module.tolist(), calls.frame.tolist(), strict=True):
        if module in once and module not in owners and data.modules[module].root == module and frame >= 0:
            line = int(frames.code[frame]), int(frames.line[frame])
            groups.setdefault((data.modules[module].type, *line), []).append(module)
    brief: dict[str, list[int]] = {}
    for (type, *_), same in groups.items():
        if len(same) > 1:
            brief.setdefault(type, []).extend(same)
    return brief if sum(map(len, brief.values())) < len(modules) else {}


def brief_modules_text(brief: Mapping[str, list[int]]) -> str:
    """``CrossEntropyLoss ×18, each called once``."""
    names = ", ".join(f"{type} ×{len(modules):,}" for type, modules in brief.items())
    return f"{names}, each called once"


def op_scopes(data: TraceData, scopes: Scopes) -> I32:
    """The scope every op belongs to; for those outside every module, the last one."""
    call, outside = data.ops.call, len(scopes.rows) - 1
    if not len(scopes.of_call):
        return np.full(len(call), outside, dtype=np.int32)
    return np.where(call >= 0, scopes.of_call[np.maximum(call, 0)], outside).astype(np.int32)


@dataclass(frozen=True, slots=True)
class OwnOps:
    """The forward ops a scope runs itself, outside its submodules: how often each, in order of first use."""

    first: int  #: id of the first one
    counts: dict[str, int]


def own_ops(data: TraceData, scopes: Scopes) -> dict[int, OwnOps]:
    """The own ops of every scope that has any, as the user wrote them where that was recorded."""
    ops = data.ops
    chosen = np.flatnonzero((ops.parent < 0) & (ops.phase == _FORWARD))
    keys = op_scopes(data, scopes)[chosen].astype(np.int64) * len(data.names) + ops.name[chosen]
    pairs, first, counts = np.unique(keys, return_index=True, return_counts=True)
    of_scope: dict[int, OwnOps] = {}
    for at in np.argsort(first, kind="stable").tolist():
        scope, name = divmod(int(pairs[at]), len(data.names))
        own = of_scope.setdefault(scope, OwnOps(int(chosen[first[at]]), {}))
        own.counts[data.names[name]] = int(counts[at])
    return of_scope


class _ScopeTree:
    """Builds the scopes: a node for every (parent node, module) pair."""

    def __init__(self, modules: list[ModuleInfo]) -> None:
        self._modules = modules
        self._ids: dict[tuple[int, int], int] = {}
        self._parent: list[int] = []
        self._module: list[int] = []
        self._position: list[tuple[int, int]] = []
        self.calls: list[list[int]] = []
        self.backward_calls: list[int] = []

    def node(self, parent: int, module: int, position: tuple[int, int]) -> int:
        """The node of a module below a parent, which is added if it is new."""
        node = self._ids.setdefault((parent, module), len(self._module))
        if node == len(self._module):
            self._parent.append(parent)
            self._module.append(module)
            self._position.append(position)
            self.calls.append([])
            self.backward_calls.append(0)
        return node

    def enter(self, caller: int, module: int, position: tuple[int, int]) -> int:
        """The node of a call, below its caller and the uncalled modules between the two."""
        if (caller, module) in self._ids:
            return self._ids[caller, module]
        calling = self._module[caller] if caller >= 0 else -1
        chain, at = [module], self._modules[module].parent
        while at != calling and at >= 0:
            chain.append(at)
            at = self._modules[at].parent
        node = caller
        for step in reversed(chain) if at == calling else [module]:
            node = self.node(node, step, position)
        return node

    def add_uncalled(self) -> None:
        """Add modules that never ran but own parameters, so that the parameter counts add up."""
        with_parameters: set[int] = set()
        for id, info in enumerate(self._modules):
            at = id if info.parameters else -1
            while at >= 0 and at not in with_parameters:
                with_parameters.add(at)
                at = self._modules[at].parent
        nodes = {module: node for node, module in reversed(list(enumerate(self._module)))}
        for id in sorted(with_parameters - nodes.keys(), key=lambda id: self._modules[id].path.count(".")):
            parent = self._modules[id].parent
            if parent < 0 or parent in nodes:
                nodes[id] = self.node(nodes.get(parent, -1), id, (_NEVER, id))

    def to_scopes(self, nodes: list[int]) -> Scopes:
        """The scopes in depth-first order, siblings in the order they ran; ``nodes`` are those of calls."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parent):
            children.setdefault(parent, []).append(node)
        for group in children.values():
            group.sort(key=lambda node: self._position[node], reverse=True)
        order: list[int] = []
        stack = list(children.get(-1, []))
        while stack:
            order.append(stack.pop())
            stack += children.get(order[-1], [])
        new = {-1: -1} | {node: rank for rank, node in enumerate(order)}
        parents = [new[self._parent[node]] for node in order]
        ends, depths = [rank + 1 for rank in range(len(order))], [0] * len(order)
        for rank, parent in enumerate(parents):
            depths[rank] = depths[parent] + 1 if parent >= 0 else 0
        for rank in range(len(order) - 1, -1, -1):
            if parents[rank] >= 0:
                ends[parents[rank]] = max(ends[parents[rank]], ends[rank])
        rows = tuple(
            Scope(self._module[node], parents[rank], depths[rank], ends[rank],
                  tuple(self.calls[node]), self.backward_calls[node], self._position[node])
            for rank, node in enumerate(order)
        )  # fmt: skip
        return Scopes(rows, np.array([new[node] for node in nodes], dtype=np.int32))


def equal_scopes(data: TraceData, costs: Costs, own_ops: Mapping[int, OwnOps]) -> list[int]:
    """A number for each scope; scopes with equal numbers differ only in their names, times and values."""
    scopes = costs.scopes
    numbers: dict[Hashable, int] = {}
    of_scope = [0] * len(scopes.rows)
    for scope in range(len(of_scope) - 1, -1, -1):  # children have higher numbers than their parent
        children = []
        for child in scopes.children(scope):
            module = scopes.rows[child].module
            name = "" if module == OUTSIDE else data.modules[module].path.rpartition(".")[2]
            children.append((name, of_scope[child]))
        key = (_own_key(data, costs, own_ops.get(scope), scope), *children)
        of_scope[scope] = numbers.setdefault(key, len(numbers))
    return of_scope


def _own_key(data: TraceData, costs: Costs, own: OwnOps | None, scope: int) -> Hashable:
    """Everything shown of one scope except its name and its times."""
    row = costs.scopes.rows[scope]
    if row.module == OUTSIDE:
        return scope  # there is only one
    info, counts = data.modules[row.module], costs.parameters[scope]
    calls, metas = data.calls, data.values.meta
    signatures = tuple(
        (
            metas[calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]]].tobytes(),
            metas[calls.outputs[calls.output_offsets[call] : calls.output_offsets[call + 1]]].tobytes(),
            int(calls.input_form[call]),
            int(calls.output_form[call]),
        )
        for call in row.calls
    )
    flops = int(costs.own.flops[scope])  # not backward: the first layer needs no gradient of its input
    ops = None if own is None else tuple(own.counts.items())
    names = len(info.aliases)
    parameters = (counts.own, counts.own_new, counts.own_trainable)
    return info.type, info.extra, names, signatures, flops, ops, parameters
