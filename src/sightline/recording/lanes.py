"""Names by which observers and the native engine know `thread_state`."""

from sightline.recording.thread_state import OpenCall
from sightline.recording.thread_state import ThreadState as Lane
from sightline.trace.assembly.layout import FORWARD, OPTIMIZER

__all__ = ["FORWARD", "OPTIMIZER", "Lane", "OpenCall"]
