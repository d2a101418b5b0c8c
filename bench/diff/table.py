"""The first true divergence of pairs of models in which one thing was planted, and none where nothing was.

    python bench/diff/table.py [--only TEXT] [--verbose]

Every pair is compared twice: both models in float32, and the first in float32 with the second in bfloat16.
Right is a verdict that names the module and the reason; of pairs that are equal up to rounding, that there is
none.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from architecture_pairs import ARCHITECTURE_PAIRS
from pairs import PAIRS, Pair
from porting_pairs import PORTING_PAIRS
from tiny_models import Inputs

import sightline as sl


def recorded(model: Any, inputs: Inputs, dtype: torch.dtype) -> sl.Trace:
    """One forward with statistics."""
    given = {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    model.to(dtype)
    torch.manual_seed(3)
    with sl.trace(model, stats=True) as trace, torch.no_grad():
        model(**given)
    return trace


def is_right(pair: Pair, diff: sl.Diff) -> bool:
    """Whether the verdict names what was planted, or nothing where nothing was."""
    found = diff.divergence
    if not pair.planted or found is None:
        return not pair.planted and diff.verdict in ("same", "close")
    modules = [place.module for place in (found.reason.a, found.reason.b) if place is not None]
    named = any(re.fullmatch(pair.module, module) for module in modules)
    return named and re.search(pair.says, found.text, re.IGNORECASE) is not None


def main() -> int:
    """Print the table; the exit status is 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="pairs whose name holds this text")
    parser.add_argument("--verbose", action="store_true", help="print every verdict, not only the wrong ones")
    options = parser.parse_args()
    chosen = [pair for pair in (*PAIRS, *ARCHITECTURE_PAIRS, *PORTING_PAIRS) if options.only in pair.name]
    right = {(planted, dtype): 0 for planted in (True, False) for dtype in (torch.float32, torch.bfloat16)}
    spent = 0.0
    for pair in chosen:
        marks, texts = [], []
        for dtype in (torch.float32, torch.bfloat16):
            first, second, inputs = pair.build()
            traces = recorded(first, inputs, torch.float32), recorded(second, inputs, dtype)
            start = time.perf_counter()
            diff = sl.diff(*traces, rename=pair.rename)
            spent += time.perf_counter() - start
            good = is_right(pair, diff)
            right[pair.planted, dtype] += good
            marks.append("right" if good else "WRONG")
            texts.append(
                "" if good and not options.verbose else str(diff.divergence and diff.divergence.text)
            )
        print(f"{pair.name:<32}{pair.model:<9}f32 {marks[0]:<7}bf16 {marks[1]}")
        for text in texts:
            if text:
                print(f"    {text}")
    for planted, what in ((True, "planted"), (False, "equal up to rounding")):
        total = sum(pair.planted is planted for pair in chosen)
        f32, bf16 = right[planted, torch.float32], right[planted, torch.bfloat16]
        print(f"{what}: {f32} of {total} in f32, {bf16} of {total} as f32 against bf16")
    print(f"comparing took {spent / max(1, 2 * len(chosen)) * 1e3:.0f} ms a pair")
    return 0 if sum(right.values()) == 2 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
