"""A graph as JSON with a version number, to be read back exactly.

An argument that JSON cannot express is an object with one key for its type: ``{"$ref": ["relu", 0]}``,
``{"$tuple": [1, 2]}``, ``{"$float": "nan"}``.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final

from sightline.data.forms import Elided, Record, Symbol
from sightline.data.trace_data import TensorMeta
from sightline.errors import DamagedFile, InvalidGraph
from sightline.graph.graph import Edge, Graph, Node, Ref
from sightline.notation import constant_text

FORMAT: Final = "sightline-graph"
VERSION: Final = 1
_META = (
    "shape",
    "stride",
    "dtype",
    "device",
    "layout",
    "itemsize",
    "type",
    "elements",
    "symbols",
    "placements",
)


def to_json(graph: Graph) -> str:
    """The whole graph; equal tensor metadata is written once."""
    metas: dict[TensorMeta, int] = {}

    def meta(item: TensorMeta | None) -> int | None:
        return None if item is None else metas.setdefault(item, len(metas))

    nodes = [
        {
            "id": node.id, "name": node.name, "op": node.op, "kind": node.kind, "args": encode(node.args),
            "module": node.module, "source": node.source, "outputs": [meta(item) for item in node.outputs],
            "repeat": node.repeat, "phase": node.phase, "target": node.target, "info": encode(node.info),
        }
        for node in graph.nodes
    ]  # fmt: skip
    edges = [[e.source, e.target, e.slot, e.argument, meta(e.meta), e.repeat, e.loop] for e in graph.edges]
    values = ([getattr(item, key) for key in _META] for item in metas)
    plain_metas = [[list(value) if isinstance(value, tuple) else value for value in row] for row in values]
    document = {
        "format": FORMAT, "version": VERSION, "name": graph.name, "modules": graph.modules,
        "info": encode(graph.info), "metas": plain_metas,
        "nodes": nodes, "edges": edges,
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Graph:
    """The graph in a text; `DamagedFile` where it is damaged or has another format."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"This is no graph: the text is not JSON ({error}).") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DamagedFile(f"This is no graph: the JSON does not say that its format is {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise DamagedFile(
            f"This graph has the version {document.get('version')!r}; this sightline reads {VERSION}."
        )
    try:
        graph = _read_graph(document)
        graph.lint()
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"This graph is damaged: {type(error).__name__} {error}.") from None
    except InvalidGraph as error:
        raise DamagedFile(f"This graph contradicts itself: {error}") from None
    return graph


def _read_graph(document: dict[str, Any]) -> Graph:
    metas: list[TensorMeta] = []
    for shape, stride, *others in document["metas"]:
        rest: list[Any] = [tuple(value) if isinstance(value, list) else value for value in others]
        metas.append(TensorMeta(tuple(shape), None if stride is None else tuple(stride), *rest))

    def meta(at: int | None) -> TensorMeta | None:
        return None if at is None else metas[_index(at)]

    nodes = tuple(
        Node(
            int(n["id"]), str(n["name"]), str(n["op"]), str(n["kind"]), decode(n["args"]), str(n["module"]),
            str(n["source"]), tuple(metas[_index(at)] for at in n["outputs"]), int(n["repeat"]),
            str(n["phase"]), str(n["target"]), decode(n["info"]),
        )
        for n in document["nodes"]
    )  # fmt: skip
    edges = tuple(
        Edge(int(source), int(target), int(slot), str(argument), meta(at), int(repeat), bool(loop))
        for source, target, slot, argument, at, repeat, loop in document["edges"]
    )
    modules = {str(path): str(type) for path, type in document["modules"].items()}
    return Graph(nodes, edges, str(document["name"]), modules, decode(document["info"]))


def _index(at: Any) -> int:
    if type(at) is not int or at < 0:
        raise ValueError(f"{at!r} is no position")
    return at


def encode(item: Any) -> Any:
    """Data in a form that JSON can hold.

    >>> encode({"x": Ref("relu"), "size": (2, 3), "eps": float("inf")})
    {'x': {'$ref': ['relu', 0]}, 'size': {'$tuple': [2, 3]}, 'eps': {'$float': 'inf'}}
    """
    if isinstance(item, int) and item.bit_length() > 512:
        return {"$symbol": constant_text(item)}
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, float):
        return item if isfinite(item) else {"$float": repr(item)}
    if isinstance(item, Ref):
        return {"$ref": [item.node, item.slot]}
    if isinstance(item, list):
        return [encode(part) for part in item]
    if isinstance(item, tuple):
        return {"$tuple": [encode(part) for part in item]}
    if isinstance(item, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in item):
            return {key: encode(part) for key, part in item.items()}
        return {"$dict": [[encode(key), encode(part)] for key, part in item.items()]}
    if isinstance(item, Record):
        return {"$record": [item.type, encode(item.fields)]}
    if isinstance(item, Elided):
        return {"$elided": item.count}
    return {"$symbol": item.text if isinstance(item, Symbol) else repr(item)}


def decode(item: Any) -> Any:
    """The inverse of `encode`; an argument that was not plain data is a `Symbol` now."""
    if isinstance(item, list):
        return [decode(part) for part in item]
    if not isinstance(item, dict):
        return item
    key: str
    content: Any
    key, content = next(iter(item.items()), ("", None))
    if len(item) != 1 or not key.startswith("$"):
        return {str(key): decode(part) for key, part in item.items()}
    if key == "$ref":
        return Ref(str(content[0]), int(content[1]))
    if key == "$tuple":
        return tuple(decode(part) for part in content)
    if key == "$float":
        return float(content)
    if key == "$symbol":
        return Symbol(str(content))
    if key == "$elided":
        return Elided(int(content))
    if key == "$record":
        return Record(str(content[0]), decode(content[1]))
    if key == "$dict":
        return {decode(name): decode(part) for name, part in content}
    raise ValueError(f"{key!r} is not known here")
