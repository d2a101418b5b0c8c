"""``python -m sightline`` is the command ``sightline``."""

from __future__ import annotations

from sightline.cli import main

main(prog_name="sightline")
