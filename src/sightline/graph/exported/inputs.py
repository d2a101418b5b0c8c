"""The inputs of an exported graph: matched to the example's structure and checked, with clear errors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sightline.argument_checks import argument_text
from sightline.errors import UsageError
from sightline.graph.exported.dynamic import Dynamic
from sightline.graph.exported.torchapi import children_of, pytree
from sightline.notation import tensor_text
from sightline.patterns import did_you_mean


def input_names(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The name of each leaf of the arguments: ``x``, ``batch['ids']``, ``pair[0]``.

    >>> input_names(["x"], (1,), {"batch": {"ids": 2}})
    ['x', "batch['ids']"]
    """
    leaves = []
    for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]:
        first = path[1]
        if isinstance(first, pytree.SequenceKey):
            name = names[first.idx] if first.idx < len(names) else f"args[{first.idx}]"
        else:
            name = str(getattr(first, "key", first))
        leaves.append(name + "".join(map(str, path[2:])))
    return leaves


def parameter_names(model: torch.nn.Module, count: int) -> list[str]:
    """The names of the first positional parameters of ``forward``; those behind ``*args`` are numbered."""
    names: list[str] = []
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C has none
        parameters = ()  # type: ignore[assignment]
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count] + [f"args[{index}]" for index in range(len(names), count)]


@dataclass
class InputSpec:
    """The inputs that a graph must be called with."""

    spec: pytree.TreeSpec  #: of ``(args, kwargs)``
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    names: tuple[str, ...]  #: of each leaf
    constants: dict[str, Any]  #: leaves that are not tensors, with the example's values
    devices: dict[str, str]  #: of the leaves that are tensors
    dynamic: Dynamic
    _checked: set[Any] = field(default_factory=set)  #: shapes, dtypes and devices that passed the check

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call in the graph's order; `UsageError` for inputs the graph cannot take."""
        args, kwargs = self._arrange(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec:
            leaves, spec = pytree.tree_flatten(_reorder_keys((args, kwargs), self.spec))
            if spec != self.spec:
                self._raise_structure_error(args, kwargs)
        key = tuple([(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else None for v in leaves])
        if self.constants or key not in self._checked:  # a loop over batches is checked once per size
            self._check(leaves)
            if len(self._checked) < 1024:
                self._checked.add(key)
        return leaves

    def _arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each input by position or by name as in the example, however the call passed it."""
        if len(args) == len(self.positional) and tuple(kwargs) == self.keywords:
            return args, kwargs
        expected = [*self.positional, *self.keywords]
        if len(args) > len(expected):
            raise UsageError(
                f"This graph takes {self._signature_text()}, but got {len(args)} positional inputs."
            )
        values = dict(zip(expected, args, strict=False))
        for name, value in kwargs.items():
            if name in values:
                raise UsageError(f"The input {name} was given twice, by position and by name.")
            if name not in expected and value is not None:
                raise UsageError(
                    f"This graph has no input {name!r}{did_you_mean(name, expected)} The inputs of a model "
                    "are fixed when it is exported: export again with it."
                )
            values[name] = value
        missing = [name for name in expected if name not in values]
        if missing:
            raise UsageError(f"The input {missing[0]} is missing: this graph takes {self._signature_text()}.")
        positional = tuple(values[name] for name in self.positional)
        return positional, {name: values[name] for name in self.keywords}

    def _signature_text(self) -> str:
        texts = [
            f"{name}: {self.dynamic.input_text(name)}" if name in self.dynamic.inputs else name
            for name in (*self.positional, *self.keywords)
        ]
        return ", ".join(texts) or "no inputs"

    def _raise_structure_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error that names the input built differently from the example."""
        specs = [child for part in children_of(self.spec) for child in children_of(part)]
        values = [*args, *kwargs.values()]
        for name, value, expected in zip((*self.positional, *self.keywords), values, specs, strict=True):
            spec = pytree.tree_structure(value)
            if spec != expected:
                tensor = f"one tensor {self.dynamic.input_text(name)}" if name in self.dynamic.inputs else ""
                raise UsageError(
                    f"The input {name} must be {tensor or _spec_text(expected)} as in the example, "
                    f"but is {_spec_text(spec)}."
                )

    def _check(self, leaves: list[Any]) -> None:
        """Raise `UsageError` for the first leaf that does not fit the graph."""
        shapes = {}
        for name, value in zip(self.names, leaves, strict=True):
            if name in self.constants:
                constant = self.constants[name]
                if isinstance(value, torch.Tensor) or value != constant:
                    raise UsageError(
                        f"The input {name} is {constant!r} in this graph, fixed by the export, but got "
                        f"{describe_value(value)}: export again with it."
                    )
                continue
            expected, got = self.dynamic.input_text(name), describe_value(value)
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"The input {name} must be a tensor {expected}, but is {got}.")
            dimensions, dtype = self.dynamic.inputs[name], (self.dynamic.dtypes or {}).get(name)
            if value.dim() != len(dimensions):
                raise UsageError(
                    f"The input {name} must be {expected}, but is {got}: {value.dim()} instead of "
                    f"{len(dimensions)} dimensions."
                )
            if str(value.dtype).removeprefix("torch.") != dtype:
                raise UsageError(
                    f"The input {name} must be {expected}, but is {got}: convert it with .to(torch.{dtype})."
                )
            device = self.devices[name]
            if value.device.type != torch.device(device).type:
                raise UsageError(
                    f"The input {name} must be on {device}, but is on {value.device}: "
                    f"move it with .to({device!r})."
                )
            for dimension, size in zip(dimensions, value.shape, strict=True):
                if not dimension.dynamic and dimension.size != size:
                    raise UsageError(f"The input {name} must be {expected}, but is {got}: {dimension}.")
            shapes[name] = tuple(value.shape)
        self.dynamic.check(shapes)


def _reorder_keys(value: Any, spec: pytree.TreeSpec) -> Any:
    """The value with the keys of its dicts in the example's order, which torch requires."""
    kind, parts = spec.type, children_of(spec)
    if kind is dict and type(value) is dict and value.keys() == set(spec.context):
        return {key: _reorder_keys(value[key], part) for key, part in zip(spec.context, parts, strict=True)}
    if kind in (list, tuple) and type(value) is kind and len(value) == len(parts):
        return kind(_reorder_keys(item, part) for item, part in zip(value, parts, strict=True))
    return value


def _spec_text(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "one value"
    count = spec.num_children
    keys = f" with the keys {list(spec.context)}" if spec.type is dict else f" of {count}"
    return f"a {spec.type.__name__}{keys}" if spec.type is not None else "nothing"


def describe_value(value: Any) -> str:
    """A value in an error message: a tensor in our notation, anything else as Python writes it, if short."""
    if isinstance(value, torch.Tensor):
        return tensor_text(tuple(value.shape), str(value.dtype), str(value.device))
    return argument_text(value)
