"""What a recording in progress has, whichever engine records it: names, faults, steps, who takes part."""

from __future__ import annotations

import time
import weakref
from types import CodeType, FrameType
from typing import Any, ClassVar, Final

from sightline.errors import CaptureError, NonFiniteError
from sightline.recording.arguments import Arguments
from sightline.recording.calibration import HandlerOverhead
from sightline.recording.cpu_statistics import StatisticsBuffer
from sightline.recording.device_statistics import DeviceStatistics
from sightline.recording.device_time import NO_WORK
from sightline.recording.exception_notes import comes_from_a_signal, fault_text
from sightline.recording.memory import Reading, before_and_after, read_allocators
from sightline.recording.modules import Modules
from sightline.recording.operations import OpInfo
from sightline.recording.stacks import variable_name
from sightline.recording.torchapi import Tensor, current_node, sequence_number
from sightline.recording.training_log import TrainingLog
from sightline.recording.values import ACTIVATION, EXTERNAL, INPUT, KIND
from sightline.trace.assembly.arrays import IntArray
from sightline.trace.assembly.batch import StepMark
from sightline.trace.data import ModuleInfo

_MAX_FAULTS: Final = 20
#: Exceptions of observers that are meant for the program.
STOPS_THE_RUN: Final = (NonFiniteError, CaptureError)
clock = time.perf_counter_ns


class SessionBase:
    """The mutable state behind one `sightline.trace`, as far as engines share it."""

    engine: ClassVar = "python"
    modules: Modules
    arguments: Arguments
    values: Any  #: `Values`, or what stands for it
    stacks: Any  #: `Stacks`, or what stands for it
    ops: Any  #: streams of rows, as those of `Stream`
    calls: Any
    memory: Any  #: the stream of what `Storages` writes

    def __init__(self, name: str, level: str) -> None:
        self.name, self.level = name, level
        self.infos: list[OpInfo] = []
        self.faults: list[str] = []
        self.fault_count = 0
        self.regions: list[int] = []  # opaque ops whose outputs are still unknown
        self.before_region: dict[int, weakref.ref[Any]] = {}  # tensors that were there when one began
        self.observer: Any = None  #: who is told of everything while it happens
        self.readings: Any = None  #: who took statistics: it has ``columns()``
        self.measurer: Any = None  #: who has asked for numbers
        self.captures: Any = None  #: who kept tensors
        self.check: Any = None  #: who looked for what is not finite
        self.keeper: Any = None  #: who takes what is written away while the run goes on: it has ``data()``
        self.steps: list[StepMark] = []
        self.training = TrainingLog()
        self._state_of: dict[int, int] = {}  # optimizer -> how many entries of its state were named
        self.node_ops: dict[int, int] = {}  #: autograd node -> the op of the last build that made it
        self.running = True
        self.module_infos: list[ModuleInfo] | None = None
        self.exception: str | None = None
        self.compiled = "opaque"
        self.time = "host"
        self.device_work = NO_WORK  #: what devices did, once they were asked
        self.compilations = 0  #: how often Dynamo has compiled something meanwhile
        self.compile_time = 0  #: nanoseconds that took
        self.first_sequence = sequence_number()
        self.ended = 0
        self._allocators: tuple[Reading, Reading | None] = (read_allocators(), None)
        self.begin = clock()

    # -- what engines do in their own way --------------------------------------------------------------

    @property
    def threads(self) -> int:
        """How many threads have worked for the recording."""
        raise NotImplementedError

    @property
    def handler_overhead(self) -> HandlerOverhead:
        """What it costs just to be seen."""
        raise NotImplementedError

    @property
    def ident(self) -> int:
        """The thread it was started on."""
        raise NotImplementedError

    def begin_optimizer_step(self, frame: FrameType, closure: CodeType | None) -> None:
        """An optimizer steps, called by ``frame``.

        What runs inside a function of the code ``closure``, which it was given, is no part of its update.
        """
        raise NotImplementedError

    def end_optimizer_step(self) -> None:
        """It has stepped."""
        raise NotImplementedError

    def leave_out(self, taken: int) -> None:
        """So many nanoseconds of what is open on this thread are no part of the run."""
        raise NotImplementedError

    def where(self) -> tuple[list[int], int]:
        """The modules whose calls are open on this thread, outermost first, and the phase."""
        raise NotImplementedError

    def next_id(self) -> int:
        """A number in the order of ops and calls."""
        raise NotImplementedError

    def open_rows(self) -> tuple[IntArray, IntArray]:
        """Rows of the ops and calls that have begun and not ended."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the stop: close what is still open, and read what must be read while the model lives."""
        raise NotImplementedError

    def not_raised(self) -> BaseException | None:
        """An observer's error that was to stop the run, and came too late for that."""
        return None

    def release(self) -> None:
        """Nothing will be asked of the engine any more."""

    def abandon(self) -> None:
        """It will never begin: give back what it holds."""

    def new_deferred(self, fill: str) -> DeviceStatistics:
        """Where numbers of tensors on devices are kept."""
        return DeviceStatistics(fill)

    def new_readings(self) -> StatisticsBuffer:
        """Where the numbers of tensors are kept."""
        return StatisticsBuffer()

    def written(self) -> int:
        """How much has been written for ops and calls, and how many are open."""
        raise NotImplementedError

    def progress(self) -> tuple[int, int, bool]:
        """What changes when anything has been recorded, or the recording has ended."""
        return self.written(), 0 if self.captures is None else len(self.captures.infos), self.running

    def refresh(self) -> None:
        """Bring the small tables up to date, where the engine keeps them elsewhere."""

    def note_error(self, error: BaseException) -> None:
        """An exception is leaving the block."""

    def raised_by(self, error: BaseException) -> bool:
        """Whether an exception came out of the last op that failed."""
        raise NotImplementedError

    # -- what a tensor is that no recorded op made ------------------------------------------------------

    def explain(self, tensor: Any) -> tuple[int, str, int]:
        """Kind, name and producer of a tensor seen for the first time."""
        named = self.modules.tensor_name(tensor)
        if named is not None:
            return KIND[named[0]], named[1], -1
        running = self.where()[0]
        if self.level == "none":  # the ops between modules were not watched
            return (ACTIVATION if running else INPUT), "", -1
        if self.regions and self.is_of_region(tensor):
            return ACTIVATION, "", self.regions[-1]
        if not running:
            return INPUT, "", -1
        held_as = self.modules.attribute_name(tensor, running)
        if held_as is not None:
            return KIND[held_as[0]], held_as[1], -1
        name = variable_name(tensor)
        if name:
            return KIND["constant"], name, -1
        if self.level == "api":  # what runs in a backward pass shows only as the modules it calls
            return (EXTERNAL if current_node() is None else ACTIVATION), "", -1
        # Every op is seen, so a scalar that none has made is one of torch's own (of a scripted function).
        constant = tensor.dim() == 0 and not tensor.requires_grad
        return (KIND["constant"] if constant else EXTERNAL), "", -1

    def is_of_region(self, tensor: Any) -> bool:
        """Whether compiled code may have made a tensor that nothing else explains."""
        return True

    # -- faults ----------------------------------------------------------------------------------------

    def fault(self, error: BaseException) -> None:
        """Count a fault of our own; the first ones are kept with their place.

        What must stop the run does, and so does what a signal handler has raised for the program.
        """
        if issubclass(type(error), STOPS_THE_RUN) or comes_from_a_signal(error):
            raise error
        self.note_fault(error)

    def note_fault(self, error: BaseException) -> None:
        """Count a fault, whatever it is."""
        self.fault_count += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault_text(error))

    def allocator_readings(self) -> dict[str, dict[str, list[int]]]:
        """What the allocators of devices said at the start, and say now, or said at the end."""
        before, after = self._allocators
        return before_and_after(before, read_allocators() if after is None else after)

    def note_end(self) -> None:
        """Nothing is recorded any more: how long it took, and what devices hold at its end."""
        self.running = False
        self.ended = self.ended or clock()
        self._allocators = (self._allocators[0], read_allocators())

    def elapsed(self) -> int:
        """Nanoseconds from the start to the stop, or to now."""
        return (self.ended or clock()) - self.begin

    # -- names -----------------------------------------------------------------------------------------

    def note_compilation(self, taken: int) -> None:
        """Dynamo has compiled something on this thread, in so many nanoseconds."""
        self.compilations += 1
        self.compile_time += taken
        self.leave_out(taken)

    def let_go(self, tensor: Any) -> Any:
        """Hold no weak reference to a tensor, until `take_back`, which is given what this returns."""
        self.before_region.pop(id(tensor), None)
        return self.values.let_go(tensor), self.modules.let_go(tensor)

    def take_back(self, tensor: Any, known: Any) -> None:
        """Know a tensor again, whatever it looks like by now."""
        value, names = known
        if value is not None:
            self.values.know_as(tensor, value)
        self.modules.take_back(tensor, names)

    def name_spied(self, name: str, value: Any) -> None:
        """A value that was spied on has the name it was given, unless it has one."""
        for tensor in self.arguments.tensors(value, []):
            known = self.values.known(tensor)
            if known is not None:
                self.values.names.setdefault(known, name)

    def label_gradients(self, new: bool = True) -> None:
        """Name the gradients that parameters hold now: ``fc1.weight.grad``."""
        self.modules.name_assigned()
        held = [(f"{name}.grad", parameter.grad) for name, parameter in self.modules.parameters()]
        self.values.label(((name, grad) for name, grad in held if grad is not None), "gradient", new)

    def label_state(self, optimizer: Any) -> None:
        """Name the tensors an optimizer keeps, ``fc1.weight.exp_avg``; once named they stay so."""
        held = sum(map(len, optimizer.state.values()))
        if self._state_of.get(id(optimizer)) == held:
            return
        self._state_of[id(optimizer)] = held
        names = {id(parameter): name for name, parameter in self.modules.parameters()}
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {position}")
                state = optimizer.state.get(parameter, {})
                found = ((f"{name}.{key}", item) for key, item in state.items() if isinstance(item, Tensor))
                self.values.label(found, "state")
