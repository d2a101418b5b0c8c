"""The module call that each node of a graph ran in, as a tree of scopes.

A runtime graph has it recorded: ``info["calls"]`` lists the module calls, and ``node.info["call"]`` is one of
them. Elsewhere it follows from the module paths: consecutive nodes with the same module are one call of it.
A scope is always contiguous in the graph's order, so that replacing it by one node cannot make a cycle.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from sightline.graph.graph import Graph, Node

#: Containers of modules, which are never called.
CONTAINERS: Final = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})


def relative_path(path: str, around: str) -> str:
    """A module path relative to one around it.

    >>> relative_path("blocks.0.attn", "blocks.0"), relative_path("blocks.0", "")
    ('attn', 'blocks.0')
    """
    return path[len(around) + 1 :] if around and path.startswith(f"{around}.") else path


@dataclass(frozen=True, slots=True)
class ModuleScope:
    """One call of a module."""

    path: str
    parent: int  #: -1 outside
    call: int  #: into ``info["calls"]``; -1 where there are none


@dataclass(frozen=True, slots=True)
class ScopeTree:
    """All scopes, a parent before its children, and the scope of every node that is in one."""

    scopes: list[ModuleScope]
    of_node: dict[int, int]

    def chain(self, scope: int) -> list[int]:
        """A scope and its ancestors, outermost first."""
        scopes: list[int] = []
        while scope >= 0:
            scopes.append(scope)
            scope = self.scopes[scope].parent
        return scopes[::-1]

    def common(self, first: int, second: int) -> int:
        """The innermost scope around both."""
        shared = -1
        for one, other in zip(self.chain(first), self.chain(second), strict=False):
            if one != other:
                break
            shared = one
        return shared

    def widen(self, scope_of: dict[int, int], source: int, reader: int) -> None:
        """Set the scope of a node that does not run to one around all its readers so far."""
        scope = self.of_node.get(reader, -1)
        scope_of[source] = self.common(scope_of[source], scope) if source in scope_of else scope


def scope_tree(graph: Graph) -> ScopeTree:
    """The scopes of a graph.

    >>> nodes = (Node(0, "relu", "relu", module="blocks.0"), Node(1, "add", "+", module=""))
    >>> tree = scope_tree(Graph(nodes, (), modules={"": "Net", "blocks.0": "Block"}))
    >>> [scope.path for scope in tree.scopes]
    ['', 'blocks.0']
    """
    chains = _CallChains(graph)
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
    return ScopeTree(scopes, of_node)


_Chain = list[tuple[Hashable, str, int]]


class _CallChains:
    """The module calls around each node, outermost first: a key, the path, and the call's number."""

    def __init__(self, graph: Graph) -> None:
        self._modules = graph.modules
        self._calls: list[list[object]] | None = graph.info.get("calls") or None
        self._cache: dict[Hashable, _Chain] = {}

    def of(self, node: Node) -> _Chain:
        """The module calls around a node."""
        if self._calls is not None:
            return self._of_call(self._calls, node.info.get("call", -1))
        if "collapsed" not in node.info:
            return self._of_path(node.module)
        # The node is a call of the module, not inside it.
        return self._of_path(node.module.rpartition(".")[0]) if node.module else []

    def _of_call(self, calls: list[list[object]], call: int) -> _Chain:
        chain = self._cache.get(call)
        if chain is None:
            chain = []
            at = call
            while 0 <= at < len(calls):
                path, parent = calls[at][:2]
                chain.append((at, str(path), at))
                at = parent if isinstance(parent, int) and parent < at else -1
            chain.reverse()
            self._cache[call] = chain
        return chain

    def _of_path(self, path: str) -> _Chain:
        chain = self._cache.get(path)
        if chain is None:
            parts = path.split(".") if path else []
            prefixes = [".".join(parts[:count]) for count in range(len(parts) + 1)]
            chain = [
                (prefix, prefix, -1)
                for prefix in prefixes
                if self._modules.get(prefix, "" if prefix == path and path else "ModuleList")
                not in CONTAINERS
            ]
            self._cache[path] = chain
        return chain
