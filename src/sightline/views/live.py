"""What is printed while the model runs: the same lines as the finished view, one op at a time.

A recorder makes an `OpEvent`, or anything that looks like one, for every op and hands it over; each is
written and flushed before the next runs, so that what came before a crash is on the screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from sightline.analysis.places import first_own, torch_file
from sightline.trace.forms import Form
from sightline.views.chain import ChainWriter, PlaceLike, as_line, op_spans
from sightline.views.outline import Printer


class LiveOp(Protocol):
    """An op that just ran, or just raised."""

    @property
    def name(self) -> str: ...
    @property
    def form(self) -> Form: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def output(self) -> str: ...
    @property
    def chain(self) -> Sequence[PlaceLike]: ...
    @property
    def phase(self) -> str: ...
    @property
    def raised(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OpEvent:
    """An op as plain data: ``inputs`` are the texts of its tensors, ``chain`` its frames, outermost first.

    For a backward op the chain is the one of its forward op.
    """

    name: str
    form: Form
    inputs: Sequence[str] = ()
    output: str = ""
    chain: Sequence[PlaceLike] = field(default=())
    phase: str = "forward"
    raised: bool = False


class LiveCode:
    """Prints ops under their source lines as they come, exactly as ``t.code()`` does afterwards.

    >>> import sys
    >>> live = LiveCode(sys.stdout)
    >>> live.op(OpEvent("relu", Form(()), output="f32[2]"))
    (no Python source)
    │ # relu() -> f32[2];
    """

    def __init__(
        self, stream: IO[str] | None = None, *, color: bool | None = None, torch_frames: bool = False
    ) -> None:
        self._printer = Printer(stream, color)
        self._writer = ChainWriter()
        self._torch_frames = torch_frames

    def op(self, event: LiveOp) -> None:
        """Write one op, and the source lines that differ from the op before."""
        chain = [place for place in event.chain if self._torch_frames or not torch_file(place.file)]
        chain = chain[first_own(place.file for place in chain) :]
        content = op_spans(
            event.name, event.form.fill(event.inputs), event.output, event.phase, raised=event.raised
        )
        for entry in self._writer.op(chain, event.phase, content):
            self._printer.write(as_line(entry))
        self._printer.flush()
