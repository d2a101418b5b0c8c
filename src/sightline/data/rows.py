"""The rows of a recording: ops, values, module calls, steps, modules, frames, read from columns on demand.

Each column of the schema is a property in `row_properties`; properties derived from several are here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sightline.data import trace_data as d
from sightline.data.row_properties import (
    FrameProperties,
    ModuleCallProperties,
    OpProperties,
    ValueProperties,
)
from sightline.data.table import Row, Table, linked_row
from sightline.notation import call_text, numbers_text, position_text, value_text
from sightline.text_encoding import for_output, printable


@printable
class Frame(FrameProperties, table="frames"):
    """A source position on the way to an op: file, line, columns, function, and the frame that called it."""

    __slots__ = ()

    @property
    def _code(self) -> d.CodeInfo:
        return self._data.raw.codes[int(self._data.raw.frames.code[self.id])]

    @property
    def file(self) -> str:
        return self._code.file

    @property
    def function(self) -> str:
        """Qualified name of the function: ``Net.forward``."""
        return self._code.function

    @property
    def code(self) -> str:
        """The source line, stripped; empty where the source is not available."""
        return self._data.raw.source_lines.line(self.file, self.line).strip()

    @property
    def columns(self) -> tuple[int, int] | None:
        """First and last column of the expression on its line, 0-based, in bytes; None if unknown."""
        frames = self._data.raw.frames
        if frames.column[self.id] < 0:
            return None
        return int(frames.column[self.id]), int(frames.end_column[self.id])

    @property
    def chain(self) -> list[Frame]:
        """The frames that led here, outermost first, this one last."""
        chain: list[Frame] = []
        frame: Frame | None = self
        while frame is not None:
            chain.append(frame)
            frame = frame.parent
        return chain[::-1]

    @property
    def position(self) -> str:
        return position_text(self.file, self.line)

    def __repr__(self) -> str:
        return f"<Frame {self.position} in {self.function}>"


@printable
class Module(Row, table="modules"):
    """A module of the model: its path, its class, its parameters."""

    __slots__ = ()

    @property
    def _info(self) -> d.ModuleInfo:
        return self._data.raw.modules[self.id]

    @property
    def path(self) -> str:
        """Path relative to the model; ``""`` for the model itself."""
        return self._info.path

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._info.aliases

    @property
    def type(self) -> str:
        return self._info.type

    @property
    def type_module(self) -> str:
        return self._info.type_module

    @property
    def extra(self) -> str:
        return self._info.extra

    @property
    def training(self) -> bool:
        return self._info.training

    @property
    def parameters(self) -> tuple[d.ParameterInfo, ...]:
        return self._info.parameters

    @property
    def parent(self) -> Module | None:
        row: Module | None = linked_row("modules", self._data, self._info.parent)
        return row

    @property
    def root(self) -> Module:
        return Module(self._data, self._info.root)

    @property
    def depth(self) -> int:
        return len(self.path.split(".")) if self.path else 0

    @property
    def calls(self) -> Table[ModuleCall]:
        return self._data.module_calls._of(self._data.calls_of_module.get(self.id, []))

    @property
    def label(self) -> str:
        """The path, or the class name for a root."""
        return self._info.label

    def __repr__(self) -> str:
        return f"<Module {self.label} ({self.type})>"


class ValueNumbers(NamedTuple):
    """Statistics of a tensor's elements; all but the counts are over the finite ones."""

    min: float
    max: float
    mean: float
    std: float
    l2: float
    zeros: int
    nans: int
    infs: int
    fingerprint: int  #: 64 bits; 0 if it was not taken

    @property
    def finite(self) -> bool:
        return not self.nans and not self.infs

    def __str__(self) -> str:
        return for_output(numbers_text(self))


@printable
class Value(ValueProperties, table="values"):
    """A tensor at one moment of its life: an in-place op makes a new value of it."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def dtype(self) -> str:
        return self.meta.dtype

    @property
    def device(self) -> str:
        return self.meta.device

    @property
    def stride(self) -> tuple[int, ...] | None:
        return self.meta.stride

    @property
    def slot(self) -> int:
        """Its index among its producer's outputs; -1 where an op changed another value in the same memory."""
        return int(self._data.raw.values.slot[self.id])

    @property
    def storage_bytes(self) -> int:
        storage = self.storage
        return int(self._data.raw.storages[storage]) if storage >= 0 else 0

    @property
    def module(self) -> Module | None:
        """The module of the op that made it; for a gradient that of its forward op."""
        producer = self.producer
        return producer.module if producer is not None else None

    @property
    def consumers(self) -> Table[Op]:
        return Table(self._data, Op, self._data.consumers(self.id))

    @property
    def stats(self) -> ValueNumbers | None:
        """Minimum, maximum, mean and so on, where they were measured (``stats=True``).

        They are of the first time that it was measured. Running statistics that a batch norm updates later
        stay the same value: the schema of that op does not name them as written.
        """
        return self._data.numbers(self.id)

    def __str__(self) -> str:
        return str(self.meta)

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<Value {value_text(self.id)} {self.meta} {self.kind}{name}>"


@printable
class Op(OpProperties, table="ops"):
    """One operation: an API call as the user wrote it, or an aten op the dispatcher ran."""

    __slots__ = ()

    @property
    def module(self) -> Module | None:
        call = self.call
        return call.module if call else None

    @property
    def args(self) -> dict[str | int, Any]:
        """The arguments by name (aten) or position; tensors are `Value` rows."""
        return self._data.bound_arguments(self)

    @property
    def device_duration(self) -> int | None:
        """Nanoseconds that devices spent on it, and on the ops it ran; None without ``time="device"``."""
        durations = self._data.device_durations
        return None if durations is None else int(durations[self.id])

    @property
    def children(self) -> Table[Op]:
        """The aten ops of an API call."""
        return Table(self._data, Op, self._data.children(self.id))

    def __str__(self) -> str:
        outputs = self.result.fill([str(value) for value in self.outputs])
        return for_output(call_text(self.name, self.form, [str(value) for value in self.inputs], outputs))

    def __repr__(self) -> str:
        return f"<Op {self.id} {self.name} {self.phase}>"


@printable
class ModuleCall(ModuleCallProperties, table="calls"):
    """One call of a module: its inputs, its outputs, and the ops that ran inside."""

    __slots__ = ()

    @property
    def depth(self) -> int:
        return self._data.call_depths[self.id]

    @property
    def ops(self) -> Table[Op]:
        """Every op that ran inside it, its submodules' included."""
        calls = self._data.raw.calls
        return Table(self._data, Op, range(int(calls.first_op[self.id]), int(calls.end_op[self.id])))

    @property
    def children(self) -> Table[ModuleCall]:
        return Table(self._data, ModuleCall, self._data.calls_of_parent.get(self.id, []))

    @property
    def device_duration(self) -> int | None:
        """Nanoseconds that devices spent on its ops; None without ``time="device"``."""
        durations = self._data.call_device_durations
        return None if durations is None else int(durations[self.id])

    def __repr__(self) -> str:
        return f"<ModuleCall {self.module.label}#{self.index}>"


@printable
class Step(Row):
    """A stretch of the run: named by ``with sl.step("step0"):``, or a detected training step."""

    __slots__ = ()

    @property
    def _info(self) -> d.StepInfo:
        return self._data.step_infos[self.id]

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def ops(self) -> Table[Op]:
        return Table(self._data, Op, range(self._info.first_op, self._info.end_op))

    @property
    def module_calls(self) -> Table[ModuleCall]:
        return Table(self._data, ModuleCall, range(self._info.first_call, self._info.end_call))

    @property
    def start(self) -> int:
        return self._info.start

    @property
    def duration(self) -> int:
        """Nanoseconds, including the recorder's own time."""
        return self._info.duration

    def __repr__(self) -> str:
        return f"<Step {self.name}: {len(self.ops)} ops>"
