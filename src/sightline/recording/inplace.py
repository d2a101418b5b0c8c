"""The two lines behind "one of the variables needed for gradient computation has been modified by an inplace
operation": the op that saved the tensor, and the ops that changed it since.

Nothing is watched for it. After the exception the autograd graph is still there, and a node that was not run
yet refuses to hand out a saved tensor that was changed: the last such node is the one that raised. The
recording knows which op made the node, and every version of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sightline.trace.data import MUTATES
from sightline.trace.tables import Index, Op, Value

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

#: What autograd says of a saved tensor that was changed.
MESSAGE: Final = "modified by an inplace operation"
_MAX_NODES: Final = 200_000
_SHOWN: Final = 8  # changes told
#: Saved under these names is what the op returned.
_RESULTS: Final = frozenset(f"{stem}{i}" for stem in ("result", "output", "out") for i in ("", 0, 1, 2, 3))


def culprits(
    session: SessionBase, index: Index, raised: TracebackType | None
) -> tuple[Op, Value, list[Op]] | None:
    """The op that saved the tensor, what it saved, and the ops that changed it since; None if unknown."""
    found = _refusing_node(raised)
    if found is None:
        return None
    number, attributes = found
    saver_id = session.node_ops.get(number)
    if saver_id is None:
        return None
    saver = index.ops[saver_id]
    for value in _candidates(saver, attributes):
        changes = _changes(index, value, saver_id)
        if changes:
            return saver, value, changes
    return None


def _refusing_node(raised: TracebackType | None) -> tuple[int, list[str]] | None:
    """The sequence number of the node that raised, and the attributes it could not hand out."""
    best: tuple[int, list[str]] | None = None
    for node in _nodes(_roots(raised)):
        saved = [name for name in dir(node) if name.startswith(("_saved_", "saved_tensors"))]
        refused = [name for name in saved if _refuses(node, name)]
        if refused and (best is None or node._sequence_nr() > best[0]):
            best = node._sequence_nr(), [name.removeprefix("_saved_") for name in refused]
    return best


def _refuses(node: Any, name: str) -> bool:
    try:
        getattr(node, name)
    except Exception as refusal:
        return MESSAGE in str(refusal)
    return False


def _roots(raised: TracebackType | None) -> list[Any]:
    """What the backward pass that raised was started from: torch's own frame still knows it."""
    found: list[Any] = []
    at = raised
    while at is not None:
        if at.tb_frame.f_code.co_name == "_engine_run_backward":
            given = at.tb_frame.f_locals.get("t_outputs", ())
            found = [tensor.grad_fn for tensor in given if getattr(tensor, "grad_fn", None) is not None]
        at = at.tb_next
    return found


def _nodes(roots: list[Any]) -> Iterator[Any]:
    seen = set(roots)
    waiting = list(roots)
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.pop()
        yield node
        with suppress(RuntimeError):
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    waiting.append(below)


def _candidates(saver: Op, attributes: list[str]) -> Iterator[Value]:
    """What the op may have saved, the likeliest first."""
    if any(name in _RESULTS for name in attributes):
        yield from saver.outputs
    named = saver.args
    for name in attributes:
        value = named.get(name)
        if isinstance(value, Value):
            yield value
    yield from saver.inputs
    yield from saver.outputs


def _changes(index: Index, value: Value, after: int) -> list[Op]:
    """The aten ops that changed the memory of a value after an op, in order."""
    data = index.raw
    later = np.flatnonzero((data.ops.flags & MUTATES).astype(bool))
    found = []
    for op in later[later > after].tolist():
        made = data.ops.outputs[data.ops.output_offsets[op] : data.ops.output_offsets[op + 1]]
        if (data.values.storage[made] == value.storage).any() and value.storage >= 0:
            found.append(index.ops[op])
    return found[:_SHOWN]
