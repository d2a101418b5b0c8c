"""Names of files of captured tensors: a key may hold any character, a file name may not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import unicodedata
from pathlib import Path

from sightline.errors import UsageError
from sightline.store.shards.shard_file import SUFFIX, UNFINISHED


class FileNames:
    """The file names of one folder: checked, short enough, and distinct even where case is ignored.

    >>> names = FileNames(Path())
    >>> names.take("q.pt"), names.take("Q.pt")
    ('q.pt', 'Q~fd1d41fb607d.pt')
    """

    def __init__(self, folder: Path) -> None:
        self._used: set[str] = set()
        self._longest = 255
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not every system can say
            self._longest = os.pathconf(folder, "PC_NAME_MAX")

    def take(self, name: str) -> str:
        """The name to use."""
        bad = any(char in '/\\:*?"<>|' or not char.isprintable() for char in name)
        if bad or not name or name[0] == "." or name[-1] in ". " or name.endswith((SUFFIX, UNFINISHED)):
            raise UsageError(
                f"{name!r} cannot be the name of a file of tensors; `file_name` makes one that can."
            )
        short = name
        tries = 0
        while len(short.encode()) > self._longest or _fold_case(short) in self._used:
            digest = hashlib.sha256(f"{tries}{name}".encode()).hexdigest()[:12]
            stem, dot, suffix = name.rpartition(".")
            stem, suffix = (stem, dot + suffix) if stem and len(suffix) <= 16 else (name, "")
            start = stem.encode()[: self._longest - len(suffix.encode()) - 13].decode(errors="ignore")
            short = f"{start}~{digest}{suffix}"
            tries += 1
        self._used.add(_fold_case(short))
        return short


def _fold_case(name: str) -> str:
    """A name as a file system sees it that ignores case and normalises accents."""
    return unicodedata.normalize("NFC", name).casefold()


def file_name(key: str, suffix: str = ".pt") -> str:
    """A file name for a key, for `ShardWriter.put_file`.

    >>> file_name("step0/blocks.0.attn/output/0/0"), file_name("../../etc/passwd")
    ('step0~blocks.0.attn~output~0~0.pt', '_.~..~etc~passwd.pt')
    """
    name = "".join(
        "~" if char == "/" else char if char.isalnum() or char in "._-+=@()[]," else "_" for char in key
    )
    return ("_" + name[1:] if not name or name[0] == "." else name) + suffix
