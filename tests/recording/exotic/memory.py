"""Memory that is freed while tensors still show it, and tensors that are swapped, copied and pickled."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import sightline as sl
from tests.recording.exotic.comparison import Record, X, grads_of, mlp, program


class Freeing(nn.Module):
    """Frees the memory of a tensor, as FSDP does, and goes on to use the tensor object."""

    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scratch", torch.ones(8))
        self.tail = nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.layer(x).detach()
        view = y[1:]
        flat = y.view(-1)
        y.untyped_storage().resize_(0)
        sl.spy("freed", y)
        sl.spy("view", view)
        self.scratch.untyped_storage().resize_(0)
        return self.tail(y), view, flat, self.tail(self.scratch)


@program
def freed_results(record: Record) -> Any:
    model = Freeing()
    with record(model):
        results = model(X)
        again = results[0].untyped_storage()
        again.resize_(48)
        results[0].copy_(X)
    return results


@program
def freed_parameters(record: Record) -> Any:
    model = mlp()
    layer: Any = model[0]
    kept = layer.weight.detach().clone()
    with record(model):
        first = model(X)
        first.sum().backward()
        layer.weight.untyped_storage().resize_(0)
        layer.weight.grad.untyped_storage().resize_(0)
        model[2](torch.ones(2, 8))
        layer.weight.untyped_storage().resize_(kept.nbytes)
        with torch.no_grad():
            layer.weight.copy_(kept)
        layer.weight.grad = None
        model(X).sum().backward()
    return first, grads_of(model)


@program
def shrunk_storage(record: Record) -> Any:
    """A storage that is smaller than its tensor says: reading the tensor reads beyond its end."""
    model = nn.Identity()
    tensor = torch.arange(float(1 << 18))
    mask = torch.ones(1 << 16, dtype=torch.int64)
    with record(model):
        doubled = tensor * 2
        doubled.untyped_storage().resize_(16)
        mask.untyped_storage().resize_(8)
        sl.spy("shrunk", doubled)
        sl.spy("mask", mask)
        model(doubled)
        model(mask)
        model(doubled.view(2, -1))
    return doubled[:4]


@program
def copied_on_write(record: Record) -> Any:
    """Memory that two tensors share until one of them is written to stays shared."""
    lazy: Any = torch._lazy_clone
    shared: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    outcomes = []
    for size in (64, 5000):
        whole = torch.arange(float(size))
        with record():
            copy_ = lazy(whole)
            sl.spy("copy", copy_)
            total = nn.Identity()(copy_).sum()
            outcomes.append((total, shared(whole), shared(copy_)))
    return outcomes


@contextmanager
def swapping() -> Iterator[None]:
    """Module conversion by ``torch.utils.swap_tensors``."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@program
def swapped_by_conversion(record: Record) -> Any:
    model = mlp()
    with swapping(), torch.no_grad(), record(model):
        before = model(X)
        doubled = [one * 2 for one in model.parameters()]
        model.to(torch.bfloat16)
        return before, doubled, model(X.bfloat16())


@program
def swapped_with_a_graph(record: Record) -> Any:
    """The output of a layer keeps the node of its weight alive, to which torch adds a hook meanwhile."""
    layer = nn.Linear(4, 4)
    with swapping(), record(layer):
        y = layer(X)
        layer.to(torch.bfloat16)
        return y, layer(X.bfloat16())


@program
def swapped_with_gradients(record: Record) -> Any:
    model = mlp()
    with swapping(), record(model):
        model(X).sum().backward()
        model.double()
        model(X.double()).sum().backward()
    return grads_of(model)


@program
def swapped_after_the_block(record: Record) -> Any:
    """The recording still lives, which is not finished in a moment: it may hold no reference to a weight."""
    model = mlp()
    with swapping():
        with record(model):
            model(X).sum().backward()
        model.to(torch.bfloat16)
        return grads_of(model), model(X.bfloat16())


@program
def swapped_in_a_later_block(record: Record) -> Any:
    model = mlp()
    with swapping():
        with record(model):
            before = model(X).detach()
        with record(model):
            model.double()
            return before, model(X.double())


@program
def swapped_by_hand_after_the_block(record: Record) -> Any:
    constant = torch.full((3,), 2.0)
    with record():
        doubled, halved = torch.ones(3) * constant, torch.zeros(2, 2) + 1
    torch.utils.swap_tensors(doubled, halved)
    torch.utils.swap_tensors(constant, halved)
    return constant, doubled, halved


@program
def swapped_by_loading(record: Record) -> Any:
    model, state = mlp(), mlp().state_dict()
    with swapping(), record(model):
        before = model(X).detach()
        model.load_state_dict(state)
        return before, model(X)


@program
def swapped_by_hand(record: Record) -> Any:
    one, other = torch.ones(3), torch.zeros(2, 2)
    with record():
        doubled, halved = one * 2, other + 1
        torch.utils.swap_tensors(doubled, halved)
        torch.utils.swap_tensors(one, other)
        return one, other, doubled, halved, doubled.sum(), one + 1


@program
def swapped_by_an_imported_function(record: Record) -> Any:
    from torch.utils import swap_tensors

    with record():
        doubled, halved = torch.ones(3) * 2, torch.zeros(2, 2) + 1
        swap_tensors(doubled, halved)
        return doubled, halved


@program
def swap_refused_as_ever(record: Record) -> Any:
    """A weak reference of the program's own is refused, recorded or not."""
    import weakref

    with record():
        one, other = torch.ones(3) * 2, torch.ones(3) * 3
        reference = weakref.ref(one)
        torch.utils.swap_tensors(one, other)
    return reference


@program
def copied_and_pickled(record: Record) -> Any:
    model = mlp()
    with record(model):
        first = model(X)
        twin = copy.deepcopy(model)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        pickled = pickle.loads(pickle.dumps(model))
        twin(X).sum().backward()
        return first, loaded(X), pickled(X), grads_of(twin), sorted(vars(model)), list(model.state_dict())
