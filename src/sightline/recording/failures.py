"""Facts about an exception that only the running process knows, for `sightline.explain` to put into words.

The exception is in flight while they are read, and its class may refuse anything: hence `_attributes`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from sightline.argument_checks import is_written
from sightline.data.file_owners import cell_name, torch_file
from sightline.explain.failure import Failure
from sightline.explain.out_of_memory import CPU_ALLOCATOR, REQUESTED_SIZE
from sightline.notation import position_text
from sightline.recording.torchapi import OpOverload, Tensor, unobserved
from sightline.tensor_memory import has_memory, holds_freed
from sightline.text_encoding import for_errors

if TYPE_CHECKING:
    from sightline.recording.session import Session

_FOLDER: Final = os.path.dirname(__file__) + os.sep
_OVERLOAD_CALL: Final = OpOverload.__call__.__code__
_MAX_NODES: Final = 200_000
#: The message of autograd about a saved tensor that was changed.
_CHANGED_IN_PLACE: Final = "modified by an inplace operation"

_attributes: Final[Any] = BaseException
#: Attributes of any exception, also where its class overrides them.
traceback_of: Final[Callable[[BaseException], TracebackType | None]] = _attributes.__traceback__.__get__
_cause_of: Final[Callable[[BaseException], BaseException | None]] = _attributes.__cause__.__get__
_context_of: Final[Callable[[BaseException], BaseException | None]] = _attributes.__context__.__get__


def failure_of(session: Session, error: BaseException) -> Failure:
    """The facts about an exception that left a block."""
    message, kind = message_of(error), type(error)
    in_place = issubclass(kind, RuntimeError) and _CHANGED_IN_PLACE in message
    node = _changed_node(error) if in_place else None
    saver = None if node is None else session.node_ops.get(node[0])
    return Failure(
        message=message,
        location=_raise_location(error),
        raised_by_op=_is_raised_by_op(session, error),
        level=session.level,
        in_place=in_place,
        saver=None if node is None or saver is None else (saver, node[1]),
        out_of_memory=issubclass(kind, torch.OutOfMemoryError)
        or (
            issubclass(kind, RuntimeError)
            and CPU_ALLOCATOR in message
            and REQUESTED_SIZE.search(message) is not None
        ),
        index_ranges=_index_ranges(error) if issubclass(kind, IndexError) else {},
        recursion_limit=sys.getrecursionlimit() if issubclass(kind, RecursionError) else None,
    )


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, in the encoding of standard error."""
    note = for_errors(note)
    try:
        BaseException.add_note(error, note)
    except AttributeError:  # a frozen dataclass
        object.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def message_of(error: BaseException) -> str:
    """The text of an exception; if its ``str()`` fails, the text that Python prints then."""
    try:
        if not _shows_plain_arguments(error) and unobserved(partial(holds_freed, error)):
            return "<its text may show a tensor whose memory was freed>"
        return f"{error}"
    except BaseException:  # a class may raise anything here, while the exception is in flight
        return "<exception str() failed>"


def _shows_plain_arguments(error: BaseException) -> bool:
    """Whether the text of an exception consists of numbers and texts only, whatever else it holds."""
    plain = type(error).__str__ in (_attributes.__str__, KeyError.__str__)
    return plain and is_written(_attributes.args.__get__(error))


def exception_text(error: BaseException) -> str:
    """The exception that ended a recording, as its info stores it."""
    name, text = type(error).__name__, message_of(error)[:500]
    return f"{name}: {text}" if text else name


def fault_text(error: BaseException) -> str:
    """A fault of the recorder with its function and line, as the info of a recording stores it."""
    at = _innermost(error)
    location = "" if at is None else f" ({at.tb_frame.f_code.co_name}:{at.tb_lineno})"
    return f"{type(error).__name__}: {message_of(error)}{location}"


def tracebacks(error: BaseException) -> Iterator[TracebackType]:
    """The frames that an exception went through, the outermost first."""
    at = traceback_of(error)
    while at is not None:
        yield at
        at = at.tb_next


def _innermost(error: BaseException) -> TracebackType | None:
    return next(reversed(list(tracebacks(error))), None)


def _is_raised_by_op(session: Session, error: BaseException | None) -> bool:
    """Whether an op raised this exception, or one that it was raised from."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if session.raised_by(error):
            return True
        cause = _cause_of(error)
        error = _context_of(error) if cause is None else cause
    return False


def _raise_location(error: BaseException) -> str:
    """The innermost line of the traceback that is not torch's own or ours."""
    location = ""
    for at in tracebacks(error):
        code = at.tb_frame.f_code
        if not torch_file(code.co_filename):
            line = at.tb_lineno or code.co_firstlineno
            location = f"{position_text(cell_name(code.co_filename), line)} in {code.co_qualname}"
    return location


def _index_ranges(error: BaseException) -> dict[str, tuple[int, int]]:
    """The smallest and largest index that the torch function which failed was given, by its variables.

    The traceback still has them; classes that a loss ignores are left out.
    """
    at = _innermost(error)
    local = {} if at is None else at.tb_frame.f_locals
    ranges = {}
    for name, ignored in (("input", None), ("target", local.get("ignore_index", -100))):
        index = local.get(name)
        if type(index) is Tensor and index.is_cpu and index.numel() and not index.is_floating_point():
            extremes = unobserved(partial(_extremes, index, ignored))
            if extremes is not None:
                ranges[name] = extremes
    return ranges


def _extremes(index: Any, ignored: Any) -> tuple[int, int] | None:
    if not has_memory(index):
        return None
    valid = index if ignored is None else index[index != ignored]
    return (int(valid.min()), int(valid.max())) if valid.numel() else None


# -- the autograd node whose saved tensor was changed ------------------------------------------------------


def _changed_node(error: BaseException) -> tuple[int, list[str]] | None:
    """The sequence number of the node that raised, and its attributes that cannot be read."""
    roots: list[
        Any
    ] = []  # the nodes that the failed backward pass started from, in variables of torch's frame
    for at in tracebacks(error):
        if at.tb_frame.f_code.co_name == "_engine_run_backward":
            outputs = at.tb_frame.f_locals.get("t_outputs", ())
            roots = [tensor.grad_fn for tensor in outputs if getattr(tensor, "grad_fn", None) is not None]
    best: tuple[int, list[str]] | None = None
    for node in _nodes(roots):
        saved = [name for name in dir(node) if name.startswith(("_saved_", "saved_tensors"))]
        refused = [name for name in saved if _refuses(node, name)]
        if refused and (best is None or node._sequence_nr() > best[0]):
            best = node._sequence_nr(), [name.removeprefix("_saved_") for name in refused]
    return best


def _refuses(node: Any, name: str) -> bool:
    try:
        getattr(node, name)
    except Exception as refusal:
        return _CHANGED_IN_PLACE in str(refusal)
    return False


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


# -- frames ------------------------------------------------------------------------------------------------


def comes_from_a_signal(error: BaseException) -> bool:
    """Whether a signal handler raised it, while code of ours was running."""
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()} - {None}
    return bool(handlers) and any(at.tb_frame.f_code in handlers for at in tracebacks(error))


def leave_out_own_frames(error: BaseException) -> None:
    """Give an exception the traceback it would have without a recording.

    After a handler of ours, torch's ``OpOverload.__call__`` is left out too: our handler called it.
    """
    shown: list[TracebackType] = []
    ours = False
    for at in tracebacks(error):
        code = at.tb_frame.f_code
        own = code.co_filename.startswith(_FOLDER)
        if not own and not (ours and code is _OVERLOAD_CALL):
            shown.append(at)
        ours = own
    traceback: TracebackType | None = None
    for one in reversed(shown):
        line: int | None = one.tb_lineno  # None where a compiler gave its code no lines; stored as -1
        traceback = TracebackType(traceback, one.tb_frame, one.tb_lasti, -1 if line is None else line)
    if traceback is not None:  # else it is an error of our own
        BaseException.with_traceback(error, traceback)  # an exception may refuse to have attributes set
