"""The log folds layers and steps that look alike, and says what differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sightline as sl
from tests.recording import training_loops as loops


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x).relu()
        return out


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_equal_layers_are_one_block_with_the_range_of_their_names() -> None:
    model, x = Stack(5), torch.ones(2, 4)
    with sl.trace(model) as t:
        model(x)
    assert str(t.log()).splitlines() == [
        "● Stack",
        "├─ Input: Tensor [2, 4] @ cpu",
        "│",
        "│  ● blocks.0…4 (Block) ×5",
        "│  ├─ Input: Tensor [2, 4] @ cpu",
        "│  │",
        "│  │  ● blocks.0…4.fc (Linear) (in_features: 4, out_features: 4, bias: True)",
        "│  │  ├─ Input: Tensor [2, 4] @ cpu",
        "│  │  └─ Output: Tensor [2, 4] @ cpu",
        "│  │  │",
        "│  │  ● Tensor.relu() @ [Block.forward]",
        "│  │  ├─ Input: Tensor [2, 4] @ cpu",
        "│  │  └─ Output: Tensor [2, 4] @ cpu",
        "│  │",
        "│  └─ Output: Tensor [2, 4] @ cpu",
        "│",
        "└─ Output: Tensor [2, 4] @ cpu",
    ]
    assert str(t.log(fold=False)).count("(Linear)") == 5


def test_layers_of_other_widths_and_other_names_stay_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 8))
    with sl.trace(model) as t:
        model(torch.ones(2, 4))
    heads = [line for line in str(t.log()).splitlines() if "Linear" in line]
    assert [head.split("(in")[0].strip(" │●") for head in heads] == [
        "0…1 (Linear)",
        "2 (Linear)",
        "3 (Linear)",
    ]
    assert [head.rpartition(")")[2] for head in heads] == [" ×2", "", ""]


@pytest.mark.parametrize("sizes", [[3, 7, 2, 9, 4], [5, 5, 5, 5, 5]])
def test_runs_of_a_loop_fold_whatever_the_batch(sizes: list[int]) -> None:
    model = Stack(1)
    with sl.trace(model) as t:
        for size in sizes:
            loss = model(torch.ones(size, 4)).sum()
            loss.backward()
    text = str(t.log())
    text_of_size = "2…9" if len(set(sizes)) > 1 else "5"
    assert f"Tensor [{text_of_size}, 4] @ cpu" in text
    assert text.count("● Stack") == 1
    assert text.splitlines()[0] == "┌ ×5"


def test_steps_of_a_training_fold_and_statistics_are_over_all_of_them() -> None:
    model = loops.net()
    with sl.trace(model, stats=True) as t:
        loops.plain(model, 4)
    text = str(t.log())
    assert text.count("● Sequential") == 1
    assert len(text.splitlines()) < len(str(t.log(fold=False)).splitlines()) / 3


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:  # transformers leaves a method on nn.Module when it makes its first model
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(n_layer=6, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    )
    return model.eval()


def test_every_layer_of_a_real_model_is_one_block(gpt2: nn.Module) -> None:
    with sl.trace(gpt2) as t, torch.no_grad():
        gpt2(torch.arange(8)[None])
    heads = [line.strip(" │") for line in str(t.log()).splitlines() if "(GPT2Block)" in line]
    assert heads == ["● transformer.h.0…5 (GPT2Block) ×6"]


@pytest.mark.usefixtures("gpt2")
def test_eighty_layers_without_memory_are_one_block() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=80, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=50,
        )).eval()  # fmt: skip
        with sl.trace(model) as t, torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
    heads = [line.strip(" │") for line in str(t.log()).splitlines() if "(LlamaDecoderLayer)" in line]
    assert heads == ["● model.layers.0…79 (LlamaDecoderLayer) ×80"]


def test_what_raised_stands_by_itself() -> None:
    model = Stack(3)
    model.blocks[2].fc.weight = nn.Parameter(torch.ones(4, 5))  # type: ignore[union-attr]  # a Linear
    with pytest.raises(RuntimeError), sl.trace(model) as t:
        model(torch.ones(2, 4))
    text = str(t.log())
    assert "blocks.0…1 (Block) ×2" in text
    assert "blocks.2 (Block)" in text
    assert "Raised: it ended in an exception" in text


def test_a_very_deep_model_is_folded_level_by_level() -> None:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(150):
        model = nn.Sequential(model)
    with sl.trace(model) as t:
        model(torch.ones(1, 2))
    assert str(t.log()).count("(Linear)") == 1
