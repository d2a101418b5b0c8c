"""Planted bugs: scripts with one mistake each, the same scripts repaired, and a check that tells them apart.

A file of ``bugs/`` is a script with marks at the ends of its lines. ``#!`` is a line of the bug, ``#+`` one
of the repaired script, each in place of the other. What is wrong should be named at a line with ``#!`` or
``#@`` (``~`` after a mark: not there). ``#: kind`` is the kind of problem, and what follows ``#: check`` is
run after the script: it fails with the bug, and passes without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "bugs"
_MARK: Final = re.compile(r"\s*#([!@])(~?)$")
_REPAIR: Final = re.compile(r"^(\s*)#\+ (.*)$")


@dataclass(frozen=True)
class Planted:
    """A bug and its repair."""

    name: str
    kind: str  #: of the problem that should be named
    script: str
    repaired: str
    lines: tuple[int, ...]  #: of the script, any of which is a good place to point at
    check: str

    @classmethod
    def read(cls, path: Path) -> Planted:
        """A bug from its file."""
        body, _, check = path.read_text().partition("#: check\n")
        script: list[str] = []
        repaired: list[str] = []
        places: list[int] = []
        kind = ""
        for line in body.splitlines():
            if line.startswith("#: kind "):
                kind = line.removeprefix("#: kind ").strip()
                continue
            repair = _REPAIR.match(line)
            if repair is not None:
                repaired.append(repair[1] + repair[2])
                continue
            mark = _MARK.search(line)
            plain = _MARK.sub("", line)
            script.append(plain)
            if mark is None or mark[1] == "@":
                repaired.append(plain)
            if mark is not None and not mark[2]:
                places.append(len(script))
        text, other = ("\n".join(lines) + "\n" for lines in (script, repaired))
        return cls(path.stem, kind, text, other, tuple(places), check)


def planted(names: tuple[str, ...] = ()) -> list[Planted]:
    """All of them, or those that are named."""
    found = [Planted.read(path) for path in sorted(FOLDER.glob("*.py"))]
    return [one for one in found if not names or one.name in names]
