"""What an exception gains: the failing op, its module and line, and where each of its tensors came from."""

from __future__ import annotations

from sightline.notation import position_text
from sightline.recording.inplace import culprits, is_inplace_error
from sightline.recording.session import Session
from sightline.trace.data import TraceData
from sightline.trace.origins import argument_names, origin, place_text
from sightline.trace.tables import Index, Op, Value


def exception_text(error: BaseException) -> str:
    """What a recording says of the exception that ended it."""
    name, text = type(error).__name__, str(error)[:500]
    return f"{name}: {text}" if text else name


def explain(session: Session, data: TraceData, error: BaseException) -> None:
    """Add a note to an exception that left the block."""
    session.exception = exception_text(error)
    data.info["exception"] = session.exception
    index = Index(data)
    changed = culprits(session, index, error) if is_inplace_error(error) else None
    op = _failed_op(session, index, error)
    lines = []
    if changed is not None:
        lines += _changed_in_place(*changed)
    elif op is not None:
        lines.append(f"sightline: {op.name} failed{_where(op)}")
        given = zip(argument_names(op), op.inputs, strict=False)
        lines += (f"  {name} {value} = {origin(value, op)}" for name, value in given)
        if is_inplace_error(error) and session.level == "api":
            lines.append('  record with ops="both" to see which op saved the tensor and which changed it')
    else:
        call = next((call for call in reversed(index.module_calls) if call.raised or call.unfinished), None)
        if call is not None:
            lines.append(f"sightline: raised{_raised_at(error)} ({call.module.label}), no op failed")
    if lines:
        error.add_note("\n".join(lines))


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
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if not {"torch", "sightline"} & set(code.co_filename.replace("\\", "/").split("/")[:-1]):
            place = f" at {position_text(code.co_filename, at.tb_lineno)} in {code.co_qualname}"
        at = at.tb_next
    return place


def _failed_op(session: Session, index: Index, error: BaseException | None) -> Op | None:
    """The op this exception, or one it was raised from, came out of."""
    if session.failure is None:
        return None
    key = session.failure
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if id(error) == key:
            raised = [op for op in index.ops[-50:] if op.raised]
            aten = [op for op in raised if op.level == "aten"]
            found = aten or raised
            return found[-1] if found else None
        error = error.__cause__ or error.__context__
    return None


def _where(op: Op) -> str:
    place = place_text(op)
    return f" at {place}" if place and not place.startswith("(") else f" {place}" if place else ""
