"""Recorded values that stay what they were, although ops change tensors in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from sightline.graph.exported.plan import Step


class Snapshots:
    """Keeps recorded values as they were, when ops change tensors in place."""

    def __init__(self, records: list[Any], inputs: list[Any]) -> None:
        self._records = records
        self._inputs = inputs
        self._holders: dict[int, list[int]] = {}  #: storage -> the steps whose record has a part in it

    def recorded(self, position: int) -> None:
        """Note which storages the record of a step lies in."""
        holders = self._holders
        for value in (self._records[position], *self._inputs[position]):
            for tensor in (value,) if isinstance(value, torch.Tensor) else _tensors(value):
                holders.setdefault(_storage(tensor), []).append(position)

    def before_write(self, step: Step, values: list[Any]) -> tuple[Any, ...]:
        """Copy each recorded tensor in memory that a step writes; the step's inputs as they are now."""
        took = tuple([values[source] for source in step.sources])
        written = [values[source] for source in step.writes]
        for storage in {_storage(tensor) for tensor in _tensors(written)}:
            copied = _Copies(storage)
            took = pytree.tree_map_only(torch.Tensor, copied, took)
            for position in self._holders.pop(storage, ()):
                for table in (self._records, self._inputs):
                    table[position] = pytree.tree_map_only(torch.Tensor, copied, table[position])
        return took


class _Copies:
    """Copies the tensors of one storage, each once."""

    def __init__(self, storage: int) -> None:
        self._storage = storage
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # originals live on: ids stay theirs

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) != self._storage:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, tensor.detach().clone())
        return self._made[id(tensor)][1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return id(tensor)
