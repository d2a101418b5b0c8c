"""Where a rank was when its recording ended, or is now, and how that ended."""

from __future__ import annotations

import re
from typing import Final

from sightline.ranks.collectives import messages_of
from sightline.ranks.merge import Run
from sightline.ranks.record import RankRecord

#: Text of backends around an error: ``[…/tcp/pair.cc:553]``, ``[127.0.0.1]:29500``, the version of NCCL.
_LIBRARY: Final = re.compile(
    r"\[[^\[\]\s]+\.(?:cc|cpp|h|hpp|cu):\d+\]\s*|\s*\[[\da-f.:]+\]:\d+| in: \S+\.(?:cc|cpp|h|hpp):\d+(?=,)"
    r"|, NCCL version [\d.]+"
)
#: Errors of backends, whose cause is something that another rank did or did not do.
_BACKEND: Final = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|ProcessGroup|Connection (closed|reset|refused)|Broken pipe"
    r"|Timed out waiting \d+ ?ms|Watchdog caught collective",
    re.IGNORECASE,
)
_LONG: Final = 100  #: of an error more is not shown
_IDLE: Final = 1_000_000_000  #: ns without an op that are worth a word


def whereabouts(run: Run, record: RankRecord) -> str:
    """Where a rank was when its recording ended, and how that ended; or where it is."""
    last = "no op"
    if record.last_op:
        last = run.names.op_text(record.last_op, record.last_place, record.last_forward)
    if record.failed:
        return f"raised {error_text(str(record.info['exception']))} after {last}"
    waits = record.waits_at
    waiting = (
        "" if waits is None else f"in {last}" if last.endswith(waits[0]) else f"at {waits[0]}, after {last}"
    )
    if record.running:
        if waits is not None:
            return f"has waited {waiting} for {_seconds(waits[1])}"
        at = f"is running, at {record.stack} when it was asked" if record.stack else "is running"
        if not record.last_op:
            return f"{at}; none of its ops is written yet"
        idle = record.elapsed - record.last_end
        ago = f", {_seconds(idle)} ago" if idle > _IDLE else ""
        return f"{at}; its last op was {last}{ago}"
    if record.stack:
        return f"was at {record.stack}, after {last}"
    if record.unfinished and waits is not None:
        return f"was cut short while it waited {waiting}"
    if record.unfinished and not record.last_op:
        return "was cut short before any of its ops was written"
    if record.unfinished:
        return f"was cut short {'in or after' if record.last_is_collective else 'after'} {last}"
    return f"ended after {last}"


def _seconds(ns: int) -> str:
    """A time that goes on while it is read: whole seconds.

    >>> _seconds(12_345_678_900)
    '12 s'
    """
    return f"{max(round(ns / 1e9), 1):,} s"


def error_text(text: str) -> str:
    """The first line of an error, without the parts that backends put around it.

    >>> error_text("RuntimeError: [/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:29500. This is")
    'RuntimeError: Connection closed by peer'
    """
    line = _LIBRARY.sub("", text.strip().partition("\n")[0])
    if len(line) > _LONG or line != text.strip().partition("\n")[0]:
        line = line.partition(". ")[0]
    return line if len(line) <= _LONG else f"{line[: _LONG - 1]}…"


def is_consequence(run: Run, record: RankRecord) -> bool:
    """Whether a rank failed because of another one: in a collective that not all came to, or in a backend."""
    if not record.failed or not record.last_is_collective:
        return False
    if _BACKEND.search(str(record.info["exception"])):
        return True
    for name, calls in record.groups.items():
        if not len(calls) or messages_of(name) is not None or calls.op[-1] != record.last_row:
            continue
        ends = [
            len(theirs) + theirs.first if (theirs := run.records[rank].groups.get(name)) is not None else 0
            for rank in run.groups.get(name, ())
            if rank in run.records
        ]
        return min(ends) < calls.first + len(calls)
    return False
