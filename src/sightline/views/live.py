"""``live=``: the lines of ``code()`` or the blocks of ``log()``, printed while the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from sightline.data.file_owners import torch_file
from sightline.data.forms import Form
from sightline.data.live_events import LiveCallEvent, LiveOpEvent, SourceFrame
from sightline.data.user_frames import first_user_index
from sightline.views.log_blocks import OK, RAISED, BlockStyle, LogModule, LogOp
from sightline.views.rendering import Line, Printer, line
from sightline.views.source_chain import ChainWriter, entry_line, op_spans


@dataclass(frozen=True, slots=True)
class CodeOp:
    """An op that just ran, or just raised, as plain data.

    ``inputs`` are the texts of its tensors, ``chain`` its frames, outermost first; for a backward op those of
    its forward op.
    """

    name: str
    form: Form
    inputs: Sequence[str] = ()
    output: str = ""
    chain: Sequence[SourceFrame] = field(default=())
    phase: str = "forward"
    raised: bool = False


class LiveCode:
    """Prints ops under their source lines as they run, exactly as ``t.code()`` does afterwards.

    >>> import sys
    >>> live = LiveCode(sys.stdout)
    >>> live.op(CodeOp("relu", Form(()), output="f32[2]"))
    (no Python source)
    │ # relu() -> f32[2];
    """

    def __init__(
        self, stream: IO[str] | None = None, *, color: bool | None = None, torch_frames: bool = False
    ) -> None:
        self._printer = Printer(stream, color)
        self._writer = ChainWriter()
        self._torch_frames = torch_frames

    def op(self, event: CodeOp) -> None:
        """Write one op, and the source lines that differ from the op before."""
        chain = [frame for frame in event.chain if self._torch_frames or not torch_file(frame.file)]
        chain = chain[first_user_index(frame.file for frame in chain) :]
        name, arguments = event.form.written(event.name, event.inputs)
        content = op_spans(name, arguments, event.output, event.phase, raised=event.raised)
        for entry in self._writer.op(chain, event.phase, content):
            self._printer.write(entry_line(entry))
        self._printer.flush()

    def note(self, text: str) -> None:
        """Write a remark about the run."""
        self._printer.write(line((f"# {text}", "dim")))
        self._printer.flush()


class LiveLog:
    """Prints module calls and operations as they happen.

    >>> from sightline.data.trace_data import TensorMeta
    >>> from sightline.data.forms import ONE_TENSOR
    >>> x = TensorMeta((2, 6), None, "float32", "cpu")
    >>> log = LiveLog()
    >>> call = LogModule("fc", "Linear", "in_features=6", 0, True, ONE_TENSOR, (x,), outputs=(x,))
    >>> log.enter(call); log.exit(call)
    ● fc (Linear) (in_features: 6)
    ├─ Input: Tensor [2, 6] @ cpu
    └─ Output: Tensor [2, 6] @ cpu
    """

    def __init__(
        self, *, title: str | None = None, root: bool = True, inside: bool = False,
        style: BlockStyle | None = None, color: bool | None = None, file: IO[str] | None = None,
    ) -> None:  # fmt: skip
        self._title = title
        self._root = root
        self._inside = inside
        self._style = style or BlockStyle()
        self._printer = Printer(file, color)
        self._leaves = 0  # leaf calls that are running; nothing inside them is printed
        self._last: int | None = None  # depth of the last block

    def start(self) -> None:
        """Print the first banner."""
        if self._title is not None:
            self._print([self._style.banner(f"TRACING {self._title} STARTED")])
            self._last = 0

    def stop(self) -> None:
        """Print the last banner."""
        if self._title is not None:
            self._print([self._style.rail(0), self._style.banner(f"TRACING {self._title} COMPLETE")])

    def enter(self, event: LogModule) -> None:
        """A module call begins: a container is printed, a leaf waits for its end."""
        if self._opens(event):
            if not self._leaves and self._shown(event):
                event = self._shift_depth(event)
                self._block(event.depth, self._style.opened(event))
        else:
            self._leaves += 1

    def exit(self, event: LogModule) -> None:
        """A module call ended; ``event`` has its outputs, or the state it ended in."""
        if self._opens(event):
            if not self._leaves and self._shown(event):
                event = self._shift_depth(event)
                self._block(event.depth, self._style.closed(event))
            return
        self._leaves -= 1
        if not self._leaves:
            event = self._shift_depth(event)
            self._block(event.depth, self._style.leaf(event))

    def op(self, event: LogOp) -> None:
        """An operation ended; those inside a leaf are not printed."""
        if self._leaves:
            return
        if not self._root and event.depth:
            event = replace(event, depth=event.depth - 1)
        self._block(event.depth, self._style.op(event))

    def note(self, text: str) -> None:
        """A remark about the run, beside all modules."""
        self._block(0, [self._style.banner(text)])

    def _opens(self, event: LogModule) -> bool:
        return self._inside or not event.leaf

    def _shown(self, event: LogModule) -> bool:
        return self._root or event.depth > 0

    def _shift_depth(self, event: LogModule) -> LogModule:
        """The event, one level up where the root is left out."""
        return replace(event, depth=event.depth - 1) if not self._root and event.depth else event

    def _block(self, depth: int, lines: list[Line]) -> None:
        rail = [] if self._last is None else [self._style.rail(min(self._last, depth))]
        self._last = depth
        self._print([*rail, *lines])

    def _print(self, lines: list[Line]) -> None:
        for each in lines:
            self._printer.write(each)
        self._printer.flush()


class CodeWatcher:
    """Prints ops under their source lines: aten ops where they are recorded, else API calls."""

    def __init__(self, ops: str, stream: IO[str] | None = None, *, color: bool | None = None) -> None:
        self._level = "api" if ops == "api" else "aten"
        self._live = LiveCode(stream, color=color)

    def op(self, event: LiveOpEvent) -> None:
        """Print an op of the level that is shown, under its lines."""
        if event.level == self._level or event.flavour == "opaque":
            inputs, outputs = [str(meta) for meta in event.inputs], [str(meta) for meta in event.outputs]
            self._live.op(
                CodeOp(
                    event.name, event.form, inputs, event.result.fill(outputs), event.chain, event.phase,
                    event.raised,
                )
            )  # fmt: skip

    def enter(self, event: LiveCallEvent) -> None:
        """Module calls show as the lines they run."""

    def leave(self, event: LiveCallEvent) -> None:
        """Module calls show as the lines they run."""

    def finish(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._live.note(note)


class LogWatcher:
    """Prints a block per module call and operation: API calls where they are recorded, else aten ops."""

    def __init__(self, ops: str, stream: IO[str] | None = None, *, color: bool | None = None) -> None:
        self._level = "aten" if ops == "aten" else "api"
        self._live = LiveLog(color=color, file=stream)

    def op(self, event: LiveOpEvent) -> None:
        """Print an operation of the forward pass."""
        shown = event.level == self._level or event.flavour == "opaque"
        if shown and event.phase == "forward":
            self._live.op(
                LogOp(
                    event.name, event.flavour, self.caller(event), event.depth, event.form, event.inputs,
                    event.result, event.outputs, RAISED if event.raised else OK, self.note(event),
                    labels=self.labels(event),
                )
            )  # fmt: skip

    def caller(self, event: LiveOpEvent) -> str:
        """The innermost function of the user's code that called an operation."""
        own = [frame for frame in event.chain if not torch_file(frame.file)]
        return own[-1].function if own else ""

    def note(self, event: LiveOpEvent) -> str:  # noqa: ARG002 — subclasses use it
        """A remark after an operation; a subclass may return one."""
        return ""

    def labels(self, event: LiveOpEvent) -> tuple[str, str, str]:  # noqa: ARG002 — subclasses use it
        """The names of both sides of an operator and of its result; a subclass may read the source."""
        return "Left", "Right", "Output"

    def enter(self, event: LiveCallEvent) -> None:
        self._live.enter(_module_event(event))

    def leave(self, event: LiveCallEvent) -> None:
        self._live.exit(_module_event(event))

    def finish(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._live.note(note)


def _module_event(event: LiveCallEvent) -> LogModule:
    return LogModule(
        event.path, event.type, event.extra, event.depth, event.leaf, event.form, event.inputs, event.result,
        event.outputs, RAISED if event.raised else OK, root=event.root,
    )  # fmt: skip
