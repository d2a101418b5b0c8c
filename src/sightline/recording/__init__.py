"""What runs while the model runs: interception, bookkeeping, interning, and the build of the trace.

Only `tracing`, `compat` and `cli` may import from here; nothing here imports a view.
"""
