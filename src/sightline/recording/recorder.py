"""A recording from start to stop: a session put in place, taken out, and turned into data when asked."""

from __future__ import annotations

import atexit
import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sightline.errors import NonFiniteError, UsageError
from sightline.markers import current_step
from sightline.options import Capture, Check, Stats
from sightline.ranks import this_rank
from sightline.recording import installation
from sightline.recording.atomic import stored
from sightline.recording.captures import CaptureObserver
from sightline.recording.device_time import DeviceTimer
from sightline.recording.exception_notes import exception_text, explain, fault_text
from sightline.recording.modules import original
from sightline.recording.native.engine import chosen, load
from sightline.recording.nonfinite_check import Judge, NonFiniteChecker
from sightline.recording.observers import LiveObserver, Observer, Observers
from sightline.recording.session import Session
from sightline.recording.session_base import SessionBase
from sightline.recording.snapshot import build
from sightline.recording.stacks import hide_own_frames, leave_out_own_frames
from sightline.recording.statistics import StatisticsObserver
from sightline.recording.step_marks import note_step
from sightline.recording.stream_folder import claim, unclaim
from sightline.recording.stream_writer import StreamWriter
from sightline.recording.torchapi import Module, compiler, undisturbed
from sightline.trace.bundle.writer import amend_info
from sightline.trace.events import Watcher
from sightline.trace.index import Index

hide_own_frames()
#: Recordings that are being kept, to be finished when the interpreter ends.
_kept: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for recorder in list(_kept):
        recorder.stop()


def check_model(model: Any) -> None:
    """A model is a module or nothing."""
    if model is not None and not isinstance(model, Module):
        raise UsageError(
            f"sl.trace(model) takes a torch.nn.Module or nothing, not {type(model).__name__}; "
            "leave it out to trace any tensor code in the block."
        )


def _name_here(name: str) -> str:
    """The name of a recording; in a distributed job it says of which process."""
    here = this_rank()
    return name if here is None else f"{name}, rank {here.rank} of {here.world_size}"


@dataclass(frozen=True)
class RecordingOptions:
    """What is to be done beyond recording."""

    watcher: Watcher | None = None
    stats: Stats | None = None
    check: Check | None = None
    judge: Judge = lambda data, check: None
    capture: Capture | None = None
    folder: Path | None = None  #: where it is written while it runs
    last: int | None = None  #: how many ops are kept
    engine: str = "auto"
    source: bool = True  #: whether the text of source files goes into the folder
    environment: bool = True  #: and versions, host and command line
    overwrite: bool = False  #: whether a recording that is in the folder is replaced
    time: str = "host"
    observer: Callable[[Any], Observer] | None = None  #: makes one more observer, from the session


class Recorder:
    """One recording."""

    def __init__(
        self, model: Any, level: str, name: str | None = None, compiled: str = "opaque",
        asked: RecordingOptions | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._level = level
        self._name = _name_here(name or (type(original(model)).__name__ if model is not None else "trace"))
        self._compiled = compiled
        self._asked = asked or RecordingOptions()
        self._checker: NonFiniteChecker | None = None
        self._session: SessionBase | None = None
        self._index: Index | None = None
        self._seen: Any = None
        self._stance: Any = None
        self._timer: DeviceTimer | None = None
        self._files: list[int] = []  # the journal's, when it is claimed
        self._makes_folder = False  # it was not there before
        self._late: BaseException | None = None  # an observer's error, which comes out of the block
        self._stopped = False
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._session is not None and self._session.running

    def start(self, frame: FrameType | None, above: bool = True, stays: bool = True) -> None:
        """Put everything in place. ``frame`` is the block's own: nothing above it changes while it runs.

        Without ``above`` nothing above it is recorded either: it is the first of a program. Unless it
        ``stays`` till the end it is not held, because that would keep its caller's variables alive.

        Whatever goes wrong, an interrupt too, leaves nothing behind.
        """
        try:
            self._start(frame.f_back if frame and stays else None, above)
        except BaseException:
            self.cancel()
            raise

    def _start(self, caller: FrameType | None, above: bool) -> None:
        session = self._session = undisturbed(partial(self._session_of, caller, above))
        session.compiled, session.time = self._compiled, self._asked.time
        self._keep(session)
        if session.time == "device":
            self._timer = DeviceTimer(session.begin)
            undisturbed(self._timer.start)
        self._model = None  # the session knows it weakly; a kept trace keeps no model
        if self._compiled == "eager":
            stored(partial(setattr, self, "_stance"), partial(compiler.set_stance, "force_eager"))
        if current_step():
            note_step(session, begins=True)
        if session.keeper is not None:
            _kept.add(self)
            session.keeper.start()
        installation.install(session)

    def cancel(self) -> None:
        """Undo a start; safe to call again."""
        session = self._session
        if self._timer is not None:
            self._timer.cancel()
        if session is not None:
            self._take_out(session)
            _kept.discard(self)
            if session.captures is not None:
                session.captures.close()
            if session.keeper is not None:
                session.keeper.discard()
            session.abandon()
        if self._asked.folder is not None:
            unclaim(self._asked.folder, self._files)
            if self._makes_folder:
                with suppress(OSError):  # it is not empty, or was never made
                    self._asked.folder.rmdir()
        self._session = None

    def _session_of(self, caller: FrameType | None, above: bool) -> SessionBase:
        """A recording by the engine that was chosen."""
        asked = self._asked
        given = self._model, self._name, self._level, caller, above
        if chosen(asked.engine) == "native":
            from sightline.recording.native.session import NativeSession, NoSlot

            for attempt in (1, 2):
                try:
                    return NativeSession(load(), *given)
                except NoSlot:
                    if attempt == 1:
                        gc.collect()  # recordings that nothing but a cycle holds have slots too
                    elif asked.engine == "native":
                        raise
        return Session(*given)

    def _keep(self, session: SessionBase) -> None:
        """Put observers in place, and whoever keeps what they and the session write."""
        asked = self._asked
        file = -1
        if asked.folder is not None:
            self._makes_folder = not asked.folder.exists()
            file = claim(asked.folder, asked.overwrite, self._files)
            # The program may go to another folder, and come to its end there.
            asked = self._asked = replace(asked, folder=asked.folder.absolute())
        self._observe(session)
        if asked.folder is not None or asked.last is not None:
            session.keeper = undisturbed(
                partial(
                    StreamWriter,
                    session,
                    asked.folder,
                    file,
                    asked.last,
                    source=asked.source,
                    environment=asked.environment,
                )
            )

    def _observe(self, session: Any) -> None:
        """Have everything else done that was asked for."""
        asked = self._asked
        observers: list[Observer] = []
        if asked.watcher is not None:
            observers.append(LiveObserver(session, asked.watcher))
        if asked.observer is not None:
            observers.append(asked.observer(session))
        if asked.capture is not None:
            session.captures = CaptureObserver(session, asked.capture, asked.folder)
            observers.append(session.captures)
        measurer = None if asked.stats is None else StatisticsObserver(session, asked.stats)
        if measurer is not None:
            session.readings = session.measurer = measurer
            observers.append(measurer)
        if asked.check is not None:  # after the measurer, whose numbers it uses
            self._checker = NonFiniteChecker(session, asked.check, measurer, asked.judge, build)
            session.readings = session.check = self._checker
            observers.append(self._checker)
        if observers:
            session.observer = Observers(session, observers)

    def stop(self, error: BaseException | None = None) -> None:
        """Take everything out, and finish what was recorded; safe to call again.

        An exception gains a note and leaves the block as it came. Whatever goes wrong here after it is a
        fault that is noted, also what would else be raised: a program ends for one reason. An interrupt is
        raised when all is done but what takes long: that goes on in a thread, and who calls again waits.
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

    def _stop(self, session: SessionBase, error: BaseException | None, wait: bool) -> None:
        """Each step can be done again, by whoever was interrupted in it."""
        try:
            try:
                self._take_out(session)
            finally:
                undisturbed(partial(self._finish, session, error, wait))
            self._done(wait)
            if self._late is not None and error is None:
                raise self._late
        except Exception as own:
            if error is None:
                session.fault(own)
            else:
                self._note(session, own)

    def _done(self, wait: bool) -> None:
        """All is finished, unless what takes long was not waited for."""
        if wait:
            _kept.discard(self)
            self._stopped = True

    def _take_out(self, session: SessionBase) -> None:
        try:
            installation.uninstall(session)
        finally:
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    def _finish(self, session: SessionBase, error: BaseException | None, wait: bool) -> None:
        """After the stop: read what is still to be read, and finish what was kept."""
        self._note_late(session)
        if error is None:
            error = self._late
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
            session.time = "host"  # nobody shall take what is missing for no time
            session.note_fault(own)
        try:
            session.finish()
            if session.observer is not None and wait:
                session.observer.finish()
            if error is None and self._checker is not None and wait:
                self._checker.last_word()
        except Exception as own:
            fault = own
            if error is not None:
                session.note_fault(own)  # before the bundle is finished, so that it has it, too
        if session.keeper is None:
            session.release()
        else:  # whatever went wrong: what was kept is finished
            session.keeper.finish(wait)
        if fault is not None and error is None:
            self._done(wait)
            raise fault
        self._note_late(session)
        if not wait:
            return
        if error is not None and not issubclass(type(error), NonFiniteError):
            self._explain(session, error)

    def _explain(self, session: SessionBase, error: BaseException) -> None:
        """Add to an exception what the recording knows of it, and to the recording what was added."""
        info = self.index().raw.info
        more = explain(session, self.index().raw, error)
        info.update(more)
        if session.keeper is not None and self._asked.folder is not None:
            amend_info(self._asked.folder, more)

    def _note_late(self, session: SessionBase) -> None:
        """An error of an observer that was to stop the run, and came too late for that."""
        late = session.not_raised()
        if late is not None and self._late is None:
            self._late = late

    def _note(self, session: SessionBase, own: Exception) -> None:
        """Count a fault, also where the trace has been built already."""
        session.note_fault(own)
        if self._index is not None:
            info = self._index.raw.info
            info["faults"] = [*info["faults"], fault_text(own)]
            info["fault_count"] += 1

    def index(self) -> Index:
        """The trace so far; built when asked for, and again only if the run has gone on since."""
        with self._lock:
            session = self._session
            if session is not None:
                seen = session.progress()
                if self._index is None or seen != self._seen:
                    self._index = Index(undisturbed(partial(build, session)))
                    self._seen = seen
                if self._stopped:
                    self._session = None  # the columns say it all, in a third of the memory
            assert self._index is not None
            return self._index


_SEED = 0


def run_once(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a model; the state of the random numbers is afterwards what it was."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        model(*args, **kwargs)
