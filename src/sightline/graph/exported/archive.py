"""Exported graphs on disk: torch's own archive, and a folder of them that saves exporting twice.

**An archive can run code when it is loaded.** It is torch's format, not a recording of ours: load only what
you or someone you trust wrote. That holds for a cache folder too, which is why it is private to its owner.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from sightline.errors import DamagedFile, UsageError
from sightline.graph.exported.program import Facts
from sightline.graph.exported.tracing import Noise, heard

_FACTS: Final = "sightline.json"
_FORMAT: Final = 1


def write(program: torch.export.ExportedProgram, facts: Facts, path: Path) -> None:
    """Write an archive as a whole or not at all. The example's inputs stay out of it."""
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {str(path.parent)!r} to save the graph in.")
    bare = copy.copy(program)
    bare.example_inputs = None
    plain = json.dumps({"format": _FORMAT, **facts.to_plain()})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".pt2")
    os.close(handle)
    try:
        with heard(Noise()):
            torch.export.save(bare, temporary, extra_files={_FACTS: plain})
        os.replace(temporary, path)
    except OSError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"torch cannot save this graph: {first}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read(path: Path) -> tuple[torch.export.ExportedProgram, Facts]:
    """The program and the facts of an archive. Only for archives you trust: loading can run code."""
    if not path.is_file():
        raise UsageError(f"There is no file {str(path)!r}.")
    extra: dict[str, Any] = {_FACTS: ""}
    noise = Noise()
    try:
        with heard(noise):
            program = torch.export.load(str(path), extra_files=extra)
        plain = json.loads(extra[_FACTS] or "null")
        if plain is None:
            return program, Facts.of_foreign(program)
        if plain.pop("format") != _FORMAT:
            raise DamagedFile(f"{path} was written by another version of sightline: export the model again.")
        return program, Facts.from_plain(plain)
    except DamagedFile:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DamagedFile(
            f"{path} is not a graph that can be read: {(*noise.notes, first)[0][-300:]}"
        ) from error


class Cache:
    """A private folder of archives by key."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def load(self, key: str) -> tuple[torch.export.ExportedProgram, Facts] | None:
        """The entry of a key; None where there is none, or only a damaged one."""
        path = self._path(key)
        if not path.is_file() or not self._is_private():
            return None
        try:
            return read(path)
        except (DamagedFile, OSError):
            return None

    def store(self, key: str, program: torch.export.ExportedProgram, facts: Facts) -> str:
        """Keep an entry; why it could not be kept, or nothing."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return f"the folder {self._folder} can be written by others"
            write(program, facts, self._path(key))
        except (UsageError, OSError) as error:
            return str(error)
        return ""

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.pt2"

    def _is_private(self) -> bool:
        """Whether nobody else can put a file here, which would be run when loaded."""
        state = self._folder.stat()
        mine = not hasattr(os, "getuid") or state.st_uid == os.getuid()
        return mine and not state.st_mode & 0o022
