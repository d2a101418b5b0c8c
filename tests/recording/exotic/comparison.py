"""How a recorded run of a program is compared with the plain run, and with what options it is recorded.

A program is called with a function that opens the recorded block, ``with record(model):``, and returns what
is compared: tensors, numbers, texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sightline as sl

Record = Callable[..., AbstractContextManager[Any]]
Program = Callable[[Record], Any]

PROGRAMS: dict[str, Program] = {}

#: The options of a recording, by name; ``path`` is put in by `recorded`.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": {"ops": "none"},
    "capture": {"capture": sl.Capture(inputs=True, gradients=True)},
    "capture_ops": {"capture": sl.Capture(modules="**", ops="*", inputs=True, gradients=True, sample=7)},
    "stats": {"stats": sl.Stats(fingerprint="views")},
    "check": {"check": sl.Check(on="report")},
    "path": {"path": True, "capture": True, "stats": True, "check": sl.Check(on="report")},
    "last": {"last": 3, "capture": True},
}


def program(function: Program) -> Program:
    """Add a program to the list, by the name of its function."""
    PROGRAMS[function.__name__] = function
    return function


def mlp() -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


X = torch.arange(12.0).reshape(3, 4) / 7


def grads_of(model: nn.Module) -> list[Any]:
    """The gradients of the parameters."""
    return [one.grad for one in model.parameters()]


def _bytes_of(tensor: Any) -> Any:
    """The elements of a tensor of any kind, bit for bit; a word where it has none."""
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return "no elements"
    if tensor.is_nested:
        return [_bytes_of(one) for one in tensor.detach().unbind()]
    if tensor.layout is torch.sparse_coo:
        return [tensor.is_coalesced(), _bytes_of(tensor._indices()), _bytes_of(tensor._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [_bytes_of(one) for one in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    if tensor.layout is torch.sparse_csc:
        return [_bytes_of(one) for one in (tensor.ccol_indices(), tensor.row_indices(), tensor.values())]
    if tensor.is_mkldnn:
        return _bytes_of(tensor.to_dense())
    if tensor.is_quantized:
        return _bytes_of(tensor.int_repr())
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor._is_zerotensor():
        if tensor.untyped_storage().nbytes() < needed:
            return "freed"
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    plain = (plain + 0 if plain._is_zerotensor() else plain).contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _described(leaf: Any) -> Any:
    if isinstance(leaf, str):  # torch numbers the classes that it has compiled
        return re.sub(r"___torch_mangle_\d+\.", "", leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    sizes = "nested" if leaf.is_nested else tuple(leaf.shape)
    return type(leaf).__name__, str(leaf.dtype), str(leaf.layout), sizes, leaf.requires_grad, _bytes_of(leaf)


def outcome(name: str, record: Record) -> list[Any]:
    """All that a program leaves: what it returns, or how it fails, and the state of random numbers."""
    torch.manual_seed(0)
    try:
        result = [_described(leaf) for leaf in pytree.tree_leaves(PROGRAMS[name](record))]
    except Exception as error:  # noqa: BLE001 — it is compared
        result = [type(error), str(error)]
    return [*result, torch.get_rng_state().numpy().tobytes()]


def plain(name: str) -> list[Any]:
    """The outcome of a program that is not recorded."""
    return outcome(name, lambda model=None: nullcontext())


class EmptyMode(TorchDispatchMode):
    """Changes nothing, but for what torch itself does otherwise where a mode is active."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(name: str) -> list[Any]:
    """The outcome of a program whose block runs under a mode that does nothing."""
    return outcome(name, lambda model=None: EmptyMode())


def recorded(name: str, options: dict[str, Any], folder: Path) -> tuple[list[Any], list[sl.Trace]]:
    """The outcome of a recorded program, and its recordings."""
    traces: list[sl.Trace] = []

    @contextmanager
    def record(model: Any = None) -> Iterator[Any]:
        given = dict(options)
        if given.get("path"):
            given["path"] = folder / f"run{len(traces)}.sight"
        with sl.trace(model, **given) as t:
            traces.append(t)
            yield t

    return outcome(name, record), traces


def look_at(t: sl.Trace, folder: Path) -> None:
    """Read a recording in every way: its invariants, its tables, the views, the page, a file and back."""
    assert not t.info["faults"], t.info["faults"]
    t.validate()
    for view in (
        t.code(),
        t.log(),
        t.call_order(),
        t.summary(),
        t.memory(),
        t.source(),
        t.problems(),
        t.steps,
    ):
        assert str(view) or view is t.steps
    assert str(t)
    path = folder / "saved.sight"
    t.save(path, overwrite=True)
    again = sl.load(path)
    again.validate()
    assert str(again)
    assert str(again.code()) == str(t.code())
    assert str(again.summary()) == str(t.summary())
    for key in t.tensors:
        assert t.tensors[key].raw is not None
