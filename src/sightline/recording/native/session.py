"""A recording of the native engine from start to stop; `CallbackSession` answers what C++ asks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, ClassVar, Final

import numpy as np

from sightline.data.arrays import IntArray
from sightline.errors import UsageError
from sightline.recording.arguments import Arguments, Forms
from sightline.recording.failures import comes_from_a_signal, tracebacks
from sightline.recording.modules import Modules
from sightline.recording.native.api_names import ApiNames
from sightline.recording.native.buffers import TENSOR, NativeStacks, NativeStream, NativeValues
from sightline.recording.native.compiled_regions import has_compiled_code
from sightline.recording.native.measurements import NativeDeviceStatistics, NativeStatistics
from sightline.recording.native.python_callbacks import CallbackSession
from sightline.recording.session import STOPS_THE_RUN, HandlerOverhead
from sightline.recording.statistics.cpu import StatisticsBuffer
from sightline.recording.statistics.device import DeviceStatistics
from sightline.recording.torchapi import VARIABLE_FUNCTIONS, Module, Parameter, Tensor

_PACKAGE: Final = str(Path(__file__).parents[2]) + os.sep


class NoSlot(UsageError):
    """All of the native engine's recordings are running."""


class NativeSession(CallbackSession):
    """The Python side of one native recording."""

    engine: ClassVar = "native"

    def __init__(
        self,
        observer: ModuleType,
        model: Any,
        name: str,
        level: str,
        caller: FrameType | None,
        outer_frames: bool = True,
    ) -> None:
        super().__init__(name, level)
        self.native = observer
        self.checksum = observer.crc32
        self._ident = threading.get_ident()
        self.api_names = ApiNames(self.infos)
        self.stacks: NativeStacks = NativeStacks()
        values = self.values = NativeValues()
        self.arguments = Arguments(values, Forms())
        self.recording = values.recording = observer.Recording(
            self,
            level,
            self.begin,
            self.arguments.nothing,
            self.arguments.one_tensor,
            tensor_offset(observer),
            kwargs_slot(),
        )
        if self.recording is None:
            raise NoSlot(
                "The native engine makes at most 8 recordings at once: stop one, or leave engine= out, "
                "and the plain recorder makes it."
            )
        self.ops, self.calls = NativeStream(self.recording, "ops"), NativeStream(self.recording, "calls")
        self.memory = NativeStream(self.recording, "memory")
        values.stream, values.fresh = (NativeStream(self.recording, n) for n in ("values", "fresh"))
        for kind in (Tensor, Parameter):
            self.recording.type_kind(kind, TENSOR)
        self.modules = Modules(model, values)
        self._counters: tuple[int, ...] = ()
        self._raised = -1  # the stack of the last op that raised
        self._stopping: BaseException | None = None  # an observer's error that was not raised yet
        self._caller = caller
        self._outer_stack = self.recording.stack(caller) if caller is not None and outer_frames else -1

    # -- from start to stop ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record on this thread."""
        if self.observer is not None:
            self.recording.observe(self.observer.ops, self.observer.api, self.observer.calls)
        if self.statistics_source is not None and self.statistics_source.buffer.native:
            options = (0, False, False, False) if self.statistics is None else self.statistics.native_options
            checks = self.check is not None
            self.recording.measure(*options, checks, checks, Parameter)
        self.recording.start(self._caller, self._outer_stack)
        if has_compiled_code():
            self.recording.listen_to_nodes()
        self._caller = None

    def new_statistics_buffer(self) -> StatisticsBuffer:
        """A store for the statistics of tensors in CPU memory; C++ takes them where it records ops."""
        return NativeStatistics(self.recording) if self.level in ("aten", "both") else StatisticsBuffer()

    def new_device_statistics(self, fill: str) -> DeviceStatistics:
        if self.level not in ("aten", "both"):
            return DeviceStatistics(fill)
        return NativeDeviceStatistics(fill, self.recording, self.native.scalar_type_name)

    def abandon(self) -> None:
        """Free the slot: the recording will never begin."""
        super().abandon()
        self.running = False
        self.recording.release()

    def halt(self) -> None:
        self.note_end()
        self.recording.halt()

    def finish(self) -> None:
        if self._counters:
            return
        self.recording.finish()
        self.label_gradients(new=False)
        self.module_infos = self.modules.infos()
        self.refresh()
        self._raised = self.recording.raised()
        counters = self.recording.counters()
        if counters[4]:
            self.fault_count += counters[4]
            self.faults.append(f"{counters[4]} events of the native engine failed in C++.")
        self._counters = counters

    def release(self) -> None:
        """Copy the data of C++ and free its slot: there are few, and this one may stay unread for long."""
        super().release()
        for stream in (self.ops, self.calls, self.memory, self.values.stream, self.values.fresh):
            stream.freeze()
        if self.statistics_source is not None:
            self.statistics_source.buffer.freeze()
            self.statistics_source.device_statistics.freeze()
        self.recording.release()

    def refresh(self) -> None:
        """Read back the small tables that C++ keeps."""
        if not self._counters:
            self.stacks.refresh(self.recording)
            self.unrecorded_calls, self.unrecorded_module = self.recording.unrecorded()

    def written(self) -> int:
        return sum(self.counters()[:3])

    def counters(self) -> tuple[int, ...]:
        """Numbers written for ops, for calls, open ops and calls, threads, faults in C++."""
        counters: tuple[int, ...] = self._counters or self.recording.counters()
        return counters

    @property
    def handler_overhead(self) -> HandlerOverhead:
        """None: torch adds a fraction of a microsecond to an observed op."""
        return HandlerOverhead(0, 0)

    @property
    def ident(self) -> int:
        return self._ident

    def exclude_time(self, taken: int) -> None:
        self.recording.exclude_time(taken)

    @contextmanager
    def termination_delayed(self, seconds: float) -> Iterator[None]:
        """A block in which SIGTERM, an abort or a crash ends the process so much later at most."""
        self.native.delay_termination(seconds)
        try:
            yield
        finally:
            self.native.restore_termination()

    def has_crashed(self) -> bool:
        return bool(self.native.has_crashed())

    def note_written(self) -> None:
        self.native.written_after_crash()

    def begin_optimizer_step(self, frame: FrameType, closure: CodeType | None) -> None:
        self.recording.begin_step(frame, closure)

    def end_optimizer_step(self) -> None:
        self.recording.end_step()

    def note_error(self, error: BaseException) -> None:
        """An exception is leaving the block: if it came out of an open API call, mark that as raised."""
        self.recording.fail({at.tb_frame.f_code for at in tracebacks(error)})

    def raised_by(self, error: BaseException) -> bool:
        """Whether an exception came out of the last op that failed: its traceback has the op's line."""
        stack = self._raised
        if stack < 0:
            return False
        where = self.stacks.codes[self.stacks.code_ids[stack]], self.stacks.instructions[stack]
        return any((at.tb_frame.f_code, at.tb_lasti) == where for at in tracebacks(error))

    @property
    def threads(self) -> int:
        return self.counters()[3]

    def open_rows(self) -> tuple[IntArray, IntArray]:
        ops, calls = self.recording.open_rows()
        return np.frombuffer(ops, dtype=np.int64), np.frombuffer(calls, dtype=np.int64)

    def next_id(self) -> int:
        number: int = self.recording.next_id()
        return number

    # -- faults, and errors that stop the run -------------------------------------------------------------

    def handle_fault(self, error: BaseException) -> Callable[[], BaseException | None] | None:
        """Count a fault of the recorder; an error of a signal handler or an observer goes to the program.

        C++ has the main thread call the function it returns, as soon as that is back in the program.
        """
        if issubclass(type(error), STOPS_THE_RUN):
            # The main thread raises it as soon as it can, and observers get no more events. Another thread
            # cannot be interrupted: there the error is raised at the end of the block.
            if self._stopping is not None:
                return None
            self._stopping = error
            self.recording.observe(False, False, False)
            self.recording.report_nonfinite(False)
            return self._take_stopping if self._ident == threading.main_thread().ident else None
        if not issubclass(type(error), Exception) or comes_from_a_signal(error):
            return lambda: error
        self.note_fault(error)
        return None

    def take_pending_error(self) -> BaseException | None:
        error, self._stopping = self._stopping, None
        return error

    def _take_stopping(self) -> BaseException | None:
        """The error, unless it would hit our own code: then it waits for the end of the recording."""
        if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE) or not self.running:
            return None
        error, self._stopping = self._stopping, None
        return error


def tensor_offset(observer: ModuleType) -> int:
    """The offset of the C++ tensor in the Python object."""
    probe = VARIABLE_FUNCTIONS.empty(0)
    for offset in (observer.OBJECT_HEAD, observer.OBJECT_HEAD + 8):
        if observer.address_at(probe, offset) == probe._cdata:
            return int(offset)
    raise RuntimeError("a Python tensor does not hold its C++ one where it is expected")


def kwargs_slot() -> int:
    """The slot of the keyword arguments in the frame that calls a module's hooks."""
    inner = next(code for code in Module._call_impl.__code__.co_consts if isinstance(code, CodeType))
    return len(inner.co_varnames) + len(inner.co_cellvars) + inner.co_freevars.index("kwargs")
