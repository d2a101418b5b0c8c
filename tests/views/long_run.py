"""A long run, made by hand: a model of one module that is called again and again."""

from __future__ import annotations

from functools import cache

from sightline.api import Trace
from tests.builders import TraceBuilder

_SOURCE = """\
def run(model, batches):
    for x in batches:
        model(x)
"""


@cache
def long_run(ops: int) -> Trace:
    """So many ops, of two kinds, in half as many calls; every batch has another size."""
    b = TraceBuilder()
    b.source("long.py", _SOURCE)
    w = b.value(8, 8, kind="parameter", name="weight")
    for number in range(ops // 2):
        x = b.value(2 + number % 7, 8)
        with b.at("long.py", 3, "run", "model(x)"), b.call("", x):
            h = b.op("mm", x, w, out=x.shape)
            b.op("relu", h, out=h.shape)
    return b.build()
