"""Jobs of several processes, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(folder: Path, count: int, *command: str, engine: str = "auto") -> subprocess.CompletedProcess[str]:
    """Run a command in several processes, in a folder."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "SIGHTLINE_ENGINE": engine,
    }
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(count), *command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
