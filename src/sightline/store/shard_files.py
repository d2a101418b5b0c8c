"""The shards of a bundle: reading those that belong to it, and installing new ones when it is saved.

A database lists its shards by name, so the folder may for a while hold those of two saves without mixing them
up. A shard is installed under a new name and is never written to again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from sightline.data.trace_data import Bytes, CaptureInfo, Store
from sightline.errors import DamagedFile
from sightline.store.shards.shard_file import is_shard, shard_name
from sightline.store.shards.stores import ShardStore
from sightline.store.shards.writer import ShardWriter


class ListedShards(ShardStore):
    """The tensors in certain shards of a folder; other shards are ignored.

    >>> ListedShards(Path("run.sight/tensors"), []).captures()
    []
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(folder)
        self._names = tuple(names)

    def read(self, key: str) -> Bytes:
        try:
            return super().read(key)
        except DamagedFile as error:
            missing = next((name for name in self._names if not (self._folder / name).exists()), None)
            if missing is None:
                raise
            raise DamagedFile(
                f"{self._folder / missing} is missing: it was lost, or another recording saved over this one."
            ) from error

    def _file_names(self) -> list[str]:
        return list(self._names)


class ShardInstall:
    """Puts the shards of one save into its folder; ``undo`` removes them again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._new_paths: list[Path] = []

    def install(self, captures: Sequence[CaptureInfo], store: Store | None) -> list[str]:
        """Put every captured tensor into a shard of the folder; returns the names of the shards.

        Tensors in memory go to a temporary folder first, and are moved when all shards are complete.
        """
        if not captures or store is None:
            return []
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        if isinstance(store, ShardStore):
            if store._folder.resolve() == self._folder.resolve():
                return store.names()
            return [self._link_or_copy(shard.path) for shard in store._shards]
        names = []
        temporary = self._folder / f".saving-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            with ShardWriter(temporary) as writer:
                for info in captures:
                    writer.put(info.key, info.dtype, info.shape, store.read(info.key), info)
            for source in sorted(temporary / name for name in os.listdir(temporary) if is_shard(name)):
                sync(source)
                target = self._reserve_path()
                os.replace(source, target)
                names.append(target.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return names

    def undo(self) -> None:
        """Remove the new shards."""
        for path in self._new_paths:
            path.unlink(missing_ok=True)
        self._new_paths.clear()

    def _link_or_copy(self, source: Path) -> str:
        """Install a shard of another folder: as a hard link where that works, else as a copy."""
        target = self._reserve_path()
        temporary = target.with_name(f".{target.name}.part")
        try:
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)
                temporary.chmod(0o600)
                sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return target.name

    def _reserve_path(self) -> Path:
        """Create the next free path: another process may be saving here too."""
        numbers = [int(name.partition(".")[0]) for name in os.listdir(self._folder) if is_shard(name)]
        number = max(numbers, default=-1) + 1
        while True:
            path = self._folder / shard_name(number)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                number += 1
                continue
            self._new_paths.append(path)
            return path


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk: the database that lists it must not get there first."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
