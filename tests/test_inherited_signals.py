"""The tests pass where signals are inherited as ignored, as under ``nohup`` or a shell's ``trap``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_an_interrupt_is_one_where_it_was_ignored() -> None:
    one = "tests/cli/test_run.py::test_an_interrupt_ends_it_as_it_would_end"
    command = f"trap '' INT; exec '{sys.executable}' -m pytest -n 0 -q -p no:cacheprovider {one}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
