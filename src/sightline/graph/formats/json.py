"""A graph as JSON with a version number, to be read back exactly.

Arguments are plain data with tensors in it: what JSON has no word for is an object with one key that says
what it is: ``{"$ref": ["relu", 0]}``, ``{"$tuple": [1, 2]}``, ``{"$float": "nan"}``.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final

from sightline.errors import DamagedFile, InvalidGraph
from sightline.graph.graph import Edge, Graph, Node, Ref
from sightline.notation import constant_text
from sightline.trace.data import TensorMeta
from sightline.trace.forms import Elided, Record, Symbol

FORMAT: Final = "sightline-graph"
VERSION: Final = 1
_META = ("shape", "stride", "dtype", "device", "layout", "itemsize", "type", "elements", "symbols")


def to_json(graph: Graph) -> str:
    """The whole graph; tensors that look alike are written once."""
    metas: dict[TensorMeta, int] = {}

    def meta(item: TensorMeta | None) -> int | None:
        return None if item is None else metas.setdefault(item, len(metas))

    nodes = [
        {
            "id": node.id, "name": node.name, "op": node.op, "kind": node.kind, "args": encoded(node.args),
            "module": node.module, "source": node.source, "outputs": [meta(item) for item in node.outputs],
            "repeat": node.repeat, "phase": node.phase, "target": node.target, "info": encoded(node.info),
        }
        for node in graph.nodes
    ]  # fmt: skip
    edges = [[e.source, e.target, e.slot, e.argument, meta(e.meta), e.repeat, e.loop] for e in graph.edges]
    made = {
        "format": FORMAT, "version": VERSION, "name": graph.name, "modules": graph.modules,
        "info": encoded(graph.info), "metas": [_plain_meta(item) for item in metas],
        "nodes": nodes, "edges": edges,
    }  # fmt: skip
    return json.dumps(made, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Graph:
    """The graph a text describes; a damaged or foreign one is `DamagedFile`, in one sentence."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"This is no graph: the text is not JSON ({error}).") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise DamagedFile(f"This is no graph: the JSON does not say that its format is {FORMAT!r}.")
    if read.get("version") != VERSION:
        raise DamagedFile(
            f"This graph has the version {read.get('version')!r}; this sightline reads {VERSION}."
        )
    try:
        graph = _read(read)
        graph.lint()
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"This graph is damaged: {type(error).__name__} {error}.") from None
    except InvalidGraph as error:
        raise DamagedFile(f"This graph contradicts itself: {error}") from None
    return graph


def _read(read: dict[str, Any]) -> Graph:
    metas = [
        TensorMeta(tuple(shape), None if stride is None else tuple(stride), *map(_tupled, rest))
        for shape, stride, *rest in read["metas"]
    ]

    def meta(at: int | None) -> TensorMeta | None:
        return None if at is None else metas[_natural(at)]

    nodes = tuple(
        Node(
            int(n["id"]), str(n["name"]), str(n["op"]), str(n["kind"]), decoded(n["args"]), str(n["module"]),
            str(n["source"]), tuple(metas[_natural(at)] for at in n["outputs"]), int(n["repeat"]),
            str(n["phase"]), str(n["target"]), decoded(n["info"]),
        )
        for n in read["nodes"]
    )  # fmt: skip
    edges = tuple(
        Edge(int(source), int(target), int(slot), str(argument), meta(at), int(repeat), bool(loop))
        for source, target, slot, argument, at, repeat, loop in read["edges"]
    )
    modules = {str(path): str(type) for path, type in read["modules"].items()}
    return Graph(nodes, edges, str(read["name"]), modules, decoded(read["info"]))


def _natural(at: Any) -> int:
    if type(at) is not int or at < 0:
        raise ValueError(f"{at!r} is no position")
    return at


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain_meta(item: TensorMeta) -> list[Any]:
    return [
        list(value) if isinstance(value, tuple) else value for value in (getattr(item, key) for key in _META)
    ]


def encoded(item: Any) -> Any:
    """Data as JSON can hold it.

    >>> encoded({"x": Ref("relu"), "size": (2, 3), "eps": float("inf")})
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
        return [encoded(part) for part in item]
    if isinstance(item, tuple):
        return {"$tuple": [encoded(part) for part in item]}
    if isinstance(item, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in item):
            return {key: encoded(part) for key, part in item.items()}
        return {"$dict": [[encoded(key), encoded(part)] for key, part in item.items()]}
    if isinstance(item, Record):
        return {"$record": [item.type, encoded(item.fields)]}
    if isinstance(item, Elided):
        return {"$elided": item.count}
    return {"$symbol": item.text if isinstance(item, Symbol) else repr(item)}


def decoded(item: Any) -> Any:
    """The inverse of `encoded`; what was no plain data is a `Symbol` now."""
    if isinstance(item, list):
        return [decoded(part) for part in item]
    if not isinstance(item, dict):
        return item
    if len(item) == 1:
        key, held = next(iter(item.items()))
        if key.startswith("$"):
            return _special(key, held)
    return {str(key): decoded(part) for key, part in item.items()}


def _special(key: str, held: Any) -> Any:
    if key == "$ref":
        return Ref(str(held[0]), int(held[1]))
    if key == "$tuple":
        return tuple(decoded(part) for part in held)
    if key == "$float":
        return float(held)
    if key == "$symbol":
        return Symbol(str(held))
    if key == "$elided":
        return Elided(int(held))
    if key == "$record":
        return Record(str(held[0]), decoded(held[1]))
    if key == "$dict":
        return {decoded(name): decoded(part) for name, part in held}
    raise ValueError(f"{key!r} is not known here")
