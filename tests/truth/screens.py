"""A printed view taken apart as a reader does it: titled lines, and tables by their columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_RULE = re.compile(r"^─+$")
_MARGIN = 10


@dataclass(frozen=True)
class Table:
    """A table: its titles, and the cells of each row."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: tuple[str, ...] = ()

    def column(self, title: str) -> list[str]:
        """The cells below a title."""
        at = self.titles.index(title)
        return [row[at] for row in self.rows]


@dataclass
class Screen:
    """The titled lines and the tables of a view, in order."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def screen(text: str, margin: int = _MARGIN) -> Screen:
    """The parts of a view whose titled lines begin with a title of ``margin`` columns."""
    found = Screen()
    for block in _blocks(text):
        if len(block) > 1 and _RULE.match(block[1]):
            found.tables.append(table(block))
        else:
            found.facts += _facts(block, margin)
    return found


def _blocks(text: str) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for row in text.splitlines():
        if row.strip():
            blocks[-1].append(row)
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def _facts(block: Sequence[str], margin: int) -> list[tuple[str, str]]:
    """Titles and texts; a line without a title continues the one before."""
    facts: list[tuple[str, str]] = []
    for row in block:
        title, text = row[:margin].strip(), row[margin:].strip()
        if row.startswith("trace ") or (title and row[margin - 1 : margin] not in ("", " ")):
            title, _, text = row.partition(" ")
        if title:
            facts.append((title, text.strip()))
        elif facts:
            facts[-1] = (facts[-1][0], f"{facts[-1][1]}\n{text}")
        else:
            facts.append(("", text))
    return facts


def table(block: Sequence[str]) -> Table:
    """A table: columns are separated by at least two columns that are blank in every row."""
    rules = [at for at, row in enumerate(block) if _RULE.match(row)]
    texts = [row for at, row in enumerate(block) if at not in rules]
    size = max(map(len, texts))
    padded = [row.ljust(size) for row in texts]
    blank = [all(row[at] == " " for row in padded) for at in range(size)]
    begins = [0]
    begins += [at for at in range(2, size) if not blank[at] and blank[at - 1] and blank[at - 2]]
    cells = [
        tuple(
            row[begin:end].rstrip() if not number else row[begin:end].strip()
            for number, (begin, end) in enumerate(zip(begins, [*begins[1:], size], strict=True))
        )
        for row in padded
    ]
    has_footer = len(rules) > 1
    return Table(cells[0], tuple(cells[1 : -1 if has_footer else None]), cells[-1] if has_footer else ())
