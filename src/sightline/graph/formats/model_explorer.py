"""A graph for Google's Model Explorer: a graph collection whose namespaces are the module paths.

All attributes are text, and ``/`` separates namespaces. Statistics, FLOPs and time are attributes of the
nodes and also node data, by which the page can colour: it reads them from files of their own, one for each
item of ``nodeData``, and ignores them in the graph's file.
"""

from __future__ import annotations

from typing import Any

from sightline.graph.formats.drawing import printable
from sightline.graph.graph import Graph, Node
from sightline.graph.module_scopes import ScopeTree, relative_path, scope_tree
from sightline.notation import constant_text


def to_model_explorer(graph: Graph) -> dict[str, Any]:
    """A graph collection: ``json.dump`` it and open the file in Model Explorer.

    >>> g = Graph((Node(0, "relu", "relu", module="act"),), (), modules={"act": "ReLU"})
    >>> collection = to_model_explorer(g)
    >>> collection["graphs"][0]["nodes"][0]["namespace"]
    'act'
    """
    tree = scope_tree(graph)
    spaces = _Namespaces(graph, tree)
    nodes = [_node(graph, node, spaces.of(node)) for node in graph.topological()]
    quantities: dict[str, dict[str, dict[str, float]]] = {}
    for node in graph.nodes:
        numbers = {key: node.info.get(key) for key in ("duration", "flops")}
        first: dict[str, Any] = next(filter(None, node.info.get("statistics") or []), {})
        numbers |= {key: first.get(key) for key in ("mean", "std", "nans", "infs")}
        for key, value in numbers.items():
            if isinstance(value, int | float) and value == value:
                quantities.setdefault(key, {})[node.name] = {"value": value}
    name = printable(graph.name) or "graph"
    inner: dict[str, Any] = {"id": name, "nodes": nodes}
    classes = spaces.classes()
    if classes:
        inner["groupNodeAttributes"] = classes
    collection: dict[str, Any] = {"label": name, "graphs": [inner]}
    if quantities:
        gradient = [{"stop": 0, "bgColor": "white"}, {"stop": 1, "bgColor": "#ff922b"}]
        collection["nodeData"] = [
            {"name": key, "results": results, "gradient": gradient} for key, results in quantities.items()
        ]
    return collection


class _Namespaces:
    """``blocks/0/attn``; further calls of a module have a number: ``cell (2)``."""

    def __init__(self, graph: Graph, tree: ScopeTree) -> None:
        self._tree, self._types = tree, graph.modules
        self._texts: list[str] = []
        self._scope_of = dict(tree.of_node)
        seen: dict[str, int] = {}
        for scope in tree.scopes:
            around = self._texts[scope.parent] if scope.parent >= 0 else ""
            outer = tree.scopes[scope.parent].path if scope.parent >= 0 else ""
            inner = relative_path(scope.path, outer)
            own = "/".join(printable(part).replace("/", "∕") for part in inner.split("."))
            text = "/".join(part for part in (around, own) if part)
            count = seen[text] = seen.get(text, 0) + 1
            self._texts.append(f"{text} ({count})" if count > 1 and text else text)
        for edge in graph.edges:  # parameters are shown with their readers
            if edge.source not in tree.of_node and graph.by_id[edge.source].kind != "input":
                tree.widen(self._scope_of, edge.source, edge.target)

    def classes(self) -> dict[str, dict[str, str]]:
        """The attributes that the page shows for a selected group."""
        return {
            text: {"class": printable(self._types[scope.path]), "module": printable(scope.path)}
            for text, scope in zip(self._texts, self._tree.scopes, strict=True)
            if text and self._types.get(scope.path)
        }

    def of(self, node: Node) -> str:
        scope = self._scope_of.get(node.id, -1)
        return self._texts[scope] if scope >= 0 else ""


def _node(graph: Graph, node: Node, namespace: str) -> dict[str, Any]:
    times = f" ×{node.repeat}" if node.repeat > 1 else ""
    attrs = [("kind", node.kind), ("name", node.name), ("target", node.target), ("module", node.module)]
    attrs += [("source", node.source), ("phase", node.phase if node.phase != "forward" else "")]
    attrs += [(f"arg {key}", constant_text(item)) for key, item in node.args.items()]
    attrs += [(key, str(value)) for key, value in node.info.items() if isinstance(value, int | float | str)]
    return {
        "id": node.name,
        "label": printable(node.op) + times,
        "namespace": namespace,
        "incomingEdges": [
            {
                "sourceNodeId": graph.by_id[edge.source].name,
                "sourceNodeOutputId": str(edge.slot),
                "targetNodeInputId": str(at),
            }
            for at, edge in enumerate(graph.incoming(node))
        ],
        "attrs": [_attr(key, value) for key, value in attrs if value],
        "outputsMetadata": [
            {"id": str(slot), "attrs": [_attr("tensor_shape", str(meta))]}
            for slot, meta in enumerate(node.outputs)
        ],
        "inputsMetadata": [
            {"id": str(at), "attrs": [_attr("__tensor_tag", edge.argument)]}
            for at, edge in enumerate(graph.incoming(node))
        ],
    }


def _attr(key: str, value: str) -> dict[str, str]:
    return {"key": printable(key), "value": printable(value)}
