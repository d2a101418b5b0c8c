"""What the page of a run weighs, how long it takes to write, and how fast it is in a real browser.

    python bench/page.py [--quick]

Training steps of a GPT-2 of twelve layers (narrow: a page holds ops, not weights) are recorded: one step, and
as many as make 20,000 and 200,000 ops. Each page is written, then opened in the system's Chromium, without a
GPU. Time to interactive runs from the navigation to the page's own mark that everything is drawn and answers.
Then a folded layer is expanded, and the tree is opened wide and scrolled for a second. The best of some
rounds is printed, with what it may be.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

import sightline as sl

#: For each size: megabytes, seconds to interactive, seconds to write; None where nothing is said.
LIMITS: Final = {"one step": (1.5, 1.0, None), "20k ops": (3.0, 2.0, None), "200k ops": (15.0, 5.0, 3.0)}
FRAMES_PER_SECOND, EXPAND_MS = 50, 200
_CHROMIUM: Final = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run"
).split()

#: Scrolls the tree for a second and counts the frames that were drawn.
_SCROLL: Final = """async () => {
  const tree = document.getElementById("tree");
  let frames = 0;
  const start = performance.now();
  while (performance.now() - start < 1000) {
    await new Promise(requestAnimationFrame);
    tree.scrollTop += 120;
    frames += 1;
  }
  return frames * 1000 / (performance.now() - start);
}"""
#: Opens the first closed group of the tree and waits for the frame in which it is drawn.
_EXPAND: Final = """async () => {
  const row = document.querySelector("#tree .row.group[aria-expanded=false] .twist")
    ?? document.querySelector("#tree .row[aria-expanded=false] .twist");
  if (!row) return NaN;
  const start = performance.now();
  row.click();
  await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - start;
}"""


def recorded(ops: int) -> sl.Trace:
    """Training steps of a GPT-2 until there are at least so many ops."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 12, "n_embd": 48, "n_head": 4, "vocab_size": 300, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 300, (2, 16))

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with sl.trace(model) as t:
        train()
    per_step = len(t.ops)
    with sl.trace(model) as t:
        for _ in range(max(1, round(ops / per_step))):
            train()
    return t


def measured(trace: sl.Trace, browser: Any, path: Path, rounds: int) -> dict[str, float]:
    """What was seen of one page, the best of some rounds."""
    best: dict[str, float] = {}

    def note(name: str, seen: float, better: Any = min) -> None:
        best[name] = better(best.get(name, seen), seen)

    for _ in range(rounds):
        start = time.perf_counter()
        trace.html(path)
        note("write", time.perf_counter() - start)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("[data-ready]", timeout=120_000)
        note("ready", time.perf_counter() - start)
        note("expand", page.evaluate(_EXPAND))
        page.fill("#search", "a")  # a search opens the tree wide
        page.wait_for_timeout(300)
        note("frames", page.evaluate(_SCROLL), max)
        page.close()
    best["MB"] = path.stat().st_size / 1e6
    return best


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description="What the page of a run costs.")
    parser.add_argument("--quick", action="store_true", help="without the 200,000 ops, in one round")
    quick = parser.parse_args().quick
    from playwright.sync_api import sync_playwright

    sizes = {"one step": 1, "20k ops": 20_000} | ({} if quick else {"200k ops": 200_000})
    print(f"{'':10} {'ops':>8} {'MB':>12} {'interactive':>16} {'write':>15} {'expand':>16} {'scroll':>16}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_CHROMIUM)
        for name, ops in sizes.items():
            trace = recorded(ops)
            seen = measured(trace, browser, Path(folder) / "run.html", 1 if quick else 3)
            size, ready, write = LIMITS[name]
            cells = [
                f"{name:10} {len(trace.ops):>8,}",
                f"{seen['MB']:>6.2f} (≤ {size:>4})",
                f"{seen['ready']:>8.2f} s (≤ {ready})",
                f"{seen['write']:>6.2f} s{f' (≤ {write})' if write else '':8}",
                f"{seen['expand']:>5.0f} ms (≤ {EXPAND_MS})",
                f"{seen['frames']:>6.0f} fps (≥ {FRAMES_PER_SECOND})",
            ]
            print(*cells, flush=True)
        browser.close()


if __name__ == "__main__":
    main()
