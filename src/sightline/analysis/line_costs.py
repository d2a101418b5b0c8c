"""What ran on each source line, all its runs taken together: ops, shapes, calls and time.

An op counts on the innermost visible line of its chain; a backward op on the line of its forward op. The
lines further out on the chain get its time as time spent inside them. The time of a backward op is spent
where ``backward()`` was called, and there alone: the line of its forward op only says how much of it is its.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sightline.analysis.row_groups import group_rows, list_numbers, list_places
from sightline.analysis.select import Mask
from sightline.trace.data import I32, I64, LEVELS, PHASES, RAISED, TraceData
from sightline.trace.index import Index
from sightline.trace.user_frames import FrameChains, op_frames

_FORWARD, _BACKWARD, _RECOMPUTE = map(PHASES.index, ("forward", "backward", "recompute"))


@dataclass
class LineTally:
    """The ops of one phase on one line."""

    ops: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, None] = field(default_factory=dict)  #: distinct results, in the order they came
    values: list[int] = field(default_factory=list)  #: every result
    time: int = 0
    elsewhere: int = 0  #: of ``time``, what was spent on the line that called ``backward()``
    raised: int = 0


@dataclass
class LineRecord:
    """One source line over the whole recording."""

    phases: dict[str, LineTally] = field(default_factory=dict)
    calls: int = 0  #: how often it ran, as far as the recording can tell
    inside: int = 0  #: time of the ops that ran in what it called

    @property
    def time(self) -> int:
        """Time of the ops that ran while this line did."""
        return self.inside + sum(tally.time - tally.elsewhere for tally in self.phases.values())


@dataclass
class Lines:
    """The lines of every visible file, files in the order they first ran."""

    files: dict[str, dict[int, LineRecord]] = field(default_factory=dict)
    elsewhere: int = 0  #: ops with no visible line
    elsewhere_time: int = 0

    def at(self, file: str, line: int) -> LineRecord:
        return self.files.setdefault(file, {}).setdefault(line, LineRecord())


def tally_lines(index: Index, ops: Mask, hidden: Callable[[str], bool], times: I64 | None = None) -> Lines:
    """The selected ops by source line; ``hidden`` says which files are not looked at.

    ``times`` are those that are added up: what each op took on the host, unless others are given.
    """
    data = index.raw
    chains = FrameChains(data, hidden)
    lines = Lines()
    metas = index.meta_texts
    columns, ids = data.ops, ops.nonzero()[0]
    places, lengths = list_places(columns.output_offsets, ids)
    made = columns.outputs[places]
    made_metas = data.values.meta[made]
    shown, own = op_frames(data, ids), columns.frame[ids]
    phase, name, raised = columns.phase[ids], columns.name[ids], columns.flags[ids] & RAISED
    groups = group_rows(shown, own, phase, name, raised, list_numbers(made_metas, lengths))
    counts = np.bincount(groups.of).tolist()
    total = np.zeros(len(counts), dtype=np.int64)
    np.add.at(total, groups.of, (columns.duration if times is None else times)[ids])
    made_by = np.repeat(groups.of, lengths)
    values = made[np.argsort(made_by, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(made_by, minlength=len(counts))).tolist()
    results = [values[start:end] for start, end in pairwise([0, *ends])]
    first_made = (np.cumsum(lengths) - lengths).tolist()
    for group, at in enumerate(groups.first.tolist()):
        count, time = counts[group], int(total[group])
        chain = chains.of(int(shown[at]))
        if not chain:
            lines.elsewhere += count
            lines.elsewhere_time += time
            continue
        position = _position(data, chain[-1])
        # A backward op ran where backward() was called, if that is a line that is shown.
        called = chains.of(int(own[at])) if own[at] != shown[at] else ()
        around = dict.fromkeys(_position(data, frame) for frame in called or chain[:-1])
        tally = lines.at(*position).phases.setdefault(PHASES[phase[at]], LineTally())
        if called and position not in around:
            tally.elsewhere += time
        for outer in around:
            if outer != position:
                lines.at(*outer).inside += time
        tally.ops[data.names[name[at]]] += count
        tally.time += time
        tally.raised += int(raised[at]) * count
        tally.values += results[group]
        for meta in made_metas[first_made[at] : first_made[at] + lengths[at]].tolist():
            tally.shapes[metas[meta]] = None
    _count_calls(data, chains, lines)
    return lines


def _position(data: TraceData, frame: int) -> tuple[str, int]:
    frames = data.frames
    return data.codes[frames.code[frame]].file, int(frames.line[frame])


def _count_calls(data: TraceData, chains: FrameChains, lines: Lines) -> None:
    """How often each line ran: how often one instruction of it did, summed over those who called it."""
    ops, calls = data.ops, data.calls
    api = LEVELS.index("api")
    level = api if (ops.level == api).any() else 1 - api
    ran = (ops.level == level) & (ops.phase == _FORWARD)  # a step or a backward pass loops in hidden code
    entered = Counter(calls.frame[(calls.phase != _BACKWARD) & (calls.phase != _RECOMPUTE)].tolist())
    counts = _least(chains, ops.frame[ran], ops.name[ran])
    for frame, count in entered.items():
        if chains.of(frame)[-1:] == (frame,):  # a call made by hidden code says nothing about its line
            counts[frame] = max(counts.get(frame, 0), count)
    runs: dict[tuple[int, str, int], int] = {}
    for frame, count in counts.items():
        key = (int(data.frames.parent[frame]), *_position(data, frame))
        runs[key] = max(runs.get(key, 0), count)
    for (_, file, line), count in runs.items():
        record = lines.files.get(file, {}).get(line)
        if record is not None:
            record.calls += count


def _least(chains: FrameChains, frames: I32, names: I32) -> dict[int, int]:
    """For each visible frame, how often its rarest op ran: some ops run several times in one go."""
    counts: Counter[tuple[int, int]] = Counter()
    groups = group_rows(frames, names)
    for at, count in zip(groups.first.tolist(), np.bincount(groups.of).tolist(), strict=True):
        chain = chains.of(int(frames[at]))
        if chain:
            counts[chain[-1], int(names[at])] += count
    least: dict[int, int] = {}
    for (frame, _), count in counts.items():
        least[frame] = min(least.get(frame, count), count)
    return least
