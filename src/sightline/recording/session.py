"""A recording in progress: the state that both engines share, and the methods that each has of its own."""

from __future__ import annotations

import time
import weakref
import zlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from sightline.argument_checks import key_text
from sightline.assemble.batch import StepMark
from sightline.data.arrays import IntArray
from sightline.data.trace_data import KIND, ModuleInfo
from sightline.errors import CaptureError, NonFiniteError
from sightline.recording.arguments import Arguments
from sightline.recording.cuda_devices import (
    NO_WORK,
    AllocatorStatistics,
    before_and_after,
    read_allocators,
)
from sightline.recording.distributed import WaitLog
from sightline.recording.event_gate import EventGate
from sightline.recording.failures import comes_from_a_signal, fault_text
from sightline.recording.modules import Modules
from sightline.recording.operations import OpInfo
from sightline.recording.program_warnings import WarningLog
from sightline.recording.stacks import StackTrie, variable_name
from sightline.recording.statistics.cpu import StatisticsBuffer
from sightline.recording.statistics.device import DeviceStatistics
from sightline.recording.tensor_registry import ACTIVATION, EXTERNAL, INPUT, TensorRegistry
from sightline.recording.torchapi import Tensor, in_backward, sequence_number
from sightline.recording.training_log import TrainingLog, held_parameters
from sightline.store.shards.shard_file import Checksum

if TYPE_CHECKING:
    from sightline.recording.captures import CaptureObserver
    from sightline.recording.nonfinite_check import NonFiniteChecker
    from sightline.recording.observers import Observer
    from sightline.recording.statistics.observer import StatisticsObserver
    from sightline.recording.streaming.writer import StreamWriter

_MAX_FAULTS: Final = 20
#: Exceptions of observers that are meant for the program.
STOPS_THE_RUN: Final = (NonFiniteError, CaptureError)
clock = time.perf_counter_ns


class RowStream(Protocol):
    """Rows that an engine writes and a snapshot reads."""

    def numbers(self) -> IntArray:
        """Everything in it, which stays in it."""

    def take(self) -> IntArray:
        """Everything in it, which is removed from it."""


@dataclass(frozen=True, slots=True)
class HandlerOverhead:
    """Nanoseconds added by an empty handler: per aten op, and per API call."""

    aten: int
    api: int


class Session(ABC):
    """One recording in progress; each engine has a subclass, which sees the ops and writes the rows."""

    engine: ClassVar[str]
    modules: Modules
    arguments: Arguments
    values: TensorRegistry
    stacks: StackTrie
    ops: RowStream
    calls: RowStream
    memory: RowStream  #: when storages are allocated, resized and freed

    def __init__(self, name: str, level: str) -> None:
        self.name, self.level = name, level
        self.infos: list[OpInfo] = []
        self.faults: list[str] = []
        self.fault_count = 0
        self.regions: list[int] = []  # opaque ops whose outputs are still unknown
        self.before_region: dict[int, weakref.ref[Any]] = {}  # tensors that existed when a region began
        self.events = EventGate()
        self.observer: Observer | None = None  #: gets every event; of several, an `Observers`
        self.statistics: StatisticsObserver | None = None  #: of ``stats=``
        self.checksum: Checksum = zlib.crc32  #: of captured tensors
        self.captures: CaptureObserver | None = None  #: of ``capture=``
        self.check: NonFiniteChecker | None = None  #: of ``check=``
        self.stream_writer: StreamWriter | None = None  #: of ``path=`` and ``last=``
        self.steps: list[StepMark] = []
        self.training = TrainingLog()
        self.warnings = WarningLog()
        self._state_sizes: dict[int, int] = {}  # optimizer -> how many entries of its state were named
        self.node_ops: dict[int, int] = {}  #: autograd node -> the op of the last build that made it
        self.running = True
        self.module_infos: list[ModuleInfo] | None = None
        self.exception: str | None = None
        self.compiled = "opaque"
        self.time = "host"
        self.device_work = NO_WORK  #: the work of devices; set when the recording stops
        self.compilations = 0  #: how many regions Dynamo has compiled meanwhile
        self.compile_time = 0  #: nanoseconds that took
        self.engine_reason = ""  #: why the plain engine records though it was not requested
        self.unrecorded_calls = 0  #: of modules, on threads that nothing records
        self.unrecorded_module = ""  #: the class of the first of them
        self.first_sequence = sequence_number()
        self.ended = 0
        self._allocators: tuple[AllocatorStatistics, AllocatorStatistics | None] = (read_allocators(), None)
        self.waits = WaitLog()  #: for other processes of a distributed job
        self.wall_begin = time.time_ns()  #: the clock that processes on other hosts have too
        self.begin = clock()

    @property
    def statistics_source(self) -> NonFiniteChecker | StatisticsObserver | None:
        """The observer whose statistics go into the trace; a check includes those of ``stats=``."""
        return self.statistics if self.check is None else self.check

    # -- the methods of each engine ------------------------------------------------------------------------

    @property
    @abstractmethod
    def threads(self) -> int:
        """How many threads have run recorded code."""

    @property
    @abstractmethod
    def handler_overhead(self) -> HandlerOverhead:
        """The time torch adds to an op or call for handing it to the recorder."""

    @property
    @abstractmethod
    def ident(self) -> int:
        """The thread it was started on."""

    @abstractmethod
    def begin_optimizer_step(self, frame: FrameType, closure: CodeType | None) -> None:
        """An optimizer steps, called by ``frame``.

        The ops inside its ``closure``, a function of this code, are not part of the update.
        """

    @abstractmethod
    def end_optimizer_step(self) -> None:
        """The optimizer has stepped."""

    def termination_delayed(self, seconds: float) -> AbstractContextManager[None]:
        """A block in which SIGTERM, an abort or a crash ends the process so much later at most.

        Only the native engine can do that, which is built from C++.
        """
        return nullcontext()

    def has_crashed(self) -> bool:
        """Whether a thread has crashed, and waits for the last batch before it ends the process."""
        return False

    @abstractmethod
    def note_written(self) -> None:
        """The last batch after a crash is written."""

    @abstractmethod
    def exclude_time(self, duration: int) -> None:
        """Leave so many nanoseconds out of the durations of the ops and calls open on this thread."""

    @abstractmethod
    def context(self) -> tuple[list[int], int]:
        """The modules whose calls are open on this thread, outermost first, and the phase."""

    @abstractmethod
    def next_id(self) -> int:
        """A number in the order of ops and calls."""

    @abstractmethod
    def open_rows(self) -> tuple[IntArray, IntArray]:
        """Rows of the ops and calls that have begun and not ended."""

    @abstractmethod
    def halt(self) -> None:
        """Record nothing more, on any thread."""

    def stop_in_fork(self) -> None:
        """Stop in a forked process, which reads nothing: the stream writer and its file are the parent's."""
        self.halt()
        self.forget_all()
        if self.stream_writer is not None:
            self.stream_writer.abandon()

    @abstractmethod
    def finish(self) -> None:
        """After the stop: close open calls, and read the modules while the model lives."""

    def take_pending_error(self) -> BaseException | None:
        """An observer's error that came too late to stop the run."""
        return None

    def release(self) -> None:
        """Free what the engine holds: nothing more will be read from it."""
        self.forget_all()

    def abandon(self) -> None:
        """Free what the engine holds: the recording will never begin."""
        self.forget_all()

    def new_device_statistics(self, fill: str) -> DeviceStatistics:
        """A store for the statistics of tensors on devices."""
        return DeviceStatistics(fill)

    def new_statistics_buffer(self) -> StatisticsBuffer:
        """A store for the statistics of tensors in CPU memory."""
        return StatisticsBuffer()

    @abstractmethod
    def written(self) -> int:
        """How much has been written for ops and calls, and how many are open."""

    def progress(self) -> tuple[int, int, bool]:
        """A state that differs once anything more was recorded, or the recording has ended."""
        return self.written(), 0 if self.captures is None else len(self.captures.infos), self.running

    @abstractmethod
    def refresh(self) -> None:
        """Read back the small tables that the engine keeps elsewhere."""

    @abstractmethod
    def note_error(self, error: BaseException) -> None:
        """An exception is leaving the block."""

    @abstractmethod
    def raised_by(self, error: BaseException) -> bool:
        """Whether an exception came out of the last op that failed."""

    # -- tensors that no recorded op made ------------------------------------------------------------------

    def explain(self, tensor: Any) -> tuple[int, str, int]:
        """Kind, name and producer of a tensor seen for the first time."""
        named = self.modules.tensor_name(tensor)
        if named is not None:
            return KIND[named[0]], named[1], -1
        running = self.context()[0]
        if self.level == "none":  # the ops between modules are not recorded
            return (ACTIVATION if running else INPUT), "", -1
        if self.regions and self.is_of_region(tensor):
            return ACTIVATION, "", self.regions[-1]
        if not running:
            return INPUT, "", -1
        attribute = self.modules.attribute_name(tensor, running)
        if attribute is not None:
            return KIND[attribute[0]], attribute[1], -1
        name = variable_name(tensor)
        if name:
            return KIND["constant"], name, -1
        if self.level == "api":  # a backward pass shows only as the modules it calls
            return (ACTIVATION if in_backward() else EXTERNAL), "", -1
        # Every op is seen, so a scalar that none has made is one of torch's own (of a scripted function).
        constant = tensor.dim() == 0 and not tensor.requires_grad
        return (KIND["constant"] if constant else EXTERNAL), "", -1

    def is_of_region(self, tensor: Any) -> bool:
        """Whether compiled code may have made a tensor that nothing else explains."""
        return True

    # -- faults ----------------------------------------------------------------------------------------

    def fault(self, error: BaseException) -> None:
        """Count a fault of the recorder; the text of the first ones is kept.

        An error that must stop the run is raised, and so is one that a signal handler has raised.
        """
        if issubclass(type(error), STOPS_THE_RUN) or comes_from_a_signal(error):
            raise error
        self.note_fault(error)

    def note_fault(self, error: BaseException) -> None:
        """Count a fault, and raise nothing."""
        self.fault_count += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault_text(error))

    def allocator_statistics(self) -> dict[str, dict[str, list[int]]]:
        """The allocator statistics of each device at the start, and at the end or now."""
        before, after = self._allocators
        return before_and_after(before, read_allocators() if after is None else after)

    def note_end(self) -> None:
        """Recording has ended: note when, and the allocator statistics at that moment."""
        self.running = False
        self.ended = self.ended or clock()
        self._allocators = (self._allocators[0], read_allocators())

    def elapsed(self) -> int:
        """Nanoseconds from the start to the stop, or to now."""
        return (self.ended or clock()) - self.begin

    def note_compilation(self, duration: int, regions: int) -> None:
        """Dynamo has compiled so many regions on this thread, or the backward pass of one, in nanoseconds."""
        self.compilations += regions
        self.compile_time += duration
        self.exclude_time(duration)

    # -- names -----------------------------------------------------------------------------------------

    def forget(self, tensor: Any) -> Any:
        """Drop all weak references to a tensor; returns the entries that `restore` puts back."""
        self.before_region.pop(id(tensor), None)
        existed = self.check is not None and self.check.forget(tensor)
        return self.values.forget(tensor), self.modules.forget(tensor), existed

    def forget_all(self) -> None:
        """Drop the weak references to all tensors, for good.

        A trace may be kept for long, and ``torch.utils.swap_tensors`` refuses tensors that have any.
        """
        self.regions.clear()  # or results would be looked for among tensors that are not known any more
        self.before_region.clear()
        self.values.forget_all()
        self.modules.forget_all()
        if self.check is not None:
            self.check.forget_all()

    def restore(self, tensor: Any, entries: Any) -> None:
        """Give a tensor the value and names that `forget` returned, whatever its memory and layout are."""
        value, names, existed = entries
        if value is not None:
            self.values.rebind(tensor, value)
        self.modules.restore(tensor, names)
        if existed and self.check is not None:
            self.check.restore(tensor)

    def name_spied(self, name: str, value: Any) -> None:
        """Give the tensors in a spied value its name, unless they have one."""
        for tensor in self.arguments.tensors(value, []):
            number = self.values.find(tensor)
            if number is not None:
                self.values.names.setdefault(number, name)

    def label_gradients(self, new: bool = True, optimizer: Any = None) -> None:
        """Name the gradients that parameters hold now: ``fc1.weight.grad``.

        Parameters of an optimizer that belong to no module have their number in it: ``parameter 3.grad``.
        """
        self.modules.name_assigned()
        gradients = [(f"{name}.grad", parameter.grad) for name, parameter in self.modules.parameters()]
        if optimizer is not None:
            known = self.modules.tensor_name
            gradients += [
                (f"parameter {position}.grad", parameter.grad)
                for position, parameter in enumerate(held_parameters(optimizer))
                if known(parameter) is None
            ]
        self.values.label(((name, grad) for name, grad in gradients if grad is not None), "gradient", new)

    def label_state(self, optimizer: Any) -> None:
        """Name the tensors an optimizer keeps, ``fc1.weight.exp_avg``; once named they stay so."""
        count = sum(map(len, optimizer.state.values()))
        if self._state_sizes.get(id(optimizer)) == count:
            return
        self._state_sizes[id(optimizer)] = count
        names = {id(parameter): name for name, parameter in self.modules.parameters()}
        for position, parameter in enumerate(held_parameters(optimizer)):
            name = names.get(id(parameter), f"parameter {position}")
            state = optimizer.state.get(parameter, {})
            named = (
                (f"{name}.{key if isinstance(key, str) else key_text(key)}", item)
                for key, item in state.items()
                if isinstance(item, Tensor)
            )
            self.values.label(named, "state")
