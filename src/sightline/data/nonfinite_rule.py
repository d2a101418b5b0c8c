"""The rule for blaming an op for a NaN or an infinity, shared by the recorder's check and the analysis.

`sightline.analysis.nonfinite` applies it to a whole recording and decides; the check applies it to one op as
it runs, to know whether the recording so far is worth that search.
"""

from __future__ import annotations

import math
from typing import Any

from sightline.data.forms import leaves

#: Bits of a state: a tensor holds a NaN, an infinity.
NAN, INF = 1, 2


def new_states(outputs: int, inputs: int, requested: int = 0) -> int:
    """The states that an op made itself: a NaN out of inputs without one, an infinity out of finite inputs.

    ``requested`` is in its plain arguments, as in ``masked_fill(mask, -inf)``.

    >>> new_states(NAN, INF) == NAN, new_states(NAN | INF, NAN), new_states(INF, 0, requested=INF)
    (True, 0, 0)
    """
    new = 0 if inputs & NAN else outputs & NAN if inputs & INF else outputs
    return new & ~requested


def argument_states(arguments: Any) -> int:
    """Whether a NaN or an infinity is among plain arguments, however nested.

    >>> argument_states(([1.0, float("-inf")], {"value": 2})) == INF
    True
    """
    states = 0
    for _, leaf in leaves(arguments):
        if isinstance(leaf, float | complex):
            parts = (leaf.real, leaf.imag)
            states |= NAN * any(map(math.isnan, parts)) | INF * any(map(math.isinf, parts))
    return states
