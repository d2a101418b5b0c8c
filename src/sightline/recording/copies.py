"""How a tensor is kept: a compact copy, its bytes, or a file of its own."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline.errors import DamagedFile, UsageError
from sightline.options import Capture
from sightline.recording.torchapi import Tensor, is_functorch_wrapped
from sightline.trace.stores import Bytes


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


class Pool:
    """Memory that copies on their way to disk use again and again: new memory costs more than the copying.

    A buffer comes back when nobody holds the bytes of its copy any more.
    """

    def __init__(self, most: int = 256 << 20) -> None:
        self._free: defaultdict[tuple[int, bool], list[Any]] = defaultdict(list)  # by size, and if pinned
        self._room = most  # bytes that may lie idle
        self._streams: dict[torch.device, Any] = {}

    def copy(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, Bytes]:
        """A dense copy of a tensor in CPU memory, and its bytes."""
        buffer, octets = self._taken(tensor.numel() * dtype.itemsize, pinned=False)
        return buffer.view(dtype).view(tensor.shape).copy_(tensor), octets

    def fetch(self, tensor: Any, dtype: torch.dtype) -> tuple[Any, Callable[[], Bytes]]:
        """The same of a CUDA tensor, into pinned memory; its bytes are there once the function returns.

        Nothing waits here: the tensor is copied on its device, so that what happens to it next changes
        nothing, and that copy comes over on a stream of its own, beside what the program does.
        """
        device = tensor.device
        dense = tensor.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        buffer, octets = self._taken(dense.nbytes, pinned=True)
        host = buffer.view(dtype).view(tensor.shape)
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

    def _taken(self, size: int, pinned: bool) -> tuple[Any, Bytes]:
        """A buffer that nobody uses, and its bytes; it comes back when those are let go of."""
        free = self._free[size, pinned]
        if free:
            buffer = free.pop()
            self._room += size
        else:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        octets: Bytes = buffer.numpy()
        weakref.finalize(octets, self._give_back, buffer, pinned).atexit = False
        return buffer, octets

    def _give_back(self, buffer: Any, pinned: bool) -> None:
        if buffer.nbytes <= self._room:  # called by whichever thread dropped the bytes: each step is atomic
            self._room -= buffer.nbytes
            self._free[buffer.nbytes, pinned].append(buffer)


def kept_copy(tensor: Any, wanted: Capture) -> Any:
    """A copy of its own, dense, with the elements in order."""
    return to_keep(tensor, wanted).to(
        device=wanted.device, dtype=wanted.dtype, copy=True, memory_format=torch.contiguous_format
    )


def to_keep(tensor: Any, wanted: Capture) -> Any:
    """The elements that are kept, still in the memory of the tensor."""
    kept = tensor.detach().as_subclass(Tensor)
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
