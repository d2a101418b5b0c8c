"""The note on the user's exception: the failing op, its module and line, and where its tensors came from.

In-place modifications and out-of-memory errors have notes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sightline.analysis.op_text import api_call_of, argument_names, location_text, origin_text, short_name
from sightline.data.index import Index, Op, Value
from sightline.data.trace_data import MUTATES
from sightline.explain.failure_causes import advice, cause_lines, numbers_origin, size_text
from sightline.explain.out_of_memory import out_of_memory_lines

_MAX_CHANGES: Final = 8  # that a note lists
_LAST_OPS: Final = 50  # among which the failing one is
#: Names of saved attributes that hold what the op returned.
_RESULTS: Final = frozenset(f"{stem}{i}" for stem in ("result", "output", "out") for i in ("", 0, 1, 2, 3))
#: Ops that look up rows by an index, and the variable of torch's function that holds the index.
_LOOK_UPS: Final = {"embedding": "input", "nll_loss_forward": "target", "nll_loss2d_forward": "target"}


@dataclass(frozen=True, slots=True)
class Failure:
    """The facts about an exception that only its process knew; `sightline.recording.failures` reads them."""

    message: str
    location: str = ""  #: the innermost line that is not torch's: ``net.py:9 in Net.forward``
    raised_by_op: bool = False
    level: str = "both"  #: the ``ops=`` of the recording
    in_place: bool = False  #: autograd says that a saved tensor was changed
    saver: tuple[int, list[str]] | None = None  #: the op that saved it, and the names it was saved under
    out_of_memory: bool = False
    #: The smallest and largest index that torch's function was given, by its variable.
    index_ranges: dict[str, tuple[int, int]] | None = None
    recursion_limit: int | None = None  #: of a RecursionError


def explain_failure(index: Index, failure: Failure) -> dict[str, Any]:
    """The note on an exception, and the facts that views read, as the info of the recording stores them."""
    changed = _in_place_changes(index, failure)
    op = _failed_op(index) if failure.raised_by_op else None
    lines: list[str] = []
    why: list[str] = []
    if failure.out_of_memory:
        lines += out_of_memory_lines(index, failure.message, op)
    elif changed is not None:
        saved, *changes = _in_place_lines(*changed)
        lines += [f"sightline: {saved}", *(f"  {change}" for change in changes)]
        why = [f"{saved} {', '.join(changes)}"]
    elif op is not None:
        lines.append(f"sightline: {op.name} failed{_location_text(op)}{_api_text(op)}")
        inputs = zip(argument_names(op), op.inputs, strict=False)
        lines += (f"  {name} {value} = {origin_text(value, op)}" for name, value in inputs)
        why = _index_lines(op, failure) or cause_lines(op, failure.message)
        lines += (f"  {line}" for line in why)
        if failure.in_place and failure.level == "api":
            lines.append('  record with ops="both" to see which op saved the tensor and which changed it')
    else:
        call = next((call for call in reversed(index.module_calls) if call.raised or call.unfinished), None)
        if call is not None:
            at = f" at {failure.location}" if failure.location else ""
            lines.append(f"sightline: raised{at} ({call.module.label}), no op failed")
        why = advice(failure.message)
        if call is not None and why:
            tensors = [str(value) for value in call.inputs if value.shape]
            lines.append(f"  it was given {', '.join(tensors[:4])}")
        lines += (f"  {line}" for line in why)
    if failure.recursion_limit is not None:
        lines.append(
            "sightline: while something records, torch puts one more function on the stack for every module "
            "call;\n  if it fails only then, raise the limit: "
            f"sys.setrecursionlimit({2 * failure.recursion_limit})"
        )
    facts = {"op": -1 if op is None else op.id, "place": failure.location, "why": why}
    return {"note": "\n".join(lines), "failure": facts}


def _failed_op(index: Index) -> Op | None:
    """The last op that raised, inside an API call that raised too."""
    raised = [op for op in index.ops[-_LAST_OPS:] if op.raised]
    ops = [op for op in raised if op.level == "aten"] or raised
    return ops[-1] if ops else None


# -- a saved tensor that was changed -----------------------------------------------------------------------


def _in_place_changes(index: Index, failure: Failure) -> tuple[Op, Value, list[Op]] | None:
    """The op that saved a tensor, that tensor, and the ops that changed it since; None if unknown."""
    if failure.saver is None:
        return None
    saver, attributes = index.ops[failure.saver[0]], failure.saver[1]
    for value in _candidates(saver, attributes):
        changes = _changes(index, value, saver.id)
        if changes:
            return saver, value, changes
    return None


def _candidates(saver: Op, attributes: list[str]) -> Iterator[Value]:
    """The values that an op may have saved, the likeliest first."""
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
    changes = []
    for op in later[later > after].tolist():
        outputs = data.ops.outputs[data.ops.output_offsets[op] : data.ops.output_offsets[op + 1]]
        if (data.values.storage[outputs] == value.storage).any() and value.storage >= 0:
            changes.append(index.ops[op])
    return changes[:_MAX_CHANGES]


def _in_place_lines(saver: Op, value: Value, changes: list[Op]) -> list[str]:
    saved = f"its result {value}"
    if value not in list(saver.outputs):
        saved = f"its input {value} ({origin_text(value, saver)})"
    head = f"{saver.name}{_location_text(saver)} saved {saved} for the backward pass; changed since by"
    return [head, *(f"{op.name}{_location_text(op)}" for op in changes)]


# -- an index out of range ---------------------------------------------------------------------------------


def _index_lines(op: Op, failure: Failure) -> list[str]:
    """An index that is out of range: which one, and where it was made."""
    variable = _LOOK_UPS.get(op.name.partition(".")[0])
    given = (failure.index_ranges or {}).get(variable or "")
    if given is None or len(op.inputs) < 2:
        return []
    table, indices = op.inputs[0], op.inputs[1]
    classes_at = 0 if variable == "input" or len(table.shape) < 2 else 1
    low, high = given
    rows = table.shape[classes_at]
    if low >= 0 and high < rows:
        return []
    wrong, made = high if high >= rows else low, numbers_origin(indices)
    if variable == "input":
        return [f"index {wrong} is out of range of {origin_text(table, op)} with {rows} rows: {made}"]
    count = size_text(table, classes_at, rows, short=True)
    return [f"class {wrong} is out of range of {rows} classes, 0 … {rows - 1}: {made}; {count}"]


# -- text --------------------------------------------------------------------------------------------------


def _location_text(op: Op) -> str:
    location = location_text(op)
    if not location:
        return ""
    return f" {location}" if location.startswith("(") else f" at {location}"


def _api_text(op: Op) -> str:
    """The function as it is written, where it has another name: ``, inside linear``."""
    name = short_name(api_call_of(op))
    return "" if name in (op.name, op.name.partition(".")[0]) else f", inside {name}"
