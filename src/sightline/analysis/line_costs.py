"""The ops, shapes, calls and time of each source line, all its runs taken together.

An op counts on the innermost visible line of its stack; a backward op on the line of its forward op. Its
callers' lines get its time as time spent inside them. The time of a backward op is spent where ``backward()``
was called, and only there: the line of its forward op shows its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sightline.analysis.row_groups import flat_positions, group_rows, list_keys
from sightline.analysis.select import Mask
from sightline.data.index import Index
from sightline.data.trace_data import I64, LEVELS, PHASES, RAISED, TraceData
from sightline.data.user_frames import FrameChains, op_frames

_FORWARD, _BACKWARD, _RECOMPUTE = map(PHASES.index, ("forward", "backward", "recompute"))


@dataclass
class LineTally:
    """The ops of one phase on one line."""

    ops: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, None] = field(default_factory=dict)  #: of distinct results, in the order of the run
    values: list[int] = field(default_factory=list)  #: every result
    time: int = 0
    elsewhere: int = 0  #: of ``time``, the part spent on the line that called ``backward()``
    raised: int = 0


@dataclass
class LineRecord:
    """One source line over the whole recording."""

    phases: dict[str, LineTally] = field(default_factory=dict)
    calls: int = 0  #: how often it ran, as far as the recording can tell
    inside: int = 0  #: time of the ops that ran in the functions it called

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
    """The selected ops by source line, without files that are ``hidden``.

    ``times`` are added up; by default those that each op took on the host.
    """
    data = index.raw
    chains = FrameChains(data, hidden)
    lines = Lines()
    metas = index.meta_texts
    columns, ids = data.ops, ops.nonzero()[0]
    positions, lengths = flat_positions(columns.output_offsets, ids)
    outputs = columns.outputs[positions]
    output_metas = data.values.meta[outputs]
    shown, own = op_frames(data, ids), columns.frame[ids]
    phase, name, raised = columns.phase[ids], columns.name[ids], columns.flags[ids] & RAISED
    groups = group_rows(shown, own, phase, name, raised, list_keys(output_metas, lengths))
    counts = np.bincount(groups.of).tolist()
    total = np.zeros(len(counts), dtype=np.int64)
    np.add.at(total, groups.of, (columns.duration if times is None else times)[ids])
    output_groups = np.repeat(groups.of, lengths)
    values = outputs[np.argsort(output_groups, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(output_groups, minlength=len(counts))).tolist()
    results = [values[start:end] for start, end in pairwise([0, *ends])]
    first_output = (np.cumsum(lengths) - lengths).tolist()
    for group, at in enumerate(groups.first.tolist()):
        count, time = counts[group], int(total[group])
        chain = chains.of(int(shown[at]))
        if not chain:
            lines.elsewhere += count
            lines.elsewhere_time += time
            continue
        position = _position(data, chain[-1])
        # A backward op ran where backward() was called, if that is a line that is shown.
        backward_call = chains.of(int(own[at])) if own[at] != shown[at] else ()
        callers = dict.fromkeys(_position(data, frame) for frame in backward_call or chain[:-1])
        tally = lines.at(*position).phases.setdefault(PHASES[phase[at]], LineTally())
        if backward_call and position not in callers:
            tally.elsewhere += time
        for outer in callers:
            if outer != position:
                lines.at(*outer).inside += time
        tally.ops[data.names[name[at]]] += count
        tally.time += time
        tally.raised += int(raised[at]) * count
        tally.values += results[group]
        for meta in output_metas[first_output[at] : first_output[at] + lengths[at]].tolist():
            tally.shapes[metas[meta]] = None
    _count_calls(data, chains, lines)
    return lines


def _position(data: TraceData, frame: int) -> tuple[str, int]:
    frames = data.frames
    return data.codes[frames.code[frame]].file, int(frames.line[frame])


def _count_calls(data: TraceData, chains: FrameChains, lines: Lines) -> None:
    """How often each line ran: how often one of its instructions did, summed over the callers."""
    ops, calls = data.ops, data.calls
    api = LEVELS.index("api")
    level = api if (ops.level == api).any() else 1 - api
    ran = (ops.level == level) & (ops.phase == _FORWARD)  # a step or a backward pass loops in hidden code
    entered = Counter(calls.frame[(calls.phase != _BACKWARD) & (calls.phase != _RECOMPUTE)].tolist())
    # For each visible frame, how often its rarest op ran: others may run several times at once.
    frames, names = ops.frame[ran], ops.name[ran]
    op_counts: Counter[tuple[int, int]] = Counter()
    groups = group_rows(frames, names)
    for at, count in zip(groups.first.tolist(), np.bincount(groups.of).tolist(), strict=True):
        chain = chains.of(int(frames[at]))
        if chain:
            op_counts[chain[-1], int(names[at])] += count
    counts: dict[int, int] = {}
    for (frame, _), count in op_counts.items():
        counts[frame] = min(counts.get(frame, count), count)
    for frame, count in entered.items():
        if chains.of(frame)[-1:] == (frame,):  # calls from hidden code do not count runs of a line
            counts[frame] = max(counts.get(frame, 0), count)
    runs: dict[tuple[int, str, int], int] = {}
    for frame, count in counts.items():
        key = (int(data.frames.parent[frame]), *_position(data, frame))
        runs[key] = max(runs.get(key, 0), count)
    for (_, file, line), count in runs.items():
        record = lines.files.get(file, {}).get(line)
        if record is not None:
            record.calls += count
