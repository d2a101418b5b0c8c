"""`DiskSink`: columns that are assembled batch by batch, on disk until they are saved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from sightline.assemble.memory_sink import SINK_COLUMNS, Array, resolve_versions
from sightline.store.bundle_schema import CHUNK_ROWS

_SPILL: Final = 1 << 16  #: bytes of a column that wait in memory before they go to its file


class DiskSink:
    """A `Sink` with a file per column, in a folder that ``close`` removes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(0o700, parents=True)
        self._files: dict[tuple[str, str], int] = {}
        self._waiting: dict[tuple[str, str], list[bytes]] = {}
        self._sizes: dict[tuple[str, str], int] = {}  # how many numbers each column has
        try:
            for kind, columns in SINK_COLUMNS.items():
                for name in columns:
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                    self._files[kind, name] = os.open(folder / f"{kind}.{name}", flags, 0o600)
                    self._waiting[kind, name] = []
                    self._sizes[kind, name] = 0
        except BaseException:  # too many open files, for one
            self.close()
            raise

    def close(self) -> None:
        """Close and remove all files."""
        for number in self._files.values():
            os.close(number)
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, kind: str, columns: dict[str, Any]) -> None:
        """Append rows to a table."""
        for name, dtype in SINK_COLUMNS[kind].items():
            column = np.asarray(columns[name]).astype(dtype)
            waiting = self._waiting[kind, name]
            waiting.append(column.tobytes())
            self._sizes[kind, name] += len(column)
            if sum(map(len, waiting)) >= _SPILL:
                self._spill(kind, name)

    def patch(self, kind: str, name: str, position: int, value: int) -> None:
        """Replace the number of a row that was added."""
        self._spill(kind, name)
        dtype = np.dtype(SINK_COLUMNS[kind][name])
        os.pwrite(self._files[kind, name], np.array(value, dtype=dtype).tobytes(), position * dtype.itemsize)

    def _spill(self, kind: str, name: str) -> None:
        waiting = self._waiting[kind, name]
        if waiting:
            data, file = b"".join(waiting), self._files[kind, name]
            at = os.fstat(file).st_size
            while data:  # a write may be partial
                done = os.pwrite(file, data, at)
                data, at = data[done:], at + done
            waiting.clear()

    def size(self, kind: str, name: str) -> int:
        """The length of a column; values include their new versions."""
        more = self._sizes["versions", name] if kind == "values" else 0
        return self._sizes[kind, name] + more

    def blocks(self, kind: str, name: str) -> Iterator[Array]:
        """A column in chunks; offsets as lengths, and values with their new versions."""
        values = self._sizes["values", "meta"]
        total, own = self.size(kind, name), self._sizes[kind, name]
        for at in range(0, total, CHUNK_ROWS):
            end = min(at + CHUNK_ROWS, total)
            parts = [self._read(kind, name, at, min(end, own))] if at < own else []
            if end > own:
                parts.append(self._read("versions", name, max(at - own, 0), end - own))
            block = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield resolve_versions(block, values) if name in ("inputs", "previous") else block

    def _read(self, kind: str, name: str, begin: int, end: int) -> Array:
        self._spill(kind, name)
        dtype = np.dtype(SINK_COLUMNS[kind][name])
        octets = os.pread(self._files[kind, name], (end - begin) * dtype.itemsize, begin * dtype.itemsize)
        return np.frombuffer(octets, dtype=dtype)
