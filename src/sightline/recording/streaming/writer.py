"""``path=`` and ``last=``: a thread beside the run that takes rows from the session, batch by batch.

With ``path=`` each batch becomes a frame of a journal on disk (`journal_file`), and at the end the journal
becomes a bundle. With ``last=`` only the frames that the last ops need are kept (`last_frames`), in memory
and in the journal. Either way the session holds half a second of the run, however long it is. The thread runs
no op and no mode sees it. If the disk fails, the run goes on, and the trace has a fault.

Batches are taken and written by this thread alone, also when the program reads the recording so far or stops
it: an interrupt ends the program's waiting, and not the job it waits for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from sightline.assemble.batch import Batch, Tables
from sightline.assemble.last_ops import Dropped
from sightline.data.arrays import Rows
from sightline.data.source_files import SourceFiles
from sightline.data.trace_data import TraceData
from sightline.errors import CaptureError, InvalidTrace
from sightline.recording.snapshot import TableSnapshot
from sightline.recording.streaming.batches import BatchCutter, JournalLookups
from sightline.recording.streaming.journal_file import JournalFile
from sightline.recording.streaming.last_frames import LastFrames
from sightline.recording.torchapi import without_modes
from sightline.schema.streams import CALL, OP
from sightline.store import json_codec
from sightline.store.damage import READ_ERRORS, Damage
from sightline.store.environment import environment_of
from sightline.store.journal import JOURNAL, Journal, constant_fields, encode, new_table_rows
from sightline.store.reader import load
from sightline.store.recovery import assemble_journal, finish_recording
from sightline.store.soundness import sound_part
from sightline.store.sources import whole_source
from sightline.store.writer import PRIVATE, WholeColumns, save_columns
from sightline.threads import start_thread

if TYPE_CHECKING:
    from sightline.recording.session import Session

#: A batch is written this often: a killed process loses the rows that are younger.
SECONDS: Final = 0.3
#: SIGTERM ends the process so much later: time for the batch that is being recorded.
GRACE_SECONDS: Final = 1.0
#: A waiting thread checks this often that the thread it waits for is alive.
_POLL_SECONDS: Final = 1.0
_MAX_STALE: Final = 1 << 20  #: bytes of dropped frames in a journal before it is rewritten


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


class StreamWriter:
    """Writes the batches of a session to disk, or keeps the last of them."""

    def __init__(
        self, session: Session, folder: Path | None, file: int, last: int | None, *,
        source: bool = True, environment: bool = True,
    ) -> None:  # fmt: skip
        self._session = session
        self._save_options = {"source": source, "environment": environment}
        self._file = None if folder is None else JournalFile(folder, file)
        self._last = None if last is None else LastFrames(last)
        self._cutter, self._snapshot = BatchCutter(session), TableSnapshot(session)
        self._lookups = JournalLookups(session)
        self._table_sizes: dict[str, int] = {}
        self._stale = 0  # bytes of the journal that ``last=`` no longer needs
        self._rewritten = Dropped()  # dropped by ``last=``, and no longer in the journal on disk either
        self._open_ids: tuple[list[int], list[int]] = ([], [])
        self._bundle_error: str | None = None
        self._final: TraceData | None = None
        self._sources: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._finish_job: _Job | None = None
        self._stopped = False
        self._write(self._cutter.cut(), first=True)  # everything known before the run
        if self._file is not None:
            self._file.publish()
        self._thread = threading.Thread(target=self._run, name="sightline-stream-writer", daemon=True)

    def start(self) -> None:
        """Begin to take batches."""
        start_thread(self._thread)

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
        with nullcontext() if self._file is None else self._session.termination_delayed(GRACE_SECONDS):
            while not self._stopped:
                try:
                    self._jobs.get(timeout=SECONDS).do()
                except Empty:
                    crashed = self._session.has_crashed()
                    try:
                        self._flush()
                    except Exception as error:  # the run goes on
                        self._session.note_fault(error)
                    if crashed:
                        self._session.note_written()

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
        opened = Rows(batch.open_ops, OP).ids.tolist(), Rows(batch.open_calls, CALL).ids.tolist()
        changed = opened != self._open_ids
        self._open_ids = opened
        contents = (  # each of these is in one batch only
            *vars(batch.rows).values(), *vars(batch.late).values(), batch.outputs, batch.absent,
            batch.nbytes, batch.late_nbytes, batch.memory, batch.updates, batch.steps, batch.captures,
        )  # fmt: skip
        waiting = self._file is not None and not self._file.is_complete
        return changed or any(map(len, contents)) or waiting

    def _write(self, batch: Batch, first: bool = False) -> None:
        tables = self._tables(self._rewritten if self._file is not None else None)
        operators: list[Any] = []
        flops: list[Any] = []
        try:
            operators, flops = self._lookups.new_entries(self._cutter.ops, batch, tables)
        except Exception as error:  # without them the rows are written all the same
            self._session.note_fault(error)
        more: dict[str, Any] = {"since": dict(self._table_sizes)}
        new_entries = new_table_rows(tables, self._table_sizes, operators, flops)
        if self._file is not None and self._save_options["source"]:
            # The user's source files that are new: a killed process could not add them later.
            new = dict.fromkeys(code.file for code in tables.codes if code.file not in self._sources)
            self._sources.update(new)
            sources = ((file, whole_source(file)) for file in new)
            more["sources"] = [(file, text) for file, text in sources if text is not None]
        if first:
            more["first"] = constant_fields(tables)
            facts: Any = SimpleNamespace(
                info=tables.info, metas=tables.metas
            )  # all that `environment_of` reads
            known = environment_of(facts) if self._save_options["environment"] else {}
            more["environment"] = json_codec.dumps(known)
        frame = encode(batch, new_entries, tables.info, more)
        if self._file is not None:
            self._file.append(frame)
        if self._last is not None:
            self._keep(self._last, frame, batch)

    def _keep(self, last: LastFrames, frame: bytes, batch: Batch) -> None:
        """Keep a frame for ``last=``; of a journal that is mostly dropped frames, write a new one."""
        if self._session.level == "none":  # module calls count
            count, lost = len(Rows(batch.rows.calls, CALL)), Dropped(len(self._cutter.calls))
        else:
            count = len(Rows(batch.rows.ops, OP))
            lost = Dropped.of(self._cutter.ops, self._snapshot.tables.operations)
        self._stale += last.add(frame, batch, count, lost)
        if self._file is not None and self._stale > last.size + _MAX_STALE:
            if self._file.replace(self._last_frames(last)):
                self._stale, self._rewritten = 0, last.dropped

    def _last_frames(self, last: LastFrames) -> list[bytes]:
        return last.journal_frames(self._tables(), *self._lookups.entries())

    def _tables(self, dropped: Dropped | None = None) -> Tables:
        """The small tables; ``dropped`` is missing in the rows beside them, by default all of ``last=``."""
        tables = self._snapshot.update()
        if self._last is not None:
            tables.info |= {"last": self._last.count, **(dropped or self._last.dropped).to_info()}
        if not self._save_options["environment"]:
            tables.info = {key: value for key, value in tables.info.items() if key not in PRIVATE}
        error = self._bundle_error or (None if self._file is None else self._file.error)
        if error is not None:
            tables.info["faults"] = [*tables.info["faults"], error]
            tables.info["fault_count"] += 1
        return tables

    def release(self) -> None:
        """The finished recording has been handed over: its file is closed with the last that reads it."""
        self._final = None

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
        with closing(self._journal()) as journal:
            tables = self._tables()
            copied = replace(  # which does not grow with the recording
                tables, operations=list(tables.operations), metas=list(tables.metas),
                forms=list(tables.forms), places=list(tables.places), codes=list(tables.codes),
                modules=list(tables.modules), files=dict(tables.files), schemas=dict(tables.schemas),
                info=dict(tables.info),
            )  # fmt: skip
            data, assembler = assemble_journal(journal, copied, store)
        session.node_ops = assembler.node_ops()
        return data

    def _journal(self) -> Journal:
        if self._last is not None:
            return Journal(None, self._last_frames(self._last))
        assert self._file is not None
        return self._file.read()

    def finish(self, wait: bool = True) -> None:
        """The recording has stopped: turn the journal into a bundle. Safe to call again.

        Without ``wait`` it is finished a little later.
        """
        if not self._is_own_process:
            self._session.forget_all()
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
                    whole = self._in_memory() if self._last is not None else None
                    self._final = whole if self._file is None else self._save_bundle(self._file, whole)
                except Exception as error:  # the trace is in memory: its faults say why there is no bundle
                    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                    left = "nothing of it is on disk"
                    if self._file is not None and self._file.exists:
                        left = f"{self._file.folder}/{JOURNAL} stays"
                    self._bundle_error = f"No bundle was made: {reason.rstrip('.')}; {left}."
                    self._final = self._readable_part()
            finally:
                self._stopped = True
                if self._file is not None:
                    self._file.close()
                self._session.release()
                if self._last is not None:
                    self._last.clear()

    def _readable_part(self) -> TraceData:
        """The recording in memory; where batches contradict each other, as its journal reads."""
        try:
            return self._in_memory()
        except (Damage, *READ_ERRORS):
            if self._file is None:
                raise
            data = load(self._file.folder)
            data.info["faults"] = [*data.info["faults"], self._bundle_error]
            data.info["fault_count"] += 1
            del data.info["unfinished"]
            return data

    def _save_bundle(self, file: JournalFile, whole: TraceData | None) -> TraceData:
        """Write the bundle, from the journal or from ``whole``, and open it."""
        session = self._session
        if not file.exists:  # a folder that the program has removed is not made again
            raise CaptureError(f"{file.folder} was removed while it was written to")
        if not file.is_complete:
            raise CaptureError(file.error)
        if whole is None:
            try:
                store = None if session.captures is None else session.captures.store()
                with closing(self._journal()) as journal:
                    tables = self._tables()
                    _, assembler = finish_recording(journal, tables, file.folder, store, **self._save_options)
                session.node_ops = assembler.node_ops()
            except InvalidTrace:  # its sound part is found in memory
                whole = self._in_memory()
        if whole is not None:
            whole = sound_part(whole)
            save_columns(whole, WholeColumns(whole), file.folder, sweep=(JOURNAL,), **self._save_options)
        data = load(file.folder)
        if not self._save_options["source"]:  # on this machine the source files can still be read
            data.__dict__["source_lines"] = SourceFiles()
        return data


__all__ = ["StreamWriter"]
