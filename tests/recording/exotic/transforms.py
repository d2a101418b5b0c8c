"""Transforms of functions, and modules whose parameters are computed, replaced or made late."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import sightline as sl
from tests.recording.exotic.comparison import Record, X, grads_of, mlp, program


@program
def vmapped(record: Record) -> Any:
    model = mlp()
    with record(model):
        return torch.vmap(lambda row: sl.spy("row", model(row)).softmax(-1))(X)


@program
def vmapped_randomly(record: Record) -> Any:
    with record():
        return torch.vmap(lambda row: F.dropout(sl.spy("row", row), 0.5), randomness="different")(X)


@program
def differentiated(record: Record) -> Any:
    model = mlp()
    weights = dict(model.named_parameters())

    def loss(weights: Any, x: Any) -> Any:
        return sl.spy("y", torch.func.functional_call(model, weights, (x,))).square().mean()

    with record(model):
        return torch.func.grad_and_value(loss)(weights, X), torch.func.vmap(
            torch.func.grad(loss), in_dims=(None, 0)
        )(weights, X)


@program
def jacobians(record: Record) -> Any:
    model = mlp()
    with record(model):
        reverse = torch.func.jacrev(lambda x: sl.spy("y", model(x)))(X[0])
        forward = torch.func.jacfwd(lambda x: sl.spy("y", model(x)))(X[0])
        hessian = torch.func.hessian(lambda x: model(x).square().sum())(X[0])
        return reverse, forward, hessian, torch.func.jvp(model, (X,), (torch.ones_like(X),))


@program
def functionalized(record: Record) -> Any:
    def function(x: Any) -> Any:
        y = x.clone()
        sl.spy("y", y).add_(1)
        y[0].mul_(2)
        return y

    with record():
        return torch.func.functionalize(function)(X)


@program
def stacked_ensemble(record: Record) -> Any:
    models = [mlp() for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    with record(base):
        return torch.vmap(
            lambda w, b, x: torch.func.functional_call(base, (w, b), (x,)), in_dims=(0, 0, None)
        )(weights, buffers, X)


@program
def dual_numbers(record: Record) -> Any:
    import torch.autograd.forward_ad as forward

    model = mlp()
    with record(model), forward.dual_level():
        y = sl.spy("y", model(forward.make_dual(X, torch.ones_like(X))))
        return tuple(forward.unpack_dual(y))


@program
def double_backward(record: Record) -> Any:
    model = mlp()
    x = X.clone().requires_grad_()
    with record(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    return x.grad, grads_of(model)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: Any) -> Any:
        return weight.triu() + weight.triu(1).mT


@program
def parametrized(record: Record) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.utils.parametrize.register_parametrization(model[0], "weight", Symmetric())
    with record(model):
        y = model(X)
        with nn.utils.parametrize.cached():
            y = y + model(X)
        y.sum().backward()
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        return y, model(X), grads_of(model)


@program
def weight_normed(record: Record) -> Any:

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(old, new, spectral)
    with record(model):
        y = model(X)
        y.sum().backward()
        nn.utils.remove_weight_norm(old)
        return y, grads_of(model), model(X)


@program
def lazy_modules(record: Record) -> Any:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    with record(model):
        y = model(X)
        y.sum().backward()
    return y, grads_of(model), [type(one).__name__ for one in model]


@program
def pruned(record: Record) -> Any:
    from torch.nn.utils import prune

    model = mlp()
    with record(model):
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        y = model(X)
        y.sum().backward()
        prune.remove(model[0], "weight")
        return y, model(X), grads_of(model)
