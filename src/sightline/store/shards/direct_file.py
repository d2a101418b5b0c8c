"""`DirectFile`: writes past the page cache, which takes a tenth of the CPU time of writing through it.

It is for large tensors that nobody reads while the model runs. Where a file system cannot do it, the caller
writes as usual.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final, Self

import numpy as np

from sightline.data.trace_data import Bytes

PAGE: Final = 4096  #: positions in the file and addresses in memory are multiples of this
_BOUNCE_BYTES: Final = 1 << 20


class DirectFile:
    """Appends to a file that its owner has open too; bytes are in the file when `append` returns.

    The last page is filled up with zeros. The next `append` overwrites them, and the owner cuts off the last.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     direct = DirectFile.open(Path(file.name), 0)
    ...     if direct is not None:  # the file system can do it
    ...         direct.append(np.zeros(10, dtype=np.uint8))
    ...         direct.close()
    """

    def __init__(self, file: int, start: int) -> None:
        self._file = file
        self._position = start  # of the last page
        self._rest: Bytes = np.zeros(0, dtype=np.uint8)  # the bytes of the last page, if that is not full
        self._bounce: Bytes | None = None

    @classmethod
    def open(cls, path: Path, start: int) -> Self | None:
        """Append from ``start`` on, a multiple of the page; None where that cannot be done."""
        if not hasattr(os, "O_DIRECT") or start % PAGE:
            return None
        try:
            return cls(os.open(path, os.O_WRONLY | os.O_DIRECT), start)
        except OSError:
            return None

    def append(self, data: Bytes) -> None:
        """Write bytes; after an error, the bytes of earlier calls are still whole."""
        position, rest = self._position, self._rest
        if not rest.nbytes and address_of(data) % PAGE == 0:
            whole = data.nbytes & -PAGE
            self._write(data[:whole], position)
            position, data = position + whole, data[whole:]
        while data.nbytes:
            if self._bounce is None:  # memory that begins at a page, for bytes that do not
                self._bounce = np.frombuffer(mmap.mmap(-1, _BOUNCE_BYTES), dtype=np.uint8)
            pages = self._bounce
            taken = min(data.nbytes, pages.nbytes - rest.nbytes)
            used = rest.nbytes + taken
            pages[: rest.nbytes] = rest
            pages[rest.nbytes : used] = data[:taken]
            end = -(-used // PAGE) * PAGE
            pages[used:end] = 0
            self._write(pages[:end], position)
            whole = used & -PAGE
            position, data, rest = position + whole, data[taken:], pages[whole:used].copy()
        self._position, self._rest = position, rest

    def close(self) -> None:
        """Give up the file."""
        os.close(self._file)

    def _write(self, pages: Bytes, position: int) -> None:
        while pages.nbytes:
            written = os.pwrite(self._file, pages.data, position) & -PAGE
            if not written:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            pages, position = pages[written:], position + written


def address_of(data: Bytes) -> int:
    """The address of an array's bytes in memory."""
    address: int = data.__array_interface__["data"][0]
    return address
