"""Running an architecture: its model as it was built, its forward and backward, everything they left."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.recording.architectures import Architecture

SEED = 7


@dataclass
class Run:
    """What one run of a model left: everything that must be the same with and without a trace."""

    model: torch.nn.Module
    inputs: dict[str, Any]
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    random: Any = None
    calls: Counter[str] = field(default_factory=Counter)  #: how often each module's forward ran
    flops: tuple[int, int] = (0, 0)  #: after the forward, after the backward

    def state(self) -> dict[str, Any]:
        """Flags, hooks and attributes of every module, and the values of its parameters and buffers."""
        found: dict[str, Any] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            found[f"{path}: training"] = module.training
            found[f"{path}: attributes"] = sorted(vars(module))
            for name, value in vars(module).items():
                if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                    found[f"{path}: {name}"] = len(value or ())
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    found[f"{path}: {name}"] = tensor
                    found[f"{path}: {name}: flags"] = tensor is not None and (
                        tensor.requires_grad,
                        tensor.is_leaf,
                    )
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    found[f"{path}: {name} (attribute)"] = value
        return found


@functools.cache
def pristine(architecture: Architecture) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model as it was built; every run gets a copy of it."""
    torch.manual_seed(SEED)
    return architecture.build()


def prepare(architecture: Architecture, mode: str) -> Run:
    model, inputs = copy.deepcopy(pristine(architecture))
    run = Run(model.train(mode == "train"), inputs)
    forget_tables(model)
    if mode == "train":  # hooks of the user's own, which also count
        for path, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(_count, run.calls, path))
    torch.manual_seed(SEED + 1)
    return run


def forget_tables(model: Any) -> None:
    """Empty the caches of methods: a table kept from an earlier run would come from nowhere in this one."""
    for kind in {type(module) for module in model.modules()}:
        for name in vars(kind):
            for cell in getattr(getattr(kind, name), "__closure__", None) or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()


def _count(calls: Counter[str], path: str, *_: Any) -> None:
    calls[path] += 1


def execute(run: Run, mode: str, counter: FlopCounterMode | None = None) -> Run:
    """The forward, the backward unless gradients are off, and what came out of both."""
    with grad_mode(mode), mock.patch.object(torch, "seed", _seed):
        output = run.model(**run.inputs)
        run.outputs = list(leaves(output))
        first = counter.get_total_flops() if counter is not None else 0
        losses = [value for _, value in run.outputs if _differentiable(value)]
        if losses:
            sum(value.float().square().mean() for value in losses).backward()
    run.flops = (first, counter.get_total_flops() if counter is not None else 0)
    run.random = torch.get_rng_state()
    run.gradients = {name: parameter.grad for name, parameter in run.model.named_parameters()}
    return run


def _seed() -> int:
    """In place of ``torch.seed``, which takes entropy from the system: Reformer calls it in its forward."""
    return torch.manual_seed(SEED + 2).initial_seed()


def grad_mode(mode: str) -> AbstractContextManager[Any]:
    if mode == "inference":
        return torch.inference_mode()
    return torch.no_grad() if mode == "no_grad" else nullcontext()


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()


def leaves(item: Any, path: str = "output", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in an output, by its path: dicts, lists, dataclasses, caches."""
    if isinstance(item, torch.Tensor) or item is None or isinstance(item, int | float | str | bool):
        yield path, item
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from leaves(value, f"{path}.{key}", depth + 1)
    elif isinstance(item, list | tuple):
        for position, value in enumerate(item):
            yield from leaves(value, f"{path}[{position}]", depth + 1)
    elif is_dataclass(item):
        for one in fields(item):
            yield from leaves(getattr(item, one.name), f"{path}.{one.name}", depth + 1)
    elif depth < 8 and type(item).__module__.startswith("transformers."):
        yield from leaves(vars(item), path, depth + 1)
