"""What a model returns, made fit for torch.export and put together again after a run.

torch.export takes apart what it knows: tuples, lists, dicts, registered classes. A plain dataclass travels as
a dict of its fields and is made again by `rebuilt`. What nobody can take apart, such as a cache of keys and
values in the output of a transformer, is left out, and its place is told.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

_PLAIN: Final = (
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype, torch.device,
    int, float, complex, str, bool, type(None),
)  # fmt: skip
Path = tuple[Any, ...]


@dataclass
class OutputStructure:
    """How the output of a model differs from what the graph returns."""

    classes: dict[Path, type] = field(default_factory=dict)  #: where a dataclass travels as a dict
    left_out: dict[str, str] = field(default_factory=dict)  #: where something was -> its class
    texts: dict[Path, str] = field(default_factory=dict)  #: strings: torch writes them but cannot read them

    def fit(self, output: Any, path: Path = ()) -> Any:
        """The output as torch can take it apart.

        >>> returned = Returned()
        >>> returned.fit({"y": 1, "cache": object()}), returned.left_out
        ({'y': 1}, {"['cache']": 'object'})
        """
        if not _holds_unknown(output):
            return output
        if _is_plain_dataclass(output):
            self.classes[path] = type(output)
            return self._items(
                {one.name: getattr(output, one.name) for one in fields(output)}, path, none=True
            )
        if isinstance(output, dict):  # transformers' ModelOutput is one too
            kept = self._items(dict(output), path, none=False)
            return type(output)(**kept) if hasattr(output, "__dataclass_fields__") else type(output)(kept)
        if isinstance(output, (tuple, list)):
            items = list(self._items(dict(enumerate(output)), path, none=True).values())
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        return output  # torch will say what is wrong with it

    def _items(self, items: dict[Any, Any], path: Path, *, none: bool) -> dict[Any, Any]:
        """The parts of a container; what cannot be is None or missing."""
        kept: dict[Any, Any] = {}
        for key, value in items.items():
            here = (*path, key)
            if _is_hopeless(value):
                self.left_out["".join(f"[{part!r}]" for part in here)] = type(value).__name__
                if none:
                    kept[key] = None
            elif isinstance(value, str):
                self.texts[here] = value
                kept[key] = None
            else:
                kept[key] = self.fit(value, here)
        return kept

    def rebuilt(self, output: Any, path: Path = ()) -> Any:
        """The output with its dataclasses made again, from what a graph returned."""
        if path in self.texts:
            return self.texts[path]
        if not any(known[: len(path)] == path for known in (*self.classes, *self.texts)):
            return output
        if isinstance(output, dict):
            parts: Any = {key: self.rebuilt(value, (*path, key)) for key, value in output.items()}
            parts = parts if type(output) is dict else type(output)(**parts)
        elif isinstance(output, (tuple, list)):
            items = [self.rebuilt(value, (*path, key)) for key, value in enumerate(output)]
            parts = type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        else:
            return output
        kind = self.classes.get(path)
        return parts if kind is None else _made(kind, parts)

    def to_plain(self) -> dict[str, Any]:
        """The same as what JSON knows: classes by the names under which they can be imported."""
        classes = [[list(path), kind.__module__, kind.__qualname__] for path, kind in self.classes.items()]
        texts = [[list(path), text] for path, text in self.texts.items()]
        return {"classes": classes, "left_out": self.left_out, "texts": texts}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> OutputStructure:
        """What `to_plain` described; a class that is not imported here stays a dict."""
        classes = {}
        for path, module, name in plain["classes"]:
            kind: Any = sys.modules.get(module)
            for part in name.split("."):
                kind = getattr(kind, part, None)
            if isinstance(kind, type) and is_dataclass(kind):
                classes[tuple(path)] = kind
        texts = {tuple(path): text for path, text in plain["texts"]}
        return cls(classes, dict(plain["left_out"]), texts)


def _made(kind: type, parts: dict[str, Any]) -> Any:
    """An instance with these fields, without running code of the class."""
    made: Any = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


def _holds_unknown(value: Any) -> bool:
    return any(not isinstance(leaf, _PLAIN) or isinstance(leaf, str) for leaf in pytree.tree_leaves(value))


def _is_registered(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value)


def _is_plain_dataclass(value: Any) -> bool:
    return not isinstance(value, dict) and not _is_registered(value) and is_dataclass(value)


def _is_hopeless(value: Any) -> bool:
    return not isinstance(value, _PLAIN) and not _is_registered(value) and not is_dataclass(value)
