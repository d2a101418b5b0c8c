"""The shards of a bundle: which ones belong to it, and how those of another place get into it.

A database lists its shards by name, so a folder may for a while hold those of the save before and of the next
one: nobody mixes them up. A shard gets into the folder under a new name, and is never written to again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from sightline.errors import DamagedFile
from sightline.trace.data import CaptureInfo
from sightline.trace.shard_writer import ShardWriter
from sightline.trace.shards import Bytes, Shard, is_shard, read_shard, shard_name
from sightline.trace.tensor_stores import ShardStore, Store


class ListedShards(ShardStore):
    """The tensors in certain shards of a folder; others are not looked at.

    >>> ListedShards(Path("run.sight/tensors"), []).captures()
    []
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(folder)
        self._names = tuple(names)

    def read(self, key: str) -> Bytes:
        """The bytes of a tensor, mapped from its file."""
        try:
            return super().read(key)
        except DamagedFile as error:
            gone = next((name for name in self._names if not (self._folder / name).exists()), None)
            if gone is None:
                raise
            raise DamagedFile(
                f"{self._folder / gone} is missing: it was lost, or another recording saved over this one."
            ) from error

    def names(self) -> list[str]:
        """The names of its shards."""
        return list(self._names)

    @cached_property
    def _shards(self) -> list[Shard]:
        shards = []
        found: set[str] = set()
        for name in self._names:
            shard = read_shard(self._folder / name)
            twice = next((key for key in shard.spans if key in found), None)
            if twice is not None:
                raise DamagedFile(f"{shard.path} is damaged: {twice[:60]!r} is also in another shard.")
            found.update(shard.spans)
            shards.append(shard)
        return shards


class ShardInstall:
    """The shards of one save: what is already there is named, what is not is brought in.

    ``undo`` takes away again what was brought in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []

    def place(self, captures: Sequence[CaptureInfo], store: Store | None) -> list[str]:
        """Have every captured tensor in a shard of the folder; returns the names of the shards."""
        if not captures or store is None:
            return []
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        if isinstance(store, ShardStore):
            if store._folder.resolve() == self._folder.resolve():
                return store.names()
            return [self._brought(shard.path) for shard in store._shards]
        return self._written(captures, store)

    def undo(self) -> None:
        """Leave the folder as it was."""
        for path in self._made:
            path.unlink(missing_ok=True)
        self._made.clear()

    def _written(self, captures: Sequence[CaptureInfo], store: Store) -> list[str]:
        """Write tensors from memory to shards of their own, and give these their names when all are done."""
        apart = self._folder / f".saving-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            with ShardWriter(apart) as writer:
                for info in captures:
                    writer.put(info.key, info.dtype, info.shape, store.read(info.key), info)
            names = sorted(name for name in os.listdir(apart) if is_shard(name))
            return [self._moved(apart / name) for name in names]
        finally:
            shutil.rmtree(apart, ignore_errors=True)

    def _moved(self, source: Path) -> str:
        _to_disk(source)
        target = self._fresh()
        os.replace(source, target)
        return target.name

    def _brought(self, source: Path) -> str:
        """A shard of another folder: shared where the disk can do that, else copied."""
        target = self._fresh()
        apart = target.with_name(f".{target.name}.part")
        try:
            try:
                os.link(source, apart)
            except OSError:
                shutil.copyfile(source, apart)
                apart.chmod(0o600)
                _to_disk(apart)
            os.replace(apart, target)
        finally:
            apart.unlink(missing_ok=True)
        return target.name

    def _fresh(self) -> Path:
        """A name that nobody has, taken at once: another process may be saving here, too."""
        taken = [int(name.partition(".")[0]) for name in os.listdir(self._folder) if is_shard(name)]
        number = max(taken, default=-1) + 1
        while True:
            path = self._folder / shard_name(number)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                number += 1
                continue
            self._made.append(path)
            return path


def _to_disk(path: Path) -> None:
    """Wait until a file is on the disk: what is named after it must not be there without it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
