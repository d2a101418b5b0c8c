"""How far the results of paired module calls are apart, in the order of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sightline.diff.alignment import Alignment
from sightline.diff.values import State


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A pair of module calls and how far what they return is apart."""

    call_a: int
    call_b: int
    a: str
    b: str
    type_a: str
    type_b: str
    depth: int
    state: State
    error: float  #: NaN where nothing was measured

    @property
    def name(self) -> str:
        """The path, both where they differ."""
        return self.a if self.a == self.b else f"{self.a} | {self.b}"

    def to_dict(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "call_a": self.call_a, "call_b": self.call_b,
                "state": self.state.name.lower(),
                "error": self.error if math.isfinite(self.error) else None}  # fmt: skip


def module_rows(made: Alignment) -> list[ModuleRow]:
    """A row for each pair of calls, in the order in which they ended."""
    a, b = made.a, made.b
    order, depths = a.data.calls.order, a.index.call_depths
    rows = []
    for x, y in enumerate(made.calls.of_a.tolist()):
        if y < 0:
            continue
        state, error = State.UNKNOWN, math.nan
        for one, other in zip(*made.exchanged(x, y, "outputs"), strict=False):
            verdict = made.compare(one, other)
            if verdict.state >= state and not (verdict.error <= error):
                error = verdict.error
            state = max(state, verdict.state)
        one_, other_ = a.module(x), b.module(y)
        rows.append(
            (
                int(order[x]),
                ModuleRow(x, y, a.label(x), b.label(y), one_.type, other_.type, depths[x], state, error),
            )
        )
    return [row for _, row in sorted(rows, key=lambda each: each[0])]
