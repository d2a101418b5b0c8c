"""Packages that are not there: the message names the fix, and sightline itself needs none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "missing", "told"),
    [
        ("transformers", ["transformers"], "pip install 'transformers[torch]'."),
        ("lightning", ["lightning", "pytorch_lightning"], "pip install lightning."),
    ],
)
def test_a_missing_package_is_named(module: str, missing: list[str], told: str) -> None:
    script = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\nimport sightline.integrations.{module}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: sightline.integrations.{module} needs ")
    assert last.endswith(told)


def test_importing_sightline_imports_no_integration() -> None:
    script = (
        "import sys, sightline; sightline.trace, sightline.diff\n"
        "print([name for name in sys.modules if name.startswith('sightline.integrations')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
