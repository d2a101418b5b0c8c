"""The columns of the rows a recorder writes: once per op, once per module call, once per value.

Column 0 of a row is its length, column 1 its id. Ops, module calls and steps share one counter of ids.
"""

from typing import Final

#: Fixed columns of an op row; its inputs and then its outputs follow.
(
    O_INFO, O_FORM, O_RESULT, O_STACK, O_CALL, O_PARENT, O_SEQUENCE, O_NODE, O_START, O_DURATION, O_BITS,
    O_INPUTS,
) = range(2, 14)  # fmt: skip
O_WIDTH: Final = 14
#: O_BITS and C_BITS are the phase in its lowest bits, then the flags, then the thread.
FLAG_SHIFT: Final = 4
THREAD_SHIFT: Final = 12
#: Fixed columns of a call row; its inputs and then its outputs follow.
(
    C_MODULE, C_PARENT, C_STACK, C_BITS, C_START, C_DURATION, C_END, C_INPUT_FORM, C_OUTPUT_FORM,
    C_INPUTS,
) = range(2, 12)  # fmt: skip
C_WIDTH: Final = 12
#: The end of a call that has not ended: larger than every id.
NO_END: Final = 1 << 60
#: Where the last batch ends: after every op, call and value, also after calls without an end.
END: Final = 1 << 62
#: Fixed columns of a value row.
V_META, V_STORAGE, V_OFFSET, V_KIND, V_PRODUCER, V_PREVIOUS, V_BASE, V_FLAGS = range(2, 10)
V_WIDTH: Final = 10
#: What is written of the plain result of an op in storage of its own: value, metadata, op.
FRESH_WIDTH: Final = 3
#: A flag of a version of a value: it is not in the memory of the one before it.
MOVED: Final = 256
#: What is written when a storage is seen first, changes its size or is freed: value, bytes (-1: freed), time.
M_WIDTH: Final = 3
#: An offset that is the one of the value's base.
INHERITED: Final = -1

#: Statistics of a value: min, max, mean, std, l2; and value, zeros, nans, infs and the fingerprint's lanes.
FLOATS: Final = 5
COUNTS: Final = 4
LANES: Final = 4

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(4)  # positions in data.PHASES
