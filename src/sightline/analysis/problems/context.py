"""`ProblemContext`: look-ups of the checks by op, value and module, derived once per recording.

Checks look at aten ops, which alone tell exactly what ran. Where only API calls or module calls were
recorded, most checks report nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.problems.problem import Finding
from sightline.analysis.value_names import ModuleNames
from sightline.data.file_owners import installed_file
from sightline.data.index import Index
from sightline.data.trace_data import (
    FLAVOURS,
    I32,
    I64,
    KINDS,
    LEVELS,
    PHASES,
    RAISED,
    UNFINISHED,
    TensorMeta,
    TraceData,
)

Mask = NDArray[np.bool_]
T = TypeVar("T")

FORWARD: Final = PHASES.index("forward")
BACKWARD: Final = PHASES.index("backward")
_ATEN: Final = LEVELS.index("aten")
_LOW: Final = ("bfloat16", "float16")

#: Multiplications of matrices and ops built on them: where a model's work is.
MATMULS: Final = frozenset(
    "mm addmm bmm baddbmm matmul linear convolution _convolution mkldnn_convolution cudnn_convolution "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math scaled_dot_product_attention".split()
)
#: Ops that draw random numbers: two runs on the same inputs are not the same value.
RANDOM: Final = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform uniform_ "
    "bernoulli bernoulli_ dropout dropout_ native_dropout alpha_dropout feature_dropout multinomial poisson "
    "exponential_ geometric_ cauchy_ log_normal_ random_ rrelu_with_noise binomial _fused_dropout "
    "_sample_dirichlet _standard_gamma".split()
)


class ProblemContext:
    """A recording as the checks see it."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.data: TraceData = index.raw
        self._derived: dict[Callable[[ProblemContext], Any], Any] = {}

    def derived(self, derive: Callable[[ProblemContext], T]) -> T:
        """The result of ``derive`` for this recording, computed once for all checks."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        result: T = self._derived[derive]
        return result

    # -- ops -------------------------------------------------------------------------------------

    @cached_property
    def ended(self) -> Mask:
        """Ops that returned."""
        mask: Mask = (self.data.ops.flags & (RAISED | UNFINISHED)) == 0
        return mask

    @cached_property
    def aten(self) -> Mask:
        """Aten ops that returned."""
        mask: Mask = (self.data.ops.level == _ATEN) & self.ended
        return mask

    @cached_property
    def forward(self) -> Mask:
        """Aten ops of the forward pass."""
        mask: Mask = self.aten & (self.data.ops.phase == FORWARD)
        return mask

    @cached_property
    def bare_names(self) -> list[str]:
        """Every name of the recording without its overload: ``mul`` of ``mul.Tensor``."""
        return [name.partition(".")[0] for name in self.data.names]

    def named(self, names: frozenset[str] | set[str]) -> Mask:
        """Which aten ops have one of these names, whatever the overload."""
        ids = [id for id, name in enumerate(self.bare_names) if name in names]
        mask: Mask = np.isin(self.data.ops.name, ids) & self.aten
        return mask

    def name(self, op: int) -> str:
        """The name of an op without its overload."""
        return self.bare_names[int(self.data.ops.name[op])]

    def written(self, op: int) -> str:
        """The name of the API call an op came from, or the op's own name where none was recorded."""
        parent = int(self.data.ops.parent[op])
        return self.data.names[int(self.data.ops.name[parent if parent >= 0 else op])]

    def inputs(self, op: int) -> list[int]:
        return self.data.ops.inputs_of(op)

    def outputs(self, op: int) -> list[int]:
        return self.data.ops.outputs_of(op)

    def users(self, value: int) -> list[int]:
        """The aten ops that read a value in the forward pass."""
        return [op for op in self.index.consumers(value) if self.forward[op]]

    @cached_property
    def readers(self) -> I64:
        """The op of every entry of ``ops.inputs``."""
        ops = self.data.ops
        return np.repeat(np.arange(len(ops)), np.diff(ops.input_offsets))

    def any_input(self, tensors: Mask) -> Mask:
        """The ops that read any of these tensors; ``tensors`` is a mask over values."""
        mask = np.zeros(len(self.data.ops), dtype=np.bool_)
        mask[self.readers[tensors[self.data.ops.inputs]]] = True
        return mask

    # -- values ------------------------------------------------------------------------------------

    def of_meta(self, test: Callable[[TensorMeta], bool]) -> Mask:
        """Which values have metadata that passes a test, which runs once per kind of tensor."""
        passed = np.array([test(meta) for meta in self.data.metas] or [False], dtype=np.bool_)
        return passed[self.data.values.meta]

    def meta(self, value: int) -> TensorMeta:
        return self.data.metas[int(self.data.values.meta[value])]

    def producer(self, value: int) -> int:
        return int(self.data.values.producer[value])

    def kind(self, value: int) -> str:
        return KINDS[self.data.values.kind[value]]

    @cached_property
    def low(self) -> Mask:
        """Values of low precision with at least one dimension: those that decide type promotion."""
        return self.of_meta(lambda meta: meta.dtype in _LOW and bool(meta.shape))

    @cached_property
    def floating(self) -> Mask:
        """Values that can hold a gradient, a NaN or an infinity."""
        return self.of_meta(lambda meta: meta.dtype.startswith(("float", "bfloat", "complex")))

    def results(self, op: int) -> list[int]:
        """The results of an op: its outputs, and the new versions of tensors that share their memory."""
        return self.index.values_made_by(op)

    def stat(self, value: int) -> int:
        """The row of a value in the table of statistics, or -1."""
        return self.index.stat_row(value)

    def args(self, op: int) -> list[Any]:
        """The plain arguments of an op, by position and by name; tensors are left out."""
        form = self.data.forms[int(self.data.ops.form[op])]
        return [*form.args, *(form.kwargs or {}).values()]

    # -- the run -------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether everything that ran was recorded, so that anything missing did not happen."""
        return not self.gap

    @cached_property
    def gap(self) -> str:
        """The reason that the recording is incomplete, to begin a sentence; empty if it is complete."""
        ops, info = self.data.ops, self.data.info
        # A checkpoint ends its second forward with an exception, as soon as it has what it needs.
        raised = ((ops.flags & RAISED) != 0) & (ops.phase != PHASES.index("recompute"))
        unfinished = (ops.flags & UNFINISHED).any() or (self.data.calls.flags & UNFINISHED).any()
        reasons = (
            (info.get("exception"), "the run ended with an exception"),
            (info.get("fault_count"), "the recorder failed"),
            (unfinished, "the recording ended inside an op or a call"),
            (raised.any(), "an op raised an exception"),
            ((ops.flavour == FLAVOURS.index("opaque")).any(), "compiled code was not looked into"),
            ((self.data.values.kind == KINDS.index("evicted")).any(), "the first ops were not kept"),
        )
        return next((text for holds, text in reasons if holds), "")

    # -- source lines and modules --------------------------------------------------------------------

    @cached_property
    def frames(self) -> I32:
        """The frame each op is shown under: its own, for a backward op its forward op's."""
        return self.index.op_frames

    def visible(self, frame: int) -> int:
        """The innermost frame outside torch, or -1."""
        return int(self.index.user_frames[frame])

    def place(self, frame: int) -> str:
        """The line of a frame outside torch: ``net.py:9 in Net.forward``; empty if there is none."""
        shown = self.visible(frame)
        if shown < 0:
            return ""
        row = self.index.frames[shown]
        return f"{row.position} in {row.function}"

    def own_place(self, frame: int) -> str:
        """The innermost line of the user's own code where `place` is one of a library; else empty."""
        chain = self.index.user_chains.of(frame)
        frames = self.index.frames
        own = next((at for at in reversed(chain) if not installed_file(frames[at].file)), -1)
        return self.place(own) if chain and own not in (-1, chain[-1]) else ""

    def is_own(self, op: int) -> bool:
        """Whether an op was written in the user's own code: not in torch or another package."""
        frame = self.index.ops[op].frame
        return frame is not None and not installed_file(frame.file)

    def line(self, op: int) -> str:
        """The source line of an op: ``net.py:9 in Net.forward``; empty where none is known."""
        return self.place(int(self.frames[op]))

    def at_line(self, op: int) -> str:
        """An op as it is written and its line: ``squeeze at net.py:9``; ``squeeze`` alone without one."""
        name = self.written(op).rpartition(".")[2]
        line = self.line(op).partition(" in ")[0]
        return f"{name} at {line}" if line else name

    def by_line(self, ops: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
        """Ops of the same source line and key together, in the order of the run."""
        groups: dict[tuple[int, Hashable], list[int]] = {}
        for op in ops:
            groups.setdefault((self.visible(int(self.frames[op])), key(op)), []).append(op)
        return list(groups.values())

    def finding(self, title: str, op: int, value: int = -1, why: str = "") -> Finding:
        """A finding about an op, at its line and in its module."""
        return Finding(title, self.module(op), int(self.frames[op]), op, value, why=why)

    def module(self, op: int) -> int:
        """The module an op ran in, or -1."""
        return int(self.index.op_modules[op])

    @cached_property
    def module_names(self) -> ModuleNames:
        return ModuleNames(self.index)

    def module_label(self, module: int) -> str:
        return self.module_names.label(module)

    def module_type(self, module: int) -> str:
        return self.data.modules[module].type if module >= 0 else ""

    def first_call(self, module: int) -> int:
        """The first call of a module, or -1."""
        return next(iter(self.index.calls_of_module.get(module, ())), -1)

    def call_frame(self, call: int) -> int:
        """The frame a module was called from; -1 for no call."""
        return int(self.data.calls.frame[call]) if call >= 0 else -1
