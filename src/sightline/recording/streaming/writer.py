"""``path=`` and ``last=``: a thread beside the run that takes rows from the session, batch by batch.

With ``path=`` each batch becomes a frame of a journal on disk, and at the end the journal becomes a bundle.
With ``last=`` a ring of frames is kept, in memory and in the journal, as long as the last ops need them.
Either way the session holds half a second of the run, however long it is. The thread runs no op and no mode
sees it. If the disk fails, frames wait in memory, the run goes on, and the trace has a fault.

Batches are taken and written by this thread alone, also when the program reads the recording so far or stops
it: an interrupt ends the program's waiting, and not the job it waits for.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sightline.errors import CaptureError
from sightline.recording.snapshot import TableSnapshot
from sightline.recording.streaming.batches import BatchCutter, JournalLookups
from sightline.recording.streaming.journal_file import BEGUN, lock
from sightline.recording.torchapi import without_modes
from sightline.trace.assembly.arrays import EMPTY, IntArray, Rows
from sightline.trace.assembly.batch import Batch, StepMark, Streams, Tables, ValueUpdate
from sightline.trace.assembly.calls import matching_begin
from sightline.trace.assembly.last_ops import Dropped, reusable_values
from sightline.trace.assembly.row_columns import C_WIDTH, O_WIDTH
from sightline.trace.assembly.values import open_allocations
from sightline.trace.bundle import json_codec
from sightline.trace.bundle.environment import environment_of
from sightline.trace.bundle.journal import HEAD, JOURNAL, Journal, constant_fields, encode, new_table_rows
from sightline.trace.bundle.reader import load
from sightline.trace.bundle.recovery import assemble_journal, finish_recording
from sightline.trace.bundle.sources import whole_source
from sightline.trace.bundle.writer import PRIVATE, WholeColumns, save_columns
from sightline.trace.data import TraceData
from sightline.trace.source_files import SourceFiles

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

#: A batch is written this often: a killed process loses what is younger.
SECONDS: Final = 0.3
#: SIGTERM ends the process so much later: time for the batch that is being recorded.
GRACE_SECONDS: Final = 1.0
#: A waiting thread checks this often that the thread it waits for is alive.
_POLL_SECONDS: Final = 1.0
_REWRITTEN: Final = f".{JOURNAL}.anew"  #: a journal that is about to replace a longer one
_MAX_STALE: Final = 1 << 20  #: bytes of unneeded frames in a journal before it is rewritten


class _Job:
    """A job for the thread, and its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.is_done = False
        # Written in C, unlike `Event`, whose lock an interrupt can leave locked for good.
        self._signal: SimpleQueue[None] = SimpleQueue()
        self._result: Any = None
        self._error: Exception | None = None

    def do(self) -> None:
        """Run it, unless it was run."""
        if not self.is_done:
            try:
                self._result = self._work()
            except Exception as error:  # `result` raises it
                self._error = error
            self.is_done = True
            self._signal.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until it is done, or for so long."""
        with suppress(Empty):
            self._signal.get(timeout=seconds)
            self._signal.put(None)  # for other waiting threads

    def result(self) -> Any:
        """Its result; raises its error."""
        if self._error is not None:
            raise self._error
        return self._result


class JournalFrame(NamedTuple):
    """A batch in the ring of ``last=``."""

    data: bytes
    ops: int  #: how many ops belong to it
    dropped: Dropped  #: what is lost with it: its ops, and late ones, which belong to earlier batches
    before: bytes  #: a frame of what its rows may refer to


class StreamWriter:
    """Writes the batches of a session to disk, or keeps the last of them."""

    def __init__(
        self, session: SessionBase, folder: Path | None, file: int, last: int | None, *,
        source: bool = True, environment: bool = True,
    ) -> None:  # fmt: skip
        self._save_options = {"source": source, "environment": environment}
        self._session, self._folder, self._file, self._ring_size = session, folder, file, last
        self._file_identity = _identity(file)
        self._cutter, self._snapshot = BatchCutter(session), TableSnapshot(session)
        self._lookups = JournalLookups(session)
        self._table_sizes: dict[str, int] = {}
        self._ring: deque[JournalFrame] = deque()  # of ``last=``
        self._pending: list[bytes] = []  # frames the disk did not take
        self._size = len(HEAD)
        self._stale = 0  # bytes of the journal that are no longer needed
        self._live_values: IntArray = EMPTY  # rows of the values that may be used again, for ``last=``
        self._memory: IntArray = EMPTY  # and of the live storages
        self._learned: dict[int, ValueUpdate] = {}
        self._steps: list[StepMark] = []  # those that are open
        self._open_ids: tuple[list[int], list[int]] = ([], [])
        self._dropped = Dropped()  # from the ring
        self._rewritten = Dropped()  # of that, what the journal on disk no longer has either
        self._write_error: str | None = None
        self._final: TraceData | None = None
        self._sources: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._finish_job: _Job | None = None
        self._stopped = False
        self._begin()
        self._thread = threading.Thread(target=self._run, name="sightline-stream-writer", daemon=True)

    def _begin(self) -> None:
        """Write the first frame, with everything known before the run."""
        self._write(self._cutter.cut(), first=True)
        if self._folder is not None:
            if self._pending:
                raise CaptureError(self._write_error)
            os.replace(self._folder / BEGUN, self._folder / JOURNAL)

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def abandon(self) -> None:
        """Stop in a forked child: the file and the thread are the parent's."""
        self._lock = threading.RLock()
        self._stopped = True

    def discard(self) -> None:
        """The recording has never begun: end the thread. Safe to call again."""
        self._stopped = True
        self._jobs.put(_Job(int))
        self._join()

    def _join(self) -> None:
        """Wait for the end of the thread, which is near: it leaves SIGTERM as it found it."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_POLL_SECONDS)

    @property
    def _is_own_process(self) -> bool:
        return os.getpid() == self._pid

    # -- while it runs -----------------------------------------------------------------------------------

    def _run(self) -> None:
        on_disk = self._folder is not None
        with self._session.termination_delayed(GRACE_SECONDS) if on_disk else nullcontext():
            while not self._stopped:
                try:
                    self._jobs.get(timeout=SECONDS).do()
                except Empty:
                    self._take_batch()

    def _take_batch(self) -> None:
        try:
            self._flush()
        except Exception as error:  # the run goes on
            self._session.note_fault(error)

    def _run_job(self, job: _Job) -> Any:
        """Have the thread run a job, and wait for it."""
        if threading.current_thread() is not self._thread:
            self._jobs.put(job)
            while self._thread.is_alive() and not job.is_done:
                job.wait(_POLL_SECONDS)
        job.do()  # where the thread has ended
        return job.result()

    def flush(self) -> None:
        """Take a batch and write it now."""
        if self._is_own_process:
            self._run_job(_Job(self._flush))

    def _flush(self) -> None:
        with self._lock:
            if self._final is None and not self._stopped:
                batch = self._cutter.cut()
                if self._is_worth_writing(batch):
                    self._write(batch)

    def _is_worth_writing(self, batch: Batch) -> bool:
        """Whether a batch has anything that no earlier one has."""
        opened = Rows(batch.open_ops, O_WIDTH).ids.tolist(), Rows(batch.open_calls, C_WIDTH).ids.tolist()
        changed = opened != self._open_ids
        self._open_ids = opened
        contents = (  # each of these is in one batch only
            *vars(batch.rows).values(), *vars(batch.late).values(), batch.outputs, batch.absent,
            batch.nbytes, batch.late_nbytes, batch.memory, batch.updates, batch.steps, batch.captures,
        )  # fmt: skip
        return changed or any(map(len, contents)) or bool(self._pending)

    def _write(self, batch: Batch, first: bool = False) -> None:
        tables = self._tables(self._rewritten if self._folder is not None else None)
        operators, flops = self._new_lookups(batch, tables)
        more: dict[str, Any] = {"since": dict(self._table_sizes)}
        new_entries = new_table_rows(tables, self._table_sizes, operators, flops)
        if self._folder is not None and self._save_options["source"]:
            more["sources"] = self._new_sources(tables)
        if first:
            more["first"] = constant_fields(tables)
            more["environment"] = json_codec.dumps(
                _environment(tables) if self._save_options["environment"] else {}
            )
        frame = encode(batch, new_entries, tables.info, more)
        if self._folder is not None:
            self._append(frame)
        if self._ring_size is not None:
            self._add_to_ring(frame, batch)

    def _new_lookups(self, batch: Batch, tables: Tables) -> tuple[list[Any], list[Any]]:
        """Lookups that recovering the journal needs; without them the rows are written all the same."""
        try:
            return self._lookups.new_entries(self._cutter.ops, batch, tables)
        except Exception as error:
            self._session.note_fault(error)
            return [], []

    def _tables(self, dropped: Dropped | None = None) -> Tables:
        """The small tables; ``dropped`` is what the rows beside them lack, by default those of the ring."""
        tables = self._snapshot.update()
        if self._ring_size is not None:
            tables.info |= {"last": self._ring_size, **(dropped or self._dropped).to_info()}
        if not self._save_options["environment"]:
            tables.info = {key: value for key, value in tables.info.items() if key not in PRIVATE}
        if self._write_error is not None:
            tables.info["faults"] = [*tables.info["faults"], self._write_error]
            tables.info["fault_count"] += 1
        return tables

    def _new_sources(self, tables: Tables) -> list[tuple[str, str]]:
        """The user's source files that are new: a killed process could not add them later."""
        new = [code.file for code in tables.codes if code.file not in self._sources]
        self._sources.update(new)
        sources = ((file, whole_source(file)) for file in dict.fromkeys(new))
        return [(file, text) for file, text in sources if text is not None]

    def _append(self, frame: bytes) -> None:
        self._pending.append(frame)
        try:
            while self._pending:
                self._reopen_if_closed()
                _write_all(self._file, self._pending[0], self._size)
                self._size += len(self._pending.pop(0))
        except OSError as error:
            self._note_failure(error)

    def _note_failure(self, error: OSError) -> None:
        """Note the first failure; the frame stays pending."""
        with suppress(OSError):
            self._reopen_if_closed()
            os.ftruncate(self._file, self._size)
        if self._write_error is None:
            self._write_error = (
                f"{self._folder} could not be written: {error.strerror or error}; "
                "what was recorded since is in memory only."
            )

    def _reopen_if_closed(self) -> None:
        """Open our file again if the program has closed its descriptor, as some close all of them."""
        if _identity(self._file) == self._file_identity:
            return
        self._file = -1
        assert self._folder is not None
        file = os.open(self._folder / JOURNAL, os.O_RDWR)
        if _identity(file) != self._file_identity:
            os.close(file)
            raise OSError(errno.EBADF, "its file was closed by the program")
        self._file = file
        lock(file)

    def _close(self) -> None:
        if self._file >= 0 and _identity(self._file) == self._file_identity:
            with suppress(OSError):
                os.close(self._file)
        self._file = -1

    # -- the last ops ------------------------------------------------------------------------------------

    def _add_to_ring(self, frame: bytes, batch: Batch) -> None:
        """Add a frame, and drop those that hold only older ops."""
        assert self._ring_size is not None
        before = Batch(
            rows=Streams(values=self._live_values), memory=self._memory, updates=list(self._learned.values()),
            steps=list(self._steps),
        )  # fmt: skip
        calls = self._session.level == "none"
        own = Rows(batch.rows.calls, C_WIDTH) if calls else Rows(batch.rows.ops, O_WIDTH)
        lost = Dropped(len(self._cutter.calls))
        if not calls:
            lost = Dropped.of(self._cutter.ops, self._snapshot.tables.operations)
        self._ring.append(JournalFrame(frame, len(own), lost, encode(before, {}, {})))
        self._memory = open_allocations(self._memory, batch.memory)
        self._live_values = reusable_values(self._live_values, batch, self._learned)
        self._track_steps(batch)
        count = sum(one.ops for one in self._ring)
        while len(self._ring) > 1 and count - self._ring[0].ops >= self._ring_size:
            dropped = self._ring.popleft()
            count -= dropped.ops
            self._dropped += dropped.dropped
            self._stale += len(dropped.data)
        live = sum(len(one.data) for one in self._ring)
        if self._file >= 0 and self._stale > live + _MAX_STALE:
            self._rewrite()

    def _track_steps(self, batch: Batch) -> None:
        """Update which steps are open."""
        for mark in batch.steps:
            if mark.begins:
                self._steps.append(mark)
            elif (at := matching_begin(self._steps, mark)) >= 0:
                self._steps.pop(at)

    def _ring_frames(self) -> list[bytes]:
        """The frames of the ring, after one with all tables so far."""
        tables = self._tables()
        since: dict[str, int] = {}
        operators, flops = self._lookups.entries()
        head = Journal(None, [self._ring[0].before]).batch(0)
        start = encode(
            head,
            new_table_rows(tables, since, operators, flops),
            tables.info,
            {"first": constant_fields(tables)},
        )
        return [start, *(_without_tables(one.data, tables.info) for one in self._ring)]

    def _rewrite(self) -> None:
        """Replace the journal by one of the frames that are still needed."""
        assert self._folder is not None
        part, file = self._folder / _REWRITTEN, -1
        try:
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            data = b"".join([HEAD, *self._ring_frames()])
            _write_all(file, data, 0)
            lock(file)
            os.replace(part, self._folder / JOURNAL)
        except OSError as error:
            if file >= 0:
                os.close(file)
            self._note_failure(error)
            return
        self._close()
        self._file, self._file_identity, self._size, self._stale = file, _identity(file), len(data), 0
        self._pending.clear()
        self._rewritten = self._dropped

    # -- as a trace --------------------------------------------------------------------------------------

    def data(self) -> TraceData:
        """The recording so far, or the finished one."""
        if self._final is not None:
            return self._final
        data: TraceData = self._run_job(_Job(self._current_data))
        return data

    def _current_data(self) -> TraceData:
        with self._lock:
            if self._final is None:
                self._flush()
                return self._in_memory()
            return self._final

    def _in_memory(self) -> TraceData:
        session = self._session
        store = None if session.captures is None else session.captures.store()
        journal = self._journal()
        try:
            data, assembler = assemble_journal(journal, self._copy_tables(self._tables()), store)
        finally:
            journal.close()
        session.node_ops = assembler.node_ops()
        return data

    def _copy_tables(self, tables: Tables) -> Tables:
        """A copy of the tables that does not grow with the recording."""
        return replace(
            tables, operations=list(tables.operations), metas=list(tables.metas), forms=list(tables.forms),
            places=list(tables.places), codes=list(tables.codes), modules=list(tables.modules),
            files=dict(tables.files), schemas=dict(tables.schemas), info=dict(tables.info),
        )  # fmt: skip

    def _journal(self) -> Journal:
        if self._ring_size is not None:
            return Journal(None, self._ring_frames())
        assert self._folder is not None
        with suppress(OSError):
            self._reopen_if_closed()
        return Journal(self._folder / JOURNAL, self._pending, self._file)

    def finish(self, wait: bool = True) -> None:
        """The recording has stopped: turn the journal into a bundle. Safe to call again.

        Without ``wait`` it is finished a little later.
        """
        if not self._is_own_process:
            return
        if self._finish_job is None:
            self._finish_job = _Job(partial(without_modes, self._finish))
        if wait or not self._thread.is_alive():
            self._run_job(self._finish_job)
            self._join()
        else:
            self._jobs.put(self._finish_job)

    def _finish(self) -> None:
        with self._lock:
            if self._final is not None:
                return
            try:
                if self._session.captures is not None:
                    self._session.captures.close()
                self._write(self._cutter.cut(last=True))
                try:
                    whole = self._in_memory() if self._ring_size is not None else None
                    self._final = self._save_bundle(whole) or whole
                except (
                    Exception
                ) as error:  # the trace is in memory, and its faults say why there is no bundle
                    self._write_error = self._failure_text(error)
                    self._final = self._in_memory()
            finally:
                self._stopped = True
                self._close()
                self._session.release()
                self._ring.clear()

    def _failure_text(self, error: Exception) -> str:
        """Why there is no bundle, and what there is instead."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        left = f"{self._folder}/{JOURNAL} stays" if self._journal_exists() else "nothing of it is on disk"
        return f"No bundle was made: {reason.rstrip('.')}; {left}."

    def _journal_exists(self) -> bool:
        return self._folder is not None and (self._folder / JOURNAL).exists()

    def _save_bundle(self, whole: TraceData | None) -> TraceData | None:
        """Write the bundle, from the journal or from ``whole``, and open it; None without ``path=``."""
        if self._folder is None:
            return None
        session = self._session
        if not self._journal_exists():  # a folder that the program has removed is not made again
            raise CaptureError(f"{self._folder} was removed while it was written to")
        if self._write_error is not None and self._pending:
            raise CaptureError(self._write_error)
        if whole is not None:
            save_columns(whole, WholeColumns(whole), self._folder, sweep=(JOURNAL,), **self._save_options)
        else:
            store = None if session.captures is None else session.captures.store()
            journal = self._journal()
            try:
                _, assembler = finish_recording(
                    journal, self._tables(), self._folder, store, **self._save_options
                )
            finally:
                journal.close()
            session.node_ops = assembler.node_ops()
        data = load(self._folder)
        if not self._save_options["source"]:  # on this machine the source files can still be read
            data.__dict__["source_lines"] = SourceFiles()
        return data


def _environment(tables: Tables) -> dict[str, Any]:
    class Data:
        info, metas = tables.info, tables.metas

    return environment_of(Data)  # type: ignore[arg-type]  # it reads only these two


def _without_tables(frame: bytes, info: dict[str, Any]) -> bytes:
    """A frame without its additions to the tables, which an earlier frame has, and with newer info."""
    journal = Journal(None, [frame])
    head = journal.heads()[0]
    more = {"sources": head["sources"]} if "sources" in head else {}
    return encode(journal.batch(0), {}, info, more)


def _identity(file: int) -> tuple[int, int] | None:
    """The identity of the file behind a descriptor; None for one that is closed."""
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


__all__ = ["StreamWriter"]
