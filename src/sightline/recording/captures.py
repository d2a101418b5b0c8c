"""``capture=``: copies of tensors, taken as the run passes them, in memory or on disk."""

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
from sightline.data.trace_data import PHASES, Bytes, CaptureInfo, Store
from sightline.errors import CaptureError, DamagedFile, UsageError
from sightline.options import Capture
from sightline.recording.arguments import path_text
from sightline.recording.observers import ObservedCall, ObservedOp, Observer, SpiedTensor
from sightline.recording.operations import OP
from sightline.recording.statistics.observer import Selection, results_of
from sightline.recording.torchapi import (
    Tensor,
    in_backward,
    unobserved,
)
from sightline.store.shards.direct_file import PAGE
from sightline.store.shards.file_names import file_name
from sightline.store.shards.stores import MemoryStore, ShardStore
from sightline.store.shards.writer import DIRECT_BYTES, ShardWriter
from sightline.tensor_memory import has_memory

if TYPE_CHECKING:
    from sightline.recording.session import Session


def copied_size(tensor: Any, options: Capture) -> int | None:
    """Bytes that a copy of a tensor takes; None for one that has none to be read: fake, freed."""
    if not has_memory(tensor) or tensor.is_quantized:
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # the copy would become a part of the graph
    count = tensor.numel() if options.sample is None else min(tensor.numel(), options.sample)
    return int(
        count * (tensor if options.dtype is None else torch.empty(0, dtype=options.dtype)).element_size()
    )


class BufferPool:
    """Reuses the memory of copies that are written to disk: new memory costs more than the copying.

    A buffer returns to the pool when the array of its bytes is freed.
    """

    def __init__(self, capacity: int = 256 << 20) -> None:
        # By shape, dtype and whether pinned: buffers, and views of them that are ready to be copied to.
        self._free: defaultdict[tuple[Any, torch.dtype, bool], list[tuple[Any, Any]]] = defaultdict(list)
        self._room = capacity  # bytes that may still be added to the pool
        self._streams: dict[torch.device, Any] = {}

    def copy(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, Bytes]:
        """A dense copy of a tensor in CPU memory, and its bytes."""
        host, data = self._take_buffer(tensor.shape, dtype, pinned=False)
        return host.copy_(tensor), data

    def fetch(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, Callable[[], Bytes]]:
        """The same for a CUDA tensor, into pinned memory; the function returned waits for its bytes.

        Nothing waits here: the tensor is copied on its device, so that later changes of it do no harm, and
        that copy is transferred on a stream of its own, beside the work of the program.
        """
        device = tensor.device
        dense = tensor.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        host, data = self._take_buffer(tensor.shape, dtype, pinned=True)
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
            return data

        return host, wait

    def _take_buffer(self, shape: torch.Size, dtype: torch.dtype, pinned: bool) -> tuple[Any, Bytes]:
        """A free buffer as a tensor, and its bytes; freeing those returns it to the pool."""
        free = self._free[shape, dtype, pinned]
        if free:
            buffer, host = free.pop()
            self._room += buffer.nbytes
        else:
            # A large one begins at a page, so that a disk can read it directly; pinned memory comes in pages.
            nbytes = shape.numel() * dtype.itemsize
            spare = PAGE if nbytes >= DIRECT_BYTES and not pinned else 0
            buffer = torch.empty(nbytes + spare, dtype=torch.uint8, pin_memory=pinned)
            start = -buffer.data_ptr() % PAGE if spare else 0
            buffer = buffer[start : start + nbytes]
            host = buffer.view(dtype).view(shape)
        data: Bytes = buffer.numpy()  # a new array each time: this use ends when it is freed
        weakref.finalize(data, self._give_back, buffer, host, pinned).atexit = False
        return host, data

    def _give_back(self, buffer: Any, host: Any, pinned: bool) -> None:
        if buffer.nbytes <= self._room:  # called by any thread: each step is atomic
            self._room -= buffer.nbytes
            self._free[host.shape, host.dtype, pinned].append((buffer, host))


def dense_copy(tensor: Any, options: Capture) -> Any:
    """A dense copy of a tensor, with the elements in order."""
    return selected_elements(tensor, options).to(
        device=options.device, dtype=options.dtype, copy=True, memory_format=torch.contiguous_format
    )


def selected_elements(tensor: Any, options: Capture) -> Any:
    """The elements to be copied, still in the memory of the tensor."""
    plain = type(tensor) is Tensor and not tensor.requires_grad
    elements = tensor if plain else tensor.detach().as_subclass(Tensor)
    if options.sample is not None and elements.numel() > options.sample:
        elements = elements.reshape(-1)[:: -(-elements.numel() // options.sample)]
    if elements.is_conj() or elements.is_neg():
        elements = elements.resolve_conj().resolve_neg()
    return elements


def as_bytes(copy: Any) -> Bytes | Callable[[], Bytes]:
    """The bytes of a copy; for one on a device a function that waits for them, called by another thread."""
    return _bytes(copy) if copy.is_cpu else lambda: _bytes(copy.cpu())


def _bytes(copy: Any) -> Bytes:
    if copy.is_complex():
        copy = torch.view_as_real(copy)
    flat = copy.reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, dtype=np.uint8)
    return data


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
    """A tensor that may be captured, as ``Capture(when=…)`` gets it."""

    step: str
    module: str
    name: str
    call: int
    role: str
    phase: str


def _with_gradient(capture: Callable[[Any], None], parameter: Any) -> None:
    capture(parameter.grad)


class CaptureObserver(Observer):
    """Captures the tensors that a `Capture` selects."""

    def __init__(self, session: Session, options: Capture, folder: Path | None) -> None:
        if options.dtype is not None and not isinstance(options.dtype, torch.dtype):
            raise UsageError(
                f"Capture(dtype={argument_text(options.dtype)}) takes a torch dtype, such as torch.bfloat16."
            )
        try:
            unobserved(partial(torch.empty, 0, device=options.device))
        except Exception as error:
            raise UsageError(
                f"Capture(device={argument_text(options.device)}) cannot be used here: {error}"
            ) from error
        self._session = session
        self._options = options
        self.ops = self.api = bool(options.ops)
        self._selection = Selection(session, options.modules, options.ops)
        self._every_module = options.modules is None and not options.ops and options.names is None
        self._writer: ShardWriter | None = None
        self._files: StoredFiles | None = None
        self._folder = None if folder is None else folder / "tensors"
        if self._folder is not None:
            self._writer = ShardWriter(self._folder, on_error=options.on_error, checksum=session.checksum)
            self._files = StoredFiles(self._folder) if options.format == "pt" else None
        self._copies: dict[str, Any] = {}
        self._keys: set[str] = set()
        self._pool = BufferPool()
        self._awaiting_gradient: dict[
            int, tuple[str, str, str, int, int]
        ] = {}  # results of ops that had no gradient yet, by value
        self.infos: list[CaptureInfo] = []  # with the ids values have while recording
        self._counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._calls: dict[int, int] = {}  # open call -> which call of its module it is
        self._call_counts: defaultdict[int, int] = defaultdict(int)
        self._seen_values: set[int] = set()
        self._handles: list[Any] = []
        self._spied: dict[str, None] = {}
        self._bytes = 0
        self._left_out = 0

    # -- module calls ------------------------------------------------------------------------------------

    def enter(self, call: ObservedCall) -> None:
        """Capture the arguments of a module, before it can change them."""
        index = self._call_counts[call.module]
        self._call_counts[call.module] = index + 1
        everything = self._options.modules is None
        if not (self._every_module if everything else self._selection.module(call.module, exactly=True)):
            return
        self._calls[call.number] = index
        if self._options.gradients:
            self._hook_parameters(call)
        if self._options.inputs:
            given: Any = (call.args, call.kwargs) if call.kwargs else call.args
            self._capture_all(self._label(call.module), "input", index, "input", given, call.phase)

    def leave(self, call: ObservedCall) -> None:
        """Capture the result of a module."""
        index = self._calls.pop(call.number, None)
        if index is not None and not call.raised and self._options.outputs:
            self._capture_all(self._label(call.module), "output", index, "output", call.result, call.phase)

    def _label(self, number: int) -> str:
        record = self._session.modules.all[number]
        return record.path or type(record.ref()).__name__

    # -- ops and spies -----------------------------------------------------------------------------------

    def op(self, event: ObservedOp) -> None:
        """Capture the results of a selected op."""
        info = event.info
        if info.flavour != OP and self._awaiting_gradient:
            # Inside the dispatcher, results of ops have no gradient yet; those that a call returns do.
            for tensor in self._session.arguments.tensors(event.result, []):
                value = self._session.values.find(tensor)
                capture = None if value is None else self._awaiting_gradient.pop(value, None)
                if capture is not None:
                    self._hook_gradient(tensor, *capture)
        if not self._selection(event):
            return
        label = self._label(event.modules[-1]) if event.modules else ""
        name = info.name if info.flavour == OP else info.name.rpartition(".")[2]
        new = []
        for tensor in results_of(self._session, event):
            value = self._session.values.find(tensor)
            # An API call returns the result of its last op, which was captured already.
            if value is not None and value not in self._seen_values:
                self._seen_values.add(value)
                new.append(tensor)
        if new:
            self._capture_all(label, name, self._next_index(label, name), "op", new, event.phase, flat=True)

    def wants(self, event: ObservedOp) -> bool:
        """Only selected ops, and API calls that may return the result of one of those."""
        if not self._options.ops:
            return False
        return self._selection.op(event.info) or (bool(self._awaiting_gradient) and event.info.flavour != OP)

    def spied(self, spied: SpiedTensor) -> None:
        """Capture a value that ``sl.spy`` was called with."""
        names = self._options.names
        self._spied.setdefault(spied.name)
        if names is not None and not any(fnmatchcase(spied.name, glob) for glob in names):
            return
        if spied.module is None:
            label = self._label(spied.modules[-1]) if spied.modules else ""
        else:
            record = self._session.modules.by_id.get(id(spied.module))
            label = type(spied.module).__name__ if record is None else self._label(record.number)
        index = self._next_index(label, spied.name)
        self._capture_all(label, spied.name, index, "spy", spied.value, spied.phase)

    def _next_index(self, label: str, name: str) -> int:
        key = (markers.current_step(), label, name)
        self._counts[key] += 1
        return self._counts[key] - 1

    # -- gradients ---------------------------------------------------------------------------------------

    def _hook_parameters(self, call: ObservedCall) -> None:
        module = self._session.modules.all[call.module].ref()
        label = self._label(call.module)
        for name, parameter in module._parameters.items() if module is not None else ():
            if parameter is not None and parameter.requires_grad and -id(parameter) not in self._seen_values:
                self._seen_values.add(-id(parameter))
                capture = partial(self._capture_gradient, label, f"{name}.grad", "", 0, 0)
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(partial(_with_gradient, capture))
                )

    def _hook_gradient(self, tensor: Any, label: str, name: str, path: str, index: int, slot: int) -> None:
        if tensor.requires_grad:
            capture = partial(self._capture_gradient, label, f"{name}.grad", path, index, slot)
            self._handles.append(tensor.register_hook(capture))

    def _capture_gradient(
        self, label: str, name: str, path: str, index: int, slot: int, gradient: Any
    ) -> None:
        if not self._session.running or not isinstance(gradient, Tensor):
            return
        if not self._session.events.enter():
            return
        try:
            phase = PHASES.index("backward")
            unobserved(partial(self._capture, gradient, label, name, index, slot, "gradient", path, phase))
        except Exception as error:
            self._session.fault(error)
        finally:
            self._session.events.leave()

    def _capture_all(
        self, label: str, name: str, index: int, role: str, tree: Any, phase: int, flat: bool = False
    ) -> None:
        if type(tree) is Tensor:
            tensors = [("", tree)]
        else:
            leaves, _ = pytree.tree_flatten_with_path(tree)
            unnamed = flat or len(leaves) == 1
            numbers: dict[int, int] = {}
            tensors = [
                ("" if unnamed else path_text(path, numbers), leaf)
                for path, leaf in leaves
                if isinstance(leaf, Tensor)
            ]
        for slot, (path, tensor) in enumerate(tensors):
            if self._capture(tensor, label, name, index, slot, role, path, phase) and self._options.gradients:
                value = self._session.values.find(tensor)
                if role == "op" and value is not None and not tensor.requires_grad:
                    self._awaiting_gradient[value] = (label, name, path, index, slot)
                self._hook_gradient(tensor, label, name, path, index, slot)

    def _capture(
        self, tensor: Any, label: str, name: str, index: int, slot: int, role: str, path: str, phase: int
    ) -> bool:
        """Capture one tensor; False if it is not selected or cannot be copied."""
        options, step = self._options, markers.current_step()
        shown = PHASES[PHASES.index("backward") if in_backward() else phase]
        if options.when is not None and not options.when(Candidate(step, label, name, index, role, shown)):
            return False
        size = copied_size(tensor, options)
        if size is None or (options.max_bytes is not None and self._bytes + size > options.max_bytes):
            self._left_out += 1
            return False
        self._bytes += size
        value = self._session.values.find(tensor)
        # With its bytes where it goes to disk, or comes from a device.
        pooled = tensor.is_cuda or (tensor.is_cpu and self._writer is not None)
        if self._files is None and options.device is None and pooled:
            elements = selected_elements(tensor, options)
            pool = self._pool.copy if tensor.is_cpu else self._pool.fetch
            copy, data = pool(elements, options.dtype or elements.dtype)
        else:
            copy, data = dense_copy(tensor, options), None
        info = CaptureInfo(
            step=step, module=label, name=name, call=index, slot=slot, role=role, path=path,
            value=-1 if value is None else value, shape=tuple(copy.shape),
            dtype=str(copy.dtype).removeprefix("torch."),
            whole=options.sample is None or tensor.numel() <= options.sample,
        )  # fmt: skip
        while (key := info.key) in self._keys:  # a second backward pass through the same call
            info = replace(info, call=info.call + 1)
        self._keys.add(key)
        if self._writer is None:
            self._copies[key] = copy if data is None else data
        elif self._files is not None:
            name = self._writer.put_file(file_name(key), save_one(copy), copy.nbytes)
            self._files.names[key] = name
        else:
            self._writer.put(key, info.dtype, info.shape, as_bytes(copy) if data is None else data, info)
        self.infos.append(info)  # last: another thread may read the recording so far
        return True

    def requested(self) -> dict[str, Any]:
        """The globs, and the names of spied values they can match."""
        options = self._options
        globs = {name: list(getattr(options, name) or ()) for name in ("modules", "ops", "names")}
        return {"capture": {**globs, "max_bytes": options.max_bytes, "spied": list(self._spied)}}

    @property
    def left_out(self) -> int:
        """How many tensors were beyond ``max_bytes``, cannot be copied, or could not be written."""
        return self._left_out + (0 if self._writer is None else self._writer.failures)

    @property
    def lost(self) -> frozenset[str]:
        """The keys of the tensors that could not be written."""
        lost = frozenset() if self._writer is None else self._writer.lost
        if self._files is None:
            return lost
        return frozenset(key for key, name in list(self._files.names.items()) if name in lost)

    # -- afterwards --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Remove the hooks, and wait until all is written."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Wait until all is written, and raise nothing."""
        if self._writer is not None:
            with suppress(CaptureError):  # `finish` raises it
                self._writer.close()

    def store(self) -> Store:
        """The store of the tensors captured so far."""
        if self._session.running and self._writer is not None:
            self._writer.flush()
        if self._files is not None:
            return self._files
        if self._folder is not None:
            return ShardStore(self._folder)
        for key, tree in list(self._copies.items()):  # the model may go on meanwhile
            read = as_bytes(tree) if isinstance(tree, Tensor) else tree
            self._copies[key] = read() if callable(read) else read
        return MemoryStore(dict(self._copies))
