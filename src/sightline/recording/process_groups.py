"""The process groups of a distributed job, as ``torch.distributed`` knows them: ranks, backend, mesh.

Nothing is initialised and nothing is sent. A program may destroy its groups before the recording ends, so
they are noted when a collective of a new group or kind is met.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from time import perf_counter_ns as clock
from typing import Any, Final

import torch

from sightline.trace.forms import Symbol

#: Each group by its name, and when it was seen last.
_seen: Final[dict[str, tuple[dict[str, Any], int]]] = {}
#: Each device mesh by what it holds.
_meshes: Final[dict[str, tuple[dict[str, Any], int]]] = {}
_MAX_GROUPS: Final = 4096


def note_groups() -> None:
    """Note the groups that exist now."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    with suppress(AttributeError, TypeError, ValueError):  # tables of torch's own: they may change
        _note(c10d._world, clock())


def _note(world: Any, now: int) -> None:
    for group, name in list(world.pg_names.items())[:_MAX_GROUPS]:
        ranks = list(world.pg_group_ranks.get(group, ()))
        backend = str((world.pg_map.get(group) or ("",))[0])
        description = str(getattr(group, "group_desc", "") or "")
        _seen[str(name)] = {"ranks": ranks, "backend": backend, "description": description}, now


def groups_since(begin: int) -> dict[str, Any]:
    """The groups and meshes seen since a time of `clock`, for the trace's info."""
    note_groups()
    groups = {name: group for name, (group, at) in _seen.items() if at >= begin}
    meshes = [mesh for mesh, at in _meshes.values() if at >= begin]
    return {**({"groups": groups} if groups else {}), **({"meshes": meshes} if meshes else {})}


def object_symbol(item: Any) -> Symbol | None:
    """A process group or a reduction that a collective takes, as text; None for anything else."""
    if not isinstance(item, torch.ScriptObject):
        return None
    kind = item._type().qualified_name().rpartition(".")[2]
    if kind != "ProcessGroup":
        return None
    note_groups()
    return group_symbol(torch.distributed.ProcessGroup.unbox(item).group_name)


def group_symbol(name: str) -> Symbol:
    """A process group as an argument: ``group 0``."""
    return Symbol(f"group {name}")


def placements_of(tensor: Any) -> tuple[str, ...]:
    """How a DTensor lies on its mesh, one text for each dimension of that: ``Shard(0)``; () for others."""
    spec = getattr(tensor, "_spec", None)
    if spec is None or type(tensor).__name__ != "DTensor":
        return ()
    _note_mesh(spec.mesh)
    return tuple(_placement(each) for each in spec.placements)


def _placement(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate"
    dim = getattr(placement, "dim", None)
    if placement.is_shard():
        return f"Shard({dim})"
    name = type(placement).__name__.lstrip("_")
    return name if dim is None else f"{name}({dim})"


def _note_mesh(mesh: Any) -> None:
    names = [str(name) for name in mesh.mesh_dim_names or ()]
    found = {"names": names, "ranks": mesh.mesh.tolist(), "device": str(mesh.device_type)}
    _meshes[str((found["ranks"], names))] = found, clock()
