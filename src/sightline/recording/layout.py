"""The columns of the rows that are written once per op and once per module call."""

from sightline.trace.assembly.layout import C_WIDTH, FLAG_SHIFT, NO_END, O_WIDTH, THREAD_SHIFT

__all__ = ["C_WIDTH", "FLAG_SHIFT", "NO_END", "O_WIDTH", "THREAD_SHIFT"]
