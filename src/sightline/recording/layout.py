"""The columns of the rows that are written once per op and once per module call.

Column 0 of a row is its length, column 1 its id.
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
