"""`TracingMode` as users of torch-code-tracing know it: each aten op, live, under the lines that ran it.

    import sys, sightline.compat.torch_code_tracing
    sys.modules["torch_code_tracing"] = sightline.compat.torch_code_tracing

is enough for a script that was written for that package. Ops come from the recorder and lines from the live
view. The text differs from ``t.code()``: functions have their bare name, tensors no device, and the line of a
loop is written once while it leads to the same lines. Ops of a backward pass are under the lines of their
forward ops, any dtype has a name, and files are shortened to ``site-packages/…``.
"""

from __future__ import annotations

import dis
import inspect
import io
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, islice, takewhile
from types import FrameType, TracebackType
from typing import IO, Self, cast

from sightline.data.file_owners import torch_file
from sightline.data.forms import Form
from sightline.data.index import Frame, Index, Op
from sightline.data.live_events import LiveCallEvent, LiveOpEvent, SourceFrame
from sightline.data.not_recorded import notes
from sightline.data.source_files import indent_of
from sightline.data.trace_data import TensorMeta
from sightline.data.user_frames import first_user_index
from sightline.notation import call_text, tensor_text
from sightline.options import RecordingOptions
from sightline.recording.recorder import Recorder
from sightline.views.live import CodeOp, LiveCode
from sightline.views.source_chain import shared_lines

__all__ = ["Trace", "TracingMode"]


@dataclass(frozen=True)
class Trace:
    """One recorded op.

    >>> import torch
    >>> with TracingMode(quiet=True) as mode:
    ...     y = torch.ones(2, 3)
    >>> mode.traces[0].op_str, mode.traces[0].stack[-1].code_context
    ('ones([2, 3], device=cpu, pin_memory=False) -> f32[2, 3]', ['    y = torch.ones(2, 3)\\n'])

    The ``frame`` of an entry of the stack is None: a frame would keep all its tensors alive.
    """

    op_str: str  #: ``mul.Tensor(f32[2, 3], 2) -> f32[2, 3]``
    stack: list[inspect.FrameInfo]  #: the source positions that led to it, outermost first, without torch's
    event: CodeOp = field(repr=False)  #: the op as `TracingMode.print` writes it


class TracingMode:
    """Print every aten op in the block under the chain of source lines that led to it.

    >>> import torch
    >>> with TracingMode(color=False):
    ...     y = torch.ones(2, 3).relu().sum()  # doctest: +ELLIPSIS
    y = torch.ones(2, 3).relu().sum()  # ... in <module>:
    │ # ones([2, 3], ...) -> f32[2, 3];
    │ # relu(f32[2, 3]) -> f32[2, 3];
    │ # sum(f32[2, 3]) -> f32[];

    With ``quiet`` nothing is printed while it runs: see `print` and `format`. With ``succinct`` consecutive
    ops on one source line share it; without, only those of one expression in it do. ``color`` dims comments
    and highlights the expression, on any stream. A mode may be entered again: ops are added. Entered inside
    its own block, it reports each op once more, like a mode of torch that is on the stack twice.
    """

    def __init__(self, quiet: bool = False, succinct: bool = True, color: bool = True) -> None:
        self._quiet = quiet
        self._succinct = succinct
        self._color = color
        self._recorders: list[_Recording] = []  # those with ops that `traces` does not have yet
        self._entered: list[_Recording] = []  # all of them
        self._depth = 0  # how often the mode was entered and not left
        self._printer: _OpPrinter | None = None
        self._traces: list[Trace] = []
        self._is_shared = False  # whether a caller has the list

    def __enter__(self) -> Self:
        if not self._depth:
            if not self._quiet:
                self._printer = _OpPrinter(None, color=self._color, succinct=self._succinct)
            recorder = Recorder(None, RecordingOptions(ops="aten", name="TracingMode"), watcher=self._printer)
            recorder.start(sys._getframe(1))
            self._recorders.append(_Recording(recorder))
            self._entered.append(self._recorders[-1])
        self._set_depth(self._depth + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._depth == 1:
            self._recorders[-1].recorder.stop(error)
            if self._is_shared:
                self._take_traces()
        self._set_depth(self._depth - 1)

    def _set_depth(self, depth: int) -> None:
        """Set how often each op is reported: as often as the mode is entered."""
        if self._depth and depth:
            self._take_traces()  # those up to here, as often as they are reported now
        self._depth = depth
        if self._printer is not None and depth:
            self._printer.times = depth

    @property
    def traces(self) -> list[Trace]:
        """The ops that were recorded, in the order they ran; inside the block, those so far.

        It is one list, which may be changed: ``mode.traces.clear()`` forgets the ops so far.
        """
        self._is_shared = True
        self._take_traces()
        return self._traces

    def _take_traces(self) -> None:
        for each in self._recorders:
            for trace in each.new_traces():
                self._traces += [trace] * max(self._depth, 1)
        self._recorders = [each for each in self._recorders if each.recorder.running]

    def print(self, succinct: bool = True) -> None:
        """Write all ops to the standard output, coloured as the mode says."""
        self._write(None, self._color, succinct)

    def format(self, color: bool = False, succinct: bool = True) -> str:
        """All ops as one text.

        >>> import torch
        >>> with TracingMode(quiet=True) as mode:
        ...     y = torch.ones(2).neg()
        >>> mode.format().splitlines()[-1]
        '│ # neg(f32[2]) -> f32[2];'
        """
        out = io.StringIO()
        self._write(out, color, succinct)
        return out.getvalue().removesuffix("\n")

    def _write(self, stream: IO[str] | None, color: bool, succinct: bool) -> None:
        printer = _OpPrinter(stream, color=color, succinct=succinct)
        for trace in self.traces:
            printer.write(trace.event)
        for each in self._entered:
            printer.finish(notes(each.recorder.index().raw))


class _Recording:
    """A recording whose ops are handed over once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._taken = 0

    def new_traces(self) -> list[Trace]:
        """The ops since the last time."""
        traces = list(_traces(self.recorder.index(), self._taken))
        self._taken += len(traces)
        return traces


class _OpPrinter:
    """Writes ops with the live view, as they happen or afterwards; each as many ``times``."""

    def __init__(self, stream: IO[str] | None, *, color: bool, succinct: bool) -> None:
        self._live = LiveCode(stream, color=color)
        self._succinct = succinct
        self._numbers = count()
        self._last: Sequence[SourceFrame] = ()
        self.times = 1

    def op(self, event: LiveOpEvent) -> None:
        inputs, outputs = _tensor_texts(event.inputs), _result_text(event, _tensor_texts(event.outputs))
        chain = _shown_frames(event.chain)
        for _ in range(self.times):
            self.write(CodeOp(event.name, event.form, inputs, outputs, chain, event.phase, event.raised))

    def enter(self, event: LiveCallEvent) -> None:
        """A module call shows as the lines it runs."""

    def leave(self, event: LiveCallEvent) -> None:
        """A module call shows as the lines it runs."""

    def finish(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._live.note(note)

    def write(self, event: CodeOp) -> None:
        """Write an op under those of its lines that the op before did not have."""
        last, chain = self._last, event.chain
        if self._succinct:  # how many lines this op shares with the one before
            shared = shared_lines(last, [_bare_frame(frame) for frame in chain])
        else:
            same = (_position(a) == _position(b) for a, b in zip(last, chain, strict=False))
            shared = sum(takewhile(bool, same))
        if shared == len(chain) < len(last):
            shared -= 1  # back from a call: the line is written again, right above its op
        # The view identifies lines by their number.
        self._last = [
            _bare_frame(frame, last[at].call if at < shared else next(self._numbers))
            for at, frame in enumerate(chain)
        ]
        self._live.op(replace(event, chain=self._last))


class _DistinctText(str):
    """The text of a tensor, equal only to itself: the view folds equal neighbours, and must not here."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _tensor_texts(metas: Iterable[TensorMeta]) -> list[str]:
    """Tensors without their device: ``bf16[2, 3]``."""
    return [_DistinctText(tensor_text(meta.sizes, meta.dtype)) for meta in metas]


def _result_text(op: LiveOpEvent | Op, texts: Sequence[str]) -> str:
    """The result of an op; several outputs are in parentheses, also those of a list."""
    if op.raised:
        return ""
    if op.flavour == "opaque":  # only the tensors that recorded ops have used are known
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})" if texts else ""
    one = op.result.args[0] if len(op.result.args) == 1 else None
    return (Form((tuple(one),)) if isinstance(one, list) else op.result).fill(texts) or "None"


def _shown_frames(chain: Sequence[SourceFrame | Frame]) -> tuple[SourceFrame, ...]:
    """The frames of a chain that are shown, with the bare names of functions."""
    frames = [frame for frame in chain if not torch_file(frame.file)]
    return tuple(_bare_frame(frame) for frame in frames[first_user_index(frame.file for frame in frames) :])


def _bare_frame(frame: SourceFrame | Frame, number: int = -1) -> SourceFrame:
    function = frame.function.rpartition(".")[2]
    indent = frame.indent if isinstance(frame, SourceFrame) else -1
    return SourceFrame(
        frame.file, frame.line, frame.end_line, function, frame.code, frame.columns, number, indent
    )


def _position(frame: SourceFrame) -> Hashable:
    """A source position, to the column."""
    return frame.file, frame.line, frame.function, frame.columns, frame.end_line


def _traces(index: Index, first: int = 0) -> Iterator[Trace]:
    """The aten ops of a recording, and compiled code as opaque ops, from the ``first`` on."""
    data = index.raw
    frames = index.op_frames.tolist()

    def line(frame: SourceFrame) -> str:
        return data.source_lines.line(frame.file, frame.line)

    @cache
    def chain(frame: int) -> tuple[SourceFrame, ...]:
        shown = _shown_frames(index.frames[frame].chain) if frame >= 0 else ()
        return tuple(replace(one, indent=indent_of(line(one)) if one.code else -1) for one in shown)

    @cache
    def stack(frame: int) -> tuple[inspect.FrameInfo, ...]:
        infos = []
        for one in chain(frame):  # each with its whole line, in which columns are counted
            text, no_frame = line(one), cast("FrameType", None)
            positions = dis.Positions(one.line, one.end_line, *(one.columns or (None, None)))
            context, at = ([text], 0) if text else (None, None)
            infos.append(
                inspect.FrameInfo(
                    no_frame, one.file, one.line, one.function, context, at, positions=positions
                )
            )
        return tuple(infos)

    def event(op: Op) -> CodeOp:
        inputs, outputs = (
            _tensor_texts(data.metas[data.values.meta[v.id]] for v in part)
            for part in (op.inputs, op.outputs)
        )
        result = _result_text(op, outputs)
        return CodeOp(op.name, op.form, inputs, result, chain(frames[op.id]), op.phase, op.raised)

    shown_ops = (op for op in index.ops if op.level == "aten" or op.flavour == "opaque")
    for op in islice(shown_ops, first, None):
        shown = event(op)
        text = call_text(shown.name, shown.form, shown.inputs, shown.output)
        yield Trace(text, list(stack(frames[op.id])), shown)
