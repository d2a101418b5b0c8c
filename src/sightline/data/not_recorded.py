"""Code that ran unrecorded beside the ops: compiled, or on other threads. One sentence for each.

The sentences are for every view that would otherwise leave these out in silence, live ones too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sightline.data.trace_data import FLAVOURS, TraceData
from sightline.hints import Hint

OPAQUE = FLAVOURS.index("opaque")
_MAX_NAMES = 3


def compiled_note(names: Sequence[str]) -> str:
    """The sentence for opaque ops of these names, one for each time that compiled code ran; "" for none.

    >>> compiled_note(["compiled Net", "compiled Net"])
    'compiled code ran as 2 opaque ops (compiled Net): compiled="eager" shows what runs inside'
    """
    if not names:
        return ""
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:_MAX_NAMES]) + (", …" if len(distinct) > _MAX_NAMES else "")
    ops = "an opaque op" if len(names) == 1 else f"{len(names):,} opaque ops"
    return (
        f"compiled code ran as {ops} ({shown}): {Hint.recording('compiled', 'eager')} shows what runs inside"
    )


def other_threads_note(calls: int, module: str) -> str:
    """The sentence for module calls on threads that nothing records; "" for none.

    >>> other_threads_note(3, "Net")
    '3 module calls on other threads (Net first) were not recorded: start a recording on those threads'
    """
    if not calls:
        return ""
    if calls == 1:
        return (
            f"a module call on another thread ({module}) was not recorded: start a recording on that thread"
        )
    many = f"{calls:,} module calls on other threads ({module} first)"
    return f"{many} were not recorded: start a recording on those threads"


def other_threads(data: TraceData) -> str:
    """The sentence for the module calls on other threads of a recording."""
    return other_threads_note(
        int(data.info.get("unrecorded_calls") or 0), str(data.info.get("unrecorded_module") or "")
    )


def compiled(data: TraceData) -> str:
    """The sentence for the compiled code of a recording."""
    names = data.ops.name[np.flatnonzero(data.ops.flavour == OPAQUE)].tolist()
    return compiled_note([data.names[name] for name in names])


def notes(data: TraceData) -> list[str]:
    """Every sentence about a recording."""
    return [note for note in (compiled(data), other_threads(data)) if note]
