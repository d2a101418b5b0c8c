"""Stores of the bytes of captured tensors: in memory, or in files that are read on use."""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from sightline.data.trace_data import Bytes, CaptureInfo
from sightline.errors import DamagedFile, NotCaptured
from sightline.store.shards.shard_file import Shard, is_shard, read_shard


class MemoryStore:
    """Tensors in memory; one that is still being copied is a function that returns it, called once.

    >>> store = MemoryStore({"fc/output/0/0": np.zeros(8, dtype=np.uint8)})
    >>> store.read("fc/output/0/0").nbytes
    8
    """

    def __init__(self, tensors: Mapping[str, Bytes | Callable[[], Bytes]]) -> None:
        self._tensors = tensors  # not copied: it grows during the run
        self._arrived: dict[str, Bytes] = {}

    def read(self, key: str) -> Bytes:
        """The bytes of a tensor."""
        data = self._tensors.get(key)
        if data is None:
            raise NotCaptured(f"No tensor is kept in memory under {key!r}.")
        if callable(data):
            if key not in self._arrived:
                self._arrived[key] = data()
            data = self._arrived[key]
        data = data.reshape(-1)
        data.flags.writeable = False  # of this view only
        return data


class ShardStore:
    """Tensors in the shards of a folder, whose files are checked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ShardStore(Path(folder)).captures()
    []

    The headers of all shards are read on first use, the bytes of a tensor when it is read: they are mapped,
    and stay mapped as long as an array of them is in use. Shards that are finished later are not seen.
    """

    def __init__(self, folder: Path, *, lenient: bool = False) -> None:
        """With ``lenient``, damaged shards are left out; ``damaged()`` names them."""
        self._folder = Path(folder)
        self._lenient = lenient
        self._damaged: list[str] = []
        self._verified: set[str] = set()  # keys whose checksum was right
        self._mapped: weakref.WeakValueDictionary[Path, mmap.mmap] = weakref.WeakValueDictionary()

    def read(self, key: str) -> Bytes:
        """The bytes of a tensor, mapped from its file."""
        shard = self._shard_of.get(key)
        if shard is None:
            raise NotCaptured(f"No tensor is kept in {self._folder} under {key!r}.")
        begin, end = shard.spans[key]
        data = np.frombuffer(self._map(shard), dtype=np.uint8, count=end - begin, offset=begin)
        if key not in self._verified:
            if shard.sums.get(key, -1) not in (-1, zlib.crc32(data.data)):
                raise DamagedFile(f"{shard.path} is damaged: the numbers of {key[:60]!r} were altered.")
            self._verified.add(key)
        return data

    def damaged(self) -> list[str]:
        """The names of shards that were left out."""
        self._shards  # noqa: B018  # reads the headers
        return list(self._damaged)

    def captures(self) -> list[CaptureInfo]:
        """Every tensor in the folder, in the order of capture."""
        numbered = [pair for shard in self._shards for pair in zip(shard.orders, shard.captures, strict=True)]
        return [info for _, info in sorted(numbered, key=lambda pair: pair[0])]

    def names(self) -> list[str]:
        """The names of the shards; only a lenient store reads their headers for this."""
        return [shard.path.name for shard in self._shards] if self._lenient else self._file_names()

    def _file_names(self) -> list[str]:
        try:
            names = [name for name in os.listdir(self._folder) if is_shard(name)]
            return sorted(names, key=lambda name: int(name.partition(".")[0]))
        except OSError as error:
            raise DamagedFile(f"{self._folder} cannot be read: {error.strerror or error}.") from error

    @cached_property
    def _shards(self) -> list[Shard]:
        shards: list[Shard] = []
        shard_of: dict[str, Shard] = {}
        for name in self._file_names():
            try:
                shard = read_shard(self._folder / name)
            except DamagedFile:
                if not self._lenient:
                    raise
                self._damaged.append(name)
                continue
            twice = next((key for key in shard.spans if key in shard_of), None)
            if twice is not None:
                raise DamagedFile(
                    f"{shard.path} is damaged: {twice[:60]!r} is also in {shard_of[twice].path.name}."
                )
            shard_of.update(dict.fromkeys(shard.spans, shard))
            shards.append(shard)
        return shards

    @cached_property
    def _shard_of(self) -> dict[str, Shard]:
        return {key: shard for shard in self._shards for key in shard.spans}

    def _map(self, shard: Shard) -> mmap.mmap:
        mapped = self._mapped.get(shard.path)
        if mapped is None:
            end = max((end for _, end in shard.spans.values()), default=0)
            try:
                with open(shard.path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise DamagedFile(f"{shard.path} cannot be read: {error}.") from error
            if len(mapped) < end:
                raise DamagedFile(f"{shard.path} is damaged: it was cut short after it was opened.")
            self._mapped[shard.path] = mapped
        return mapped
