"""What an exception gains: the failing op, its module and line, and where each of its tensors came from."""

from __future__ import annotations

from typing import Any

from sightline.notation import position_text
from sightline.recording.inplace import culprits, is_inplace_error
from sightline.recording.session import Session
from sightline.trace.data import TraceData
from sightline.trace.tables import Index, Op, Value


def explain(session: Session, data: TraceData, error: BaseException) -> None:
    """Add a note to an exception that left the block."""
    session.exception = f"{type(error).__name__}: {str(error)[:500]}"
    data.info["exception"] = session.exception
    index = Index(data)
    changed = culprits(session, index, error) if is_inplace_error(error) else None
    op = _failed_op(session, index, error)
    lines = []
    if changed is not None:
        lines += _changed_in_place(*changed)
    elif op is not None:
        lines.append(f"sightline: {op.name} failed{_where(op)}")
        lines += _inputs(op)
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
    frame = user_frame(op)
    module = op.module
    place = f" at {frame.position} in {frame.function}" if frame is not None else ""
    return place + (f" ({module.label})" if module is not None else "")


def user_frame(op: Op) -> Any:
    """The innermost frame of an op that is not torch's own."""
    frame = op.frame
    while frame is not None and "/torch/" in frame.file.replace("\\", "/"):
        frame = frame.parent
    return frame if frame is not None else op.frame


def _inputs(op: Op) -> list[str]:
    names = op._data.raw.schemas.get(op.name, ()) if op.level == "aten" else ()
    lines = []
    for path, value in zip(op.form.slots(), op.inputs, strict=False):
        lines.append(f"  {_argument(path, names)} {value} = {_origin(value, op)}")
    return lines


def _argument(path: str, names: tuple[str, ...]) -> str:
    """``[1]`` as the schema calls it: ``mat1``."""
    if not path.startswith("["):
        return path
    index, _, rest = path[1:].partition("]")
    return (names[int(index)] if int(index) < len(names) else f"argument {index}") + rest


def _origin(value: Value, reader: Op) -> str:
    # A view made inside the same call (the transpose in a linear) says less than what it is a view of.
    while value.base is not None and (
        value.producer is None or (value.producer.parent == reader.parent and reader.parent is not None)
    ):
        value = value.base
    if value.kind in ("parameter", "buffer", "state"):
        return f"{value.kind} {value.name}"
    maker = value.producer
    if maker is None:
        return f"{value.kind}{' ' + value.name if value.name else ''}"
    shown = maker.parent or maker
    name = shown.name.removeprefix("torch.").removeprefix("F.").removeprefix("Tensor.")
    frame = user_frame(shown)
    place = f", {frame.position} in {frame.function}" if frame is not None else ""
    module = shown.module
    return f"{name}{place}" + (f" ({module.label})" if module is not None else "")
