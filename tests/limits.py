"""Code run in a process of its own with limits on memory and time: what a file must not be able to take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_MEASURED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from sightline.errors import SightlineError
from sightline.api import load
def peak():  # not `ru_maxrss`, in which the process that started this one counts
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) // 1024
said = {{}}
def attempt(name, do):
    try:
        do()
        text = ""
    except SightlineError as error:
        text = str(error)
    said[name] = [text, peak()]
{code}
print(json.dumps(said))
"""


def measured(code: str, *arguments: str, limit: int = 4 << 30, seconds: int = 60) -> dict[str, Any]:
    """Of each ``attempt(name, do)`` what it raised on purpose, and the peak of memory after it, in MB."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, "-c", _MEASURED.format(code=code, limit=limit), *arguments],
        capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found
