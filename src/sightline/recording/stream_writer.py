"""``path=`` and ``last=``: a thread beside the run that takes away what was written, batch by batch.

With ``path=`` each batch becomes a frame of a journal on disk, and at the end the journal becomes a bundle.
With ``last=`` frames are kept, in memory and in the journal, as long as the last ops need them. Either way
the session holds half a second of the run, however long it is. The thread runs no op and passes no mode. If
the disk fails, frames wait in memory, the run goes on, and the trace says so.

Batches are taken and written by this thread alone, also when the program asks for the recording so far or
stops it: an interrupt ends the program's waiting, and never what it waits for.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sightline.errors import CaptureError
from sightline.recording.batches import BatchCutter
from sightline.recording.flops import BatchFlops
from sightline.recording.snapshot import TableSnapshot
from sightline.recording.stream_folder import BEGUN, hold
from sightline.recording.torchapi import undisturbed
from sightline.trace.assembly.arrays import EMPTY, IntArray, Rows
from sightline.trace.assembly.batch import Batch, StepMark, Streams, Tables, ValueUpdate
from sightline.trace.assembly.calls import matching_begin
from sightline.trace.assembly.layout import C_WIDTH, O_WIDTH
from sightline.trace.assembly.ring import reusable_values
from sightline.trace.assembly.values import open_allocations
from sightline.trace.bundle import json_codec
from sightline.trace.bundle.environment import environment_of
from sightline.trace.bundle.journal import HEAD, JOURNAL, Journal, constant_fields, encode, new_table_rows
from sightline.trace.bundle.reader import load
from sightline.trace.bundle.recovery import assemble_journal, finish_recording
from sightline.trace.bundle.sources import whole_source
from sightline.trace.bundle.writer import PRIVATE, WholeColumns, save_columns
from sightline.trace.data import TraceData
from sightline.trace.source_lines import SourceLines

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

#: A batch is written this often: a killed process loses what is younger.
SECONDS: Final = 0.3
#: A waiting thread looks this often whether there is anybody to wait for.
_PATIENCE: Final = 1.0
_ANEW: Final = f".{JOURNAL}.anew"  #: a journal that is about to take the place of a longer one
_SPARE: Final = 1 << 20  #: bytes of frames that are no longer needed before a journal is written anew


class _Job:
    """Something that the thread is to do, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.is_done = False
        # Written in C, other than an `Event`, whose lock an interrupt can leave locked for good.
        self._word: SimpleQueue[None] = SimpleQueue()
        self._result: Any = None
        self._error: Exception | None = None

    def do(self) -> None:
        """Do it, unless it is done."""
        if not self.is_done:
            try:
                self._result = self._work()
            except Exception as error:  # it is for whoever has asked
                self._error = error
            self.is_done = True
            self._word.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until it is done, or so long."""
        with suppress(Empty):
            self._word.get(timeout=seconds)
            self._word.put(None)  # for others that wait

    def result(self) -> Any:
        """What came of it."""
        if self._error is not None:
            raise self._error
        return self._result


class JournalFrame(NamedTuple):
    """A batch as it is kept."""

    data: bytes
    ops: int  #: those that have their place in it
    rows: int  #: with the late ones, which have theirs before it
    before: bytes  #: with ``last=``, a frame of what could be referred to when it began


class StreamWriter:
    """Keeps what a session writes, on disk, or the last of it."""

    def __init__(
        self, session: SessionBase, folder: Path | None, file: int, last: int | None, *,
        source: bool = True, environment: bool = True,
    ) -> None:  # fmt: skip
        self._with = {"source": source, "environment": environment}
        self._session, self._folder, self._file, self._last = session, folder, file, last
        self._own = _identity(file)
        self._cutter, self._telling, self._looks = (
            BatchCutter(session),
            TableSnapshot(session),
            BatchFlops(session),
        )
        self._since: dict[str, int] = {}
        self._frames: deque[JournalFrame] = deque()  # of ``last=``
        self._pending: list[bytes] = []  # frames the disk did not take
        self._size = len(HEAD)
        self._stale = 0  # bytes of the journal that are no longer needed
        self._known: IntArray = EMPTY  # rows of the values that may be used again, for ``last=``
        self._memory: IntArray = EMPTY  # and of the storages that are held
        self._names: dict[int, ValueUpdate] = {}
        self._steps: list[StepMark] = []  # those that are open
        self._opened: tuple[list[int], list[int]] = ([], [])
        self._dropped = 0
        self._trouble: str | None = None
        self._final: TraceData | None = None
        self._sources: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._last_job: _Job | None = None
        self._is_over = False
        self._begin()
        self._thread = threading.Thread(target=self._run, name="sightline-keeper", daemon=True)

    def _begin(self) -> None:
        """The first frame, with everything known before the run."""
        self._write(self._cutter.cut(), first=True)
        if self._folder is not None:
            if self._pending:
                raise CaptureError(self._trouble)
            os.replace(self._folder / BEGUN, self._folder / JOURNAL)

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def abandon(self) -> None:
        """In a forked child: the file and the thread are the parent's."""
        self._lock = threading.RLock()
        self._is_over = True

    def discard(self) -> None:
        """The recording has never begun: end the thread. Safe to call again."""
        self._is_over = True
        self._jobs.put(_Job(int))
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    @property
    def _at_home(self) -> bool:
        return os.getpid() == self._pid

    # -- while it runs -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._jobs.get(timeout=SECONDS).do()
            except Empty:
                self._take_batch()

    def _take_batch(self) -> None:
        try:
            self._flush()
        except Exception as error:  # the run goes on
            self._session.note_fault(error)

    def _ask(self, job: _Job) -> Any:
        """Have the thread do something, and wait for it."""
        if threading.current_thread() is not self._thread:
            self._jobs.put(job)
            while self._thread.is_alive() and not job.is_done:
                job.wait(_PATIENCE)
        job.do()  # where there is no thread
        return job.result()

    def flush(self) -> None:
        """Take what there is, and keep it."""
        if self._at_home:
            self._ask(_Job(self._flush))

    def _flush(self) -> None:
        with self._lock:
            if self._final is None and not self._is_over:
                batch = self._cutter.cut()
                if self._is_news(batch):
                    self._write(batch)

    def _is_news(self, batch: Batch) -> bool:
        """Whether a batch says anything that was not said before."""
        opened = Rows(batch.open_ops, O_WIDTH).ids.tolist(), Rows(batch.open_calls, C_WIDTH).ids.tolist()
        changed = opened != self._opened
        self._opened = opened
        taken = (  # what a batch holds is in no later one
            *vars(batch.rows).values(), *vars(batch.late).values(), batch.outputs, batch.absent,
            batch.nbytes, batch.late_nbytes, batch.memory, batch.updates, batch.steps, batch.captures,
        )  # fmt: skip
        return changed or any(map(len, taken)) or bool(self._pending)

    def _write(self, batch: Batch, first: bool = False) -> None:
        tables = self._tables()
        operators, flops = self._news(batch, tables)
        more: dict[str, Any] = {"since": dict(self._since)}
        news = new_table_rows(tables, self._since, operators, flops)
        if self._folder is not None and self._with["source"]:
            more["sources"] = self._new_sources(tables)
        if first:
            more["first"] = constant_fields(tables)
            more["environment"] = json_codec.dumps(_environment(tables) if self._with["environment"] else {})
        frame = encode(batch, news, tables.info, more)
        if self._folder is not None:
            self._append(frame)
        if self._last is not None:
            self._keep(frame, batch)

    def _news(self, batch: Batch, tables: Tables) -> tuple[list[Any], list[Any]]:
        """What a killed process could not tell; rows are worth more than it."""
        try:
            return self._looks.news(self._cutter.ops, batch, tables)
        except Exception as error:  # told with the recording
            self._session.note_fault(error)
            return [], []

    def _tables(self) -> Tables:
        tables = self._telling.update()
        if self._last is not None:
            tables.info |= {"last": self._last, "dropped": self._dropped}
        if not self._with["environment"]:
            tables.info = {key: value for key, value in tables.info.items() if key not in PRIVATE}
        if self._trouble is not None:
            tables.info["faults"] = [*tables.info["faults"], self._trouble]
            tables.info["fault_count"] += 1
        return tables

    def _new_sources(self, tables: Tables) -> list[tuple[str, str]]:
        """The user's own files, as they are met: a killed process gathers none."""
        new = [code.file for code in tables.codes if code.file not in self._sources]
        self._sources.update(new)
        found = ((file, whole_source(file)) for file in dict.fromkeys(new))
        return [(file, text) for file, text in found if text is not None]

    def _append(self, frame: bytes) -> None:
        self._pending.append(frame)
        try:
            while self._pending:
                self._check_own()
                _write_all(self._file, self._pending[0], self._size)
                self._size += len(self._pending.pop(0))
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Say it once, and keep what could not be written."""
        with suppress(OSError):
            self._check_own()
            os.ftruncate(self._file, self._size)
        if self._trouble is None:
            self._trouble = (
                f"{self._folder} could not be written: {error.strerror or error}; "
                "what was recorded since is in memory only."
            )

    def _check_own(self) -> None:
        """The number still means our file: a program that closes all of them may have given it away."""
        if _identity(self._file) == self._own:
            return
        self._file = -1
        assert self._folder is not None
        file = os.open(self._folder / JOURNAL, os.O_RDWR)
        if _identity(file) != self._own:
            os.close(file)
            raise OSError(errno.EBADF, "its file was closed by the program")
        self._file = file
        hold(file)

    def _close(self) -> None:
        if self._file >= 0 and _identity(self._file) == self._own:
            with suppress(OSError):
                os.close(self._file)
        self._file = -1

    # -- the last ops ------------------------------------------------------------------------------------

    def _keep(self, frame: bytes, batch: Batch) -> None:
        """Add a frame, and let go of those that only hold older ops."""
        assert self._last is not None
        before = Batch(
            rows=Streams(values=self._known), memory=self._memory, updates=list(self._names.values()),
            steps=list(self._steps),
        )  # fmt: skip
        calls = self._session.level == "none"
        own = Rows(batch.rows.calls, C_WIDTH) if calls else Rows(batch.rows.ops, O_WIDTH)
        every = self._cutter.calls if calls else self._cutter.ops
        self._frames.append(JournalFrame(frame, len(own), len(every), encode(before, {}, {})))
        self._memory = open_allocations(self._memory, batch.memory)
        self._known = reusable_values(self._known, batch, self._names)
        self._note(batch)
        held = sum(one.ops for one in self._frames)
        while len(self._frames) > 1 and held - self._frames[0].ops >= self._last:
            gone = self._frames.popleft()
            held -= gone.ops
            self._dropped += gone.rows
            self._stale += len(gone.data)
        live = sum(len(one.data) for one in self._frames)
        if self._file >= 0 and self._stale > live + _SPARE:
            self._rewrite()

    def _note(self, batch: Batch) -> None:
        """Which steps are open now."""
        for mark in batch.steps:
            if mark.begins:
                self._steps.append(mark)
            elif (at := matching_begin(self._steps, mark)) >= 0:
                self._steps.pop(at)

    def _held(self) -> list[bytes]:
        """The frames that are needed, the first one with all tables so far."""
        tables = self._tables()
        since: dict[str, int] = {}
        operators, flops = self._looks.told()
        head = Journal(None, [self._frames[0].before]).batch(0)
        start = encode(
            head,
            new_table_rows(tables, since, operators, flops),
            tables.info,
            {"first": constant_fields(tables)},
        )
        return [start, *(_without_news(one.data) for one in self._frames)]

    def _rewrite(self) -> None:
        """A journal of the frames that are needed takes the place of the one there is."""
        assert self._folder is not None
        part, file = self._folder / _ANEW, -1
        try:
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            data = b"".join([HEAD, *self._held()])
            _write_all(file, data, 0)
            hold(file)
            os.replace(part, self._folder / JOURNAL)
        except OSError as error:
            if file >= 0:
                os.close(file)
            self._fail(error)
            return
        self._close()
        self._file, self._own, self._size, self._stale = file, _identity(file), len(data), 0
        self._pending.clear()

    # -- as a trace --------------------------------------------------------------------------------------

    def data(self) -> TraceData:
        """The recording so far, or the finished one."""
        if self._final is not None:
            return self._final
        found: TraceData = self._ask(_Job(self._data))
        return found

    def _data(self) -> TraceData:
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
            found, assembler = assemble_journal(journal, self._copy_of(self._tables()), store)
        finally:
            journal.close()
        session.node_ops = assembler.node_ops()
        return found

    def _copy_of(self, tables: Tables) -> Tables:
        """Tables that do not grow with the recording: a snapshot stays what it is."""
        return replace(
            tables, operations=list(tables.operations), metas=list(tables.metas), forms=list(tables.forms),
            places=list(tables.places), codes=list(tables.codes), modules=list(tables.modules),
            files=dict(tables.files), schemas=dict(tables.schemas), info=dict(tables.info),
        )  # fmt: skip

    def _journal(self) -> Journal:
        if self._last is not None:
            return Journal(None, self._held())
        assert self._folder is not None
        with suppress(OSError):
            self._check_own()
        return Journal(self._folder / JOURNAL, self._pending, self._file)

    def finish(self, wait: bool = True) -> None:
        """The recording has stopped: turn the journal into a bundle. Safe to call again.

        Who does not ``wait`` finds it finished a little later.
        """
        if not self._at_home:
            return
        if self._last_job is None:
            self._last_job = _Job(partial(undisturbed, self._finish))
        if wait or not self._thread.is_alive():
            self._ask(self._last_job)
        else:
            self._jobs.put(self._last_job)

    def _finish(self) -> None:
        with self._lock:
            if self._final is not None:
                return
            try:
                if self._session.captures is not None:
                    self._session.captures.close()
                self._write(self._cutter.cut(last=True))
                try:
                    whole = self._in_memory() if self._last is not None else None
                    self._final = self._saved(whole) or whole
                except Exception as error:  # the trace is there, and says why there is no bundle
                    self._trouble = self._no_bundle(error)
                    self._final = self._in_memory()
            finally:
                self._is_over = True
                self._close()
                self._session.release()
                self._frames.clear()

    def _no_bundle(self, error: Exception) -> str:
        """Why there is none, and what there is instead."""
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        left = f"{self._folder}/{JOURNAL} stays" if self._is_there() else "nothing of it is on disk"
        return f"No bundle was made: {why.rstrip('.')}; {left}."

    def _is_there(self) -> bool:
        return self._folder is not None and (self._folder / JOURNAL).exists()

    def _saved(self, whole: TraceData | None) -> TraceData | None:
        """The bundle, of what is in memory if that is ``whole``; None where none was asked for."""
        if self._folder is None:
            return None
        session = self._session
        if not self._is_there():  # what the program has removed is not made again
            raise CaptureError(f"{self._folder} was removed while it was written to")
        if self._trouble is not None and self._pending:
            raise CaptureError(self._trouble)
        if whole is not None:
            save_columns(whole, WholeColumns(whole), self._folder, sweep=(JOURNAL,), **self._with)
        else:
            store = None if session.captures is None else session.captures.store()
            journal = self._journal()
            try:
                _, assembler = finish_recording(journal, self._tables(), self._folder, store, **self._with)
            finally:
                journal.close()
            session.node_ops = assembler.node_ops()
        found = load(self._folder)
        if not self._with["source"]:  # here the files are at hand
            found.__dict__["source_lines"] = SourceLines()
        return found


def _environment(tables: Tables) -> dict[str, Any]:
    class Facts:
        info, metas = tables.info, tables.metas

    return environment_of(Facts)  # type: ignore[arg-type]  # it reads no more than these


def _without_news(frame: bytes) -> bytes:
    """A frame whose additions to the tables were told before."""
    journal = Journal(None, [frame])
    head = journal.heads()[0]
    more = {"sources": head["sources"]} if "sources" in head else {}
    return encode(journal.batch(0), {}, json_codec.loads(head["info"]), more)


def _identity(file: int) -> tuple[int, int] | None:
    """Which file a number means; None for one that is closed."""
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _write_all(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


__all__ = ["StreamWriter"]
