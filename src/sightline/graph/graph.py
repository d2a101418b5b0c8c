"""`Graph`: nodes and edges as plain data, with a method for each query, transformation and format."""

from __future__ import annotations

import gc
import html
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from sightline.argument_checks import argument_text, check_arguments
from sightline.data.forms import map_leaves
from sightline.data.trace_data import TensorMeta
from sightline.errors import NoSuchNode
from sightline.text_encoding import for_output, printable

if TYPE_CHECKING:
    import os

    import networkx as nx


#: The kinds of nodes. All but "call" and "output" have no edges into them.
NODE_KINDS: Final = ("input", "parameter", "buffer", "constant", "call", "output")


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a tensor: the node that computed it, and which of its outputs it is.

    >>> Ref("relu_1"), Ref("split", 1)
    (relu_1, split[1])
    """

    node: str
    slot: int = 0

    def __repr__(self) -> str:
        return f"{self.node}[{self.slot}]" if self.slot else self.node


@printable
@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph: an op, a collapsed module, or a value that no node computed.

    >>> Node(0, "relu", "relu", "call", {"self": Ref("x")}, "act", "net.py:9 in Net.forward").name
    'relu'
    """

    id: int
    name: str  #: unique in its graph: ``relu_1``, ``blocks_0_attn_qkv_weight``
    op: str  #: in short: ``relu``, ``+``, ``Linear``; of a parameter its path
    kind: str = "call"  #: one of ``NODE_KINDS``
    args: dict[str, Any] = field(default_factory=dict)  #: by name, tensors as `Ref`
    module: str = ""  #: path of the module it ran in, or of the one that owns the parameter
    source: str = ""  #: ``net.py:9 in Net.forward``
    outputs: tuple[TensorMeta, ...] = ()
    repeat: int = 1  #: how many nodes it stands for after folding
    phase: str = "forward"
    target: str = ""  #: the full name of the op: ``torch.nn.functional.linear``, ``aten.add.Tensor``
    info: dict[str, Any] = field(default_factory=dict)  #: flops, duration, statistics; plain data only


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that flows from an output of one node to an argument of another.

    >>> Edge(0, 1, 0, "self").loop
    False
    """

    source: int  #: id of a node
    target: int
    slot: int = 0  #: which output of the source
    argument: str = ""  #: which argument of the target: ``self``, ``mat1``, ``tensors[0]``
    meta: TensorMeta | None = None
    repeat: int = 1
    loop: bool = False  #: from one round of a folded loop to a later one: no cycle in the computation


@printable
@dataclass(frozen=True)
class Graph:
    """A data-flow graph.

    >>> x = Node(0, "x", "x", "input")
    >>> y = Node(1, "relu", "relu", "call", {"self": Ref("x")})
    >>> g = Graph((x, y), (Edge(0, 1, 0, "self"),), "net")
    >>> g["relu"].args, [node.name for node in g], len(g)
    ({'self': x}, ['x', 'relu'], 2)
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    name: str = ""
    modules: dict[str, str] = field(default_factory=dict)  #: path of each module -> its class
    info: dict[str, Any] = field(default_factory=dict)

    # -- queries -----------------------------------------------------------------------

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def _incoming(self) -> dict[int, list[Edge]]:
        incoming: dict[int, list[Edge]] = {}
        for edge in self.edges:
            incoming.setdefault(edge.target, []).append(edge)
        return incoming

    @cached_property
    def _outgoing(self) -> dict[int, list[Edge]]:
        outgoing: dict[int, list[Edge]] = {}
        for edge in self.edges:
            outgoing.setdefault(edge.source, []).append(edge)
        return outgoing

    def incoming(self, node: Node | str) -> tuple[Edge, ...]:
        """The edges into a node, in the order of its arguments."""
        return tuple(self._incoming.get(self._node(node).id, ()))

    def outgoing(self, node: Node | str) -> tuple[Edge, ...]:
        """The edges out of a node."""
        return tuple(self._outgoing.get(self._node(node).id, ()))

    def __getitem__(self, name: str) -> Node:
        node = self.by_name.get(name) if name in self else None
        if node is None:
            from sightline.patterns import did_you_mean

            text = argument_text(name)
            raise NoSuchNode(f"This graph has no node {text}{did_you_mean(text, self.by_name)}")
        return node

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.by_name

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.topological())

    def keys(self) -> list[str]:
        """The names of the nodes, in an order in which they can be computed."""
        return [node.name for node in self]

    def _node(self, node: Node | str) -> Node:
        return self[node.name if isinstance(node, Node) else node]

    def topological(self) -> tuple[Node, ...]:
        """The nodes, each after all it was computed from; loop edges do not count."""
        return self._order

    @cached_property
    def _order(self) -> tuple[Node, ...]:
        from sightline.graph.queries import topological

        return topological(self)

    def ancestors(self, node: Node | str) -> tuple[Node, ...]:
        """Everything a node was computed from, directly or not.

        >>> g = Graph((Node(0, "x", "x", "input"), Node(1, "y", "relu")), (Edge(0, 1),))
        >>> [node.name for node in g.ancestors("y")], g.descendants("y")
        (['x'], ())
        """
        from sightline.graph.queries import ancestors

        return ancestors(self, self._node(node))

    def descendants(self, node: Node | str) -> tuple[Node, ...]:
        """Everything that was computed from a node, directly or not."""
        from sightline.graph.queries import descendants

        return descendants(self, self._node(node))

    def shortest(self, start: Node | str, end: Node | str) -> tuple[Node, ...]:
        """The shortest path from one node to another, both included."""
        from sightline.graph.queries import shortest

        return shortest(self, self._node(start), self._node(end))

    @check_arguments
    def nodes_of(
        self, *, module: str | None = None, op: str | None = None, kind: str | None = None
    ) -> tuple[Node, ...]:
        """The nodes that match every glob; a module includes everything inside it.

        >>> g = Graph((Node(0, "x", "x", "input"), Node(1, "y", "relu")), (Edge(0, 1),))
        >>> [node.name for node in g.nodes_of(op="re*")]
        ['y']
        """
        from sightline.graph.queries import select_nodes

        return select_nodes(self, module, op, kind)

    def lint(self) -> Graph:
        """Raise `InvalidGraph` for the first contradiction; else return the graph itself."""
        from sightline.graph.lint import lint

        lint(self)
        return self

    # -- other graphs ----------------------------------------------------------------------------

    @check_arguments
    def subgraph(self, module: str) -> Graph:
        """The nodes in the modules of a glob; tensors that cross its boundary become inputs and outputs."""
        from sightline.graph.queries import subgraph

        return subgraph(self, module)

    def fold(self) -> Graph:
        """Repeated layers and loops shown once, with a count."""
        from sightline.graph.fold import fold

        return fold(self)

    def collapse(self, depth: int) -> Graph:
        """Every module call at this depth becomes one node, as does every call that calls no other."""
        from sightline.graph.collapse import collapse

        return collapse(self, depth)

    def prune(self, *what: str | Iterable[str]) -> Graph:
        """The graph without "views", "parameters", "constants" or "leaves"; the rest stays connected."""
        from sightline.graph.prune import prune

        return prune(self, what)

    # -- formats ---------------------------------------------------------------------------------

    def to_networkx(self) -> nx.MultiDiGraph:
        """A `networkx.MultiDiGraph` keyed by node name, with plain attributes."""
        from sightline.graph.formats.networkx import to_networkx

        return to_networkx(self)

    def to_dot(self) -> str:
        """The graph in graphviz' language, with modules as nested boxes."""
        from sightline.graph.formats.dot import to_dot

        return to_dot(self)

    def to_mermaid(self) -> str:
        """A Mermaid flowchart, for Markdown."""
        from sightline.graph.formats.mermaid import to_mermaid

        return to_mermaid(self)

    def to_model_explorer(self) -> dict[str, Any]:
        """Data for Google's Model Explorer; write it with `json.dump`."""
        from sightline.graph.formats.model_explorer import to_model_explorer

        return to_model_explorer(self)

    def to_json(self) -> str:
        """The whole graph as JSON; `Graph.from_json` reads it back."""
        from sightline.graph.formats.json import to_json

        return to_json(self)

    @classmethod
    @check_arguments
    def from_json(cls, text: str) -> Graph:
        """The graph that `to_json` wrote.

        >>> g = Graph((Node(0, "x", "x", "input"), Node(1, "y", "relu")), (Edge(0, 1),))
        >>> Graph.from_json(g.to_json()) == g
        True
        """
        from sightline.graph.formats.json import from_json

        return from_json(text)

    @check_arguments
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``.svg``, ``.png``, ``.pdf``, ``.dot``, ``.mmd`` or ``.json``; pictures need graphviz."""
        from sightline.graph.formats.files import save

        save(self, path)

    def __str__(self) -> str:
        from sightline.graph.formats.listing import listing

        return for_output(listing(self))

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<Graph{name}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    def _repr_html_(self) -> str:
        from sightline.graph.formats.files import inline_svg

        return inline_svg(self) or f"<pre>{html.escape(str(self))}</pre>"


def map_refs(args: dict[str, Any], change: Callable[[Ref], Any]) -> dict[str, Any]:
    """The arguments with every `Ref` replaced by the result of ``change`` for it.

    >>> map_refs({"tensors": [Ref("a"), Ref("b", 1)], "dim": 0}, lambda ref: ref.node)
    {'tensors': ['a', 'b'], 'dim': 0}
    """
    changed: dict[str, Any] = map_leaves(args, lambda leaf: change(leaf) if isinstance(leaf, Ref) else leaf)
    return changed


def replace_refs(node: Node, change: Callable[[Ref], Any]) -> Node:
    """The node with its tensor arguments replaced; itself where none of them changes."""
    args = map_refs(node.args, change)
    return node if args == node.args else replace(node, args=args)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch the garbage collector off for a block; building many small objects is faster without it.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
