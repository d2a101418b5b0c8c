"""The pictures of the documents, drawn from runs of small models: `make pictures`.

    python docs/pictures.py [cnn t5 …]

Needs graphviz, transformers, and Chromium for the page. The same models give the same files: weights and
inputs are seeded, and nothing that a run measures is drawn, except in the page.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import sightline as sl
from sightline.graph.graph import Graph

FOLDER: Final = Path(__file__).parent / "pictures"


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class Convolutional(nn.Module):
    """A small image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(2)
        self.block = Residual(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Any:
        x = self.pool(torch.relu(self.stem(image)))
        return self.fc(self.block(x).mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """A sequence read by a cell, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.cell = nn.LSTMCell(16, 32)
        self.head = nn.Linear(32, 100)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        h = c = x.new_zeros(len(x), 32)
        states = []
        for step in x.unbind(dim=1):
            h, c = self.cell(step, (h, c))
            states.append(h)
        return self.head(torch.stack(states, dim=1))


def run(model: nn.Module, **inputs: Any) -> sl.Trace:
    """The trace of one forward pass."""
    model.eval()
    with torch.no_grad(), sl.trace(model) as t:
        model(**inputs)
    return t


def cnn() -> Graph:
    """Every call, with the shape of what flows."""
    return run(Convolutional(), image=torch.randn(4, 3, 64, 64)).graph(fold=False)


def gpt2(**options: Any) -> Graph:
    """GPT-2 with its twelve layers, narrow."""
    from transformers import GPT2Config, GPT2Model

    sizes = {"n_layer": 12, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    t = run(GPT2Model(config), input_ids=torch.randint(0, 1000, (2, 16)))
    return t.graph(prune=("views", "constants", "leaves"), **options)


def t5() -> Graph:
    """An encoder and a decoder, each with its repeated layers shown once."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 6, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 1000}
    model = T5ForConditionalGeneration(T5Config(**sizes, use_cache=False))
    source, target = torch.randint(0, 1000, (2, 16)), torch.randint(0, 1000, (2, 8))
    t = run(model, input_ids=source, decoder_input_ids=target)
    return t.graph(fold=True, depth=3, prune=("views", "constants", "leaves"))


def lstm() -> Graph:
    """A recurrence as a loop."""
    return run(Recurrent(), tokens=torch.randint(0, 100, (4, 12))).graph(fold=True)


def screen() -> str:
    """A terminal with the code of an attention layer, as the README shows it first."""
    from rich.console import Console
    from rich.text import Text

    sys.path.insert(0, str(FOLDER.parent.parent / "examples"))
    from tiny_transformer import TinyTransformer

    model = TinyTransformer()
    tokens = torch.randint(0, 32, (2, 8))
    with sl.trace(model) as t:
        model(tokens).sum().backward()
    written = io.StringIO()
    t.code(level="api", phase="forward", module="blocks.0.attn").print(color=True, file=written)
    # Paths are shown from where Python was started: only the name is the same on every machine.
    text = re.sub(r"[\w./-]*/(?=\w+\.py:)", "", written.getvalue())
    console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True)
    for line in text.splitlines()[4:]:  # the first two lines and their arrows are of this file
        console.print(Text.from_ansi(line)[4:], no_wrap=True, crop=True)
    return console.export_svg(title="t.code()", code_format=TERMINAL, unique_id="screen")


def narrow_gpt2() -> Any:
    """A GPT-2 of four narrow layers, with a head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def page() -> bytes:
    """The page of a training run, as Chromium draws it."""
    model = narrow_gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 500, (2, 32))

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()  # what happens only once would fill the timeline
    with sl.trace(model, stats=True, name="train") as t:
        for _ in range(3):
            train()
    return screenshot(t, click=".node.call:has-text('lm_head')")


def page_diff() -> bytes:
    """The page of two runs, one of which has another constant in one layer."""
    model = narrow_gpt2().eval()
    tokens = torch.randint(0, 500, (2, 32))
    traces = []
    for name, eps in (("before", 1e-5), ("after", 1e-3)):
        model.transformer.h[1].ln_2.eps = eps
        with torch.no_grad(), sl.trace(model, stats=True, name=name) as t:
            model(input_ids=tokens)
        traces.append(t)
    return screenshot(sl.diff(*traces))


def screenshot(shown: sl.Trace | sl.Diff, click: str = "") -> bytes:
    """A page in Chromium, after a click."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        shown.html(f"{folder}/run.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
        page.goto(f"file://{folder}/run.html")
        page.wait_for_selector("[data-ready]")
        if click:
            page.click(click)
        picture: bytes = page.screenshot()
        browser.close()
    return picture


#: A terminal window without fonts from elsewhere: a picture loads nothing.
TERMINAL: Final = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
    line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


PICTURES: Final[dict[str, Callable[[], Graph | str | bytes]]] = {
    "screen": screen,
    "page": page,
    "page-diff": page_diff,
    "cnn": cnn,
    "gpt2-folded": lambda: gpt2(fold=True),
    "gpt2-depth-2": lambda: gpt2(fold=False, depth=2),
    "gpt2-screen": lambda: gpt2(fold=True, depth=3),
    "t5": t5,
    "lstm": lstm,
}


def main(wanted: list[str]) -> None:
    """Draw the pictures that were asked for, or all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name in wanted or PICTURES:
        torch.manual_seed(0)
        picture = PICTURES[name]()
        file = FOLDER / f"{name}.svg"
        if isinstance(picture, bytes):
            file.with_suffix(".png").write_bytes(picture)
            continue
        if isinstance(picture, str):
            file.write_text(picture, "utf-8")
            continue
        picture.save(file)
        # What graphviz notes of itself differs from machine to machine.
        text = re.sub(r"<!--.*?-->\s*", "", file.read_text("utf-8"), flags=re.DOTALL)
        file.write_text(text, "utf-8")
        print(f"{file.name}: {len(picture)} nodes, {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
