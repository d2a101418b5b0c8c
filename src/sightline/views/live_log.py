"""`LiveLog`: the blocks of ``log()`` printed while the model runs.

Whoever watches the run (the recorder) calls `enter`, `exit` and `op` with plain events. A container is
printed at its entry and a leaf at its exit; every block is flushed, so that what came before a crash is
on the screen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import IO

from sightline.views.blocks import BlockStyle, ModuleEvent, OpEvent
from sightline.views.outline import Line, Printer


class LiveLog:
    """Prints module calls and operations as they happen.

    >>> from sightline.trace.data import TensorMeta
    >>> from sightline.trace.forms import ONE_TENSOR
    >>> x = TensorMeta((2, 6), None, "float32", "cpu")
    >>> log = LiveLog()
    >>> call = ModuleEvent("fc", "Linear", "in_features=6", 0, True, ONE_TENSOR, (x,), outputs=(x,))
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
        self._leaves = 0  # leaf calls that are running: what happens inside them is not printed
        self._last: int | None = None  # depth of what was printed last

    def start(self) -> None:
        """Print the first banner."""
        if self._title is not None:
            self._print([self._style.banner(f"TRACING {self._title} STARTED")])
            self._last = 0

    def stop(self) -> None:
        """Print the last banner."""
        if self._title is not None:
            self._print([self._style.rail(0), self._style.banner(f"TRACING {self._title} COMPLETE")])

    def enter(self, event: ModuleEvent) -> None:
        """A module call begins: a container is printed, a leaf waits for its end."""
        if self._opens(event):
            if not self._leaves and self._shown(event):
                event = self._placed(event)
                self._block(event.depth, self._style.opened(event))
        else:
            self._leaves += 1

    def exit(self, event: ModuleEvent) -> None:
        """A module call ended; ``event`` has its outputs, or the state it ended in."""
        if self._opens(event):
            if not self._leaves and self._shown(event):
                event = self._placed(event)
                self._block(event.depth, self._style.closed(event))
            return
        self._leaves -= 1
        if not self._leaves:
            event = self._placed(event)
            self._block(event.depth, self._style.leaf(event))

    def op(self, event: OpEvent) -> None:
        """An operation ended; inside a leaf it is not worth a block."""
        if self._leaves:
            return
        if not self._root and event.depth:
            event = replace(event, depth=event.depth - 1)
        self._block(event.depth, self._style.op(event))

    def _opens(self, event: ModuleEvent) -> bool:
        return self._inside or not event.leaf

    def _shown(self, event: ModuleEvent) -> bool:
        return self._root or event.depth > 0

    def _placed(self, event: ModuleEvent) -> ModuleEvent:
        """With the root left out, everything moves up by one."""
        return replace(event, depth=event.depth - 1) if not self._root and event.depth else event

    def _block(self, depth: int, lines: list[Line]) -> None:
        rail = [] if self._last is None else [self._style.rail(min(self._last, depth))]
        self._last = depth
        self._print([*rail, *lines])

    def _print(self, lines: list[Line]) -> None:
        for each in lines:
            self._printer.write(each)
        self._printer.flush()
