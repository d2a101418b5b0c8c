"""Small programs that ``last=N`` cuts at every op: each cut must be the end of the whole recording."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sightline as sl

Work = Callable[[], Any]


class Square(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Square it."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Its gradient."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def _repeated(work: Work, times: int = 2) -> Work:
    return lambda: [work() for _ in range(times)]


def _linear() -> Work:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    return _repeated(lambda: torch.relu(layer(x)).mean().backward(), 3)


def _only_backward() -> Work:
    loss = torch.relu(nn.Linear(4, 4)(torch.randn(2, 4))).mean()
    return loss.backward


def _second_derivative() -> Work:
    x = torch.randn(3, requires_grad=True)

    def work() -> None:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.sum().backward()

    return _repeated(work)


def _checkpointed(reentrant: bool) -> Callable[[], Work]:
    def program() -> Work:
        inner, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
        return _repeated(lambda: checkpoint(inner, x, use_reentrant=reentrant).sum().backward())

    return program


def _recurrent() -> Work:
    cells, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 3, 3)
    return _repeated(lambda: cells(x)[0].sum().backward())


def _in_place() -> Work:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def work() -> None:
        y = layer(x).clone()
        y[0].mul_(2)
        y.add_(1).relu_()
        y.sum().backward()

    return _repeated(work)


def _views() -> Work:
    x = torch.randn(2, 6, requires_grad=True)
    return _repeated(lambda: x.view(3, 4).t()[1:].reshape(-1).narrow(0, 1, 3).sum().backward())


def _optimized(optimizer: Any, **options: Any) -> Callable[[], Work]:
    def program() -> Work:
        layer, x = nn.Linear(3, 2), torch.randn(2, 3)
        updates = optimizer(layer.parameters(), lr=0.1, **options)

        def work() -> None:
            updates.zero_grad()
            layer(x).pow(2).sum().backward()
            updates.step()

        return _repeated(work)

    return program


def _another_thread() -> Work:
    layer, x = nn.Linear(3, 2), torch.randn(2, 3)

    def work() -> None:
        other = threading.Thread(target=lambda: layer(x).sum().backward())
        layer(x).relu().sum().backward()
        other.start()
        other.join()

    return _repeated(work)


def _convolution() -> Work:
    layers, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2)), torch.randn(2, 1, 6, 6)
    return _repeated(lambda: layers(x).mean().backward())


def _embedding() -> Work:
    table, tokens = nn.Embedding(5, 3), torch.tensor([[0, 2], [1, 2]])
    return _repeated(lambda: F.cross_entropy(table(tokens).flatten(1), torch.tensor([1, 0])).backward())


def _attention() -> Work:
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(1, 3, 4)
    return lambda: layer(x, x, x)[0].sum().backward()


def _no_gradients() -> Work:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)

    def work() -> None:
        with torch.no_grad():
            layer(x).softmax(-1)
        with torch.inference_mode():
            layer(x).argmax(-1)

    return _repeated(work)


def _own_function() -> Work:
    x = torch.randn(3, requires_grad=True)
    return _repeated(lambda: Square.apply(x).sum().backward())


def _gradient_hooks() -> Work:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    layer.register_full_backward_hook(lambda *_: None)
    return _repeated(lambda: layer(x).sum().backward())


def _shared_weight() -> Work:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    return _repeated(lambda: (layer(layer(x)) + x @ layer.weight).sum().backward())


def _failing() -> Work:
    x = torch.randn(3, requires_grad=True)

    def work() -> None:
        with suppress(RuntimeError):
            (x.exp() @ torch.ones(4)).sum().backward()
        x.exp().sum().backward()

    return _repeated(work)


def _named() -> Work:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)

    def work() -> None:
        for number in range(2):
            with sl.step(f"step{number}"):
                sl.spy("hidden", layer(x)).sum().backward()

    return work


PROGRAMS: dict[str, Callable[[], Work]] = {
    "linear": _linear, "only backward": _only_backward, "second derivative": _second_derivative,
    "checkpoint": _checkpointed(False), "reentrant checkpoint": _checkpointed(True), "gru": _recurrent,
    "in place": _in_place, "views": _views, "sgd": _optimized(torch.optim.SGD, momentum=0.9),
    "adam": _optimized(torch.optim.Adam), "another thread": _another_thread, "convolution": _convolution,
    "embedding": _embedding, "attention": _attention, "no gradients": _no_gradients,
    "own function": _own_function, "gradient hooks": _gradient_hooks, "shared weight": _shared_weight,
    "failing": _failing, "named": _named,
}  # fmt: skip


def recorded(name: str, **options: Any) -> sl.Trace:
    """A recording of a program."""
    torch.manual_seed(0)
    work = PROGRAMS[name]()
    with sl.trace(**options) as trace:
        work()
    return trace


def wrong_cuts(name: str, folder: Path, cuts: Callable[[int], range], **options: Any) -> Iterator[str]:
    """How ``last=N`` differs from the end of the whole recording, for some N, in memory or with ``path=``."""
    whole = recorded(name, **options)
    count = len(whole.ops)
    forward = [-1 if op.forward is None else op.forward.id for op in whole.ops]
    for kept in cuts(count):
        here = f"{name}, last={kept} of {count}"
        more = {"path": folder / f"{kept}.sight"} if kept % 2 else {}
        trace = recorded(name, last=kept, **more, **options)
        trace.validate()
        faults = trace.info["faults"]
        if faults:
            yield f"{here}: {faults[0]}"
            continue
        if more:
            trace = sl.load(more["path"])
            trace.validate()
        if [op.name for op in trace.ops] != [op.name for op in whole.ops[-kept:]]:
            yield f"{here}: other ops"
        links = [-1 if op.forward is None else op.forward.id for op in trace.ops]
        first = count - kept
        if links != [max(op - first, -1) for op in forward[-kept:]]:
            yield f"{here}: other forward ops: {links}"
