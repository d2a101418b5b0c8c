"""What an exception gains: the failing op, its module and line, and where each of its tensors came from.

An exception is an object of the user's: its methods and attributes may do anything, and are left alone where
there is another way.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from sightline.notation import position_text
from sightline.recording.inplace import MESSAGE, culprits
from sightline.recording.out_of_memory import is_out_of_memory, out_of_memory_lines
from sightline.recording.torchapi import Tensor, undisturbed
from sightline.trace.causes import advice, cause_lines, numbers_origin, size_text
from sightline.trace.data import TraceData
from sightline.trace.file_owners import torch_file
from sightline.trace.notebook_cells import cell_name
from sightline.trace.origins import argument_names, origin, place_text
from sightline.trace.tables import Index, Op, Value

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase

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
        lines += (f"  {name} {value} = {origin(value, op)}" for name, value in given)
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
        return [f"index {wrong} is out of range of {origin(table, op)} with {rows} rows: {made}"]
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
    place = place_text(op)
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
