"""Which module is which: paths, aliases and the names of parameters, buffers and attributes.

Modules are known by ``id`` with a weak reference, like tensors. What the trace says of a module is read
once, when recording stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final
from weakref import ref

import torch
from torch.nn import Embedding, Linear

from sightline.recording.torchapi import Module, Parameter, Tensor, no_dispatch, quiet, undisturbed
from sightline.recording.values import KIND, Values
from sightline.trace.data import ModuleInfo, ParameterInfo

_MAX_EXTRA: Final = 500


class ModuleRecord:
    """A module that has been met."""

    __slots__ = ("aliases", "info", "number", "parent", "path", "ref", "root")

    def __init__(self, module: Any, number: int, path: str, root: int, parent: int) -> None:
        self.ref = ref(module)
        self.number = number
        self.path = path
        self.aliases = [path]
        self.root = root
        self.parent = parent
        self.info: ModuleInfo | None = None  #: of a module that may not live to the end


class Modules:
    """The modules of the model, and of whatever else is called."""

    def __init__(self, model: Any, values: Values) -> None:
        self._values = values
        self.all: list[ModuleRecord] = []
        self.by_id: dict[int, ModuleRecord] = {}
        self._tensors: dict[int, tuple[ref[Any], str, str]] = {}
        self._keys: dict[int, tuple[ref[Any], int]] = {}
        self._numbers = itertools.count()
        self._attributes: dict[int, tuple[ref[Any], str, str]] | None = None
        self._labels: dict[str, int] = {}
        #: Modules that their owner holds unseen, and as what.
        self.unregistered: list[tuple[int, int, str]] = []
        self.same_weights: list[tuple[str, str]] = []  #: an embedding and a layer of equal numbers
        self.given = model is not None
        if model is not None:
            self.add_root(model)

    def add_root(self, model: Any) -> None:
        """Know a model and everything in it; a second model's paths begin with its class name."""
        model = original(model)
        prefix = ""
        if self.all:
            label = type(model).__name__
            seen = self._labels[label] = self._labels.get(label, -1) + 1
            prefix = f"{label}_{seen}" if seen else label
        root, given = len(self.all), self.given and not self.all
        by_path: dict[str, int] = {}
        walked = _walked(model)
        for path, module in walked:
            full = _join(prefix, path)
            known = self._find(module)
            if known is None:
                parent = by_path.get(path.rpartition(".")[0], -1) if path else -1
                known = self._add(module, full, root, parent)
            elif full not in known.aliases:
                known.aliases.append(full)
            by_path[path] = known.number
        self._name_tensors(walked, prefix)
        self._note_same_weights(walked, prefix)
        if not given:
            self._read_now(self.all[root:])

    def _add(self, module: Any, path: str, root: int, parent: int) -> ModuleRecord:
        known = ModuleRecord(module, len(self.all), path, root, parent)
        self.all.append(known)
        self.by_id[id(module)] = known
        return known

    def _find(self, module: Any) -> ModuleRecord | None:
        module = original(module)
        known = self.by_id.get(id(module))
        return known if known is not None and known.ref() is module else None

    def _name_tensors(self, walked: Sequence[tuple[str, Any]], prefix: str) -> None:
        """Know parameters and buffers from the start, so that meeting them costs nothing in the run."""
        with quiet():  # a model met in the block is read while the function mode is on
            for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
                for path, module in walked:
                    for name, tensor in getattr(module, table).items():
                        if tensor is not None and self.tensor_name(tensor) is None:
                            self._name_tensor(tensor, kind, _join(_join(prefix, path), name))

    def _name_tensor(self, tensor: Any, kind: str, name: str) -> None:
        values = self._values
        self._tensors[id(tensor)] = (ref(tensor), kind, name)
        values.label([(name, tensor)], kind)
        if kind == "parameter" and tensor.grad is not None and values.known(tensor.grad) is None:
            values.first_sight(tensor.grad, KIND["gradient"], f"{name}.grad")

    def of(self, module: Any, where: Callable[[], tuple[list[int], int]]) -> ModuleRecord:
        """What is known of a module that is called ``where`` others are; one not met before is placed."""
        return self._find(module) or self._place(original(module), where()[0])

    def _place(self, module: Any, around: Sequence[int]) -> ModuleRecord:
        """A module that was not there before: made in the block, or attached since, or a root of its own."""
        for outer in (self.all[number] for number in reversed(around)):
            owner = outer.ref()
            for path, found in _walked(owner) if owner is not None else ():
                if found is module:
                    full = _join(outer.path, path)
                    self._name_tensors(_walked(module), full)
                    known = self._add(module, full, outer.root, outer.number)
                    self._read_now([known])
                    return known
        self.add_root(module)
        known = self.by_id[id(module)]
        for outer in (self.all[number] for number in reversed(around)):
            attribute = _held_as(outer.ref(), module)
            if attribute:
                self.unregistered.append((known.number, outer.number, attribute))
                break
        return known

    def _note_same_weights(self, walked: Sequence[tuple[str, Any]], prefix: str) -> None:
        """Pairs of an embedding and a layer whose weights are two tensors with the same numbers in them."""
        weights = [(path, one, one._parameters.get("weight")) for path, one in walked]
        tables = [(path, weight) for path, one, weight in weights if isinstance(one, Embedding)]
        layers = [(path, weight) for path, one, weight in weights if isinstance(one, Linear)]
        for (path, table), (other, layer) in itertools.product(tables, layers):
            if table is not layer and _is_plain(table) and _is_plain(layer) and table.shape == layer.shape:
                if undisturbed(partial(_are_copies, table, layer)):
                    pair = (_join(_join(prefix, one), "weight") for one in (path, other))
                    self.same_weights.append((next(pair), next(pair)))

    def told(self) -> dict[str, Any]:
        """What was seen of modules that is in no table of theirs."""
        found: dict[str, list[Any]] = {"unregistered": self.unregistered, "same_weights": self.same_weights}
        return {name: [list(one) for one in rows] for name, rows in found.items() if rows}

    def tensor_name(self, tensor: Any) -> tuple[str, str] | None:
        """Kind and name of a parameter or buffer."""
        found = self._tensors.get(id(tensor))
        return (found[1], found[2]) if found is not None and found[0]() is tensor else None

    def name_assigned(self) -> None:
        """Name the parameters and buffers that modules were given in the block, of which no op told."""
        for known in self.all:
            module = known.ref()
            if module is None:
                continue
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in table.items():
                    if tensor is not None and self.tensor_name(tensor) is None:
                        full = _join(known.path, name)
                        self._tensors[id(tensor)] = ref(tensor), kind, full
                        self._values.label([(full, tensor)], kind, new=False)

    def let_go(self, tensor: Any) -> list[Any]:
        """Hold no weak reference to a tensor; what was known of it."""
        return [table.pop(id(tensor), ())[1:] for table in self._tables()]

    def take_back(self, tensor: Any, known: list[Any]) -> None:
        """Know it again."""
        for table, entry in zip(self._tables(), known, strict=True):
            if entry:
                table[id(tensor)] = ref(tensor), *entry

    def _tables(self) -> tuple[dict[int, Any], ...]:
        """What is known of tensors, each entry beginning with a weak reference."""
        return self._tensors, self._keys, {} if self._attributes is None else self._attributes

    def attribute_name(self, tensor: Any, running: Sequence[int]) -> tuple[str, str] | None:
        """Kind and name of the attribute under which a running module, or any of the model, holds a tensor.

        It may be a parameter that was assigned in the block: by ``load_state_dict(assign=True)``, by hand.
        """
        if self._attributes is None:  # looked through once: a tensor that is not there is asked for often
            self._attributes = {}
            for known in self.all:
                self._read_attributes(known)
        for known in (self.all[number] for number in reversed(running)):
            self._read_attributes(known)
            found = self._attributes.get(id(tensor))
            if found is not None and found[0]() is tensor:
                if found[1] != "constant":
                    self._tensors[id(tensor)] = found
                return found[1], found[2]
        return None

    def _read_attributes(self, known: ModuleRecord) -> None:
        module = known.ref()
        if module is not None and self._attributes is not None:
            for kind, name, value in _attributes(module):
                if isinstance(value, Tensor):
                    self._attributes[id(value)] = (ref(value), kind, _join(known.path, name))

    def parameters(self) -> list[tuple[str, Any]]:
        """Every named parameter that is still alive."""
        found = ((name, held()) for held, kind, name in self._tensors.values() if kind == "parameter")
        return [(name, tensor) for name, tensor in found if tensor is not None]

    def says(self, module: Any) -> str:
        """What a module says of itself: ``in_features=6, out_features=6``."""
        return _extra(module) if module is not None else ""

    def infos(self) -> list[ModuleInfo]:
        """What the trace keeps of every module that was called, and of those that hold one."""
        return [self._info(known) for known in self.all]

    def _read_now(self, met: Sequence[ModuleRecord]) -> None:
        """What is said of modules that were met in the block: they may be gone when it ends."""
        with quiet(), no_dispatch():  # ``extra_repr`` is code of the user's
            for known in met:
                known.info = self._info(known)

    def _info(self, known: ModuleRecord) -> ModuleInfo:
        module = known.ref()
        if module is None:
            if known.info is not None:
                return known.info
            return ModuleInfo(known.path, tuple(known.aliases), "?", "", known.parent, "", False, known.root)
        kind = type(module)
        return ModuleInfo(
            known.path, tuple(known.aliases), kind.__name__, kind.__module__, known.parent, _extra(module),
            bool(module.training), known.root, _parameters(module, known.path, self._key),
        )  # fmt: skip

    def _key(self, tensor: Any) -> int:
        """A number that tensors share only if they are one and the same."""
        found = self._keys.get(id(tensor))
        if found is None or found[0]() is not tensor:
            found = self._keys[id(tensor)] = ref(tensor), next(self._numbers)
        return found[1]


def original(module: Any) -> Any:
    """The module that was compiled, of what ``torch.compile`` returned for it; any other as it is."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else module


def _walked(model: Any) -> list[tuple[str, Any]]:
    """The modules in a model and their paths. Compiled ones are where they would be if they were not."""
    found = model.named_modules(remove_duplicate=False)
    named = ((".".join(part for part in path.split(".") if part != "_orig_mod"), one) for path, one in found)
    return [(path, one) for path, one in named if original(one) is one]


_MOST_HELD: Final = 1000  #: a longer list holds data, not layers


def _held_as(owner: Any, module: Any) -> str:
    """The attribute of a module, a plain list or dict, in which it holds another; empty if there is none."""
    for name, value in vars(owner).items() if owner is not None else ():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        if not isinstance(value, dict | list | tuple) or len(value) > _MOST_HELD:
            continue
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if item is module or (isinstance(item, list | tuple) and any(one is module for one in item)):
                return f"{name}[{key!r}]"
    return ""


def _are_copies(one: Any, other: Any) -> bool:
    """Whether two weights have the same numbers in them."""
    with torch.no_grad():
        return bool(torch.equal(one[:1], other[:1]) and torch.equal(one, other) and one.std() > 0)


def _is_plain(weight: Any) -> bool:
    """Whether the numbers of a parameter can be compared at once: on a device nobody waits for them."""
    return (
        type(weight) is Parameter and weight.is_cpu and weight.layout is torch.strided and weight.numel() > 0
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _attributes(module: Any) -> list[tuple[str, str, Any]]:
    """Kinds, names and values of what a module holds, one level into lists and dicts too."""
    tables = ("parameter", module._parameters), ("buffer", module._buffers)
    found = [(kind, name, value) for kind, table in tables for name, value in table.items()]
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            found.append(("constant", name, value))
        elif isinstance(value, list | tuple):
            found += (("constant", f"{name}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, dict) and not name.startswith("_"):
            found += (("constant", f"{name}[{key!r}]", item) for key, item in value.items())
    return found


def _extra(module: Any) -> str:
    if type(module).extra_repr is Module.extra_repr:
        return ""
    try:
        return str(module.extra_repr())[:_MAX_EXTRA]
    except Exception:  # it is the user's code, and only for display
        return ""


@cache  # there are a few, and their texts are made anew each time
def _dtype(dtype: Any) -> tuple[str, int]:
    return str(dtype).removeprefix("torch."), dtype.itemsize


def _parameters(module: Any, path: str, key: Callable[[Any], int]) -> tuple[ParameterInfo, ...]:
    if not module._parameters and not module._buffers:
        return ()
    held = [(name, tensor, False) for name, tensor in module._parameters.items()]
    held += [(name, tensor, True) for name, tensor in module._buffers.items()]
    infos = []
    for name, tensor, buffer in held:
        if tensor is None:
            continue
        try:
            shape, numel = tuple(tensor.shape), tensor.numel()
        except Exception:  # a lazy parameter has no shape yet
            shape, numel = (), 0
        dtype, itemsize = _dtype(tensor.dtype)
        infos.append(
            ParameterInfo(
                name, _join(path, name), shape, dtype, numel, numel * itemsize,
                isinstance(tensor, Parameter) and tensor.requires_grad, buffer, key(tensor),
            )
        )  # fmt: skip
    return tuple(infos)
