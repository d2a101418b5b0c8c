"""The example's transformer, run once with statistics; a golden file names the lines here."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

import sightline as sl

_EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_transformer.py"
_NOISE = re.compile(r"-?\d[\d.]*e-(0[6-9]|[1-9]\d)|(?<=mean )-?0(?=,)")


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_transformer_measured", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run() -> sl.Trace:
    example = _example()
    torch.manual_seed(0)
    model = example.TinyTransformer()
    tokens, targets = example.sample()
    # By the engine that is everywhere: a mode makes torch detach what it saves.
    with sl.trace(model, name="tiny transformer", stats=True, engine="python") as t:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
    return t


@cache
def tiny_transformer() -> sl.Trace:
    """The trace, recorded in a thread of its own: no line of a test is on the way to its ops.

    Every op took a microsecond, and a module call as many as it has ops.
    """
    with ThreadPoolExecutor(1) as pool, torch.random.fork_rng(devices=[]):
        data = pool.submit(_run).result().data
    ops, calls = data.ops, data.calls
    lasted = (calls.end_op - calls.first_op).astype(np.int64) * 1000
    return sl.Trace(
        replace(
            data,
            ops=replace(ops, duration=np.full(len(ops), 1000)),
            calls=replace(calls, duration=lasted),
        )
    )


def steady(text: str) -> str:
    """A text in which what is only rounding is written as ``~0``."""
    return _NOISE.sub("~0", text)
