"""Links every backward op to the forward op whose autograd node it belongs to, batch by batch.

A forward op advances autograd's sequence number, and the node it makes carries that number; a backward op
knows the node it runs for. An op that runs for no node is linked through the values it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.assemble.ops import OPAQUE, BatchOps
from sightline.assemble.values import LiveValues
from sightline.data.arrays import EMPTY, IntArray, Mask, expand_ranges, offsets_of
from sightline.schema.tables import BACKWARD, FORWARD, RECOMPUTE

#: How many autograd nodes, counted from the last, keep the op that made them.
_NODES: Final = 1 << 17


class ForwardLinks:
    """The forward ops of the backward ops of one batch."""

    def __init__(self, ops: BatchOps, live: LiveValues) -> None:
        self._ops, self._live = ops, live
        self._batch_makers = EMPTY  # for each live value, the aten op of this batch that made it; -1: none

    def find(self, recomputes: Mask, first_gradients: Mask) -> None:
        """Link every backward op to the forward op whose autograd node it belongs to."""
        ops, live = self._ops, self._live
        node = ops.rows.column("node")
        in_backward = (node != -1) & (ops.level == 1)
        again = in_backward & recomputes[ops.stack]
        ops.phase[again] = RECOMPUTE
        ops.phase[(ops.level == 0) & (ops.phase == BACKWARD) & recomputes[ops.stack]] = RECOMPUTE
        makes = (ops.level == 1) | (ops.flavour == OPAQUE)
        self._note_nodes(np.flatnonzero(makes))
        nodes = ops.before.nodes
        linked = np.flatnonzero(makes & (node >= 0) & ~again)
        if len(linked) and nodes.shape[1]:
            keys = (nodes[0] << 32) + nodes[1]
            at = np.searchsorted(keys, (node[linked] << 32) + ops.base + linked) - 1  # an op before this one
            fits = (at >= 0) & (nodes[0][at] == node[linked])
            ops.forward[linked[fits]] = nodes[1][at[fits]]
            ops.forward_call[linked[fits]] = nodes[2][at[fits]]
        # The first op of this batch that returned each live value, unless an earlier batch did.
        owners = np.repeat(np.arange(len(ops.ids)), ops.output_counts)
        rows = live.at(ops.outputs)
        by_aten = (ops.level[owners] == 1) & (rows >= 0)
        makers = np.full(len(live), -1, dtype=np.int64)
        makers[rows[by_aten][::-1]] = owners[by_aten][::-1]  # the first of equal ones is written last
        makers[live.maker >= 0] = -1
        self._batch_makers = makers
        self._link_accumulations(np.flatnonzero((node == -2) & in_backward & ~again))
        self._link_first_gradients(first_gradients)

    def _note_nodes(self, making: IntArray) -> None:
        """Add the autograd nodes of these ops to the table of nodes."""
        ops = self._ops
        before, sequence = ops.before, ops.rows.column("sequence")
        node = ops.rows.column("node")
        parts = [np.zeros((3, 0), dtype=np.int64)]
        for thread in np.unique(ops.thread[making]).tolist():
            here = making[ops.thread[making] == thread]
            now = sequence[here]
            start = before.sequences.get(thread)
            if start is None:  # a thread that is new: its first op made a node, unless it ran for one
                start = int(now[0]) - bool(now[0] > 0 and node[here[0]] == -1)
            reached = np.maximum.accumulate(np.concatenate([[start], now]))
            earlier = reached[:-1]
            resumed = ops.after_gaps(here)
            earlier[resumed] = np.maximum(earlier, now)[resumed]  # lost ops made the nodes between
            ahead = now > earlier
            parts.append(np.stack([now[ahead] - 1, ops.base + here[ahead], ops.call[here[ahead]]]))
            # An op recorded from outside made all the nodes counted since; one recorded below autograd made
            # only the last, and the op before it made the others.
            more = np.where(ahead, np.minimum(now - 1 - earlier, _NODES), 0)
            if more.any():
                owner = np.searchsorted(making, here) - (not ops.tables.whole_ops)
                op = np.where(owner >= 0, ops.base + making[owner], before.last_op)
                call = np.where(owner >= 0, ops.call[making[owner]], before.last_call)
                numbers = np.arange(int(more.sum())) + np.repeat(earlier - (np.cumsum(more) - more), more)
                extra = np.stack([numbers, np.repeat(op, more), np.repeat(call, more)])
                parts.append(extra[:, extra[1] >= 0])
            before.sequences[thread] = int(reached[-1])
        if len(making):
            before.last_op, before.last_call = ops.base + int(making[-1]), int(ops.call[making[-1]])
        new = np.concatenate(parts, axis=1)
        new = new[:, np.lexsort((new[1], new[0]))]
        old = before.nodes
        nodes = np.concatenate([old, new], axis=1)
        if old.shape[1] and new.shape[1] and new[0, 0] <= old[0, -1]:  # each thread counts on its own
            nodes = nodes[:, np.lexsort((nodes[1], nodes[0]))]
        if nodes.shape[1] > _NODES + _NODES // 4:
            nodes = nodes[:, np.sort(np.argpartition(nodes[1], -_NODES)[-_NODES:])]
        before.nodes = nodes

    def note_makers(self) -> None:
        """Store with each value the op that made it and its forward op, for later batches."""
        ops, live = self._ops, self._live
        rows = np.flatnonzero(self._batch_makers >= 0)
        makers = self._batch_makers[rows]
        live.maker[rows], live.maker_call[rows] = ops.base + makers, ops.call[makers]
        live.maker_forward[rows] = ops.forward[makers]
        live.maker_forward_call[rows] = ops.forward_call[makers]

    def _input_makers(self, chosen: IntArray) -> Iterator[tuple[int, int, int]]:
        """The inputs of some ops: the op, the value's row, and the op of this batch that made it."""
        ops, live = self._ops, self._live
        counts = ops.input_counts[chosen]
        rows = live.at(ops.inputs[expand_ranges(offsets_of(ops.input_counts)[chosen], counts)])
        makers = np.where(rows >= 0, self._batch_makers[rows], -1) if len(live) else rows
        return zip(np.repeat(chosen, counts).tolist(), rows.tolist(), makers.tolist(), strict=True)

    def _link_accumulations(self, unlinked: IntArray) -> None:
        """Link an op that adds into a leaf's gradient to the forward op of the tensor it adds.

        The gradient it adds to is of an earlier backward pass, so that the latest forward op counts.
        """
        ops, live = self._ops, self._live
        for op, input_row, maker in self._input_makers(unlinked):
            if 0 <= maker < op:
                forward, call = int(ops.forward[maker]), int(ops.forward_call[maker])
            elif maker < 0 and input_row >= 0 and live.maker[input_row] >= 0:
                forward, call = int(live.maker_forward[input_row]), int(live.maker_forward_call[input_row])
            else:
                continue
            if forward > ops.forward[op]:
                ops.forward[op], ops.forward_call[op] = forward, call

    def _link_first_gradients(self, stacks: Mask) -> None:
        """Link the ops that ``backward()`` runs before its first node: they make the gradient of the loss."""
        ops, live = self._ops, self._live
        ops.phase[ops.starts_backward & (ops.phase == FORWARD)] = BACKWARD
        inside = np.flatnonzero((ops.parent >= 0) & (ops.phase == FORWARD))
        if len(inside):
            inside = inside[np.isin(ops.parent_ids[inside], list(ops.before.backwards))]
        makes = (ops.level == 1) & (ops.phase == FORWARD) & stacks[ops.stack]
        inside = np.union1d(inside, np.flatnonzero(makes))
        ops.phase[inside] = BACKWARD
        linked = -1
        for op, input_row, maker in self._input_makers(inside):
            if op == linked:
                continue
            if 0 <= maker < op:
                ops.forward[op], ops.forward_call[op] = ops.base + maker, ops.call[maker]
            elif maker < 0 and input_row >= 0 and live.maker[input_row] >= 0:
                ops.forward[op] = live.maker[input_row]
                ops.forward_call[op] = live.maker_call[input_row]
            else:
                continue
            linked = op
