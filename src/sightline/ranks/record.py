"""`RankRecord`: one rank reduced to the parts that ranks are compared by, so that hundreds fit into memory.

Ops, collectives and source lines are numbers into tables that all ranks share (`SharedNames`), and ranks that
ran the same ops share one array of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.index import Index
from sightline.data.trace_data import I32, I64, PHASES, TraceData
from sightline.ranks.collectives import Collective, Collectives, kind_of, released
from sightline.ranks.fingerprints import Fingerprints, fingerprints_of
from sightline.store import load
from sightline.store.paths import STACKS
from sightline.store.repair import is_being_recorded

_BACKWARD: Final = PHASES.index("backward")
_MOST_STACKS: Final = 1 << 20  #: bytes that are read of a file of stacks
_STACK_LINE: Final = re.compile(r'  File "([^"]+)", line (\d+) in (.+)')


class Numbering:
    """Numbers things in the order they are first met."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def of(self, key: Hashable, thing: Any = None) -> int:
        """The number of a key; ``thing`` is kept for a new one, or the key itself."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.all)
            self.all.append(key if thing is None else thing)
        return number


class SharedNames:
    """The tables that the records of all ranks refer to."""

    def __init__(self) -> None:
        self.places = Numbering()  #: ``train.py:9 in step``
        self.ops = Numbering()  #: names of ops
        self.steps = Numbering()  #: (op, place, the place it is the backward of or -1)
        self.modules = Numbering()  #: ``blocks.0.attn``
        self.signatures = Numbering()  #: signatures of collectives, each as its first `Collective`
        self._arrays: dict[bytes, I32] = {}

    def shared(self, array: I32) -> I32:
        """An equal array that was met before, or this one."""
        return self._arrays.setdefault(array.tobytes(), array)

    def step_text(self, step: int) -> str:
        """``relu at net.py:9 in forward``."""
        op, place, forward = self.steps.all[step]
        return self.op_text(self.ops.all[op], place, forward)

    def op_text(self, name: str, place: int, forward: int) -> str:
        """An op, the line at which its program stood, and of a backward op the line of its forward op."""
        where = self.places.all[place]
        text = f"{shown_op(name)} at {where}" if where else shown_op(name)
        if forward < 0:
            return text
        line = self.places.all[forward].partition(" in ")[0]
        return f"{text}{',' if where else ''} in the backward of {line}"


def shown_op(name: str) -> str:
    """An op as it is written: a collective by its kind.

    >>> shown_op("c10d::allreduce_"), shown_op("add.Tensor")
    ('all_reduce', 'add.Tensor')
    """
    return kind_of(name) or name


@dataclass(frozen=True)
class GroupCalls:
    """The collectives of one rank in one process group, in order."""

    first: int  #: the order number of the first one: with ``last=`` those before it are not here
    signature: I32
    place: I32
    op: I32
    start: I64  #: ns since the recording began
    released: I64  #: when the host went on
    bytes: I64  #: that the rank contributed

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True)
class RankRecord:
    """The parts of one rank's recording that are kept."""

    rank: int
    path: Path
    info: dict[str, Any]
    host: str
    ops: int
    steps: I32  #: each op with its line, by thread and then in order
    step_ops: I32  #: the rows of these ops
    groups: dict[str, GroupCalls]
    last_place: int  #: the line at which the program stood in its last op
    last_op: str
    last_is_collective: bool
    last_forward: int = -1  #: where that is a backward op, the line of its forward op, if it is another one
    last_row: int = -1  #: the last op among the ops of the recording
    last_end: int = 0  #: when that ended, in ns since the recording began
    running: bool = False  #: its process still records
    spent: dict[int, int] = field(default_factory=dict)  #: ns on the way to and in the ops of each line
    modules: I32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  #: those that were called
    module_times: I64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  #: ns in their calls
    values: Fingerprints = field(default_factory=Fingerprints)  #: compared by value
    stack: str = ""  #: where it was when SIGUSR1 came: ``train.py:9 in step``

    @property
    def unfinished(self) -> bool:
        """Its process was killed, or is still running."""
        return bool(self.info.get("unfinished"))

    @property
    def failed(self) -> bool:
        return bool(self.info.get("exception"))

    @property
    def elapsed(self) -> int:
        """Ns from the begin of the recording to its end, or until now."""
        recorded = int(self.info.get("duration_ns") or 0)
        if not self.running:
            return recorded
        return max(recorded, time.time_ns() - int(self.info.get("began_ns") or 0))

    @property
    def waits_at(self) -> tuple[str, int] | None:
        """The line at which it waited for others when the recording ended, or waits; for how long, in ns."""
        waits = self.info.get("waits") or {}
        for row in waits.get("now") or ():
            if isinstance(row, list | tuple) and len(row) == 4 and all(type(n) is int for n in row[1::2]):
                file, line, function, waited = row
                return f"{Path(str(file)).name}:{line} in {function}", waited + self.elapsed - int(
                    self.info.get("duration_ns") or 0
                )
        return None


def begins_thread(record: RankRecord, at: int) -> bool:
    """Whether the ops of another thread begin at a position in the steps of a rank."""
    return 0 < at < len(record.step_ops) and bool(record.step_ops[at] < record.step_ops[at - 1])


def read_record(path: Path, rank: int, names: SharedNames) -> RankRecord:
    """Open the recording of a rank, make its record, and close it again."""
    data = load(path)
    try:
        return record_of(data, rank, path, names)
    finally:
        data.close()


def record_of(data: TraceData, rank: int, path: Path, names: SharedNames) -> RankRecord:
    """The record of a trace."""
    index, ops, calls = Index(data), data.ops, data.calls
    places = _places(index, names)
    op_places = places[index.op_user_frames]
    collectives = Collectives(data)
    rows = _ordered_ops(data, op_places != places[-1], collectives.ops)
    stood, forward = _stood(index, places, op_places)
    keys, inverse = np.unique(np.stack([ops.name, stood, forward])[:, rows], axis=1, return_inverse=True)
    steps = np.array(
        [names.steps.of((names.ops.of(data.names[name]), *at)) for name, *at in keys.T.tolist()],
        dtype=np.int32,
    )[inverse]
    module_sums = np.bincount(
        calls.module, weights=np.maximum(calls.duration, 0), minlength=len(data.modules)
    )
    called = np.unique(calls.module)
    labels = [names.modules.of(data.modules[module].label) for module in called.tolist()]
    modules, first = np.unique(labels, return_index=True)  # two models may have modules of one name
    last = int(rows[np.argmax(ops.start[rows])]) if len(rows) else -1
    return RankRecord(
        rank=rank,
        path=path,
        info={name: data.info[name] for name in _KEPT if data.info.get(name) is not None},
        host=str((getattr(data, "environment", None) or {}).get("host") or ""),
        ops=len(ops),
        steps=names.shared(steps),
        step_ops=names.shared(rows.astype(np.int32)),
        groups=_groups(data, collectives, op_places, names),
        last_place=int(stood[last]) if last >= 0 else names.places.of(""),
        last_forward=int(forward[last]) if last >= 0 else -1,
        last_op=data.names[ops.name[last]] if last >= 0 else "",
        last_is_collective=bool(len(collectives.ops)) and last == int(collectives.ops[-1]),
        last_row=last,
        last_end=int(ops.start[last] + ops.duration[last]) if last >= 0 else 0,
        running=bool(data.info.get("unfinished")) and is_being_recorded(path),
        spent=_spent(data, rows, op_places, collectives.ops),
        modules=names.shared(modules.astype(np.int32)),
        module_times=module_sums[called[first]].astype(np.int64),
        values=fingerprints_of(index, collectives, op_places, places),
        stack=_stack(path),
    )


_KEPT: Final = (
    "name", "rank", "world_size", "job", "began_ns", "duration_ns", "unfinished", "exception", "note", "pid",
    "torch", "engine", "dropped", "last", "groups", "waits", "rank_device", "restart", "fault_count",
    "meshes", "seed",
)  # fmt: skip


def _stood(index: Index, places: I32, op_places: I32) -> tuple[I32, I32]:
    """For each op the line at which the program stood, and for a backward op that of its forward op.

    The latter is -1 where both are the same, and for all other ops.
    """
    ops = index.raw.ops
    own = places[index.user_frames[ops.frame]]
    elsewhere = (ops.phase == _BACKWARD) & (own != op_places)
    return np.where(elsewhere, own, op_places), np.where(elsewhere, op_places, np.int32(-1))


def _places(index: Index, names: SharedNames) -> I32:
    """The number of the line of each frame; the last entry, for -1, is that of no line."""
    frames, calls = index.raw.frames, index.raw.calls
    places = np.full(len(frames) + 1, names.places.of(""), dtype=np.int32)
    of_calls = index.user_frames[calls.frame[calls.parent < 0]]
    of_backward = index.user_frames[index.raw.ops.frame[index.raw.ops.phase == _BACKWARD]]
    for at in np.unique(np.concatenate([index.op_user_frames, of_calls, of_backward])).tolist():
        if at >= 0:
            row = index.frames[at]
            places[at] = names.places.of(f"{row.position} in {row.function}")
    return places


def _ordered_ops(data: TraceData, has_line: NDArray[np.bool_], collectives: I64) -> I64:
    """Aten ops, or API calls where there are none, thread by thread: threads overlap as they like.

    Threads that run no line and no collective are workers of a backend, which share its work as it comes.
    """
    ops = data.ops
    aten = np.flatnonzero(ops.level == 1)
    rows = aten if len(aten) else np.arange(len(ops))
    own = np.union1d(ops.thread[has_line], ops.thread[collectives])
    rows = rows[np.isin(ops.thread[rows], own)] if len(own) else rows
    return rows[np.argsort(ops.thread[rows], kind="stable")]


def _groups(
    data: TraceData, collectives: Collectives, op_places: I32, names: SharedNames
) -> dict[str, GroupCalls]:
    """The collectives by process group, and the messages by peer and tag."""
    before = collectives.dropped()
    by_counter: dict[tuple[str, ...], list[Collective]] = {counter: [] for counter in before}
    for each in collectives:
        by_counter.setdefault(each.counter, []).append(each)
    after = dict(zip(collectives.ops.tolist(), released(data, collectives.ops).tolist(), strict=True))
    groups = {}
    for counter, calls in by_counter.items():
        ops = [each.op for each in calls]
        groups[":".join(counter)] = GroupCalls(
            first=before[counter],
            signature=np.array([names.signatures.of(each.signature, each) for each in calls], dtype=np.int32),
            place=op_places[np.array(ops, dtype=np.int64)],
            op=np.array(ops, dtype=np.int32),
            start=np.array([each.start for each in calls], dtype=np.int64),
            released=np.array([after[op] for op in ops], dtype=np.int64),
            bytes=np.array([each.bytes for each in calls], dtype=np.int64),
        )
    return groups


def _spent(data: TraceData, rows: I64, op_places: I32, collectives: I64) -> dict[int, int]:
    """The time on the way to each line's ops and in them, on the first thread, without waiting for others.

    The time in a collective is waiting, and so is as much of the time before the next op as was recorded of
    ``Work.wait``.
    """
    ops = data.ops
    rows = rows[ops.thread[rows] == 0]
    if not len(rows):
        return {}
    ends = ops.start[rows] + ops.duration[rows]
    since = np.concatenate([ops.start[rows[:1]], ends[:-1]])
    waited = np.isin(np.concatenate([[-1], rows[:-1]]), collectives)
    gaps = np.where(waited, np.maximum(ops.start[rows] - since, 0), 0)
    times = ends - since - gaps * min(waited_time(data.info) / max(int(gaps.sum()), 1), 1.0)
    times = np.where(np.isin(rows, collectives), times - ops.duration[rows], times)
    sums = np.bincount(op_places[rows], weights=np.maximum(times, 0))
    return {int(place): int(sums[place]) for place in np.flatnonzero(sums)}


def waited_time(info: dict[str, Any]) -> int:
    """How long ``Work.wait`` took altogether, in ns."""
    lines = (info.get("waits") or {}).get("lines") or ()
    return sum(row[4] for row in lines if isinstance(row, list | tuple) and len(row) == 6)


def _stack(path: Path) -> str:
    """The innermost line outside torch of the main thread, as SIGUSR1 wrote it last."""
    file = path / STACKS
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MOST_STACKS).decode("utf-8", "replace")
    except OSError:
        return ""
    # Each signal adds the stack again.
    last = text.rpartition("(most recent call first):")[2]
    for file_name, line, function in _STACK_LINE.findall(last):
        if "/torch/" not in file_name and "/sightline/" not in file_name:
            return f"{Path(file_name).name}:{line} in {function}"
    return ""
