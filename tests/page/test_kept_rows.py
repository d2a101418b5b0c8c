"""The page of a very long run holds the folded run, the first of each repeat; every link leads somewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sightline as sl
from sightline.api import Trace
from sightline.page.payload import payload
from sightline.page.tree import CALL, GROUP, OP
from tests.builders import TraceBuilder
from tests.page.packed import unpacked


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()


@pytest.fixture(scope="module")
def trained() -> Trace:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 4)
    with sl.trace(model, stats=True, capture="blocks.*") as t:
        for _ in range(5):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@pytest.fixture(scope="module")
def pages(trained: Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    whole, folded = (unpacked(payload(trained.index, most_ops=most)) for most in (None, 10))
    return whole, folded


def test_most_of_it_is_left_out_and_it_says_so(
    pages: tuple[dict[str, Any], dict[str, Any]], trained: Trace
) -> None:
    whole, folded = pages
    assert whole["run"]["ops"] == whole["run"]["recordedOps"] == len(trained.ops)
    assert folded["run"]["recordedOps"] == len(trained.ops)
    assert folded["run"]["ops"] * 4 < len(trained.ops)
    assert len(whole["ops.id"]) == 0
    names = [trained.ops[int(id)].name for id in folded["ops.id"]]
    assert [folded["strings"][at] for at in folded["ops.name"]] == names


def test_groups_keep_their_counts_and_costs(pages: tuple[dict[str, Any], dict[str, Any]]) -> None:
    whole, folded = pages

    def groups(page: dict[str, Any], rows: Any) -> list[tuple[str, int, int]]:
        labels = [page["strings"][at] for at in page["tree.label"]]
        return [(labels[row], int(page["tree.count"][row]), int(page["tree.time"][row])) for row in rows]

    kept = groups(folded, np.flatnonzero(folded["tree.kind"] == GROUP))
    assert set(kept) <= set(groups(whole, np.flatnonzero(whole["tree.kind"] == GROUP)))
    assert any(count == 4 for _, count, _ in kept)  # the steps after the first, which makes the state


def test_every_reference_is_on_the_page(pages: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, page = pages
    ops, values = page["run"]["ops"], page["run"]["values"]
    calls = len(page["calls.module"])
    for name in ("ops.name", "ops.span", "ops.line"):
        assert len(page[name]) == ops
    for name, most in (("ops.parent", ops), ("ops.forward", ops), ("ops.call", calls), ("ops.inputs", values),
                       ("ops.outputs", values), ("calls.inputs", values), ("calls.parent", calls),
                       ("values.producer", ops), ("stats.value", values)):  # fmt: skip
        assert page[name].max() < most, name
    for name in (
        "ops.inputs",
        "ops.outputs",
        "calls.inputs",
        "calls.outputs",
        "stats.value",
        "captures.value",
    ):
        assert page[name].min() >= 0, name
    for kind, most in ((OP, ops), (CALL, calls)):
        refs = page["tree.ref"][page["tree.kind"] == kind]
        assert refs.min() >= 0
        assert refs.max() < most
    assert sorted(page["tree.ref"][page["tree.kind"] == OP].tolist()) == list(range(ops))


def test_outputs_of_a_left_out_layer_are_those_of_the_first(
    pages: tuple[dict[str, Any], dict[str, Any]], trained: Trace
) -> None:
    _, page = pages
    numbers = {int(id): at for at, id in enumerate(page["ops.id"])}
    total = next(op for op in trained.ops if op.name == "Tensor.sum" and op.id in numbers)
    assert total.inputs[0].producer is not None
    assert total.inputs[0].producer.name == "relu"
    at = numbers[total.id]
    first_input = int(page["ops.inputs"][int(page["ops.input_count"][:at].sum())])
    maker = int(page["values.producer"][first_input])
    assert page["strings"][int(page["ops.name"][maker])] == "relu"


def test_a_run_without_repeats_is_whole() -> None:
    b = TraceBuilder()
    x = b.value(2)
    b.op("relu", x, out=(2,))
    b.op("neg", x, out=(3,))
    held = unpacked(payload(b.build().index, most_ops=1))
    assert held["run"]["ops"] == held["run"]["recordedOps"] == 2
