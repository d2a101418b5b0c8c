"""`ShardWriter`: writes captured tensors to disk in a thread of its own, while the model runs on.

The queue is bounded in bytes: a disk that is too slow slows the run down instead of filling the memory.
Failures are counted and reported; a file gets the name under which it is read only when it is complete.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np

from sightline.data.dtypes import nbytes_of
from sightline.data.trace_data import Bytes, CaptureInfo
from sightline.errors import CaptureError, UsageError
from sightline.options import one_of
from sightline.store.shards.direct_file import PAGE
from sightline.store.shards.file_names import FileNames
from sightline.store.shards.shard_file import UNFINISHED, Checksum, ShardFile, TensorDescription, shard_name
from sightline.threads import start_thread

MIB: Final = 1 << 20
#: A shard is finished at this age: a killed process loses the tensors of younger ones.
SHARD_SECONDS: Final = 0.5
_LONGEST_HEADER: Final = 4 * MIB
#: The thread is woken for so many bytes, and otherwise waits a little: waking for each tensor slows the run.
_BATCH_BYTES: Final = 8 * MIB
_BATCH_SECONDS: Final = 0.05
#: Tensors of so many bytes are written past the page cache; for smaller ones the disk's latency would count.
DIRECT_BYTES: Final = 256 << 10

Data = Bytes | Callable[[], Bytes]


class ShardWriter:
    """Writes tensors to the shards of a folder, in the background.

        >>> import tempfile
        >>> from sightline.store.shards.stores import ShardStore
        >>> info = CaptureInfo("", "fc", "output", 0, 0, "output", "", -1, (2,), "float32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ShardWriter(Path(folder)) as writer:
        ...         writer.put(info.key, "float32", (2,), np.zeros(8, dtype=np.uint8), info)
        ...     [capture.key for capture in ShardStore(Path(folder)).captures()]
        ['fc/output/0/0']

    At most ``queue_bytes`` wait to be written; `put` blocks while there are more, and a larger tensor
    goes alone. With ``on_error="raise"`` the first fault is raised by the next `put`, `flush` or `close`, and
        nothing more is written; with "report" the tensor is left out and counted in `failures`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        queue_bytes: int = 256 * MIB,
        shard_bytes: int = 256 * MIB,
        on_error: Literal["raise", "report"] = "raise",
        checksum: Checksum = zlib.crc32,
    ) -> None:
        one_of("on_error", on_error, ("raise", "report"))
        for name, number in (("queue_bytes", queue_bytes), ("shard_bytes", shard_bytes)):
            if number < 1:
                raise UsageError(f"{name}={number!r} must be a whole number from 1 up.")
        probe = folder / f".probe{UNFINISHED}"
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
            others = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            why = error.strerror or error
            raise CaptureError(f"No tensors can be written to {folder}: {why}.") from error
        if others:
            raise CaptureError(
                f"{folder} already holds {others[0]!r}: tensors are written to an empty folder."
            )
        self._names = FileNames(folder)
        self._worker = _Worker(folder, queue_bytes, shard_bytes, checksum, stops=on_error == "raise")
        # The thread refers only to the worker, so a writer without references is collected, and closed by
        # this; so is one that is open when the interpreter exits.
        self._finalizer = weakref.finalize(self, self._worker.close)

    def put(self, key: str, dtype: str, shape: Sequence[int], data: Data, info: CaptureInfo) -> None:
        """Queue a tensor: its bytes in row-major order, or a function that returns them.

        The function is called in the writer's thread. The bytes belong to the writer until they are written.
        """
        if not self._worker.in_own_process:
            return
        if info.dtype != dtype or info.shape != tuple(shape):  # the arguments count
            info = replace(info, dtype=dtype, shape=tuple(map(int, shape)))
        if key != (own := info.key):
            raise UsageError(f"the key {key!r} is not that of its capture, {own!r}.")
        nbytes = nbytes_of(dtype, info.shape)
        if nbytes is None and not callable(data):
            nbytes = data.nbytes
        self._worker.put(_Tensor(info, key, data, nbytes or 0))

    def put_file(self, name: str, write: Callable[[Path], None], nbytes: int) -> str:
        """Queue a file that ``write(path)`` writes in the writer's thread; returns the name it will have.

        A name that is too long, or equal to another where case is ignored, ends in a hash.
        """
        if not self._worker.in_own_process:
            return name
        name = self._names.take(name)
        self._worker.put(_File(name, write, nbytes))
        return name

    def flush(self) -> None:
        """Wait until everything queued is in finished shards."""
        if self._worker.in_own_process:
            self._worker.flush()

    def close(self) -> None:
        """Wait until everything is written. Closing again does nothing."""
        self._worker.close()
        self._finalizer.detach()  # only now: after an interrupt it runs at exit
        self._worker.raise_fault(again=False)

    @property
    def failures(self) -> int:
        """The number of tensors and files that were not written."""
        return self._worker.failures

    @property
    def lost(self) -> frozenset[str]:
        """The keys of the tensors, and the names of the files, that were not written."""
        return self._worker.lost

    @property
    def failure(self) -> str | None:
        """The first thing that went wrong, as a sentence."""
        return str(self._worker.fault) if self._worker.fault else None

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._worker.written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CaptureError:
            if error is None:  # it must not replace the error that ended the block
                raise


@dataclass(frozen=True, slots=True)
class _Tensor:
    info: CaptureInfo
    key: str
    data: Data
    nbytes: int

    @property
    def text(self) -> str:
        return f"the tensor {self.key!r}"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.key,)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    write: Callable[[Path], None]
    nbytes: int

    @property
    def text(self) -> str:
        return f"the file {self.name!r}"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True)
class _Flush:
    done: SimpleQueue[None]  #: gets one entry when everything before is written
    nbytes: int = 0
    text: str = "the queue"
    names: tuple[str, ...] = ()


_Item = _Tensor | _File | _Flush
_Kind = tuple[int, bool]  #: of a shard: the alignment of its tensors, and whether they are large


class _Worker:
    """The queue, the thread that empties it, and the open shards.

    The queue and the counts are used only under the lock, the shards only by the thread.
    """

    def __init__(
        self, folder: Path, queue_bytes: int, shard_bytes: int, checksum: Checksum, *, stops: bool
    ) -> None:
        self.failures = 0
        self.lost: frozenset[str] = frozenset()  # of keys and names: replaced, as other threads read it
        self.fault: CaptureError | None = None
        self.written = 0
        self._folder = folder
        self._queue_bytes = queue_bytes
        self._batch_bytes = min(_BATCH_BYTES, queue_bytes)
        self._shard_bytes = shard_bytes
        self._checksum = checksum
        self._stops = stops
        self._raised = False
        self._closing = False
        self._pid = os.getpid()
        # Re-entrant: the collector may close a writer anywhere. The run acquires it directly, and waits on
        # queues, which are written in C: an interrupt inside a condition would leave it locked for good.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # only the thread waits on it
        self._waiting: list[SimpleQueue[None]] = []  # one for each `put` that waits until there is room
        self._queue: deque[_Item] = deque()
        self._queued = 0  # bytes in the queue
        self._urgent = False  # whether the thread should take the queue now
        self._sleeping = False  # whether the thread waits without a timeout
        self._unwritten = 0  # bytes queued and not yet written
        self._keys: set[str] = set()
        self._thread: threading.Thread | None = None
        self._shards: dict[_Kind, ShardFile] = {}
        self._next_shard = 0
        self._next_order = 0
        self._rooms: dict[_Kind, int] = {}  # for the header of the next shard

    @property
    def in_own_process(self) -> bool:
        """Whether this process created the writer; a forked child has no thread and writes nothing."""
        return os.getpid() == self._pid

    def put(self, item: _Item) -> None:
        """Queue an item as soon as there is room for it."""
        while (room := self._queue_or_wait(item)) is not None:
            room.get()

    def _queue_or_wait(self, item: _Item) -> SimpleQueue[None] | None:
        """Queue an item if there is room for it; else a queue that gets an entry when there may be."""
        with self._lock:
            if self._closing:
                raise CaptureError(
                    f"The writer of {self._folder} is closed: no more tensors can be put into it."
                )
            self.raise_fault()
            if self._unwritten and self._unwritten + item.nbytes > self._queue_bytes:
                self._wake()
                room: SimpleQueue[None] = SimpleQueue()
                self._waiting.append(room)
                return room
            if isinstance(item, _Tensor) and self._refuse(item):
                return None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sightline-writer", daemon=True)
                start_thread(self._thread)
            self._queue.append(item)
            self._queued += item.nbytes
            self._unwritten += item.nbytes
            if self._queued >= self._batch_bytes or isinstance(item, _Flush):
                self._wake()
            elif self._sleeping:
                self._work.notify_all()
            return None

    def _let_waiting_try(self) -> None:
        """Wake every `put` that waits for room; the lock is held."""
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            room.put(None)

    def _wake(self) -> None:
        """Make the thread take the queue now."""
        if not self._urgent:
            self._urgent = True
            self._work.notify_all()

    def flush(self) -> None:
        """Wait until everything queued before is written."""
        if self._thread is None or self._closing:
            return
        marker = _Flush(SimpleQueue())
        self.put(marker)
        marker.done.get()
        self.raise_fault()

    def close(self) -> None:
        """End the thread after it has written everything; no fault is raised here."""
        if not self.in_own_process:
            return
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._let_waiting_try()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def raise_fault(self, *, again: bool = True) -> None:
        """Raise the first fault, if faults are raised; with ``again=False`` only if it never was."""
        if self.fault is not None and self._stops and (again or not self._raised):
            self._raised = True
            raise CaptureError(str(self.fault)) from self.fault.__cause__

    def _refuse(self, item: _Tensor) -> bool:
        """Whether a tensor has a key that no shard can hold; that counts as a failure."""
        key, lost = item.key, item.names
        if key in self._keys:
            why, lost = "its key was used before", ()  # the first tensor of this key is written
        elif (
            not key
            or key == "__metadata__"
            or (not key.isascii() and any("\ud800" <= char <= "\udfff" for char in key))
        ):
            why = "its key cannot be a name in a file"
        else:
            self._keys.add(key)
            return False
        self._fail(item.text, ValueError(why), lost)
        self.raise_fault()
        return True

    def _fail(self, item: str, error: BaseException, lost: Collection[str]) -> None:
        with self._lock:
            self.failures += max(len(lost), 1)
            self.lost |= frozenset(lost)
            if self.fault is None:
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                why = why or type(error).__name__
                self.fault = CaptureError(f"{self._folder}: {item} could not be written: {why.rstrip('.')}.")
                self.fault.__cause__ = error

    # The following methods run in the thread.

    def _run(self) -> None:
        try:
            while (items := self._next_batch()) is not None:
                while items:
                    item = items.popleft()
                    self._handle(item)
                    nbytes = item.nbytes
                    del item  # its bytes are freed before others may use the space
                    with self._lock:
                        self._unwritten -= nbytes
                        self._let_waiting_try()
                    self._finish_shards(older_than=SHARD_SECONDS)
                self._finish_shards(older_than=SHARD_SECONDS)
        finally:
            self._finish_shards()

    def _next_batch(self) -> deque[_Item] | None:
        """The queue, when it is long enough or a shard is due to be finished; None at the end."""
        with self._lock:
            while not self._closing and not self._urgent:
                seconds = _BATCH_SECONDS if self._queue else None
                if self._shards:  # items that are queued until then go into them
                    opened = min(shard.opened for shard in self._shards.values())
                    seconds = opened + SHARD_SECONDS - time.monotonic()
                self._sleeping = seconds is None
                if (seconds is not None and seconds <= 0) or not self._work.wait(seconds):
                    break
            if self._closing and not self._queue:
                return None
            items, self._queue = self._queue, deque()
            self._queued, self._urgent, self._sleeping = 0, False, False
            return items

    def _handle(self, item: _Item) -> None:
        if isinstance(item, _Flush):
            self._finish_shards()
            item.done.put(None)
            return
        if self.fault is not None and self._stops:
            self._fail(item.text, self.fault, item.names)  # only counted: the first fault stops the run
            return
        try:
            if isinstance(item, _Tensor):
                self._write_tensor(item)
                return
            temporary = self._folder / f".file{UNFINISHED}"  # one at a time: only this thread writes
            try:
                item.write(temporary)
                os.replace(temporary, self._folder / item.name)
            finally:
                temporary.unlink(missing_ok=True)
            self.written += item.nbytes
        except BaseException as error:  # noqa: BLE001  # raised in the run's thread
            self._fail(item.text, error, item.names)

    def _write_tensor(self, item: _Tensor) -> None:
        data, info = item.data() if callable(item.data) else item.data, item.info
        given: object = data  # a caller may ignore the annotation
        if not isinstance(given, np.ndarray) or data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise TypeError("its bytes are not a contiguous numpy array of uint8")
        expected = nbytes_of(info.dtype, info.shape)
        if expected not in (None, data.nbytes):
            shape = list(info.shape)
            raise ValueError(f"it has {data.nbytes} bytes, not the {expected} of {info.dtype} {shape}")
        tensor = TensorDescription.of(info, data.nbytes, self._next_order)
        kind = (tensor.alignment, data.nbytes >= DIRECT_BYTES)
        shard = self._shards.get(kind)
        if shard is not None and not shard.room_for(tensor):
            self._finish(kind)
            shard = None
        if shard is None:
            path = self._folder / shard_name(self._next_shard)
            room = max(self._rooms.get(kind, PAGE), tensor.header_size)
            shard = ShardFile(path, room, direct=kind[1], checksum=self._checksum)
            self._shards[kind] = shard
            self._next_shard += 1
        shard.add(tensor, data)
        self._next_order += 1
        self.written += data.nbytes
        if shard.size >= self._shard_bytes:
            self._finish(kind)

    def _finish_shards(self, older_than: float = -1.0) -> None:
        now = time.monotonic()
        for kind, shard in list(self._shards.items()):
            if now - shard.opened > older_than:
                self._finish(kind)

    def _finish(self, kind: _Kind) -> None:
        shard = self._shards.pop(kind)
        # Twice what this one needed: many small tensors soon go into few shards, few into small ones.
        self._rooms[kind] = min(2 * shard.header_size, _LONGEST_HEADER)
        try:
            shard.finish()
        except BaseException as error:  # noqa: BLE001  # the thread must go on: others wait for it
            self.written -= shard.size
            self._fail(f"the shard {shard.path.name!r}", error, shard.keys)
