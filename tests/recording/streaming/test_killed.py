"""The tests in `killed`, in a process of their own.

They fork, and torch runs no backward pass in the fork of a process whose autograd has threads, as it has
after some tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_recordings_of_killed_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "killed.py"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
