"""Compiled code in a recording: the ops that stand for it, and what compiling took."""

from __future__ import annotations

import numpy as np

from sightline.analysis.select import Mask
from sightline.notation import time_text
from sightline.trace.data import FLAVOURS, TraceData


def is_opaque(data: TraceData) -> Mask:
    """Which ops stand for code that nobody can look into."""
    found: Mask = np.asarray(data.ops.flavour == FLAVOURS.index("opaque"))
    return found


def compiled_text(data: TraceData) -> str:
    """How often something was compiled while the recording ran, and how long that took; else nothing."""
    count = int(data.info.get("compilations") or 0)
    if not count:
        return ""
    taken = time_text(int(data.info.get("compile_ns") or 0))
    return f"{count:,} region{'s' * (count > 1)} in {taken}"
