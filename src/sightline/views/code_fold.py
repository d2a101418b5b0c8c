"""Folding of ``code()``: the ops shown once with a count, ``×12``, and the line where their bracket begins.

Ops that differ only in numbers are folded where a loop of the source runs them again, or an optimizer goes
over its weights (`CodeFold.nodes`). The bracket goes around the lines inside that loop (`CodeFold.bracket`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.fold import Node, Variation, Varying, fold_alike
from sightline.analysis.row_groups import flat_positions
from sightline.analysis.source_loops import Loop, header_text, loops_around
from sightline.data.file_owners import torch_file
from sightline.data.live_events import SourceFrame
from sightline.data.source_files import indent_of
from sightline.data.trace_data import I32, I64, PHASES, TraceData
from sightline.data.user_frames import FrameChains, op_frames
from sightline.views.source_chain import NO_SOURCE

Chain = tuple[SourceFrame, ...]


class OpWindow:
    """The columns of some ops as plain lists, by position in the window.

    Ops of one kind have the same text, except for names of values, and the same line: ``kinds`` has the kind
    of each op, ``first`` the first op of each kind.
    """

    def __init__(self, variation: Variation, ids: I64) -> None:
        data = variation.data
        ops = data.ops
        frames = op_frames(data, ids)
        groups = variation.groups(ids, frames)
        self.ids: list[int] = ids.tolist()
        self.frames: list[int] = frames.tolist()
        self.calls: list[int] = ops.call[ids].tolist()
        self.kinds: list[int] = groups.of.tolist()
        self.first: list[int] = groups.first.tolist()
        columns = (ops.name, ops.phase, ops.form, ops.result, ops.flags)
        plain = (column[ids[groups.first]].tolist() for column in columns)
        inputs = _metas(data, ids[groups.first], ops.input_offsets, ops.inputs)
        outputs = _metas(data, ids[groups.first], ops.output_offsets, ops.outputs)
        #: For each kind a key that equal texts share, names of values aside.
        self.text_keys: list[Hashable] = list(zip(*plain, inputs, outputs, strict=True))
        self._phases: list[int] = ops.phase[ids].tolist()

    def phase(self, at: int) -> str:
        return PHASES[self._phases[at]]


def _metas(data: TraceData, ids: I64, offsets: I64, values: I32) -> list[tuple[int, ...]]:
    """The metas of the values of each op."""
    positions, lengths = flat_positions(offsets, ids)
    metas = data.values.meta[values[positions]].tolist()
    starts = [0, *np.cumsum(lengths).tolist()]
    return [tuple(metas[start:end]) for start, end in pairwise(starts)]


class SourceChains:
    """The source lines above the ops of a trace: those shown, and all with the hidden ones between."""

    def __init__(
        self, data: TraceData, *, torch_frames: bool = False, hidden_frames: NDArray[np.bool_] | None = None
    ) -> None:
        self._data = data
        hidden = (lambda _: False) if torch_frames else torch_file
        self._visible = FrameChains(data, hidden, hidden_frames)
        self._all = self._visible if hidden_frames is None else FrameChains(data, hidden)
        self.hides = self._all is not self._visible
        self._frame = cache(self._read_frame)
        self.of = cache(self._read_chain)
        #: The chain of a frame, with the frames that only lead to the model.
        self.whole = cache(
            lambda frame: tuple(self._frame(each, -1) for each in self._all.of(frame)) or (NO_SOURCE,)
        )
        self.shown = cache(self._read_shown)
        self._entered = lru_cache(maxsize=1024)(self._read_entered)
        self._first_shown: dict[Chain, int] = {}

    def depth(self, frame: int, *, whole: bool = False) -> int:
        """How many lines are above the ops of a frame."""
        return len((self._all if whole else self._visible).of(frame))

    def _read_chain(self, frame: int, call: int) -> Chain:
        """The visible lines of an op in this frame and this module call."""
        visible = self._visible.of(frame)
        if not visible:
            return (NO_SOURCE,)
        entered = self._entered(call)
        outer = (self._frame(each, entered.get(each, -1)) for each in visible[:-1])
        return (*outer, self._frame(visible[-1], -1))

    def _read_shown(self, frame: int) -> int:
        """A number shared by frames that are shown as the same lines, whichever hidden ones lead to them."""
        if not self.hides:
            return frame
        lines = tuple(self._frame(each, -1) for each in self._visible.of(frame))
        return self._first_shown.setdefault(lines, frame)

    def _read_entered(self, call: int) -> dict[int, int]:
        """For each visible frame that leads into a module call, the innermost call entered from it."""
        calls = self._data.calls
        entered: dict[int, int] = {}
        while call >= 0:
            visible = self._visible.of(int(calls.frame[call]))
            if visible:
                entered.setdefault(visible[-1], call)
            call = int(calls.parent[call])
        return entered

    def _read_frame(self, frame: int, call: int) -> SourceFrame:
        frames = self._data.frames
        code = self._data.codes[frames.code[frame]]
        at, column = int(frames.line[frame]), int(frames.column[frame])
        columns = (column, int(frames.end_column[frame])) if column >= 0 else None
        text = self._data.source_lines.line(code.file, at)
        end = int(frames.end_line[frame])
        return SourceFrame(code.file, at, end, code.function, text.strip(), columns, call, indent_of(text))


class CodeFold:
    """Folds the ops of a window, and finds the line and the loop under which each repeat is shown."""

    def __init__(
        self, variation: Variation, chains: SourceChains, ops: OpWindow, steps: Sequence[int]
    ) -> None:
        self._data, self._variation = variation.data, variation
        self._chains, self._ops, self._steps = chains, ops, steps
        self._open: list[tuple[int, Loop | None]] = []  # the depth and the loop of each open repeat

    def nodes(self) -> list[Node]:
        """The ops of the window, with repeats among them."""
        ids: dict[Hashable, int] = {}
        keys: list[tuple[Hashable, Varying]] = []  # of each kind: equal for ops that differ only in numbers
        for at in self._ops.first:
            key, numbers = self._variation.op_key(self._ops.ids[at])
            shown = self._chains.shown(self._ops.frames[at])
            keys.append((ids.setdefault((shown, key), len(ids)), numbers))

        def is_loop(ops: Sequence[int]) -> bool:  # of the source, or of an optimizer over its weights
            return all(self._ops.phase(at) == "optimizer" for at in ops) or bool(self._loops_of(ops))

        return fold_alike([keys[kind] for kind in self._ops.kinds], is_loop, self._loop_start)

    def _loops_of(self, ops: Sequence[int]) -> list[Loop]:
        """The loops around some ops, the innermost first, also those in frames that are not shown.

        Loops outside a module call that contains all the ops do not count: they do not repeat these ops.
        """
        chains = [*{self._chains.whole(self._ops.frames[at]) for at in ops}]
        inside = self._common_call(ops)
        outermost = self._chains.depth(int(self._data.calls.frame[inside]), whole=True) if inside >= 0 else 0
        deepest = min(_shared_depth(chains), *(len(chain) - 1 for chain in chains))
        for at in range(deepest, outermost - 1, -1):
            if loops := self._loops_at(at, chains):
                return loops
        return []

    def _loop_start(self, first: int, period: int) -> int:
        """The beginning of a loop body in the source: after the largest step back in line numbers.

        Backward ops do not count: they stand under lines of the forward pass.
        """
        forward = [at for at in range(first, first + period) if self._ops.phase(at) != "backward"]
        chains = [self._chains.whole(self._ops.frames[at]) for at in forward]
        depth = _shared_depth(chains) if chains else 0
        if not chains or any(len(chain) <= depth for chain in chains):
            return 0
        lines = [chain[depth].line for chain in chains]
        back = np.roll(lines, 1) - lines
        return forward[int(np.argmax(back))] - first

    # -- brackets ------------------------------------------------------------------------------------

    def bracket(
        self, first: Chain, chains: Sequence[Chain], low: int, runs: Sequence[int]
    ) -> tuple[int, list[Loop]]:
        """How many source lines stay outside a repeat, and the loops it may be the body of.

        The line in the loop goes inside: the innermost one where all ops of the repeat are in a loop of the
        source that no enclosing repeat stands for; else the innermost they have in common, if each has
        another one below. The outer ``low`` lines stay outside: other ops stand under them, too.
        """
        common = _shared_depth(chains)
        low = min(low, common)
        for at in range(min(common, len(first) - 1), low - 1, -1):
            loops = self._that_may_repeat(runs, self._loops_at(at, chains))
            if loops and loops[0] not in self._open_loops(at):
                return at, loops
        return max(low, min(common - (len(chains) > 1), self._outside(runs))), []

    def header(self, depth: int, loops: Sequence[Loop], runs: Sequence[int], *, optimizer: bool) -> str:
        """The header of the loops that a repeat at this depth is the body of; "" where none is known."""
        if not loops and self._chains.hides and not optimizer:
            # It may be a trainer's loop, not one over weights.
            return header_text(self._that_may_repeat(runs, self._loops_of(runs)[:1]))
        return header_text(loops, self._open_loops(depth))

    def enter(self, depth: int, loops: Sequence[Loop]) -> None:
        """Enter a repeat; `leave` ends it."""
        self._open.append((depth, loops[0] if loops else None))

    def leave(self) -> None:
        self._open.pop()

    def _open_loops(self, depth: int) -> list[Loop]:
        """The loops at a depth that enclosing repeats already stand for."""
        return [loop for at, loop in self._open if at == depth and loop is not None]

    def _that_may_repeat(self, runs: Sequence[int], loops: Sequence[Loop]) -> list[Loop]:
        """The loops without those around a whole step, if the runs are in one."""
        steps = {self._steps[self._ops.ids[at]] for at in runs}
        if len(steps) > 1 or -1 in steps:
            return [*loops]
        return [loop for loop in loops if loop not in self._loops_of_steps]

    @cached_property
    def _loops_of_steps(self) -> set[Loop]:
        """The loops of the source around the updates of optimizers, each of which ends a step."""
        ops = self._data.ops
        frames = np.unique(ops.frame[ops.phase == PHASES.index("optimizer")])
        chains = [self._chains.whole(frame) for frame in frames.tolist()]
        own = [(at, chain) for chain in chains for at, each in enumerate(chain) if not torch_file(each.file)]
        return {loop for at, chain in own for loop in self._loops_at(at, [chain])}

    def _outside(self, runs: Sequence[int]) -> int:
        """How many source lines enclose the module calls that differ from run to run; all without any."""
        calls = self._data.calls
        shared = self._common_call(runs)
        entered = self._ops.calls[runs[0]]
        if entered == shared:
            return len(self._chains.of(self._ops.frames[runs[0]], entered))
        while int(calls.parent[entered]) != shared:
            entered = int(calls.parent[entered])
        return self._chains.depth(int(calls.frame[entered]))

    def _loops_at(self, depth: int, chains: Sequence[Chain]) -> list[Loop]:
        """The loops around all frames at a depth, the innermost first."""
        frames = [chain[depth] for chain in chains if depth < len(chain)]
        if len({(frame.file, frame.function) for frame in frames}) > 1:
            return []
        positions = [(frame.line, frame.columns[0] if frame.columns else -1) for frame in frames]
        return loops_around(self._data.source_lines, frames[0].file, positions)

    def _common_call(self, ops: Sequence[int]) -> int:
        """The innermost module call that is or contains those of all these ops; -1 without one."""
        parents = self._data.calls.parent
        paths = []
        for call in {self._ops.calls[at] for at in ops}:
            path = []
            while call >= 0:
                path.append(call)
                call = int(parents[call])
            paths.append(path[::-1])
        shared = -1
        for level in zip(*paths, strict=False):
            if len(set(level)) > 1:
                break
            shared = level[0]
        return shared


def _shared_depth(chains: Sequence[Chain]) -> int:
    """How many outer lines all the chains share."""
    count = 0
    for frames in zip(*chains, strict=False):
        if len({(frame.file, frame.line, frame.function) for frame in frames}) > 1:
            break
        count += 1
    return count
