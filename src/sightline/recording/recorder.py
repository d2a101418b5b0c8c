"""A recording from start to stop: a session is installed, removed, and turned into data on demand."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sightline.data.index import Index
from sightline.data.live_events import Watcher
from sightline.errors import NonFiniteError, UsageError
from sightline.explain.failure import explain_failure
from sightline.markers import current_step
from sightline.options import RecordingOptions
from sightline.process_rank import this_rank
from sightline.recording.atomic import store_atomically
from sightline.recording.captures import CaptureObserver
from sightline.recording.cuda_devices import DeviceTimer
from sightline.recording.distributed import StackDump
from sightline.recording.engine_choice import EngineHooks, new_session
from sightline.recording.failures import (
    add_note,
    exception_text,
    failure_of,
    fault_text,
    leave_out_own_frames,
)
from sightline.recording.modules import original
from sightline.recording.nonfinite_check import NonFiniteChecker
from sightline.recording.observers import LiveObserver, Observer, Observers
from sightline.recording.session import Session
from sightline.recording.snapshot import build
from sightline.recording.stacks import enters_block, hide_own_frames
from sightline.recording.statistics.observer import StatisticsObserver
from sightline.recording.step_marks import note_step
from sightline.recording.streaming.journal_file import claim, unclaim
from sightline.recording.streaming.writer import GRACE_SECONDS, StreamWriter
from sightline.recording.torchapi import Module, compiler, without_modes
from sightline.store.paths import remove_if_empty
from sightline.store.reader import LoadedTrace
from sightline.store.writer import amend_info

# At import, when all modules it marks are loaded, since it takes milliseconds: a start must not.
hide_own_frames()
#: Recordings that are written to disk, to be finished when the interpreter exits.
_streamed: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register  # at import, so that it runs before the exit handlers of modules that were imported before
def _finish_all() -> None:
    for recorder in list(_streamed):
        recorder.stop()


def check_model(model: Any) -> None:
    """Raise unless a model is a module or None."""
    if model is not None and not isinstance(model, Module):
        raise UsageError(
            f"sl.trace(model) takes a torch.nn.Module or nothing, not {type(model).__name__}; "
            "leave it out to trace any tensor code in the block."
        )


class Recorder:
    """One recording."""

    def __init__(
        self, model: Any, options: RecordingOptions, *, folder: Path | None = None,
        watcher: Watcher | None = None,
    ) -> None:  # fmt: skip
        """``folder`` is where ``path=`` of this process is."""
        self._model = model
        self._options = options
        self._folder = folder
        self._watcher = watcher
        name = options.name or (type(original(model)).__name__ if model is not None else "trace")
        process = this_rank()
        self._name = name if process is None else f"{name}, rank {process.rank} of {process.world_size}"
        self._session: Session | None = None
        self._hooks: EngineHooks | None = None  # of the engine of the session
        self._index: Index | None = None
        self._progress: Any = None  # of the session when the index was built
        self._stance: Any = None
        self._timer: DeviceTimer | None = None
        self._files: list[int] = []  # the descriptor of the journal, once the folder is claimed
        self._makes_folder = False  # it did not exist before
        self._stack_dump: StackDump | None = None  # of SIGUSR1
        self._late_error: BaseException | None = None  # an observer's error, raised at the end of the block
        self._stopped = False
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._session is not None and self._session.running

    def start(self, frame: FrameType | None, outer_frames: bool = True, is_block: bool | None = None) -> None:
        """Install everything. Where ``frame`` is the block's own, its callers do not change while it runs.

        Without ``outer_frames`` its callers are not recorded: it is the first of a program. ``is_block`` says
        whether the frame stays until the stop. One that does not is not held, which would keep its variables
        alive. Without it, only a frame that enters a ``with`` block stays: one that calls ``__enter__`` or
        ``start`` itself, as `contextlib.ExitStack` does, may return at once.

        After an error, or an interrupt, nothing is left installed.
        """
        try:
            if frame is not None and is_block is None:
                is_block = enters_block(frame)
            # The session gets the caller's frame only where that waits for the block.
            caller = frame.f_back if frame and is_block else None
            options = self._options
            session, self._hooks = without_modes(
                partial(
                    new_session, options.engine, self._model, self._name, options.ops, caller, outer_frames
                )
            )
            self._session = session
            session.compiled, session.time = options.compiled, options.time
            self._add_collaborators(session)
            if session.time == "device":
                self._timer = DeviceTimer(session.begin)
                without_modes(self._timer.start)
            self._model = None  # the session has weak references: a trace must not keep the model alive
            if options.compiled == "eager":
                store_atomically(
                    partial(setattr, self, "_stance"), partial(compiler.set_stance, "force_eager")
                )
            if current_step():
                note_step(session, begins=True)
            if session.stream_writer is not None:
                _streamed.add(self)
                session.stream_writer.start()
            session.waits.install()
            self._stack_dump = StackDump.install(self._folder)
            self._hooks.install(session)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Undo a start. Safe to call again."""
        session = self._session
        if self._timer is not None:
            self._timer.cancel()
        if session is not None:
            self._uninstall(session)
            _streamed.discard(self)
            if session.captures is not None:
                session.captures.close()
            if session.stream_writer is not None:
                session.stream_writer.discard()
            session.abandon()
        if self._folder is not None:
            unclaim(self._folder, self._files)
            if self._makes_folder:
                remove_if_empty(self._folder)
        self._session = None

    def _add_collaborators(self, session: Session) -> None:
        """Give the session its observers, and for ``path=`` and ``last=`` its stream writer."""
        options = self._options
        file = -1
        if self._folder is not None:
            self._makes_folder = not self._folder.exists()
            file = claim(self._folder, options.path.overwrite, self._files)
            self._folder = self._folder.absolute()  # the program may change its working folder
        observers: list[Observer] = []
        if self._watcher is not None:
            observers.append(LiveObserver(session, self._watcher))
        if options.capture is not None:
            session.captures = CaptureObserver(session, options.capture, self._folder)
            observers.append(session.captures)
        if options.stats is not None:
            session.statistics = StatisticsObserver(session, options.stats)
            observers.append(session.statistics)
        if options.check is not None:  # after the statistics, which it uses
            session.check = NonFiniteChecker(session, options.check, session.statistics, build)
            observers.append(session.check)
        if observers:
            session.observer = Observers(session, observers)
        if self._folder is not None or options.last is not None:
            bundle = options.path
            make = partial(
                StreamWriter,
                source=bundle is None or bundle.source,
                environment=bundle is None or bundle.environment,
            )
            session.stream_writer = without_modes(partial(make, session, self._folder, file, options.last))

    def stop(self, error: BaseException | None = None) -> None:
        """Remove everything installed, and finish the recording. Safe to call again.

        An exception gains a note and leaves the block unchanged. An error after it is counted as a fault
        instead of raised, also one of an observer. An interrupt is raised when all but the slow part is done:
        that goes on in a thread, and calling again waits for it.
        """
        session = self._session
        if session is None or self._stopped:
            return
        try:
            self._stop(session, error, wait=True)
        except BaseException:
            if not self._stopped:
                self._stop(session, error, wait=False)
            raise

    def _stop(self, session: Session, error: BaseException | None, wait: bool) -> None:
        """Do the steps of a stop; each may be repeated after an interrupt."""
        try:
            try:
                self._uninstall(session)
            finally:
                # A launcher ends all processes when one fails: not while the note of an exception is added.
                with session.termination_delayed(GRACE_SECONDS) if self._folder else nullcontext():
                    without_modes(partial(self._finish, session, error, wait))
            self._end(wait)
            if self._late_error is not None and error is None:
                raise self._late_error
        except Exception as own:
            if error is None:
                session.fault(own)
                return
            session.note_fault(own)
            if self._index is not None:  # a trace that has been built already has the fault too
                info = self._index.raw.info
                info["faults"] = [*info["faults"], fault_text(own)]
                info["fault_count"] += 1

    def _end(self, wait: bool) -> None:
        """Mark the recording as stopped, unless its last part still runs in a thread."""
        if wait:
            _streamed.discard(self)
            self._stopped = True
            if self._session is not None and self._session.stream_writer is not None:
                self.index()  # it is there already

    def _uninstall(self, session: Session) -> None:
        try:
            if self._hooks is not None:
                self._hooks.uninstall(session)
        finally:
            session.waits.remove()
            if self._stack_dump is not None:
                self._stack_dump.remove()
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    def _finish(self, session: Session, error: BaseException | None, wait: bool) -> None:
        """After the session is removed: finish the observers, the session and the stream writer."""
        session.events.close()
        self._note_late_error(session)
        if error is None:
            error = self._late_error
        try:
            if error is not None:
                session.exception = exception_text(error)
                session.note_error(error)
                leave_out_own_frames(error)
        except Exception as own:
            session.note_fault(own)
        fault = None
        try:
            if self._timer is not None:
                session.device_work, self._timer = self._timer.stop(), None
        except Exception as own:
            session.time = "host"  # else the missing device times would be read as zero
            session.note_fault(own)
        try:
            session.finish()
            if session.observer is not None and wait:
                session.observer.finish()
            if error is None and session.check is not None and wait:
                session.check.check_at_end()
        except Exception as own:
            fault = own
            if error is not None:
                session.note_fault(own)  # before the bundle is finished, so that it has the fault
        if session.stream_writer is None:
            session.release()
        else:  # also after a fault
            session.stream_writer.finish(wait)
        if fault is not None and error is None:
            self._end(wait)
            raise fault
        self._note_late_error(session)
        if not wait:
            return
        if error is not None and not issubclass(type(error), NonFiniteError):
            self._explain(session, error)

    def _explain(self, session: Session, error: BaseException) -> None:
        """Add a note to an exception, and the note to the recording."""
        index = self.index()
        index.raw.info["exception"] = session.exception
        explanation = explain_failure(index, failure_of(session, error))
        if explanation["note"]:
            add_note(error, explanation["note"])
        index.raw.info.update(explanation)
        if session.stream_writer is not None and self._folder is not None:
            amend_info(self._folder, explanation)

    def _note_late_error(self, session: Session) -> None:
        """Note an observer's error that came too late to stop the run."""
        late = session.take_pending_error()
        if late is not None and self._late_error is None:
            self._late_error = late

    def index(self) -> Index:
        """The trace so far; built on demand, and again only if the run has gone on since."""
        with self._lock:
            session = self._session
            if session is not None:
                progress = session.progress()
                if self._index is None or progress != self._progress:
                    self._index = Index(without_modes(partial(build, session)))
                    self._progress = progress
                if self._stopped:
                    self._session = None  # the columns hold everything, in a third of the memory
                    if session.stream_writer is not None:
                        session.stream_writer.release()
                        if isinstance(data := self._index.raw, LoadedTrace):
                            data.close_with(self)
            assert self._index is not None
            return self._index


_SEED = 0


def run_once(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a model, with a fixed seed; the state of the random number generators is restored."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        model(*args, **kwargs)
