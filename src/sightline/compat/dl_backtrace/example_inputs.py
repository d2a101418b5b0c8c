"""The example a model is traced with: its arguments, its sizes, and the eval mode of the model meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sightline.graph.exported.torchapi import pytree


def call_arguments(model: torch.nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``input_for_graph`` stands for: a dict is keywords if `forward` has them all."""
    if isinstance(example, Mapping):
        parameters = inspect.signature(model.forward).parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if all(isinstance(key, str) and (any_name or key in parameters) for key in example):
            return (), dict(example)
        return (example,), {}
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def grew_from_one(example: Any, inputs: Any) -> bool:
    """Whether inputs differ from the example only in sizes, and a size of 1 has changed."""
    before, spec = pytree.tree_flatten(example)
    now, inputs_spec = pytree.tree_flatten(inputs)
    if spec != inputs_spec:
        return False
    pairs = [(a, b) for a, b in zip(before, now, strict=True) if isinstance(a, torch.Tensor)]
    if not all(isinstance(b, torch.Tensor) and (a.dtype, a.dim()) == (b.dtype, b.dim()) for a, b in pairs):
        return False
    return any(was == 1 != size for a, b in pairs for was, size in zip(a.shape, b.shape, strict=True))


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch the model to eval mode, and every module back to its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if any(training for _, training in modes):
            model.eval()
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training
