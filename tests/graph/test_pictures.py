"""The pictures of the documentation, and that a deep model still fits a screen."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.graph.formats.files import render

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")


def test_there_is_a_picture_of_each_kind() -> None:
    assert {file.stem for file in PICTURES} >= {"cnn", "gpt2-folded", "gpt2-depth-2", "t5", "lstm"}


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.stem)
def test_a_picture_is_small_plain_and_used(file: Path) -> None:
    text = file.read_text("utf-8")
    assert len(text) < 200_000
    assert ET.fromstring(text).tag.endswith("svg")
    assert not re.search(r"<!--|<script|/home/|/Users/|/root/|\d{4}-\d{2}-\d{2}", text)
    documents = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    assert any(f"pictures/{file.name})" in document.read_text("utf-8") for document in documents)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


@needs_dot
@pytest.mark.parametrize("depth", [None, 2])
def test_48_layers_fit_one_screen(depth: int | None) -> None:
    model = nn.Sequential(nn.Embedding(9, 8), *(Layer() for _ in range(48)), nn.LayerNorm(8), nn.Linear(8, 9))
    with torch.no_grad(), sl.trace(model) as t:
        model(torch.zeros(2, 5, dtype=torch.long))
    folded = t.graph(fold=True, depth=depth)
    assert len(folded.lint().nodes_of(kind="call")) <= 15
    found = re.search(r'<svg width="(\d+)pt" height="(\d+)pt"', render(folded, "svg").decode())
    assert found is not None
    width, height = (int(size) for size in found.groups())
    assert width < 900
    assert height < 1080
    assert f"×{48}" in folded.to_dot()
