"""What runs while the model runs: interception, bookkeeping, interning, and the build of the trace.

`recorder` is the only door: `sightline.tracing` goes through it. Nothing here imports a view.
"""

from sightline.recording import torchapi as _torchapi  # first: it says in one sentence that torch is missing

__all__ = ["_torchapi"]
