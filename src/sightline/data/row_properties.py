"""Properties of rows that are columns of the schema.

Written by ``make schema`` from ``sightline/schema/tables.py``; a test checks that it is current.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.data.forms import Form
from sightline.data.table import Row, Table, linked_row, linked_rows
from sightline.data.trace_data import TensorMeta
from sightline.schema.tables import FLAVOURS, KINDS, LEVELS, PHASES

if TYPE_CHECKING:
    from sightline.data.rows import Frame, Module, ModuleCall, Op, Value


class FrameProperties(Row):
    """Source positions; a row and its parents are a stack."""

    __slots__ = ()

    @property
    def parent(self) -> Frame | None:
        """The position that called it."""
        row: Frame | None = linked_row("frames", self._data, self._data.raw.frames.parent[self.id])
        return row

    @property
    def line(self) -> int:
        """Line of the expression."""
        return int(self._data.raw.frames.line[self.id])

    @property
    def end_line(self) -> int:
        """Its last line."""
        return int(self._data.raw.frames.end_line[self.id])


class ValueProperties(Row):
    """Tensors, one row per version."""

    __slots__ = ()

    @property
    def meta(self) -> TensorMeta:
        """Shape, dtype and device."""
        return self._data.raw.metas[int(self._data.raw.values.meta[self.id])]

    @property
    def storage(self) -> int:
        """Its memory, which it may share with others."""
        return int(self._data.raw.values.storage[self.id])

    @property
    def kind(self) -> str:
        """Its role in the model."""
        return KINDS[self._data.raw.values.kind[self.id]]

    @property
    def name(self) -> str:
        """Fc1.weight of a parameter, fc1.weight.exp_avg of optimizer state."""
        return self._data.name(self._data.raw.values.name[self.id])

    @property
    def producer(self) -> Op | None:
        """The op that made it."""
        row: Op | None = linked_row("ops", self._data, self._data.raw.values.producer[self.id])
        return row

    @property
    def previous(self) -> Value | None:
        """The value that it replaced, by an in-place op."""
        row: Value | None = linked_row("values", self._data, self._data.raw.values.previous[self.id])
        return row

    @property
    def base(self) -> Value | None:
        """The value it is a view of."""
        row: Value | None = linked_row("values", self._data, self._data.raw.values.base[self.id])
        return row

    @property
    def requires_grad(self) -> bool:
        return bool(self._data.raw.values.flags[self.id] & 1)


class OpProperties(Row):
    """API calls and aten ops, in the order they began."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Mm, add.Tensor, F.linear, Tensor.view, @."""
        return self._data.name(self._data.raw.ops.name[self.id])

    @property
    def level(self) -> str:
        """A call as the user wrote it, or an op of the dispatcher."""
        return LEVELS[self._data.raw.ops.level[self.id]]

    @property
    def flavour(self) -> str:
        """How a call was written; op: an aten op, opaque: a compiled region."""
        return FLAVOURS[self._data.raw.ops.flavour[self.id]]

    @property
    def phase(self) -> str:
        """The phase it ran in; recompute: of a checkpoint."""
        return PHASES[self._data.raw.ops.phase[self.id]]

    @property
    def call(self) -> ModuleCall | None:
        """Its module call; a backward op has its forward's."""
        row: ModuleCall | None = linked_row("calls", self._data, self._data.raw.ops.call[self.id])
        return row

    @property
    def frame(self) -> Frame | None:
        """The position that ran it, torch's own lines included."""
        row: Frame | None = linked_row("frames", self._data, self._data.raw.ops.frame[self.id])
        return row

    @property
    def parent(self) -> Op | None:
        """Of an aten op, the API call it came from."""
        row: Op | None = linked_row("ops", self._data, self._data.raw.ops.parent[self.id])
        return row

    @property
    def forward(self) -> Op | None:
        """Of a backward op, its forward op."""
        row: Op | None = linked_row("ops", self._data, self._data.raw.ops.forward[self.id])
        return row

    @property
    def form(self) -> Form:
        """Its arguments."""
        return self._data.raw.forms[int(self._data.raw.ops.form[self.id])]

    @property
    def result(self) -> Form:
        """How its results are nested."""
        return self._data.raw.forms[int(self._data.raw.ops.result[self.id])]

    @property
    def start(self) -> int:
        """Since the recording began, in ns."""
        return int(self._data.raw.ops.start[self.id])

    @property
    def duration(self) -> int:
        """Host time with the ops in it, the recorder's own left out, in ns."""
        return int(self._data.raw.ops.duration[self.id])

    @property
    def flops(self) -> int | None:
        """-1 where there is no formula, -2 where there should be one."""
        return number if (number := int(self._data.raw.ops.flops[self.id])) >= 0 else None

    @property
    def raised(self) -> bool:
        return bool(self._data.raw.ops.flags[self.id] & 1)

    @property
    def unfinished(self) -> bool:
        return bool(self._data.raw.ops.flags[self.id] & 2)

    @property
    def mutates(self) -> bool:
        return bool(self._data.raw.ops.flags[self.id] & 4)

    @property
    def thread(self) -> int:
        """Which thread ran it, from 0."""
        return int(self._data.raw.ops.thread[self.id])

    @property
    def inputs(self) -> Table[Value]:
        """Tensors it read."""
        return linked_rows("values", self._data, self._data.raw.ops.inputs_of(self.id))

    @property
    def outputs(self) -> Table[Value]:
        """Tensors it returned."""
        return linked_rows("values", self._data, self._data.raw.ops.outputs_of(self.id))


class ModuleCallProperties(Row):
    """Calls of modules, in the order of entry."""

    __slots__ = ()

    @property
    def module(self) -> Module:
        """The module that was called."""
        row: Module = linked_row("modules", self._data, self._data.raw.calls.module[self.id])
        return row

    @property
    def index(self) -> int:
        """Which call of this module, from 0."""
        return int(self._data.raw.calls.index[self.id])

    @property
    def parent(self) -> ModuleCall | None:
        """The call around it."""
        row: ModuleCall | None = linked_row("calls", self._data, self._data.raw.calls.parent[self.id])
        return row

    @property
    def frame(self) -> Frame | None:
        """The source position that called it."""
        row: Frame | None = linked_row("frames", self._data, self._data.raw.calls.frame[self.id])
        return row

    @property
    def phase(self) -> str:
        """The phase it ran in."""
        return PHASES[self._data.raw.calls.phase[self.id]]

    @property
    def start(self) -> int:
        """Since the recording began, in ns."""
        return int(self._data.raw.calls.start[self.id])

    @property
    def duration(self) -> int:
        """Host time with the calls in it, the recorder's own left out, in ns."""
        return int(self._data.raw.calls.duration[self.id])

    @property
    def first_op(self) -> int:
        """Its first op; the ops up to `end_op` ran inside it."""
        return int(self._data.raw.calls.first_op[self.id])

    @property
    def end_op(self) -> int:
        """The op after its last one."""
        return int(self._data.raw.calls.end_op[self.id])

    @property
    def raised(self) -> bool:
        return bool(self._data.raw.calls.flags[self.id] & 1)

    @property
    def unfinished(self) -> bool:
        return bool(self._data.raw.calls.flags[self.id] & 2)

    @property
    def training(self) -> bool:
        return bool(self._data.raw.calls.flags[self.id] & 8)

    @property
    def evaluation(self) -> bool:
        return bool(self._data.raw.calls.flags[self.id] & 16)

    @property
    def no_grad(self) -> bool:
        return bool(self._data.raw.calls.flags[self.id] & 32)

    @property
    def input_form(self) -> Form:
        """How its inputs are nested."""
        return self._data.raw.forms[int(self._data.raw.calls.input_form[self.id])]

    @property
    def output_form(self) -> Form:
        """How its outputs are nested."""
        return self._data.raw.forms[int(self._data.raw.calls.output_form[self.id])]

    @property
    def inputs(self) -> Table[Value]:
        """Tensors it was given."""
        return linked_rows("values", self._data, self._data.raw.calls.inputs_of(self.id))

    @property
    def outputs(self) -> Table[Value]:
        """Tensors it returned."""
        return linked_rows("values", self._data, self._data.raw.calls.outputs_of(self.id))

    @property
    def order(self) -> int:
        """Its rank by completion: children come before their parent."""
        return int(self._data.raw.calls.order[self.id])
