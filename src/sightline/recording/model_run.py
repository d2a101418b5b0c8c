"""One forward of a model, for a comparison: without gradients, and with the same random numbers each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_SEED = 0


def run_once(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a model; the state of the random numbers is afterwards what it was."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        model(*args, **kwargs)
