"""The modules of a recording: their paths and aliases, and the names of parameters, buffers and attributes.

Modules are found by ``id`` with a weak reference, like tensors. The trace's facts of a module are read once,
when recording stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final
from weakref import ref

import torch
from torch.nn import Embedding, Linear

from sightline.argument_checks import key_text
from sightline.data.trace_data import KIND, ModuleInfo, ParameterInfo
from sightline.recording.tensor_registry import TensorRegistry
from sightline.recording.torchapi import (
    Module,
    Parameter,
    Tensor,
    no_torch_function,
    unobserved,
)
from sightline.tensor_memory import has_memory, holds_freed

_MAX_EXTRA: Final = 500


class ModuleRecord:
    """A module of the recording."""

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
    """The modules of the model, and others that are called."""

    def __init__(self, model: Any, values: TensorRegistry) -> None:
        self._values = values
        self.all: list[ModuleRecord] = []
        self.by_id: dict[int, ModuleRecord] = {}
        self._tensors: dict[int, tuple[ref[Any], str, str]] = {}
        self._keys: dict[int, tuple[ref[Any], int]] = {}
        self._numbers = itertools.count()
        self._attributes: dict[int, tuple[ref[Any], str, str]] | None = None
        self._labels: dict[str, int] = {}
        #: (module, owner, attribute) of modules in plain lists or dicts of another, which torch cannot see.
        self.unregistered: list[tuple[int, int, str]] = []
        self.same_weights: list[tuple[str, str]] = []  #: an embedding and a layer of equal numbers
        self._has_model = model is not None
        if model is not None:
            self.add_root(model)

    def add_root(self, model: Any) -> None:
        """Add a model and everything in it; a second model's paths begin with its class name.

        A number tells it from others of its class.
        """
        model = original(model)
        label = type(model).__name__
        seen = self._labels[label] = self._labels.get(label, -1) + 1
        prefix = "" if not self.all else f"{label}_{seen}" if seen else label
        root, is_model = len(self.all), self._has_model and not self.all
        by_path: dict[str, int] = {}
        named = _named_modules(model)
        for path, module in named:
            full = _join(prefix, path)
            record = self._find(module)
            if record is None:
                parent = by_path.get(path.rpartition(".")[0], -1) if path else -1
                record = self._add(module, full, root, parent)
            elif full not in record.aliases:
                record.aliases.append(full)
            by_path[path] = record.number
        self._name_tensors(named, prefix)
        self._note_same_weights(named, prefix)
        if not is_model:
            self._read_now(self.all[root:])

    def _add(self, module: Any, path: str, root: int, parent: int) -> ModuleRecord:
        record = ModuleRecord(module, len(self.all), path, root, parent)
        self.all.append(record)
        self.by_id[id(module)] = record
        return record

    def _find(self, module: Any) -> ModuleRecord | None:
        module = original(module)
        record = self.by_id.get(id(module))
        return record if record is not None and record.ref() is module else None

    def _name_tensors(self, modules: Sequence[tuple[str, Any]], prefix: str) -> None:
        """Register parameters and buffers at the start, so that using them costs nothing in the run."""
        with no_torch_function():  # a model first called in the block is read while the function mode is on
            for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
                named: list[tuple[str, Any]] = []
                for path, module in modules:
                    full = _join(prefix, path)
                    for name, tensor in getattr(module, table).items():
                        if tensor is not None and self.tensor_name(tensor) is None:
                            named.append((_join(full, name), tensor))
                            self._tensors[id(tensor)] = (ref(tensor), kind, named[-1][0])
                self._values.label(named, kind)
                # Gradients that parameters have already, unless something else is known to be one.
                for name, parameter in named if kind == "parameter" else ():
                    if parameter.grad is not None and self._values.find(parameter.grad) is None:
                        self._values.register(parameter.grad, KIND["gradient"], f"{name}.grad")

    def record_of(self, module: Any, context: Callable[[], tuple[list[int], int]]) -> ModuleRecord:
        """The record of a module; ``context`` returns the modules that call it, if it is new."""
        return self._find(module) or self._add_new(original(module), context()[0])

    def _add_new(self, module: Any, around: Sequence[int]) -> ModuleRecord:
        """Add a module that was made in the block, attached since, or is a root of its own."""
        for outer in (self.all[number] for number in reversed(around)):
            owner = outer.ref()
            for path, child in _named_modules(owner) if owner is not None else ():
                if child is module:
                    full = _join(outer.path, path)
                    self._name_tensors(_named_modules(module), full)
                    record = self._add(module, full, outer.root, outer.number)
                    self._read_now([record])
                    return record
        self.add_root(module)
        record = self.by_id[id(module)]
        for outer in (self.all[number] for number in reversed(around)):
            attribute = _container_of(outer.ref(), module)
            if attribute:
                self.unregistered.append((record.number, outer.number, attribute))
                break
        return record

    def _note_same_weights(self, modules: Sequence[tuple[str, Any]], prefix: str) -> None:
        """Note embeddings and layers whose weights are two tensors of equal numbers."""
        weights: list[list[tuple[str, Any]]] = [
            [(path, one._parameters.get("weight")) for path, one in modules if isinstance(one, kind)]
            for kind in (Embedding, Linear)
        ]
        for (path, table), (other, layer) in itertools.product(*weights):
            if table is not layer and unobserved(partial(_are_copies, table, layer)):
                pair = (_join(_join(prefix, one), "weight") for one in (path, other))
                self.same_weights.append((next(pair), next(pair)))

    def summary(self) -> dict[str, Any]:
        """The facts for the trace's info rather than for a table, as plain data."""
        lists: dict[str, list[Any]] = {"unregistered": self.unregistered, "same_weights": self.same_weights}
        return {name: [list(one) for one in rows] for name, rows in lists.items() if rows}

    def tensor_name(self, tensor: Any) -> tuple[str, str] | None:
        """Kind and name of a parameter or buffer."""
        entry = self._tensors.get(id(tensor))
        return (entry[1], entry[2]) if entry is not None and entry[0]() is tensor else None

    def name_assigned(self) -> None:
        """Name the parameters and buffers that were assigned in the block, which no op shows."""
        for record in self.all:
            module = record.ref()
            if module is None:
                continue
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in table.items():
                    if tensor is not None and self.tensor_name(tensor) is None:
                        full = _join(record.path, name)
                        self._tensors[id(tensor)] = ref(tensor), kind, full
                        self._values.label([(full, tensor)], kind, new=False)

    def forget(self, tensor: Any) -> list[Any]:
        """Drop the weak references to a tensor; returns its entries."""
        return [table.pop(id(tensor), ())[1:] for table in self._tables()]

    def forget_all(self) -> None:
        """Drop the weak references to all tensors."""
        for table in self._tables():
            table.clear()

    def restore(self, tensor: Any, entries: list[Any]) -> None:
        """Put back the entries that `forget` returned."""
        for table, entry in zip(self._tables(), entries, strict=True):
            if entry:
                table[id(tensor)] = ref(tensor), *entry

    def _tables(self) -> tuple[dict[int, Any], ...]:
        """The tables of tensors; each entry begins with a weak reference."""
        return self._tensors, self._keys, {} if self._attributes is None else self._attributes

    def attribute_name(self, tensor: Any, running: Sequence[int]) -> tuple[str, str] | None:
        """Kind and name of the attribute of a running module, or any of the model, that holds a tensor.

        It may be a parameter that was assigned in the block: by ``load_state_dict(assign=True)``, by hand.
        """
        if self._attributes is None:  # all modules once: tensors that are no attribute come often
            self._attributes = {}
            for record in self.all:
                self._read_attributes(record)
        for record in (self.all[number] for number in reversed(running)):
            self._read_attributes(record)
            entry = self._attributes.get(id(tensor))
            if entry is not None and entry[0]() is tensor:
                if entry[1] != "constant":
                    self._tensors[id(tensor)] = entry
                return entry[1], entry[2]
        return None

    def _read_attributes(self, record: ModuleRecord) -> None:
        module = record.ref()
        if module is not None and self._attributes is not None:
            for kind, name, value in _attributes(module):
                if isinstance(value, Tensor):
                    self._attributes[id(value)] = (ref(value), kind, _join(record.path, name))

    def parameters(self) -> list[tuple[str, Any]]:
        """Every named parameter that is still alive."""
        alive = (
            (name, reference()) for reference, kind, name in self._tensors.values() if kind == "parameter"
        )
        return [(name, tensor) for name, tensor in alive if tensor is not None]

    def extra_repr(self, module: Any) -> str:
        """The ``extra_repr()`` of a module: ``in_features=6, out_features=6``."""
        return _extra_repr(module) if module is not None else ""

    def infos(self) -> list[ModuleInfo]:
        """The facts that the trace stores of each module."""
        return [self._info(record) for record in self.all]

    def _read_now(self, records: Sequence[ModuleRecord]) -> None:
        """Read modules that were first called in the block now: they may be gone when it ends."""
        infos = unobserved(lambda: [self._info(one) for one in records])  # ``extra_repr`` is the user's code
        for record, info in zip(records, infos, strict=True):
            record.info = info

    def _info(self, record: ModuleRecord) -> ModuleInfo:
        module, path, aliases = record.ref(), record.path, tuple(record.aliases)
        if module is None:
            if record.info is not None:
                return record.info
            return ModuleInfo(
                path=path, aliases=aliases, type="?", type_module="", parent=record.parent, extra="",
                training=False, root=record.root,
            )  # fmt: skip
        kind = type(module)
        try:  # a frozen ScriptModule has no mode, and the user's class may have a property for it
            training = bool(module.training)
        except Exception:
            training = False
        return ModuleInfo(
            path=path, aliases=aliases, type=kind.__name__, type_module=kind.__module__, parent=record.parent,
            extra=_extra_repr(module), training=training, root=record.root,
            parameters=_parameters(module, path, self._key),
        )  # fmt: skip

    def _key(self, tensor: Any) -> int:
        """A number that identifies a tensor: tied parameters share it."""
        entry = self._keys.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            entry = self._keys[id(tensor)] = ref(tensor), next(self._numbers)
        return entry[1]


def original(module: Any) -> Any:
    """The module inside a compiled one, which ``torch.compile`` returned; any other module itself."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else module


def _named_modules(model: Any) -> list[tuple[str, Any]]:
    """The modules in a model and their paths; compiled ones have the path of the original."""
    named = [(path, one) for path, one in model.named_modules(remove_duplicate=False) if original(one) is one]
    if not any("_orig_mod" in path for path, _ in named):
        return named
    return [(".".join(part for part in path.split(".") if part != "_orig_mod"), one) for path, one in named]


_MAX_CONTAINER: Final = 1000  #: a longer list holds data, not layers


def _container_of(owner: Any, module: Any) -> str:
    """The attribute of a module, a plain list or dict, that holds another module; empty if none does."""
    for name, value in vars(owner).items() if owner is not None else ():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        if not isinstance(value, dict | list | tuple) or len(value) > _MAX_CONTAINER:
            continue
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for number, (key, item) in enumerate(items):
            if item is module or (isinstance(item, list | tuple) and any(one is module for one in item)):
                return f"{name}[{key_text(key, number)}]"
    return ""


def _are_copies(one: Any, other: Any) -> bool:
    """Whether two weights hold equal numbers, as far as they can be compared now."""
    for weight in (one, other):  # on a device the comparison would wait for it
        if type(weight) is not Parameter or not weight.is_cpu or not has_memory(weight) or not weight.numel():
            return False
    if one.shape != other.shape:
        return False
    return bool(torch.equal(one[:1], other[:1]) and torch.equal(one, other) and one.std() > 0)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _attributes(module: Any) -> list[tuple[str, str, Any]]:
    """Kinds, names and values of a module's attributes, one level into lists and dicts too."""
    tables = ("parameter", module._parameters), ("buffer", module._buffers)
    attributes = [(kind, name, value) for kind, table in tables for name, value in table.items()]
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            attributes.append(("constant", name, value))
        elif isinstance(value, list | tuple):
            attributes += (
                ("constant", f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor)
            )
        elif isinstance(value, dict) and not name.startswith("_"):
            attributes += (
                ("constant", f"{name}[{key_text(key, number)}]", item)
                for number, (key, item) in enumerate(value.items())
                if isinstance(item, Tensor)
            )
    return attributes


def _extra_repr(module: Any) -> str:
    kind = type(module)
    if kind.extra_repr is Module.extra_repr:
        return ""
    try:
        if not kind.__module__.startswith("torch."):  # those of torch's own show no elements
            if holds_freed(module):
                return ""
        return str(module.extra_repr())[:_MAX_EXTRA]
    except Exception:  # it is the user's code, and only for display
        return ""


@cache  # there are few, and torch formats them anew each time
def _dtype(dtype: Any) -> tuple[str, int]:
    return str(dtype).removeprefix("torch."), dtype.itemsize


def _parameters(module: Any, path: str, key: Callable[[Any], int]) -> tuple[ParameterInfo, ...]:
    if not module._parameters and not module._buffers:
        return ()
    tensors = [(name, tensor, False) for name, tensor in module._parameters.items()]
    tensors += [(name, tensor, True) for name, tensor in module._buffers.items()]
    infos = []
    for name, tensor, buffer in tensors:
        if tensor is None:
            continue
        try:
            shape, numel = tuple(tensor.shape), tensor.numel()
        except Exception:  # a lazy parameter has no shape yet
            shape, numel = (), 0
        dtype, itemsize = _dtype(tensor.dtype)
        infos.append(
            ParameterInfo(
                name=name, path=_join(path, name), shape=shape, dtype=dtype, numel=numel,
                nbytes=numel * itemsize, buffer=buffer, key=key(tensor),
                trainable=isinstance(tensor, Parameter) and tensor.requires_grad,
            )
        )  # fmt: skip
    return tuple(infos)
