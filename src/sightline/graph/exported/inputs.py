"""What a graph is called with: matched to the example's structure, and checked in words."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sightline.errors import UsageError
from sightline.graph.exported.dynamic import Dynamic
from sightline.notation import tensor_text
from sightline.patterns import did_you_mean


def input_names(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """How each leaf of the arguments is written: ``x``, ``batch['ids']``, ``pair[0]``.

    >>> input_names(["x"], (1,), {"batch": {"ids": 2}})
    ['x', "batch['ids']"]
    """
    found = []
    for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]:
        first = path[1]
        if isinstance(first, pytree.SequenceKey):
            name = names[first.idx] if first.idx < len(names) else f"args[{first.idx}]"
        else:
            name = str(getattr(first, "key", first))
        found.append(name + "".join(map(str, path[2:])))
    return found


def parameter_names(model: torch.nn.Module, count: int) -> list[str]:
    """The names of the first positional parameters of ``forward``; those behind ``*args`` are numbered."""
    names: list[str] = []
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C has none
        parameters = ()  # type: ignore[assignment]
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            names += [f"{one.name}[{index}]" for index in range(count - len(names))]
        elif one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            names.append(one.name)
    return names[:count] + [f"args[{index}]" for index in range(len(names), count)]


@dataclass
class Inputs:
    """What the graph wants to be called with."""

    spec: pytree.TreeSpec  #: of ``(args, kwargs)``
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    names: tuple[str, ...]  #: of each leaf
    constants: dict[str, Any]  #: leaves that are no tensors, and what they were
    devices: dict[str, str]  #: of the leaves that are tensors
    dynamic: Dynamic
    _passed: set[Any] = field(default_factory=set)

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call in the graph's order; `UsageError` where something does not fit."""
        args, kwargs = self._arranged(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec:
            leaves, spec = pytree.tree_flatten(_ordered((args, kwargs), self.spec))
            if spec != self.spec:
                self._structure(args, kwargs)
        key = tuple([(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else None for v in leaves])
        if self.constants or key not in self._passed:  # a loop over batches is checked once per size
            self._check(leaves)
            if len(self._passed) < 1024:
                self._passed.add(key)
        return leaves

    def _arranged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each input where the example had it, whether it came by position or by name."""
        if len(args) == len(self.positional) and tuple(kwargs) == self.keywords:
            return args, kwargs
        expected = [*self.positional, *self.keywords]
        if len(args) > len(expected):
            raise UsageError(f"This graph takes {self._takes()}, but got {len(args)} positional inputs.")
        given = dict(zip(expected, args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise UsageError(f"The input {name} was given twice, by position and by name.")
            if name not in expected and value is not None:
                raise UsageError(
                    f"This graph has no input {name!r}{did_you_mean(name, expected)} What a model is called "
                    "with is fixed when it is exported: export again with it."
                )
            given[name] = value
        missing = [name for name in expected if name not in given]
        if missing:
            raise UsageError(f"The input {missing[0]} is missing: this graph takes {self._takes()}.")
        positional = tuple(given[name] for name in self.positional)
        return positional, {name: given[name] for name in self.keywords}

    def _takes(self) -> str:
        texts = []
        for name in (*self.positional, *self.keywords):
            known = name in self.dynamic.inputs
            texts.append(f"{name}: {self.dynamic.wanted(name)}" if known else name)
        return ", ".join(texts) or "no inputs"

    def _structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Say which input is built differently."""
        wanted = [child for part in self.spec.children() for child in part.children()]
        given = [*args, *kwargs.values()]
        for name, value, want in zip((*self.positional, *self.keywords), given, wanted, strict=True):
            spec = pytree.tree_structure(value)
            if spec != want:
                tensor = f"one tensor {self.dynamic.wanted(name)}" if name in self.dynamic.inputs else ""
                raise UsageError(
                    f"The input {name} must be {tensor or _described(want)} as in the example, "
                    f"but is {_described(spec)}."
                )

    def _check(self, leaves: list[Any]) -> None:
        shapes = {}
        for name, value in zip(self.names, leaves, strict=True):
            if name in self.constants:
                was = self.constants[name]
                if isinstance(value, torch.Tensor) or value != was:
                    raise UsageError(
                        f"The input {name} is {was!r} in this graph, built in when it was made, but got "
                        f"{_short(value)}: export again with it."
                    )
            else:
                self._check_tensor(name, value)
                shapes[name] = tuple(value.shape)
        self.dynamic.check(shapes)

    def _check_tensor(self, name: str, value: Any) -> None:
        wanted = self.dynamic.wanted(name)
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"The input {name} must be a tensor {wanted}, but is {_short(value)}.")
        dimensions, got = self.dynamic.inputs[name], _short(value)
        if value.dim() != len(dimensions):
            raise UsageError(
                f"The input {name} must be {wanted}, but is {got}: {value.dim()} instead of "
                f"{len(dimensions)} dimensions."
            )
        dtype, device = (self.dynamic.dtypes or {}).get(name), self.devices[name]
        if str(value.dtype).removeprefix("torch.") != dtype:
            raise UsageError(
                f"The input {name} must be {wanted}, but is {got}: convert it with .to(torch.{dtype})."
            )
        if value.device.type != torch.device(device).type:
            raise UsageError(
                f"The input {name} must be on {device}, but is on {value.device}: "
                f"move it with .to({device!r})."
            )
        for one, size in zip(dimensions, value.shape, strict=True):
            if not one.dynamic and one.size != size:
                raise UsageError(f"The input {name} must be {wanted}, but is {got}: {one}.")


def _ordered(value: Any, spec: pytree.TreeSpec) -> Any:
    """The same with the keys of its dicts in the example's order, on which torch insists."""
    kind, parts = spec.type, spec.children()
    if kind is dict and type(value) is dict and value.keys() == set(spec.context):
        return {key: _ordered(value[key], part) for key, part in zip(spec.context, parts, strict=True)}
    if kind in (list, tuple) and type(value) is kind and len(value) == len(parts):
        return kind(_ordered(item, part) for item, part in zip(value, parts, strict=True))
    return value


def _described(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "one value"
    count = spec.num_children
    keys = f" with the keys {list(spec.context)}" if spec.type is dict else f" of {count}"
    return f"a {spec.type.__name__}{keys}" if spec.type is not None else "nothing"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(tuple(value.shape), str(value.dtype), str(value.device))
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
