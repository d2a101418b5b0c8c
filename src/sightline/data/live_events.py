"""Events of a recording in progress, as plain data, for the live views.

The recorder makes one event per op and two per module call. Events are not stored; a finished trace has its
own tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sightline.data.forms import Form
from sightline.data.trace_data import TensorMeta


@dataclass(frozen=True, slots=True)
class SourceFrame:
    """A source position on the way to an op; ``call`` is the module call entered from there, or -1."""

    file: str
    line: int
    end_line: int
    function: str
    code: str
    columns: tuple[int, int] | None
    call: int = -1
    indent: int = -1  #: bytes before the code in its line; -1 if not known


@dataclass(frozen=True, slots=True)
class LiveOpEvent:
    """An op that just ran, or just raised."""

    name: str
    level: str
    flavour: str
    phase: str
    form: Form
    inputs: Sequence[TensorMeta]
    result: Form
    outputs: Sequence[TensorMeta]
    chain: Sequence[SourceFrame]  #: outermost first; for a backward op the chain of its forward op
    depth: int  #: module calls it runs inside
    raised: bool = False


@dataclass(frozen=True, slots=True)
class LiveCallEvent:
    """A module call that begins or ends."""

    path: str  #: ``blocks.0.attn``; the class name for a root
    type: str
    extra: str
    depth: int
    leaf: bool  #: has no modules inside
    root: bool
    form: Form
    inputs: Sequence[TensorMeta]
    result: Form
    outputs: Sequence[TensorMeta] = ()
    raised: bool = False
    library: bool = False  #: its class is torch's own


class Watcher(Protocol):
    """Receives the events of a recording in progress."""

    def op(self, event: LiveOpEvent) -> None: ...
    def enter(self, event: LiveCallEvent) -> None: ...
    def leave(self, event: LiveCallEvent) -> None: ...
    def finish(self, notes: Sequence[str]) -> None: ...
