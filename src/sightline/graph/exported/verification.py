"""The comparison of an exported graph with its model: whether they agree, and the first node that differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node as FxNode

from sightline.argument_checks import argument_text
from sightline.graph.exported.program import module_calls
from sightline.graph.exported.torchapi import pytree
from sightline.text_encoding import for_output, printable

if TYPE_CHECKING:
    from sightline.graph.exported.interpreter import Run


@printable
@dataclass(frozen=True)
class Verification:
    """The result of a comparison with the model; true where nothing differs.

    >>> bool(Verification()), bool(Verification("the output differs"))
    (True, False)
    """

    difference: str = ""  #: the difference in torch's words; "" where there is none
    module: str = ""  #: the first module whose output differs
    node: str = ""  #: the node that computed it
    source: str = ""  #: its line
    left_out: tuple[str, ...] = ()  #: parts of the model's output that the graph lacks: not compared

    def __bool__(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        if self:
            without = f", without {', '.join(self.left_out)}, which it leaves out" if self.left_out else ""
            return f"The graph computes what the model computes{without}."
        if not self.node:
            return for_output(f"The graph's output differs from the model's: {self.difference}")
        line = f" ({self.source})" if self.source else ""
        return for_output(
            f"The graph differs from the model from the node {self.node!r}{line} on, which is the output of "
            f"{self.module or 'the model'}: {self.difference}"
        )


def verify_graph(
    model: torch.nn.Module,
    run: Callable[..., Run],
    simplify: Callable[[Any], Any],
    outputs: dict[tuple[str, int], list[str]],
    source: Callable[[str], str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verification:
    """Run both on the same inputs, random numbers and buffers, and compare.

    ``outputs`` comes from `module_outputs`.
    """
    called: list[tuple[str, int, list[torch.Tensor]]] = []
    with _buffers_restored(model), torch.random.fork_rng():
        random = torch.get_rng_state()
        own_args, own_kwargs = _copy_tensors((args, kwargs))
        with _record_outputs(model, called):
            eager = model(*own_args, **own_kwargs)
    with _buffers_restored(model), torch.random.fork_rng():
        torch.set_rng_state(random)
        own_args, own_kwargs = _copy_tensors((args, kwargs))
        io = run(*own_args, **own_kwargs)
    difference = _difference(simplify(io.output), simplify(eager))
    if not difference:
        return Verification()
    for path, call, tensors in called:
        names = outputs.get((path, call), [])
        if len(names) != len(tensors) or any(name not in io for name in names):
            continue  # the graph does not show which nodes are its outputs
        for name, tensor in zip(names, tensors, strict=True):
            module_difference = _difference(io[name].outputs, tensor)
            if module_difference:
                return Verification(module_difference, path, name, source(name))
    return Verification(difference)


def module_outputs(nodes: list[FxNode]) -> dict[tuple[str, int], list[str]]:
    """The output nodes of each module call: computed inside it, used outside it."""
    calls: dict[tuple[str, str], list[FxNode]] = {}
    inside: dict[FxNode, set[tuple[str, str]]] = {}
    for node in nodes:
        stack = [(path, key) for path, _, key in module_calls(node)]
        inside[node] = set(stack)
        for call in stack:
            calls.setdefault(call, []).append(node)
    outputs: dict[tuple[str, int], list[str]] = {}
    counts: dict[str, int] = {}
    for (path, key), members in calls.items():
        number = counts.get(path, 0)
        counts[path] = number + 1
        outputs[path, number] = [
            node.name
            for node in members
            if any((path, key) not in inside[user] for user in node.users)
            and isinstance(node.meta.get("val"), (torch.Tensor, list, tuple))  # not a symbolic size
        ]
    return outputs


@contextmanager
def _record_outputs(model: torch.nn.Module, called: list[Any]) -> Iterator[None]:
    """Append the result of every module to ``called``, in the order in which they return."""
    counts: dict[str, int] = {}
    handles = []

    def make_hook(path: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 — a hook gets them
            number = counts.get(path, 0)
            counts[path] = number + 1
            tensors = [
                one.detach().clone() for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor)
            ]
            called.append((path, number, tensors))

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_hook(make_hook(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _buffers_restored(model: torch.nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _copy_tensors(value: Any) -> Any:
    """The inputs with copied tensors: a model may change them in place."""
    return pytree.tree_map_only(
        torch.Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), copy.copy(value)
    )


def _difference(first: Any, second: Any) -> str:
    """The difference between two results in torch's words; "" where there is none."""
    left, left_spec = pytree.tree_flatten(first)
    right, right_spec = pytree.tree_flatten(second)
    if left_spec != right_spec:
        return f"the structure: {left_spec} and {right_spec}"
    for left_leaf, right_leaf in zip(left, right, strict=True):
        if isinstance(left_leaf, torch.Tensor) and isinstance(right_leaf, torch.Tensor):
            try:
                torch.testing.assert_close(left_leaf, right_leaf, equal_nan=True)
            except AssertionError as error:
                return " ".join(str(error).split())
        elif left_leaf != right_leaf:
            return f"{argument_text(left_leaf)} and {argument_text(right_leaf)}"
    return ""
