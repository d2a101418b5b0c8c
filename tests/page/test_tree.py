from __future__ import annotations

import torch
from torch import nn

import sightline as sl
from sightline.api import Trace
from sightline.convert.context import TableContext
from sightline.page.tree import OP, ROW_KINDS, Tree, tree_of
from tests.builders import TraceBuilder, make_trace
from tests.recording.engines import NATIVE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.fc(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.drop(x).sum()
        return result


def outline(trace: Trace, depth: int = 99) -> list[str]:
    tree = tree_of(TableContext(trace.index))
    return [_text(trace, tree, row) for row in range(len(tree)) if tree.depth[row] <= depth]


def _text(trace: Trace, tree: Tree, row: int) -> str:
    name = trace.ops[int(tree.ref[row])].name if tree.kind[row] == OP else tree.label[row]
    times = f" ×{tree.count[row]}" if tree.count[row] > 1 else ""
    return f"{'  ' * tree.depth[row]}{ROW_KINDS[tree.kind[row]]} {name}{times}".rstrip()


def trained() -> Trace:
    model, x = Net().eval(), torch.ones(2, 4)
    with sl.trace(model) as t:
        model(x).backward()
    return t


def test_layers_that_look_alike_are_one_group_in_both_phases() -> None:
    shown = outline(trained(), 2)
    assert shown[:4] == ["phase forward", "  call Net", "    group blocks.0 … blocks.4 ×5", "    call drop"]
    backward = shown[shown.index("phase backward") :]
    # The first and the last have other neighbours; under a mode only the first.
    assert f"    group {'blocks.3 … blocks.1 ×3' if NATIVE else 'blocks.4 … blocks.1 ×4'}" in backward


def test_a_call_in_which_nothing_ran_has_its_row() -> None:
    model, x = nn.Sequential(nn.Identity(), nn.ReLU()), torch.ones(2)
    with sl.trace(model) as t:
        model(x)
    assert outline(t, 1) == ["call Sequential", "  call 0", "  call 1"]


def test_every_op_has_one_row_and_rows_nest() -> None:
    for trace in (trained(), make_trace(3)):
        tree = tree_of(TableContext(trace.index))
        assert sorted(tree.ref[tree.kind == OP].tolist()) == list(range(len(trace.ops)))
        for row in range(len(tree)):
            end = int(tree.end[row])
            assert all(tree.depth[at] > tree.depth[row] for at in range(row + 1, end))
            assert end == len(tree) or tree.depth[end] <= tree.depth[row]


def test_costs_of_rows_add_up() -> None:
    trace = trained()
    tree = tree_of(TableContext(trace.index))
    top = [row for row in range(len(tree)) if tree.depth[row] == 0]
    outermost = [op for op in trace.ops if op.parent is None]
    assert sum(tree.time[row] for row in top) == sum(op.duration for op in outermost)
    assert sum(tree.flops[row] for row in top) == sum(op.flops or 0 for op in trace.ops.where(level="aten"))


def test_a_loop_of_several_modules_is_a_group_of_rounds() -> None:
    b = TraceBuilder()
    b.module("", "Net")
    for name in ("a", "b"):
        b.module(name, "Linear")
    x = b.value(2, 3)
    with b.call("", x):
        for _ in range(4):
            for name, op in (("a", "relu"), ("b", "neg")):
                with b.call(name, x):
                    x = b.op(op, x, out=(2, 3))
    shown = outline(b.build(), 3)
    assert shown[:4] == ["call Net", "  group a, b ×4", "    round round 1", "      call a"]


def test_nothing_recorded_is_an_empty_tree() -> None:
    assert len(tree_of(TableContext(TraceBuilder().build().index))) == 0


def test_building_the_model_is_an_aside() -> None:
    with sl.trace() as t:
        model = Net()
        model(torch.ones(2, 4)).backward()
    shown = outline(t, 0)
    assert shown == ["aside building the model", "phase forward", "phase backward"]
    assert outline(trained(), 0) == ["phase forward", "phase backward"]


def test_ops_around_steps_do_not_keep_them_apart() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 2, 4)
    with sl.trace(model) as t:
        torch.rand(3).mean()
        for x in data:
            model(x * 2).sum().backward()
            optimizer.step()
            torch.rand(3).mean()
    assert outline(t, 0) == [
        "aside before the first step",
        "step step0",  # later ones add to the gradients
        "group step1 … step3 ×3",
        "aside between the steps",
        "aside after the last step",
    ]


def test_calls_on_growing_tensors_are_one_group() -> None:
    b = TraceBuilder()
    b.module("", "Decoder")
    for length in range(3, 9):
        with b.call("", b.value(1, length)):
            b.op("mul.Tensor", b.value(1, length), 0.5, out=(1, length))
        b.op("argmax", b.value(1, length), out=(1,))
    assert outline(b.build(), 0) == ["group Decoder ×6"]


def test_steps_that_alternate_are_named_with_the_length_of_a_round() -> None:
    with sl.trace() as t:
        for number in range(8):
            with sl.step(f"step{number}"):
                x = torch.ones(3).relu()
                if number % 4 == 3:
                    x.tanh()
    assert outline(t, 0) == ["group step0 … step7, in rounds of 4 steps ×2"]


def test_epochs_with_an_evaluation_between_them_are_rounds_of_steps() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model) as t:
        for _ in range(2):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()
            with torch.no_grad():
                model(torch.ones(8, 4))
    assert outline(t, 0)[0] == "group step0 … step7, in rounds of 4 steps ×2"
