"""Running an exported graph node by node: every op through its own target, nothing re-implemented.

A `Pass` is one pass over a `Plan`: what is kept, edited, taken from an earlier run, streamed, freed. A `Run`
is what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from sightline.analysis.select import nearest
from sightline.errors import NoSuchNode, UsageError
from sightline.given import said
from sightline.graph.exported.plan import Plan, Step, poured
from sightline.graph.exported.snapshots import Snapshots
from sightline.notation import tensor_text

#: Stands for a value that is not there; None is a value.
NOTHING: Final = object()


class NodeIO(NamedTuple):
    """What went into a node, in the order of its arguments, and what came out.

    >>> NodeIO((1, 2), 3).outputs
    3
    """

    inputs: tuple[Any, ...]
    outputs: Any


class Run(Mapping[str, NodeIO]):
    """What every node took and made in one run, in the order they ran; ``.output`` is the model's.

    >>> import torch
    >>> from sightline.graph.exported import export
    >>> io = export(torch.nn.ReLU(), torch.tensor([[-1.0, 2.0]])).run(torch.tensor([[3.0, -4.0]]))
    >>> list(io), io["relu"].outputs, io.output
    (['input', 'relu', 'output'], tensor([[3., 0.]]), tensor([[3., 0.]]))
    """

    def __init__(self, plan: Plan, records: list[Any], inputs: list[Any], output: Any, stopped: str) -> None:
        self._plan = plan
        self._records = records
        self._inputs = inputs
        self._output = output
        self._stopped = stopped

    @property
    def output(self) -> Any:
        """What the model returns, in its own structure."""
        if self._stopped:
            raise UsageError(
                f"This run stopped after {self._stopped!r}, as `until=` asked: it has no output."
            )
        return self._output

    def __getitem__(self, name: str) -> NodeIO:
        position = self._position(name)
        if position is None:
            raise NoSuchNode(f"This graph has no node {said(name)}{nearest(said(name), self._plan.index)}")
        outputs = self._records[position]
        if outputs is NOTHING:
            raise NoSuchNode(f"The values of {name!r} were not kept: `keep=` and `until=` say which are.")
        inputs = self._inputs[position]
        if inputs is None:
            inputs = tuple(self._records[source] for source in self._plan.steps[position].sources)
        return NodeIO(inputs, outputs)

    def __iter__(self) -> Iterator[str]:
        for step, record in zip(self._plan.steps, self._records, strict=True):
            if record is not NOTHING:
                yield step.name

    def __len__(self) -> int:
        return sum(record is not NOTHING for record in self._records)

    def __contains__(self, name: object) -> bool:
        position = self._position(name)
        return position is not None and self._records[position] is not NOTHING

    def _position(self, name: object) -> int | None:
        return self._plan.index.get(name) if isinstance(name, str) else None

    def __repr__(self) -> str:
        stopped = f", stopped after {self._stopped!r}" if self._stopped else ""
        return f"<Run: {len(self)} of {len(self._plan.steps)} nodes{stopped}>"


OnNode = Callable[[str, tuple[Any, ...], Any], None]
Edit = Callable[[Any], Any]


@dataclass
class Pass:
    """One pass over a plan, and what is asked of it."""

    plan: Plan
    starts: dict[int, Any]  #: the values of the input steps
    finish: Callable[[tuple[Any, ...]], Any]  #: from the flat results to the model's output
    keep: frozenset[int] | None = None  #: None: everything
    until: int | None = None
    on_node: OnNode | None = None
    edits: dict[int, Any] = field(default_factory=dict)
    given: Run | None = None
    explain: Callable[[str], str] = str  #: a node's name -> what to add to an error in it

    def run(self) -> Run:
        """Run what must be run, in order."""
        steps, keep = self.plan.steps, self.keep
        values: list[Any] = [NOTHING] * len(steps)
        records: list[Any] = [NOTHING] * len(steps)
        inputs: list[Any] = [None] * len(steps)
        wanted = self._reused(values, records, inputs)
        recorder = Snapshots(records, inputs) if self.plan.in_place else None
        explicit = keep is not None or recorder is not None  # inputs cannot be looked up afterwards
        frees = keep is not None and self.given is None
        on_node, edits, output = self.on_node, self.edits, None
        for position, step in enumerate(steps):
            if wanted is not None and position not in wanted:
                continue
            took = None
            if recorder is not None and step.writes:
                took = recorder.before_write(step, values)
            try:
                value, output = self._value(position, step, values, output)
            except Exception as error:
                error.add_note(self._note(step, values))
                raise
            if position in edits:
                value = _edited(edits[position], value, self.plan.in_place)
            values[position] = value
            kept = keep is None or position in keep
            if on_node is not None:
                shown = output if step.kind == "output" else value
                on_node(step.name, took or tuple([values[source] for source in step.sources]), shown)
            if kept:
                records[position] = output if step.kind == "output" else value
                if explicit:
                    inputs[position] = took or tuple([values[source] for source in step.sources])
                    if recorder is not None:
                        recorder.recorded(position)
            if frees:
                for source in step.frees:
                    values[source] = NOTHING
            if position == self.until:
                break
        stopped = "" if self.until is None or steps[self.until].kind == "output" else steps[self.until].name
        return Run(self.plan, records, inputs, output, stopped)

    def _value(self, position: int, step: Step, values: list[Any], output: Any) -> tuple[Any, Any]:
        if step.kind == "call":
            edit = self.edits.get(position, NOTHING)
            if edit is not NOTHING and not callable(edit) and not step.writes:
                return None, output  # it will be replaced whatever it is
            return step.call(values), output
        if step.kind == "input":
            return self.starts[position], output
        results = tuple(poured(step.args[0], values))
        return results, self.finish(results)

    def _reused(self, values: list[Any], records: list[Any], inputs: list[Any]) -> set[int] | None:
        """Take over what an earlier run knows; which steps are left to run. None: all."""
        if self.given is None or self.plan.in_place:
            return None
        steps = self.plan.steps
        affected = set(self.edits)
        for position, step in enumerate(steps):
            if not affected.isdisjoint(step.sources):
                affected.add(position)
        affected.add(len(steps) - 1)
        wanted: set[int] = set()
        waiting = list(affected)
        while waiting:
            position = waiting.pop()
            if position not in wanted:
                wanted.add(position)
                waiting += [
                    source
                    for source in steps[position].sources
                    if source not in affected and self.given._records[source] is NOTHING
                ]
        for position in range(len(steps)):
            if position not in wanted:
                values[position] = self.given._records[position]
                if self.keep is None or position in self.keep:
                    records[position] = values[position]
                    inputs[position] = self.given._inputs[position]
        return wanted

    def _note(self, step: Step, values: list[Any]) -> str:
        texts = ", ".join(_short(values[source]) for source in step.sources)
        place = self.explain(step.name)
        edited = [repr(self.plan.steps[source].name) for source in step.sources if source in self.edits]
        after = f"; {' and '.join(edited)} had been edited" if edited else ""
        return f"In the node {step.name!r} of the exported graph{place}, given {texts or 'nothing'}{after}."


def _edited(edit: Any, value: Any, in_place: bool) -> Any:
    """The value an edit puts in the place of another; a callable that returns None has only looked."""
    if callable(edit):
        new = edit(value)
        return value if new is None else new
    return edit.clone() if in_place and isinstance(edit, torch.Tensor) else edit


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(tuple(value.shape), str(value.dtype), str(value.device))
    text = repr(value)
    return text if len(text) < 40 else type(value).__name__
