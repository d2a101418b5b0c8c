"""``capture=``: tensors are kept as they were when they passed, in memory or on disk."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from sightline import markers
from sightline.argument_checks import argument_text
from sightline.errors import CaptureError, DamagedFile, UsageError
from sightline.options import Capture
from sightline.recording.observers import ObservedCall, ObservedOp, Observer, SpiedTensor
from sightline.recording.operations import OP
from sightline.recording.statistics import Chosen, results_of
from sightline.recording.torchapi import (
    Tensor,
    below_autograd,
    current_node,
    is_functorch_wrapped,
    no_dispatch,
    quiet,
)
from sightline.trace.data import PHASES, CaptureInfo
from sightline.trace.file_names import file_name
from sightline.trace.shard_writer import ShardWriter
from sightline.trace.tensor_stores import Bytes, MemoryStore, ShardStore, Store

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


def kept_size(tensor: Any, wanted: Capture) -> int | None:
    """Bytes that keeping a tensor takes; None for one that has no elements at hand (fake, sparse, nested)."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if is_functorch_wrapped(tensor) or (
        hasattr(type(tensor), "__torch_dispatch__") and not _is_plain(tensor)
    ):
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # the copy would become a part of the graph
    count = tensor.numel() if wanted.sample is None else min(tensor.numel(), wanted.sample)
    return int(
        count * (tensor if wanted.dtype is None else torch.empty(0, dtype=wanted.dtype)).element_size()
    )


def _is_plain(tensor: Any) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


class BufferPool:
    """Memory that copies on their way to disk use again and again: new memory costs more than the copying.

    A buffer comes back when nobody holds the bytes of its copy any more.
    """

    def __init__(self, most: int = 256 << 20) -> None:
        # By shape, dtype, and if pinned: as views that are ready to be copied to.
        self._free: defaultdict[tuple[Any, torch.dtype, bool], list[tuple[Any, Any]]] = defaultdict(list)
        self._room = most  # bytes that may lie idle
        self._streams: dict[torch.device, Any] = {}

    def copy(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, Bytes]:
        """A dense copy of a tensor in CPU memory, and its bytes."""
        host, octets = self._taken(tensor.shape, dtype, pinned=False)
        return host.copy_(tensor), octets

    def fetch(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, Callable[[], Bytes]]:
        """The same of a CUDA tensor, into pinned memory; its bytes are there once the function returns.

        Nothing waits here: the tensor is copied on its device, so that what happens to it next changes
        nothing, and that copy comes over on a stream of its own, beside what the program does.
        """
        device = tensor.device
        dense = tensor.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        host, octets = self._taken(tensor.shape, dtype, pinned=True)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            host.copy_(dense, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(side)
        dense.record_stream(side)

        def wait() -> Bytes:
            arrived.synchronize()
            return octets

        return host, wait

    def _taken(self, shape: torch.Size, dtype: torch.dtype, pinned: bool) -> tuple[Any, Bytes]:
        """A tensor that nobody uses, and its bytes; it comes back when those are let go of."""
        free = self._free[shape, dtype, pinned]
        if free:
            buffer, host = free.pop()
            self._room += buffer.nbytes
        else:
            buffer = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8, pin_memory=pinned)
            host = buffer.view(dtype).view(shape)
        octets: Bytes = buffer.numpy()  # a new array each time: its end is that of this use
        weakref.finalize(octets, self._give_back, buffer, host, pinned).atexit = False
        return host, octets

    def _give_back(self, buffer: Any, host: Any, pinned: bool) -> None:
        if buffer.nbytes <= self._room:  # called by whichever thread dropped the bytes: each step is atomic
            self._room -= buffer.nbytes
            self._free[host.shape, host.dtype, pinned].append((buffer, host))


def kept_copy(tensor: Any, wanted: Capture) -> Any:
    """A copy of its own, dense, with the elements in order."""
    return to_keep(tensor, wanted).to(
        device=wanted.device, dtype=wanted.dtype, copy=True, memory_format=torch.contiguous_format
    )


def to_keep(tensor: Any, wanted: Capture) -> Any:
    """The elements that are kept, still in the memory of the tensor."""
    plain = type(tensor) is Tensor and not tensor.requires_grad
    kept = tensor if plain else tensor.detach().as_subclass(Tensor)
    if wanted.sample is not None and kept.numel() > wanted.sample:
        kept = kept.reshape(-1)[:: -(-kept.numel() // wanted.sample)]
    if kept.is_conj() or kept.is_neg():
        kept = kept.resolve_conj().resolve_neg()
    return kept


def as_bytes(copy: Any) -> Bytes | Callable[[], Bytes]:
    """The bytes of a copy; of one on a device a function that waits for them, for another thread to call."""
    return _bytes(copy) if copy.is_cpu else lambda: _bytes(copy.cpu())


def _bytes(copy: Any) -> Bytes:
    if copy.is_complex():
        copy = torch.view_as_real(copy)
    flat = copy.reshape(-1)
    octets: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, dtype=np.uint8)
    return octets


def save_one(copy: Any) -> Callable[[Path], None]:
    """A function that writes a tensor as ``torch.load(..., weights_only=True)`` reads it."""
    return lambda path: torch.save(copy.cpu(), path)


def to_torch(data: Bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """A torch tensor out of the bytes of a captured one."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"this torch has no dtype {dtype!r}; use .numpy() or .raw.")
    if not data.nbytes:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(data.copy()).view(kind).reshape(shape)


class StoredFiles:
    """The store of ``format="pt"``: one file for each tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: dict[str, str] = {}

    def read(self, key: str) -> Bytes:
        """The bytes of a tensor."""
        path = self._folder / self.names[key]
        try:
            return _bytes(torch.load(path, weights_only=True))
        except Exception as error:
            raise DamagedFile(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Candidate:
    """What ``Capture(when=…)`` is asked about."""

    step: str
    module: str
    name: str
    call: int
    role: str
    phase: str


def _check_kept_as(wanted: Capture) -> None:
    if wanted.dtype is not None and not isinstance(wanted.dtype, torch.dtype):
        raise UsageError(
            f"Capture(dtype={argument_text(wanted.dtype)}) takes a torch dtype, such as torch.bfloat16."
        )
    try:
        torch.empty(0, device=wanted.device)
    except Exception as error:
        raise UsageError(
            f"Capture(device={argument_text(wanted.device)}) cannot be used here: {error}"
        ) from error


class CaptureObserver(Observer):
    """Keeps the tensors that were asked for."""

    def __init__(self, session: SessionBase, wanted: Capture, folder: Path | None) -> None:
        _check_kept_as(wanted)
        self._session = session
        self._wanted = wanted
        self.ops = self.api = bool(wanted.ops)
        self._chosen = Chosen(session, wanted.modules, wanted.ops)
        self._every_module = wanted.modules is None and not wanted.ops and wanted.names is None
        self._writer: ShardWriter | None = None
        self._files: StoredFiles | None = None
        self._folder = None if folder is None else folder / "tensors"
        if self._folder is not None:
            self._writer = ShardWriter(self._folder, on_error=wanted.on_error)
            self._files = StoredFiles(self._folder) if wanted.format == "pt" else None
        self._held: dict[str, Any] = {}
        self._keys: set[str] = set()
        self._pool = BufferPool()
        self._unwatched: dict[int, tuple[str, str, str, int, int]] = {}  # results of ops, by value
        self.infos: list[CaptureInfo] = []  # with the ids values have while recording
        self._times: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._calls: dict[int, int] = {}  # open call -> which call of its module it is
        self._called: defaultdict[int, int] = defaultdict(int)
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        self._spied: dict[str, None] = {}
        self._bytes = 0
        self._left_out = 0

    # -- module calls ------------------------------------------------------------------------------------

    def _meant(self, call: ObservedCall) -> bool:
        if self._wanted.modules is None:
            return self._every_module
        return self._chosen.module(call.module, exactly=True)

    def enter(self, call: ObservedCall) -> None:
        """Keep what a module is given, before it can change it."""
        index = self._called[call.module]
        self._called[call.module] = index + 1
        if not self._meant(call):
            return
        self._calls[call.number] = index
        if self._wanted.gradients:
            self._watch_parameters(call)
        if self._wanted.inputs:
            given: Any = (call.args, call.kwargs) if call.kwargs else call.args
            self._keep_all(self._label(call.module), "input", index, "input", given, call.phase)

    def leave(self, call: ObservedCall) -> None:
        """Keep what it returns."""
        index = self._calls.pop(call.number, None)
        if index is not None and not call.raised and self._wanted.outputs:
            self._keep_all(self._label(call.module), "output", index, "output", call.result, call.phase)

    def _label(self, number: int) -> str:
        known = self._session.modules.all[number]
        return known.path or type(known.ref()).__name__

    # -- ops and spies -----------------------------------------------------------------------------------

    def op(self, event: ObservedOp) -> None:
        """Keep the results of an op that is meant."""
        info = event.info
        if info.flavour != OP and self._unwatched:
            self._watch_returned(event.result)
        if not self._chosen(event):
            return
        label = self._label(event.modules[-1]) if event.modules else ""
        name = info.name if info.flavour == OP else info.name.rpartition(".")[2]
        fresh = [one for one in results_of(self._session, event) if self._is_new(one)]
        if fresh:
            self._keep_all(label, name, self._time(label, name), "op", fresh, event.phase, flat=True)

    def wants(self, event: ObservedOp) -> bool:
        """Only ops that were asked for, and calls that may return what one of those has made."""
        if not self._wanted.ops:
            return False
        return self._chosen.op(event.info) or (bool(self._unwatched) and event.info.flavour != OP)

    def _watch_returned(self, result: Any) -> None:
        """Inside the dispatcher a result has no gradient to wait for; what the API call returns has."""
        for tensor in self._session.arguments.tensors(result, []):
            known = self._session.values.known(tensor)
            kept = None if known is None else self._unwatched.pop(known, None)
            if kept is not None:
                self._watch(tensor, *kept)

    def _is_new(self, tensor: Any) -> bool:
        """Whether a result was not kept before: an API call returns what its last op has made."""
        value = self._session.values.known(tensor)
        if value is None or value in self._hooked:
            return False
        self._hooked.add(value)
        return True

    def spied(self, spied: SpiedTensor) -> None:
        """Keep what ``sl.spy`` was told."""
        names = self._wanted.names
        self._spied.setdefault(spied.name)
        if names is not None and not any(fnmatchcase(spied.name, glob) for glob in names):
            return
        label = self._owner(spied)
        index = self._time(label, spied.name)
        self._keep_all(label, spied.name, index, "spy", spied.value, spied.phase)

    def _owner(self, spied: SpiedTensor) -> str:
        if spied.module is None:
            return self._label(spied.modules[-1]) if spied.modules else ""
        known = self._session.modules.by_id.get(id(spied.module))
        return type(spied.module).__name__ if known is None else self._label(known.number)

    def _time(self, label: str, name: str) -> int:
        key = (markers.current_step(), label, name)
        self._times[key] += 1
        return self._times[key] - 1

    # -- gradients ---------------------------------------------------------------------------------------

    def _watch_parameters(self, call: ObservedCall) -> None:
        module = self._session.modules.all[call.module].ref()
        label = self._label(call.module)
        for name, parameter in module._parameters.items() if module is not None else ():
            if parameter is not None and parameter.requires_grad and -id(parameter) not in self._hooked:
                self._hooked.add(-id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._of_leaf(label, name)))

    def _of_leaf(self, label: str, name: str) -> Callable[[Any], None]:
        def accumulated(parameter: Any) -> None:
            self._keep_gradient(label, f"{name}.grad", "", 0, 0, parameter.grad)

        return accumulated

    def _watch(self, tensor: Any, label: str, name: str, path: str, index: int, slot: int) -> None:
        if tensor.requires_grad:
            keep = partial(self._keep_gradient, label, f"{name}.grad", path, index, slot)
            self._handles.append(tensor.register_hook(keep))

    def _keep_gradient(self, label: str, name: str, path: str, index: int, slot: int, gradient: Any) -> None:
        if not self._session.running or not isinstance(gradient, Tensor):
            return
        try:
            with quiet(), no_dispatch(), below_autograd():
                self._keep(gradient, label, name, index, slot, "gradient", path, PHASES.index("backward"))
        except Exception as error:
            self._session.fault(error)

    # -- keeping -----------------------------------------------------------------------------------------

    def _keep_all(
        self, label: str, name: str, index: int, role: str, held: Any, phase: int, flat: bool = False
    ) -> None:
        if type(held) is Tensor:
            places = [("", held)]
        else:
            leaves, _ = pytree.tree_flatten_with_path(held)
            nameless = flat or len(leaves) == 1
            places = [
                ("" if nameless else pytree.keystr(path), leaf)
                for path, leaf in leaves
                if isinstance(leaf, Tensor)
            ]
        for slot, (place, tensor) in enumerate(places):
            if self._keep(tensor, label, name, index, slot, role, place, phase) and self._wanted.gradients:
                value = self._session.values.known(tensor)
                if role == "op" and value is not None and not tensor.requires_grad:
                    self._unwatched[value] = (label, name, place, index, slot)
                self._watch(tensor, label, name, place, index, slot)

    def _keep(
        self, tensor: Any, label: str, name: str, index: int, slot: int, role: str, path: str, phase: int
    ) -> bool:
        """Keep one tensor; False if it is not wanted or cannot be kept."""
        wanted, step = self._wanted, markers.current_step()
        shown = PHASES[phase if current_node() is None else PHASES.index("backward")]
        if wanted.when is not None and not wanted.when(Candidate(step, label, name, index, role, shown)):
            return False
        size = kept_size(tensor, wanted)
        if size is None or (wanted.max_bytes is not None and self._bytes + size > wanted.max_bytes):
            self._left_out += 1
            return False
        self._bytes += size
        value = self._session.values.known(tensor)
        copy, octets = self._copied(tensor)
        info = CaptureInfo(
            step, label, name, index, slot, role, path, -1 if value is None else value, tuple(copy.shape),
            str(copy.dtype).removeprefix("torch."), wanted.sample is None or tensor.numel() <= wanted.sample,
        )  # fmt: skip
        while (key := info.key) in self._keys:  # a second backward pass through the same call
            info = replace(info, call=info.call + 1)
        self._keys.add(key)
        self.infos.append(info)
        self._put(key, info, copy, octets)
        return True

    def _copied(self, tensor: Any) -> tuple[Any, Any]:
        """A copy of its own; its bytes too where it is on its way to the disk, or comes from a device."""
        wanted = self._wanted
        on_cpu = tensor.is_cpu and self._writer is not None
        if self._files is not None or wanted.device is not None or not (on_cpu or tensor.is_cuda):
            return kept_copy(tensor, wanted), None
        kept = to_keep(tensor, wanted)
        copy = self._pool.copy if tensor.is_cpu else self._pool.fetch
        return copy(kept, wanted.dtype or kept.dtype)

    def _put(self, key: str, info: CaptureInfo, copy: Any, octets: Any) -> None:
        if self._writer is None:
            self._held[key] = copy if octets is None else octets
        elif self._files is not None:
            name = self._writer.put_file(file_name(key), save_one(copy), copy.nbytes)
            self._files.names[key] = name
        else:
            data = as_bytes(copy) if octets is None else octets
            self._writer.put(key, info.dtype, info.shape, data, info)

    def asked(self) -> dict[str, Any]:
        """What is to be kept, and the names there were to choose from."""
        wanted = self._wanted
        globs = {name: list(getattr(wanted, name) or ()) for name in ("modules", "ops", "names")}
        return {"capture": {**globs, "max_bytes": wanted.max_bytes, "spied": list(self._spied)}}

    @property
    def left_out(self) -> int:
        """Tensors that were beyond ``max_bytes``, cannot be kept, or could not be written."""
        return self._left_out + (0 if self._writer is None else self._writer.failures)

    # -- afterwards --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take the hooks off, and wait until all is written."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Wait until all is written, whatever came of it."""
        if self._writer is not None:
            with suppress(CaptureError):  # `finish` raises it, where it is to be raised
                self._writer.close()

    def store(self) -> Store:
        """Where the tensors kept so far are."""
        if self._files is not None:
            return self._files
        if self._folder is not None:
            if self._session.running and self._writer is not None:
                self._writer.flush()
            return ShardStore(self._folder)
        for key, held in self._held.items():
            read = as_bytes(held) if isinstance(held, Tensor) else held
            self._held[key] = read() if callable(read) else read
        return MemoryStore(dict(self._held))

    def captures(self, dense: Callable[[list[int]], list[int]]) -> list[CaptureInfo]:
        """What was kept, with the ids values have in the trace."""
        ids = dense([info.value for info in self.infos])
        return [replace(info, value=value) for info, value in zip(self.infos, ids, strict=True)]
