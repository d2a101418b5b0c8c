"""A run without and with the native engine, side by side; and programs run in a process of their own."""

# mypy: disable-error-code="arg-type,no-any-return"
# torch's stubs know less of torch than these tests call.

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sightline as sl

SOURCE = Path(sl.__file__).parents[1]
#: With these, memory that was freed does not look as it did: reading it is seen at once.
POISON = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "85"}


def flat(found: Any) -> list[Any]:
    """What is in lists, tuples and dicts, in order."""
    if isinstance(found, dict):
        found = tuple(found.values())
    if isinstance(found, (list, tuple)):
        return [item for one in found for item in flat(one)]
    return [found]


def same(one: Any, other: Any) -> bool:
    """Whether two results are alike to the last bit."""
    if not isinstance(one, Tensor):
        return bool(one == other)
    if one.is_nested:
        return all(map(same, one.unbind(), other.unbind()))
    alike = (one.shape, one.dtype, one.layout, one.requires_grad, type(one))
    if alike != (other.shape, other.dtype, other.layout, other.requires_grad, type(other)):
        return False
    if one.layout == torch.sparse_coo:
        return same(one.coalesce().values(), other.coalesce().values())
    if one.layout != torch.strided:
        return same(one.to_dense(), other.to_dense())
    if one.device.type == "meta":
        return one.stride() == other.stride()
    one, other = one.detach(), other.detach()
    return one.stride() == other.stride() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def record(run: Callable[[], Any], engine: str = "native", **options: Any) -> tuple[list[Any], sl.Trace]:
    """The results of a run and its trace, which has no fault and no contradiction."""
    torch.manual_seed(0)
    with sl.trace(engine=engine, **options) as t:
        found = flat(run())
    assert t.info["engine"] == engine
    assert t.info["fault_count"] == 0, t.info["faults"]
    t.validate()
    return found, t


def unchanged(run: Callable[[], Any], **options: Any) -> sl.Trace:
    """The trace of a run whose results and random numbers are those of the plain run."""
    torch.manual_seed(0)
    plain = flat(run())
    generator = torch.get_rng_state()
    found, t = record(run, **options)
    assert torch.equal(generator, torch.get_rng_state())
    assert len(plain) == len(found)
    differing = [at for at, pair in enumerate(zip(plain, found, strict=True)) if not same(*pair)]
    assert not differing, [(plain[at], found[at]) for at in differing]
    return t


def aten(t: sl.Trace) -> list[str]:
    return [op.name for op in t.ops.where(level="aten")]


def api(t: sl.Trace) -> list[str]:
    return [op.name for op in t.ops.where(level="api")]


def program(code: str, seconds: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, with torch and sightline imported."""
    start = "import sys, torch, sightline as sl\nfrom torch import nn\ntorch.set_num_threads(1)\n"
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path]), **environment},
    )  # fmt: skip


def prints(code: str, seconds: float = 60, **environment: str) -> list[str]:
    """What a program prints that ends well and complains of nothing."""
    done = program(code, seconds, **environment)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr[-2000:])
    return done.stdout.split("\n")[:-1]
