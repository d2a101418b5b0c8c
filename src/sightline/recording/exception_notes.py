"""Notes on the user's exception: the failing op, its module and line, and where its tensors came from.

In-place modifications and out-of-memory errors have notes of their own.
"""

from __future__ import annotations

import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sightline.notation import bytes_text, position_text
from sightline.recording.torchapi import Tensor, undisturbed
from sightline.trace.causes import advice, cause_lines, numbers_origin, size_text
from sightline.trace.data import MUTATES, TraceData
from sightline.trace.held_memory import USES, HeldMemory, held_memory
from sightline.trace.index import Index, Op, Value
from sightline.trace.source_files import cell_name, torch_file
from sightline.trace.user_frames import (
    api_call_of,
    argument_names,
    backward_suffix,
    location_text,
    origin_text,
    short_name,
    user_frame,
    with_location,
)

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


#: What allocators say: ``Tried to allocate 20.00 MiB``, ``you tried to allocate 4096 bytes``.
_ASKED: Final = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
_CPU: Final = "DefaultCPUAllocator"
_LINES: Final = 3
_LARGEST: Final = 3


def is_out_of_memory(error: BaseException, message: str) -> bool:
    """Whether an exception says that memory has run out, on a device or on the host."""
    if issubclass(type(error), torch.OutOfMemoryError):
        return True
    return issubclass(type(error), RuntimeError) and _CPU in message and _ASKED.search(message) is not None


def out_of_memory_lines(index: Index, message: str, op: Op | None) -> list[str]:
    """The note: what was asked, by which op, what is held, by kind and by line, and the largest tensors."""
    asked = _ASKED.search(message)
    size = _size_text(*asked.groups()) if asked is not None else "memory"
    by = "" if op is None else f" by {with_location(short_name(op), op)}"
    lines = [f"sightline: out of memory: {size} was asked for{by}"]
    held = held_memory(index.raw)
    now = np.flatnonzero(held.end >= held.over)
    device = _device(held, now, message)
    now = now[held.device[now] == device]
    if not len(now):
        return [*lines, "  nothing is held by the tensors of this recording"]
    whole = int(held.nbytes[now].sum())
    where = "" if device == "cpu" else f" on {device}"
    kinds = Counter[str]()
    for use, nbytes in zip(held.use[now].tolist(), held.nbytes[now].tolist(), strict=True):
        kinds[USES[use]] += nbytes
    lines.append(f"  held now{where} by the tensors recorded: {bytes_text(whole)}: {_listed(kinds, 5)}")
    lines.append(f"  made by {_listed(_lines(index, held, now.tolist()), _LINES)}")
    largest = now[np.argsort(-held.nbytes[now], kind="stable")][:_LARGEST].tolist()
    lines += [f"  {bytes_text(int(held.nbytes[row]))} {_told(index, held, row)}" for row in largest]
    return [*lines, *_allocator(index.raw.info, device)]


def _size_text(number: str, unit: str) -> str:
    return bytes_text(int(float(number))) if unit.lower() == "bytes" else f"{number} {unit}"


def _device(held: HeldMemory, now: Any, message: str) -> str:
    """The device that has none left: the one of ours that holds most, the host where it says so."""
    if _CPU in message:
        return "cpu"
    there = Counter[str]()
    for name, nbytes in zip(held.device[now].tolist(), held.nbytes[now].tolist(), strict=True):
        there[name] += nbytes if name != "cpu" else 0
    return there.most_common(1)[0][0] if there else "cpu"


def _lines(index: Index, held: HeldMemory, rows: list[int]) -> Counter[str]:
    found = Counter[str]()
    for row in rows:
        value = int(held.value[row])
        op = Value(index, value).producer if value >= 0 else None
        frame = None if op is None else user_frame(op)
        name = "what was there before" if frame is None else f"{frame.position} in {frame.function}"
        found[name] += int(held.nbytes[row])
    return found


def _listed(sizes: Counter[str], count: int) -> str:
    shown = sizes.most_common(count)
    rest = sum(sizes.values()) - sum(size for _, size in shown)
    told = [f"{name} {bytes_text(size)}" for name, size in shown]
    return ", ".join([*told, *([f"others {bytes_text(rest)}"] if rest else [])])


def _told(index: Index, held: HeldMemory, row: int) -> str:
    if held.value[row] < 0:
        return "of an op that is no longer kept"
    value = Value(index, int(held.value[row]))
    if value.producer is None:
        return f"{value} {value.kind} {value.name}".rstrip()
    made = api_call_of(value.producer)
    return f"{value} = {with_location(short_name(made) + backward_suffix(made), made, short=True)}"


def _allocator(info: dict[str, Any], device: str) -> list[str]:
    numbers = (info.get("allocator") or {}).get(device)
    if not numbers:
        return []
    allocated, reserved = numbers["allocated"][1], numbers["reserved"][1]
    return [
        f"  the allocator of {device}: {bytes_text(allocated)} allocated, {bytes_text(reserved)} reserved"
    ]


_of: Final[Any] = BaseException
#: Attributes of any exception, past whatever its class puts in their way.
traceback_of: Final[Callable[[BaseException], TracebackType | None]] = _of.__traceback__.__get__
_cause_of: Final[Callable[[BaseException], BaseException | None]] = _of.__cause__.__get__
_context_of: Final[Callable[[BaseException], BaseException | None]] = _of.__context__.__get__


def message_of(error: BaseException) -> str:
    """What an exception says; one that cannot say it is told as Python tells it."""
    try:
        return f"{error}"
    except BaseException:  # a class may raise anything here, and an exception is on its way already
        return "<exception str() failed>"


def exception_text(error: BaseException) -> str:
    """What a recording says of the exception that ended it."""
    name, text = type(error).__name__, message_of(error)[:500]
    return f"{name}: {text}" if text else name


def fault_text(error: BaseException) -> str:
    """What a recording says of a fault of the recorder, with its place."""
    at = traceback_of(error)
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = "" if at is None else f" ({at.tb_frame.f_code.co_name}:{at.tb_lineno})"
    return f"{type(error).__name__}: {message_of(error)}{place}"


def explain(session: SessionBase, data: TraceData, error: BaseException) -> dict[str, Any]:
    """Add a note to an exception that left the block; returns what the recording keeps of it."""
    data.info["exception"] = session.exception
    index = Index(data)
    inplace = issubclass(type(error), RuntimeError) and MESSAGE in message_of(error)
    changed = culprits(session, index, traceback_of(error)) if inplace else None
    op = _failed_op(session, index, error)
    lines: list[str] = []
    why: list[str] = []
    if is_out_of_memory(error, message_of(error)):
        lines += out_of_memory_lines(index, message_of(error), op)
    elif changed is not None:
        lines += _changed_in_place(*changed)
    elif op is not None:
        lines.append(f"sightline: {op.name} failed{_where(op)}")
        given = zip(argument_names(op), op.inputs, strict=False)
        lines += (f"  {name} {value} = {origin_text(value, op)}" for name, value in given)
        why = _indices(op, error) or cause_lines(op, message_of(error))
        lines += (f"  {line}" for line in why)
        if inplace and session.level == "api":
            lines.append('  record with ops="both" to see which op saved the tensor and which changed it')
    else:
        call = next((call for call in reversed(index.module_calls) if call.raised or call.unfinished), None)
        if call is not None:
            lines.append(f"sightline: raised{_raised_at(error)} ({call.module.label}), no op failed")
        why = advice(message_of(error))
        if call is not None and why:
            tensors = [str(value) for value in call.inputs if value.shape]
            lines.append(f"  it was given {', '.join(tensors[:4])}")
        lines += (f"  {line}" for line in why)
    if issubclass(type(error), RecursionError):
        lines.append(
            "sightline: while something records, torch puts one more function on the stack for every module "
            "call;\n  if it fails only then, raise the limit: "
            f"sys.setrecursionlimit({2 * sys.getrecursionlimit()})"
        )
    if lines:
        _add_note(error, "\n".join(lines))
    failed = op if changed is None else changed[2][0] if changed[2] else changed[0]
    kept = {"op": -1 if failed is None else failed.id, "place": _raised_at(error).removeprefix(" at ")}
    return {"note": "\n".join(lines), "failure": {**kept, "why": why}}


def _indices(op: Op, error: BaseException) -> list[str]:
    """An index that points past the end of what it is looked up in: which one, and where it was made.

    Its number is read from the variables of the torch function that failed, which the traceback still has.
    """
    name = op.name.partition(".")[0]
    if name not in ("embedding", "nll_loss_forward", "nll_loss2d_forward") or len(op.inputs) < 2:
        return []
    at = traceback_of(error)
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    held = {} if at is None else at.tb_frame.f_locals
    index = held.get("input" if name == "embedding" else "target")
    table, given = (op.inputs[0], op.inputs[1])
    rows = table.shape[0] if name == "embedding" else table.shape[1 if len(table.shape) > 1 else 0]
    if type(index) is not Tensor or not index.is_cpu or not index.numel() or index.is_floating_point():
        return []
    # What is to be ignored is no class.
    ignored = None if name == "embedding" else held.get("ignore_index", -100)
    low, high = undisturbed(partial(_extremes, index, ignored))
    if low >= 0 and high < rows:
        return []
    wrong, made = high if high >= rows else low, numbers_origin(given)
    if name == "embedding":
        return [f"index {wrong} is out of range of {origin_text(table, op)} with {rows} rows: {made}"]
    count = size_text(table, len(table.shape) > 1, rows, short=True)
    return [f"class {wrong} is out of range of {rows} classes, 0 … {rows - 1}: {made}; {count}"]


def _extremes(index: Any, ignored: Any) -> tuple[int, int]:
    kept = index if ignored is None else index[index != ignored]
    return (int(kept.min()), int(kept.max())) if kept.numel() else (0, 0)


def _add_note(error: BaseException, note: str) -> None:
    try:
        BaseException.add_note(error, note)
    except AttributeError:  # a frozen dataclass
        object.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def _changed_in_place(saver: Op, value: Value, changes: list[Op]) -> list[str]:
    what = "its result" if value in list(saver.outputs) else "its input"
    lines = [
        f"sightline: {saver.name}{_where(saver)} saved {what} {value} for the backward pass; changed since by"
    ]
    lines += (f"  {op.name}{_where(op)}" for op in changes)
    return lines


def _raised_at(error: BaseException) -> str:
    """The innermost line of the traceback that is not torch's own or ours."""
    place = ""
    at = traceback_of(error)
    while at is not None:
        code = at.tb_frame.f_code
        if not torch_file(code.co_filename):
            line = at.tb_lineno or code.co_firstlineno
            place = f" at {position_text(cell_name(code.co_filename), line)} in {code.co_qualname}"
        at = at.tb_next
    return place


def _failed_op(session: SessionBase, index: Index, error: BaseException | None) -> Op | None:
    """The op this exception, or one it was raised from, came out of."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if session.raised_by(error):
            raised = [op for op in index.ops[-50:] if op.raised]
            aten = [op for op in raised if op.level == "aten"]
            found = aten or raised
            return found[-1] if found else None
        cause = _cause_of(error)
        error = _context_of(error) if cause is None else cause
    return None


def _where(op: Op) -> str:
    place = location_text(op)
    return f" at {place}" if place and not place.startswith("(") else f" {place}" if place else ""


def comes_from_a_signal(error: BaseException) -> bool:
    """Whether a signal handler has raised it, which ran inside code of ours."""
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()} - {None}
    at = traceback_of(error) if handlers else None
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False
