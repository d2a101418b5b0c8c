"""The interfaces of four other tools, their names and their output, over the one recorder."""

from __future__ import annotations

from typing import Final

#: The hint if torch runs an encoder layer or an attention of its own without calling the modules inside.
FUSED_HINT: Final = (
    "torch ran the whole module as one fused op; torch.backends.mha.set_fastpath_enabled(False) shows inside"
)
