"""A model's output, simplified for torch.export and restored to its own structure after a run.

torch.export flattens tuples, lists, dicts and registered classes. A plain dataclass is passed as a dict of
its fields, and `restore` makes it again. Parts that cannot be flattened, such as a transformer's cache of
keys and values, are left out, and `left_out` lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

import torch

from sightline.argument_checks import key_text
from sightline.graph.exported.torchapi import pytree

_PLAIN: Final = (
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype, torch.device,
    int, float, complex, str, bool, type(None),
)  # fmt: skip
Path = tuple[Any, ...]


@dataclass
class OutputStructure:
    """How the output of a model differs from the output of its graph."""

    classes: dict[Path, type] = field(default_factory=dict)  #: where a dict stands for a dataclass
    left_out: dict[str, str] = field(default_factory=dict)  #: path of a part that was left out -> its class
    texts: dict[Path, str] = field(default_factory=dict)  #: strings, which torch saves but cannot load

    def simplify(self, output: Any, path: Path = ()) -> Any:
        """The output as torch can flatten it.

        >>> structure = OutputStructure()
        >>> structure.simplify({"y": 1, "cache": object()}), structure.left_out
        ({'y': 1}, {"['cache']": 'object'})
        """
        leaves = pytree.tree_leaves(output)
        if all(isinstance(leaf, _PLAIN) and not isinstance(leaf, str) for leaf in leaves):
            return output
        if not isinstance(output, dict) and not _is_registered(output) and is_dataclass(output):
            self.classes[path] = type(output)
            items = {part.name: getattr(output, part.name) for part in fields(output)}
            return self._simplify_items(items, path, as_none=True)
        if isinstance(output, dict):  # transformers' ModelOutput is one too
            parts = self._simplify_items(dict(output), path, as_none=False)
            return type(output)(**parts) if hasattr(output, "__dataclass_fields__") else type(output)(parts)
        if isinstance(output, (tuple, list)):
            return _sequence(
                output, self._simplify_items(dict(enumerate(output)), path, as_none=True).values()
            )
        return output  # torch raises an error for it

    def _simplify_items(self, items: dict[Any, Any], path: Path, *, as_none: bool) -> dict[Any, Any]:
        """The items of a container; one that cannot be flattened becomes None, or is dropped."""
        simplified: dict[Any, Any] = {}
        for key, value in items.items():
            item_path = (*path, key)
            if not isinstance(value, _PLAIN) and not _is_registered(value) and not is_dataclass(value):
                self.left_out["".join(f"[{key_text(part)}]" for part in item_path)] = type(value).__name__
                if as_none:
                    simplified[key] = None
            elif isinstance(value, str):
                self.texts[item_path] = value
                simplified[key] = None
            else:
                simplified[key] = self.simplify(value, item_path)
        return simplified

    def restore(self, output: Any, path: Path = ()) -> Any:
        """The model's own output, from the output of the graph."""
        if path in self.texts:
            return self.texts[path]
        if not any(changed[: len(path)] == path for changed in (*self.classes, *self.texts)):
            return output
        if isinstance(output, dict):
            parts: Any = {key: self.restore(value, (*path, key)) for key, value in output.items()}
            parts = parts if type(output) is dict else type(output)(**parts)
        elif isinstance(output, (tuple, list)):
            parts = _sequence(output, [self.restore(value, (*path, key)) for key, value in enumerate(output)])
        else:
            return output
        kind = self.classes.get(path)
        if kind is None:
            return parts
        instance: Any = object.__new__(kind)  # without running code of the class
        for name, value in parts.items():
            object.__setattr__(instance, name, value)
        return instance

    def to_plain(self) -> dict[str, Any]:
        """Plain data for JSON, with classes by the names they are imported under."""
        classes = [[list(path), kind.__module__, kind.__qualname__] for path, kind in self.classes.items()]
        texts = [[list(path), text] for path, text in self.texts.items()]
        return {"classes": classes, "left_out": self.left_out, "texts": texts}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> OutputStructure:
        """The inverse of `to_plain`; an instance of a class that is not imported stays a dict."""
        classes = {}
        for path, module, name in plain["classes"]:
            kind: Any = sys.modules.get(module)
            for part in name.split("."):
                kind = getattr(kind, part, None)
            if isinstance(kind, type) and is_dataclass(kind):
                classes[tuple(path)] = kind
        texts = {tuple(path): text for path, text in plain["texts"]}
        return cls(classes, dict(plain["left_out"]), texts)


def _sequence(original: Any, items: Iterable[Any]) -> Any:
    """A list or tuple of the original's class; a named tuple takes its items one by one."""
    return type(original)(*items) if hasattr(original, "_fields") else type(original)(items)


def _is_registered(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value)
