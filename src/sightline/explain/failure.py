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
_LAST_OPS: Final = 50  # the failing op is one of these
#: Names of saved attributes that hold a result of the op.
_RESULTS: Final = frozenset(f"{stem}{i}" for stem in ("result", "output", "out") for i in ("", 0, 1, 2, 3))
#: Ops that look up rows by an index, and the variable of torch's function that holds the index.
_LOOK_UPS: Final = {"embedding": "input", "nll_loss_forward": "target", "nll_loss2d_forward": "target"}


@dataclass(frozen=True, slots=True)
class Failure:
    """Facts about an exception that only its process knew; `sightline.recording.failures` reads them."""

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
    changed = _in_place_lines(index, failure)
    op = None
    if failure.raised_by_op:  # the last op that raised, inside an API call that raised too
        raised = [each for each in index.ops[-_LAST_OPS:] if each.raised]
        op = next(reversed([each for each in raised if each.level == "aten"] or raised), None)
    lines: list[str] = []
    why: list[str] = []
    if failure.out_of_memory:
        lines += out_of_memory_lines(index, failure.message, op)
    elif changed:
        saved, *changes = changed
        lines += [f"sightline: {saved}", *(f"  {change}" for change in changes)]
        why = [f"{saved} {', '.join(changes)}"]
    elif op is not None:
        name = short_name(api_call_of(op))  # as it is written
        inside = "" if name in (op.name, op.name.partition(".")[0]) else f", inside {name}"
        lines.append(f"sightline: {op.name} failed{_location_text(op)}{inside}")
        inputs = zip(argument_names(op), op.inputs, strict=False)
        lines += (f"  {name} {value} = {origin_text(value, op)}" for name, value in inputs)
        why = _index_lines(op, failure) or cause_lines(op, failure.message)
        lines += (f"  {line}" for line in why)
        if failure.in_place and failure.level == "api":
            # The note is stored, and may be read from Python and on the command line.
            both = 'ops="both" (--ops both)'
            lines.append(f"  record with {both} to see which op saved the tensor and which changed it")
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


# -- a saved tensor that was changed -----------------------------------------------------------------------


def _in_place_lines(index: Index, failure: Failure) -> list[str]:
    """The op that saved a tensor for the backward pass, then the ops that changed it; none if unknown."""
    if failure.saver is None:
        return []
    saver, attributes = index.ops[failure.saver[0]], failure.saver[1]
    for value in _saved_values(saver, attributes):
        changes = _changes(index, value, saver.id)
        if changes:
            saved = f"its result {value}"
            if value not in list(saver.outputs):
                saved = f"its input {value} ({origin_text(value, saver)})"
            head = (
                f"{saver.name}{_location_text(saver)} saved {saved} for the backward pass; changed since by"
            )
            return [head, *(f"{op.name}{_location_text(op)}" for op in changes)]
    return []


def _saved_values(saver: Op, attributes: list[str]) -> Iterator[Value]:
    """The values that an op may have saved, the likeliest first."""
    if any(name in _RESULTS for name in attributes):
        yield from saver.outputs
    args = saver.args
    yield from (value for name in attributes if isinstance(value := args.get(name), Value))
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


# -- an index out of range ---------------------------------------------------------------------------------


def _index_lines(op: Op, failure: Failure) -> list[str]:
    """The index that is out of range, and its origin."""
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
    wrong, origin = high if high >= rows else low, numbers_origin(indices)
    if variable == "input":
        return [f"index {wrong} is out of range of {origin_text(table, op)} with {rows} rows: {origin}"]
    count = size_text(table, classes_at, rows, short=True)
    return [f"class {wrong} is out of range of {rows} classes, 0 … {rows - 1}: {origin}; {count}"]


# -- text --------------------------------------------------------------------------------------------------


def _location_text(op: Op) -> str:
    location = location_text(op)
    if not location:
        return ""
    return f" {location}" if location.startswith("(") else f" at {location}"
