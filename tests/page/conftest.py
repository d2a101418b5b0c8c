"""The browser that the tests of the page share, and pages opened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.api import Trace
from tests.page.browser import OpenPage, browser, needed

Opener = Callable[..., OpenPage]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    needed()
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Opener]:
    """Opens the page of a trace or a comparison; at the end it has logged and requested nothing."""
    pages: list[OpenPage] = []

    def opener(shown: Any, **options: Any) -> OpenPage:
        pages.append(OpenPage(chromium, shown, tmp_path, **options))
        return pages[-1]

    yield opener
    for page in pages:
        page.close()


@pytest.fixture(scope="session")
def gpt2() -> Trace:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=64, n_positions=32, eos_token_id=0, bos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 64, (2, 16))
    with sl.trace(model, stats=True, name="gpt2") as t:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return t
