"""Rows of ops and module calls, and the streams they are written to: integers, no object per row.

The columns are those of `schema.streams`. `op_row` and `call_row` make every row of this engine:
of an op, an API call, a compiled region, something that raised or has not ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sightline.recording.plain.thread_state import OpenCall, OpenOp, ThreadState
from sightline.schema.streams import CALL, FLAG_SHIFT, OP


def op_row(
    state: ThreadState, op: OpenOp, duration: int, outputs: list[int], result: int, *, phase: int,
    flags: int = 0, parent: int = -1, sequence: int = -1, node: int = -1,
) -> list[int]:  # fmt: skip
    """An op with its outputs and the form of its result.

    ``parent`` is the API call an aten op came from, ``sequence`` the number of the next autograd node,
    ``node`` that of the node being evaluated.
    """
    return [
        OP.width + len(op.inputs) + len(outputs), op.number, op.operation, op.form, result, op.stack,
        state.top.call, parent, sequence, node, op.start, duration,
        state.bits | phase | flags << FLAG_SHIFT, len(op.inputs), *op.inputs, *outputs,
    ]  # fmt: skip


def call_row(
    state: ThreadState, call: OpenCall, now: int, outputs: list[int], result: int, flags: int, end: int
) -> list[int]:
    """A module call with its outputs; ``end`` is a number in the order of ops and calls."""
    duration = now - call.start - (state.spent - call.spent)
    return [
        CALL.width + len(call.inputs) + len(outputs), call.call, call.module, call.outer.call, call.stack,
        call.phase | (flags | call.mode) << FLAG_SHIFT, call.start, duration, end, call.input_form, result,
        len(call.inputs), *call.inputs, *outputs,
    ]  # fmt: skip


class Stream:
    """A growing run of integers: rows that begin with their own length.

    A row is written by one ``write([...])``, which is atomic under the GIL, so that it is whole even when
    autograd's worker threads write too.
    """

    def __init__(self) -> None:
        self._written = array("q")
        self._taken = 0
        #: A function written in C, as `run_atomically` needs.
        self.write: Callable[[list[int]], None] = self._written.fromlist

    def __len__(self) -> int:
        """How many numbers were ever written, taken ones included."""
        return self._taken + len(self._written)

    def numbers(self) -> NDArray[np.int64]:
        """Everything in it. A copy: an array cannot grow while a view of it exists."""
        return np.frombuffer(self._written[:], dtype=np.int64)

    def take(self) -> NDArray[np.int64]:
        """Everything in it, which is removed from it. Rows that are written meanwhile stay."""
        taken = self._written[:]
        del self._written[: len(taken)]  # one step, and rows are whole
        self._taken += len(taken)
        return np.frombuffer(taken, dtype=np.int64)
