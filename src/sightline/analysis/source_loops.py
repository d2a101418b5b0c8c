"""The loops of a source file: which of them the code at a position is run by. Display help only.

A loop is told by its header, ``for block in self.blocks:``, and of a comprehension by its clauses,
``for x in xs if x``. What is evaluated once, as what a ``for`` goes over and its ``else``, is not in the
loop; the condition of a ``while`` is. Where a source cannot be read there are no loops; nothing here raises.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from sightline.trace.source_lines import SourceLines, syntax_tree

Spot = tuple[int, int]  # line and column, which counts bytes
Stretch = tuple[Spot, Spot]  # from a spot to before another

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop, and what of the file it runs again and again."""

    header: str
    inside: tuple[Stretch, ...]
    apart: tuple[Stretch, ...] = ()  #: functions made in it: they run when they are called
    only_holds: Stretch | None = None  #: the one loop that is all of its body, by where that stands
    at: Stretch = ((0, 0), (0, 0))  #: where the loop itself stands

    def runs(self, line: int, column: int = -1) -> bool:
        """Whether it runs what stands at a position; a column of -1 is not known."""
        return _within(self.inside, line, column) and not _within(self.apart, line, column)


def loops_around(lines: SourceLines, file: str, positions: Iterable[Spot]) -> list[Loop]:
    """The loops that run the code at all of some positions of a file, the innermost first."""
    spots = list(positions)
    return [loop for loop in _read(lines.text(file)) if all(loop.runs(*spot) for spot in spots)]


def header_text(loops: Sequence[Loop], taken: Iterable[Loop] = ()) -> str:
    """The headers of nested loops, outermost first; ``…`` where one holds more than the next.

    A body in such a nest runs as often as all of them together say. Those ``taken`` are told elsewhere.
    """
    text = loops[0].header if loops else ""
    for inner, outer in pairwise(loops):
        if outer in taken:
            break
        text = f"{outer.header} {'' if outer.only_holds == inner.at else '… '}{text}"
    return text


@lru_cache(maxsize=256)
def _read(text: str) -> tuple[Loop, ...]:
    """The loops of a text, those inside before those around."""
    tree = syntax_tree(text)
    if tree is None:
        return ()
    lines = text.splitlines()
    try:
        found = [loop for node in ast.walk(tree) for loop in _loops(node, lines)]
    except RecursionError:  # too deep to be written again
        return ()
    return tuple(sorted(found, key=lambda loop: (loop.at[0], (-loop.at[1][0], -loop.at[1][1])), reverse=True))


def _loops(node: ast.AST, lines: Sequence[str]) -> Iterator[Loop]:
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        counted = node.test if isinstance(node, ast.While) else node.iter
        header = _header(lines, _stretch(node)[0], _stretch(counted)[1])
        body = (_stretch(node.body[0])[0], _stretch(node.body[-1])[1])
        inside = (body, _stretch(counted)) if isinstance(node, ast.While) else (body,)
        only = node.body[0] if len(node.body) == 1 else None
        held = _stretch(only) if isinstance(only, ast.For | ast.AsyncFor) and not only.orelse else None
        yield Loop(header, inside, _functions(node), held, _stretch(node))
    elif isinstance(node, _Comprehension):
        made = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        first, *rest = node.generators
        again = [*made, *first.ifs, *(part for each in rest for part in (each.iter, *each.ifs))]
        header = "".join(map(ast.unparse, node.generators)).strip()
        yield Loop(header, tuple(map(_stretch, again)), _functions(node), at=_stretch(node))


def _functions(node: ast.AST) -> tuple[Stretch, ...]:
    return tuple(_stretch(inner) for inner in ast.walk(node) if isinstance(inner, _Function))


def _stretch(node: ast.AST) -> Stretch:
    first, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    end_column = getattr(node, "end_col_offset", None)
    last = getattr(node, "end_lineno", None) or first
    return (first, column), (last, column + 1 if end_column is None else end_column)


def _within(stretches: Iterable[Stretch], line: int, column: int) -> bool:
    if column < 0:
        return any(start[0] <= line <= end[0] for start, end in stretches)
    return any(start <= (line, column) < end for start, end in stretches)


def _header(text: Sequence[str], start: Spot, end: Spot) -> str:
    """The source from one spot to another and the brackets closed after it, on one line, with a colon."""
    lines = [line.encode() for line in text[start[0] - 1 : end[0]]]
    closing = lines[-1][end[1] :].partition(b":")[0]
    lines[-1] = lines[-1][: end[1]] + (b"" if closing.strip(b") ") else closing)
    lines[0] = lines[0][start[1] :]
    return " ".join(line.decode(errors="replace").strip() for line in lines) + ":"
