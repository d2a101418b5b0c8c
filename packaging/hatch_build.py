"""Completes a wheel before hatchling packs it, with the viewer of the page and with native engines.

The environment variable ``SIGHTLINE_PREBUILT`` names a folder of engines that `wheels.py` has compiled
for one CPython; the wheel is for that one then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = "SIGHTLINE_PREBUILT"


class WheelHook(BuildHookInterface[Any]):
    """Completes a wheel; an editable installation and a source distribution are left as they are."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Check the viewer, and add the engines."""
        if self.target_name != "wheel" or version == "editable":
            return
        build_viewer(Path(self.root))
        folder = os.environ.get(PREBUILT)
        if folder:
            facts = json.loads((Path(folder) / "facts.json").read_text("utf-8"))
            build_data["pure_python"] = False
            build_data["tag"] = facts["tag"]
            for path in sorted(Path(folder).iterdir()):
                build_data["force_include"][str(path)] = f"sightline/recording/native/engines/{path.name}"


def build_viewer(root: Path) -> None:
    """Build the viewer where it is missing; without Node, end with one sentence."""
    files = [root / "src" / "sightline" / "page" / f"viewer.{kind}" for kind in ("js", "css")]
    if all(path.is_file() for path in files):
        return
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(
            "sightline: the viewer of the page is not built, and building it needs Node 20: "
            "install Node and try again, or install a published wheel."
        )
    install = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"]
    for command in (install, [npm, "run", "--silent", "build"]):
        subprocess.run(command, cwd=root / "viewer", check=True)
    if not all(path.is_file() for path in files):
        raise SystemExit(
            "sightline: `npm run build` in viewer/ has not written the viewer: run it to see why."
        )
