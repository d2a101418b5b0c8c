"""Notes on the user's exception: the failing op, its module and line, and where its tensors came from.

In-place modifications and out-of-memory errors have notes of their own.
"""

from __future__ import annotations

import os
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
from sightline.recording.torchapi import OpOverload, Tensor, unobserved
from sightline.tensor_memory import has_memory
from sightline.text_encoding import for_errors
from sightline.trace.data import MUTATES, TraceData
from sightline.trace.failure_causes import advice, cause_lines, numbers_origin, size_text
from sightline.trace.file_owners import cell_name, torch_file
from sightline.trace.held_memory import USES, HeldMemory, held_memory
from sightline.trace.index import Index, Op, Value
from sightline.trace.op_text import (
    api_call_of,
    argument_names,
    backward_suffix,
    location_text,
    origin_text,
    short_name,
    with_location,
)
from sightline.trace.user_frames import user_frame

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


#: What autograd says of a saved tensor that was changed.
MESSAGE: Final = "modified by an inplace operation"
_FOLDER: Final = os.path.dirname(__file__) + os.sep
_OVERLOAD_CALL: Final = OpOverload.__call__.__code__
_MAX_NODES: Final = 200_000
_MAX_CHANGES: Final = 8  # that a note lists
#: Names of saved attributes that hold what the op returned.
_RESULTS: Final = frozenset(f"{stem}{i}" for stem in ("result", "output", "out") for i in ("", 0, 1, 2, 3))


def in_place_changes(
    session: SessionBase, index: Index, raised: TracebackType | None
) -> tuple[Op, Value, list[Op]] | None:
    """The op that saved a tensor, that tensor, and the ops that changed it since; None if unknown."""
    node = _failed_node(raised)
    if node is None:
        return None
    number, attributes = node
    saver_id = session.node_ops.get(number)
    if saver_id is None:
        return None
    saver = index.ops[saver_id]
    for value in _candidates(saver, attributes):
        changes = _changes(index, value, saver_id)
        if changes:
            return saver, value, changes
    return None


def _failed_node(raised: TracebackType | None) -> tuple[int, list[str]] | None:
    """The sequence number of the node that raised, and its attributes that cannot be read."""
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
    """The nodes that the failed backward pass started from, out of the variables of torch's frame."""
    roots: list[Any] = []
    at = raised
    while at is not None:
        if at.tb_frame.f_code.co_name == "_engine_run_backward":
            outputs = at.tb_frame.f_locals.get("t_outputs", ())
            roots = [tensor.grad_fn for tensor in outputs if getattr(tensor, "grad_fn", None) is not None]
        at = at.tb_next
    return roots


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


#: The messages of allocators: ``Tried to allocate 20.00 MiB``, ``you tried to allocate 4096 bytes``.
_REQUESTED: Final = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
_CPU: Final = "DefaultCPUAllocator"
_LINES: Final = 3
_LARGEST: Final = 3


def is_out_of_memory(error: BaseException, message: str) -> bool:
    """Whether an exception says that memory has run out, on a device or on the host."""
    if issubclass(type(error), torch.OutOfMemoryError):
        return True
    return (
        issubclass(type(error), RuntimeError) and _CPU in message and _REQUESTED.search(message) is not None
    )


def out_of_memory_lines(index: Index, message: str, op: Op | None) -> list[str]:
    """The note: the size requested, by which op; the memory held, by kind and line; the largest tensors."""
    requested = _REQUESTED.search(message)
    size = _requested_text(*requested.groups()) if requested is not None else "memory"
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
    lines.append(
        f"  held now{where} by the tensors recorded: {bytes_text(whole)}: {_sizes_text(kinds, len(USES))}"
    )
    lines.append(f"  made by {_sizes_text(_bytes_by_line(index, held, now.tolist()), _LINES)}")
    largest = now[np.argsort(-held.nbytes[now], kind="stable")][:_LARGEST].tolist()
    lines += [f"  {bytes_text(int(held.nbytes[row]))} {_tensor_text(index, held, row)}" for row in largest]
    return [*lines, *_allocator(index.raw.info, device)]


def _requested_text(number: str, unit: str) -> str:
    return bytes_text(int(float(number))) if unit.lower() == "bytes" else f"{number} {unit}"


def _device(held: HeldMemory, now: Any, message: str) -> str:
    """The device that ran out: the host if the message says so, else the device that holds most."""
    if _CPU in message:
        return "cpu"
    sizes = Counter[str]()
    for name, nbytes in zip(held.device[now].tolist(), held.nbytes[now].tolist(), strict=True):
        sizes[name] += nbytes if name != "cpu" else 0
    return sizes.most_common(1)[0][0] if sizes else "cpu"


def _bytes_by_line(index: Index, held: HeldMemory, rows: list[int]) -> Counter[str]:
    sizes = Counter[str]()
    for row in rows:
        value = int(held.value[row])
        op = Value(index, value).producer if value >= 0 else None
        frame = None if op is None else user_frame(op)
        name = "what was there before" if frame is None else f"{frame.position} in {frame.function}"
        sizes[name] += int(held.nbytes[row])
    return sizes


def _sizes_text(sizes: Counter[str], count: int) -> str:
    shown = sizes.most_common(count)
    rest = sum(sizes.values()) - sum(size for _, size in shown)
    texts = [f"{name} {bytes_text(size)}" for name, size in shown]
    return ", ".join([*texts, *([f"others {bytes_text(rest)}"] if rest else [])])


def _tensor_text(index: Index, held: HeldMemory, row: int) -> str:
    if held.value[row] < 0:
        return "of an op that is no longer kept"
    value = Value(index, int(held.value[row]))
    if value.producer is None:
        return f"{value} {value.kind} {value.name}".rstrip()
    op = api_call_of(value.producer)
    return f"{value} = {with_location(short_name(op) + backward_suffix(op), op, short=True)}"


def _allocator(info: dict[str, Any], device: str) -> list[str]:
    numbers = (info.get("allocator") or {}).get(device)
    if not numbers:
        return []
    allocated, reserved = numbers["allocated"][1], numbers["reserved"][1]
    return [
        f"  the allocator of {device}: {bytes_text(allocated)} allocated, {bytes_text(reserved)} reserved"
    ]


_attributes: Final[Any] = BaseException
#: Attributes of any exception, also where its class overrides them.
traceback_of: Final[Callable[[BaseException], TracebackType | None]] = _attributes.__traceback__.__get__
_cause_of: Final[Callable[[BaseException], BaseException | None]] = _attributes.__cause__.__get__
_context_of: Final[Callable[[BaseException], BaseException | None]] = _attributes.__context__.__get__


def message_of(error: BaseException) -> str:
    """The text of an exception; if its ``str()`` fails, the text that Python prints then."""
    try:
        return f"{error}"
    except BaseException:  # a class may raise anything here, while the exception is in flight
        return "<exception str() failed>"


def exception_text(error: BaseException) -> str:
    """The exception that ended a recording, as its info stores it."""
    name, text = type(error).__name__, message_of(error)[:500]
    return f"{name}: {text}" if text else name


def fault_text(error: BaseException) -> str:
    """A fault of the recorder with its function and line, as the info of a recording stores it."""
    at = traceback_of(error)
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    location = "" if at is None else f" ({at.tb_frame.f_code.co_name}:{at.tb_lineno})"
    return f"{type(error).__name__}: {message_of(error)}{location}"


def explain(session: SessionBase, data: TraceData, error: BaseException) -> dict[str, Any]:
    """Add a note to an exception that left the block; returns what the recording stores of it."""
    data.info["exception"] = session.exception
    index = Index(data)
    inplace = issubclass(type(error), RuntimeError) and MESSAGE in message_of(error)
    changed = in_place_changes(session, index, traceback_of(error)) if inplace else None
    op = _failed_op(session, index, error)
    lines: list[str] = []
    why: list[str] = []
    if is_out_of_memory(error, message_of(error)):
        lines += out_of_memory_lines(index, message_of(error), op)
    elif changed is not None:
        lines += _in_place_lines(*changed)
    elif op is not None:
        lines.append(f"sightline: {op.name} failed{_location_text(op)}{_api_text(op)}")
        inputs = zip(argument_names(op), op.inputs, strict=False)
        lines += (f"  {name} {value} = {origin_text(value, op)}" for name, value in inputs)
        why = _index_lines(op, error) or cause_lines(op, message_of(error))
        lines += (f"  {line}" for line in why)
        if inplace and session.level == "api":
            lines.append('  record with ops="both" to see which op saved the tensor and which changed it')
    else:
        call = next((call for call in reversed(index.module_calls) if call.raised or call.unfinished), None)
        if call is not None:
            lines.append(f"sightline: raised{_raise_location(error)} ({call.module.label}), no op failed")
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
        _add_note(error, for_errors("\n".join(lines)))
    failed = op if changed is None else changed[2][0] if changed[2] else changed[0]
    location = _raise_location(error).removeprefix(" at ")
    failure = {"op": -1 if failed is None else failed.id, "place": location, "why": why}
    return {"note": "\n".join(lines), "failure": failure}


def _index_lines(op: Op, error: BaseException) -> list[str]:
    """An index that is out of range: which one, and where it was made.

    It is read from the variables of the torch function that failed, which the traceback still has.
    """
    name = op.name.partition(".")[0]
    if name not in ("embedding", "nll_loss_forward", "nll_loss2d_forward") or len(op.inputs) < 2:
        return []
    at = traceback_of(error)
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    local = {} if at is None else at.tb_frame.f_locals
    index = local.get("input" if name == "embedding" else "target")
    table, indices = (op.inputs[0], op.inputs[1])
    rows = table.shape[0] if name == "embedding" else table.shape[1 if len(table.shape) > 1 else 0]
    if type(index) is not Tensor or not index.is_cpu or not index.numel() or index.is_floating_point():
        return []
    ignored = None if name == "embedding" else local.get("ignore_index", -100)  # which is not a class
    low, high = unobserved(partial(_extremes, index, ignored))
    if low >= 0 and high < rows:
        return []
    wrong, made = high if high >= rows else low, numbers_origin(indices)
    if name == "embedding":
        return [f"index {wrong} is out of range of {origin_text(table, op)} with {rows} rows: {made}"]
    count = size_text(table, len(table.shape) > 1, rows, short=True)
    return [f"class {wrong} is out of range of {rows} classes, 0 … {rows - 1}: {made}; {count}"]


def _extremes(index: Any, ignored: Any) -> tuple[int, int]:
    if not has_memory(index):
        return 0, 0
    valid = index if ignored is None else index[index != ignored]
    return (int(valid.min()), int(valid.max())) if valid.numel() else (0, 0)


def _add_note(error: BaseException, note: str) -> None:
    try:
        BaseException.add_note(error, note)
    except AttributeError:  # a frozen dataclass
        object.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def _in_place_lines(saver: Op, value: Value, changes: list[Op]) -> list[str]:
    what = "its result" if value in list(saver.outputs) else "its input"
    saved = f"{saver.name}{_location_text(saver)} saved {what} {value}"
    lines = [f"sightline: {saved} for the backward pass; changed since by"]
    return lines + [f"  {op.name}{_location_text(op)}" for op in changes]


def _raise_location(error: BaseException) -> str:
    """The innermost line of the traceback that is not torch's own or ours."""
    location = ""
    at = traceback_of(error)
    while at is not None:
        code = at.tb_frame.f_code
        if not torch_file(code.co_filename):
            line = at.tb_lineno or code.co_firstlineno
            location = f" at {position_text(cell_name(code.co_filename), line)} in {code.co_qualname}"
        at = at.tb_next
    return location


def _failed_op(session: SessionBase, index: Index, error: BaseException | None) -> Op | None:
    """The op this exception, or one it was raised from, came out of."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if session.raised_by(error):
            raised = [op for op in index.ops[-50:] if op.raised]
            aten = [op for op in raised if op.level == "aten"]
            ops = aten or raised
            return ops[-1] if ops else None
        cause = _cause_of(error)
        error = _context_of(error) if cause is None else cause
    return None


def _location_text(op: Op) -> str:
    location = location_text(op)
    if not location:
        return ""
    return f" {location}" if location.startswith("(") else f" at {location}"


def _api_text(op: Op) -> str:
    """The function as it is written, where it has another name: ``, inside linear``."""
    name = short_name(api_call_of(op))
    return "" if name in (op.name, op.name.partition(".")[0]) else f", inside {name}"


def comes_from_a_signal(error: BaseException) -> bool:
    """Whether a signal handler raised it, while code of ours was running."""
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()} - {None}
    at = traceback_of(error) if handlers else None
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def leave_out_own_frames(error: BaseException) -> None:
    """Give an exception the traceback it would have without a recording.

    After a handler of ours, torch's ``OpOverload.__call__`` is left out too: our handler called it.
    """
    shown: list[TracebackType] = []
    at, ours = traceback_of(error), False
    while at is not None:
        code = at.tb_frame.f_code
        own = code.co_filename.startswith(_FOLDER)
        if not own and not (ours and code is _OVERLOAD_CALL):
            shown.append(at)
        at, ours = at.tb_next, own
    traceback: TracebackType | None = None
    for one in reversed(shown):
        line: int | None = one.tb_lineno  # None where a compiler gave its code no lines; stored as -1
        traceback = TracebackType(traceback, one.tb_frame, one.tb_lasti, -1 if line is None else line)
    if traceback is not None:  # else it is an error of our own
        BaseException.with_traceback(error, traceback)  # an exception may refuse to have attributes set
