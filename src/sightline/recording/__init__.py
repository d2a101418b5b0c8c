"""The recorder, which runs while the model runs: it intercepts ops and calls, writes rows, builds the trace.

`sightline.tracing` uses `recorder`, which uses the rest. Nothing here imports a view.
"""

from sightline.recording import torchapi as _torchapi  # first: it raises one sentence if torch is missing

__all__ = ["_torchapi"]
