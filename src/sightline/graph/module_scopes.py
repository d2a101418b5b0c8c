"""Which module call each node of a graph ran in, as a tree of scopes.

A runtime graph says it exactly: ``info["calls"]`` lists the module calls, ``node.info["call"]`` is one of
them. Elsewhere it is read off the module paths: a stretch of nodes with the same module is one call of it.
A scope is always one stretch of the graph's order, so that replacing it by one node cannot make a cycle.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from sightline.graph.graph import Graph, Node

#: They hold modules and are never called.
HOLDERS: Final = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})


@dataclass(frozen=True, slots=True)
class ModuleScope:
    """One call of a module."""

    path: str
    parent: int  #: -1 outside
    call: int  #: into ``info["calls"]``; -1 where there are none


@dataclass(frozen=True, slots=True)
class ModuleNesting:
    """All scopes, a parent before its children, and the scope of every node that is in one."""

    scopes: list[ModuleScope]
    of_node: dict[int, int]

    def chain(self, scope: int) -> list[int]:
        """A scope and those around it, outermost first."""
        found: list[int] = []
        while scope >= 0:
            found.append(scope)
            scope = self.scopes[scope].parent
        return found[::-1]

    def common(self, one: int, other: int) -> int:
        """The innermost scope that holds both."""
        first, second = self.chain(one), self.chain(other)
        found = -1
        for a, b in zip(first, second, strict=False):
            if a != b:
                break
            found = a
        return found


def nesting(graph: Graph) -> ModuleNesting:
    """The scopes of a graph.

    >>> nodes = (Node(0, "relu", "relu", module="blocks.0"), Node(1, "add", "+", module=""))
    >>> [scope.path for scope in nesting(Graph(nodes, (), modules={"": "Net", "blocks.0": "Block"})).scopes]
    ['', 'blocks.0']
    """
    chains = _Chains(graph)
    scopes: list[ModuleScope] = []
    of_node: dict[int, int] = {}
    open_keys: list[Hashable] = []
    open_scopes: list[int] = []
    for node in graph.topological():
        if node.kind != "call":
            continue
        chain = chains.of(node)
        shared = 0
        for (key, _, _), opened in zip(chain, open_keys, strict=False):
            if key != opened:
                break
            shared += 1
        del open_keys[shared:], open_scopes[shared:]
        for key, path, call in chain[shared:]:
            scopes.append(ModuleScope(path, open_scopes[-1] if open_scopes else -1, call))
            open_keys.append(key)
            open_scopes.append(len(scopes) - 1)
        if open_scopes:
            of_node[node.id] = open_scopes[-1]
    return ModuleNesting(scopes, of_node)


_Chain = list[tuple[Hashable, str, int]]


class _Chains:
    """For a node the calls it is in, outermost first: a key, the path, and the call's number."""

    def __init__(self, graph: Graph) -> None:
        self._modules = graph.modules
        self._calls: list[list[object]] | None = graph.info.get("calls") or None
        self._known: dict[Hashable, _Chain] = {}

    def of(self, node: Node) -> _Chain:
        if self._calls is None:
            path = node.module
            if "collapsed" in node.info:  # it stands for a module and is not inside it
                path = path.rpartition(".")[0]
                if not node.module:
                    return []
            return self._of_path(path)
        return self._of_call(node.info.get("call", -1))

    def _of_call(self, call: int) -> _Chain:
        assert self._calls is not None
        found = self._known.get(call)
        if found is None:
            found = []
            at = call
            while 0 <= at < len(self._calls):
                path, parent = self._calls[at][:2]
                found.append((at, str(path), at))
                at = parent if isinstance(parent, int) and parent < at else -1
            found.reverse()
            self._known[call] = found
        return found

    def _of_path(self, path: str) -> _Chain:
        found = self._known.get(path)
        if found is None:
            parts = path.split(".") if path else []
            prefixes = [".".join(parts[:count]) for count in range(len(parts) + 1)]
            found = [
                (prefix, prefix, -1)
                for prefix in prefixes
                if self._modules.get(prefix, "" if prefix == path and path else "ModuleList") not in HOLDERS
            ]
            self._known[path] = found
        return found
