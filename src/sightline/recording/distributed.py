"""The facts of a distributed job in a recording: process groups, waits for other processes, and SIGUSR1.

Nothing is initialised and nothing is sent.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns as clock
from types import FrameType
from typing import Any, Final, Self
from weakref import ref

import torch

from sightline.data.file_owners import python_file, torch_file
from sightline.data.forms import Symbol
from sightline.process_rank import this_rank
from sightline.recording.stacks import frames_from
from sightline.recording.torchapi import without_modes
from sightline.store.paths import STACKS

# -- process groups, as ``torch.distributed`` knows them -----------------------------------------------------
#
# A program may destroy its groups before the recording ends, so they are noted when a collective of a new
# group or kind is met.

#: Each group by its name, and when it was seen last.
_seen: Final[dict[str, tuple[dict[str, Any], int]]] = {}
#: Each device mesh by its ranks and names.
_meshes: Final[dict[str, tuple[dict[str, Any], int]]] = {}
#: The same by the mesh's id, as long as it lives.
_described: Final[dict[int, tuple[ref[Any], dict[str, Any]]]] = {}
_MAX_GROUPS: Final = 4096


def note_groups() -> None:
    """Note the groups that exist now."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    with suppress(AttributeError, TypeError, ValueError):  # tables of torch's own: they may change
        world, now = c10d._world, clock()
        for group, name in list(world.pg_names.items())[:_MAX_GROUPS]:
            ranks = list(world.pg_group_ranks.get(group, ()))
            backend = str((world.pg_map.get(group) or ("",))[0])
            if backend == "undefined":  # none was named: one for each kind of device
                backend = str(world.pg_backend_config.get(group, backend))
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
    mesh = spec.mesh
    reference, described = _described.get(id(mesh), (None, {}))
    if reference is None or reference() is not mesh:
        ranks = without_modes(lambda: mesh.mesh.tolist())  # noqa: PLW0108 — ops make this tensor
        names = [str(name) for name in mesh.mesh_dim_names or ()]
        described = {"names": names, "ranks": ranks, "device": str(mesh.device_type)}
        _described[id(mesh)] = ref(mesh), described
    _meshes[str((described["ranks"], described["names"]))] = described, clock()
    return tuple(_placement(each) for each in spec.placements)


def _placement(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate"
    dim = getattr(placement, "dim", None)
    if placement.is_shard():
        return f"Shard({dim})"
    name = type(placement).__name__.lstrip("_")
    return name if dim is None else f"{name}({dim})"


# -- waits: ``Work.wait`` ------------------------------------------------------------------------------------

_lock: Final = threading.RLock()
_logs: Final[list[WaitLog]] = []
_original: Any = None  # torch's own ``Work.wait`` while ours is in its place

SourceLine = tuple[str, int, str]  #: file, line and function


class WaitLog:
    """Where one recording waits for other processes.

    ``Work.wait`` runs no op, so that no engine sees it. While a process of a job records, it is a Python
    function that notes the line, and how long it took; afterwards it is torch's own again. The size of the
    log is bounded by the number of source lines that wait, and by the threads that wait now.
    """

    def __init__(self) -> None:
        self._lines: dict[SourceLine, list[int]] = {}  # how often, how long together, how long at most
        self._open: dict[int, tuple[SourceLine, int]] = {}  # the threads that wait now, and since when

    def install(self) -> None:
        """Note the waits of this process from now on, if it is one of several."""
        global _original  # noqa: PLW0603 — torch's own function is one per process
        work = _work_class()
        if this_rank() is None or work is None:
            return
        with _lock:
            if self not in _logs:
                _logs.append(self)
            if _original is None:
                _original = work.__dict__["wait"]
                work.wait = wait

    def remove(self) -> None:
        """Note no more waits; the last one leaves torch as it was. Safe to call again."""
        global _original  # noqa: PLW0603 — the same
        with _lock:
            if self in _logs:
                _logs.remove(self)
            work = _work_class()
            if _original is not None and not _logs and work is not None:
                if work.__dict__.get("wait") is wait:
                    work.wait = _original
                _original = None

    def enter(self, line: SourceLine) -> None:
        """This thread begins to wait."""
        self._open[threading.get_ident()] = line, clock()

    def leave(self, line: SourceLine) -> None:
        """It has waited."""
        now = clock()
        began = self._open.pop(threading.get_ident(), (line, now))[1]
        row = self._lines.setdefault(line, [0, 0, 0])
        row[:] = row[0] + 1, row[1] + now - began, max(row[2], now - began)

    def summary(self) -> dict[str, Any]:
        """Lines with count, total and longest wait in ns; lines that wait now, with how long so far."""
        now = clock()
        lines = [[*line, *row] for line, row in list(self._lines.items())]
        return {"lines": lines, "now": [[*line, now - since] for line, since in list(self._open.values())]}


def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Work.wait``, noted."""
    original, logs = _original, tuple(_logs)
    if original is None:  # removed meanwhile
        return type(self).wait(self, *args, **kwargs)
    line = _calling_line(sys._getframe(1))
    for log in logs:
        log.enter(line)
    try:
        return original.__get__(self)(*args, **kwargs)
    finally:
        for log in logs:
            log.leave(line)


def _work_class() -> Any:
    c10d = getattr(torch._C, "_distributed_c10d", None)
    work = getattr(c10d, "Work", None)
    return work if work is not None and "wait" in vars(work) else None


def _calling_line(innermost: FrameType) -> SourceLine:
    """The innermost line that is neither torch's own nor Python's."""
    caller = innermost
    for frame in frames_from(innermost):
        file = frame.f_code.co_filename
        if not (torch_file(file) or python_file(file) or file.endswith("/typing_extensions.py")):
            caller = frame
            break
    return caller.f_code.co_filename, caller.f_lineno or 0, caller.f_code.co_qualname


# -- SIGUSR1 -------------------------------------------------------------------------------------------------

_dump: StackDump | None = None  # one per process: there is one signal


class StackDump:
    """On SIGUSR1 a process of a job writes where its main thread is, to a file in its recording's folder.

    A handler in Python would wait until the main thread comes back from C, which one that hangs in a
    collective never does; `faulthandler` writes from the signal itself. A program with a handler of its own
    keeps it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STACKS
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 — it is open until `remove`
        self._pid = os.getpid()

    @classmethod
    def install(cls, folder: Path | None) -> Self | None:
        """Have the signal write to a recording's folder; None if this is no job, or the signal is taken."""
        global _dump  # noqa: PLW0603 — there is one signal
        number = getattr(signal, "SIGUSR1", None)
        if folder is None or number is None or this_rank() is None:
            return None
        with _lock:
            if _dump is not None or signal.getsignal(number) is not signal.SIG_DFL:
                return None
            try:
                dump = cls(folder)
                # Not of all threads: one that runs changes its frames under the reader, and that crashes.
                faulthandler.register(number, file=dump._file.fileno(), all_threads=False)
            except (OSError, RuntimeError, ValueError):  # the run goes on without it
                return None
            _dump = dump
            return dump

    def remove(self) -> None:
        """Undo it; a file that nothing was written to is removed. Safe to call again."""
        global _dump  # noqa: PLW0603 — the same
        with _lock:
            if _dump is not self:
                return
            faulthandler.unregister(signal.SIGUSR1)
            with suppress(OSError):
                self._file.close()
                if self._pid == os.getpid() and not self._path.stat().st_size:
                    self._path.unlink()
            _dump = None
