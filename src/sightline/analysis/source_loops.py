"""The loops of a source file that run the code at a position. For display only.

A loop is shown by its header, ``for block in self.blocks:``, a comprehension by its clauses,
``for x in xs if x``. Code that is evaluated once, such as the iterable of a ``for`` and its ``else``, is not
in the loop; the condition of a ``while`` is. An unreadable source has no loops; nothing here raises.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from sightline.data.source_files import SourceFiles, syntax_tree

Position = tuple[int, int]  # line and column; columns count bytes
Span = tuple[Position, Position]  # start and end, which is not included

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop, and the spans of source it runs repeatedly."""

    header: str
    body: tuple[Span, ...]
    functions: tuple[Span, ...] = ()  #: defined in it: they run when they are called
    only_loop: Span | None = None  #: the loop that is its whole body
    span: Span = ((0, 0), (0, 0))  #: of the loop itself

    def runs(self, line: int, column: int = -1) -> bool:
        """Whether it runs the code at a position; a column of -1 is unknown."""
        return _within(self.body, line, column) and not _within(self.functions, line, column)


def loops_around(lines: SourceFiles, file: str, positions: Iterable[Position]) -> list[Loop]:
    """The loops that run the code at all of some positions of a file, the innermost first."""
    wanted = list(positions)
    return [
        loop for loop in _file_loops(lines.text(file)) if all(loop.runs(*position) for position in wanted)
    ]


def header_text(loops: Sequence[Loop], shown: Iterable[Loop] = ()) -> str:
    """The headers of nested loops, outermost first; ``…`` where a loop contains more than the next one.

    Loops in ``shown`` have a line of their own, and end the text.
    """
    text = loops[0].header if loops else ""
    for inner, outer in pairwise(loops):
        if outer in shown:
            break
        text = f"{outer.header} {'' if outer.only_loop == inner.span else '… '}{text}"
    return text


@lru_cache(maxsize=256)
def _file_loops(text: str) -> tuple[Loop, ...]:
    """The loops of a text, inner ones first."""
    tree = syntax_tree(text)
    if tree is None:
        return ()
    lines = text.splitlines()
    try:
        loops = [loop for node in ast.walk(tree) for loop in _loops(node, lines)]
    except RecursionError:  # too deep for ast.unparse
        return ()

    def outer_first(loop: Loop) -> tuple[Position, Position]:
        start, (end_line, end_column) = loop.span
        return start, (-end_line, -end_column)

    return tuple(sorted(loops, key=outer_first, reverse=True))


def _loops(node: ast.AST, lines: Sequence[str]) -> Iterator[Loop]:
    """The loop or the comprehension that a node is, if it is one."""
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        control = node.test if isinstance(node, ast.While) else node.iter
        header = _header(lines, _span(node)[0], _span(control)[1])
        body = (_span(node.body[0])[0], _span(node.body[-1])[1])
        repeated = (body, _span(control)) if isinstance(node, ast.While) else (body,)
        only = node.body[0] if len(node.body) == 1 else None
        only_loop = _span(only) if isinstance(only, ast.For | ast.AsyncFor) and not only.orelse else None
        yield Loop(header, repeated, _functions(node), only_loop, _span(node))
    elif isinstance(node, _Comprehension):
        elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        first, *rest = node.generators
        parts = [*elements, *first.ifs, *(part for each in rest for part in (each.iter, *each.ifs))]
        header = "".join(map(ast.unparse, node.generators)).strip()
        yield Loop(header, tuple(map(_span, parts)), _functions(node), span=_span(node))


def _functions(node: ast.AST) -> tuple[Span, ...]:
    return tuple(_span(inner) for inner in ast.walk(node) if isinstance(inner, _Function))


def _span(node: ast.AST) -> Span:
    first, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    end_column = getattr(node, "end_col_offset", None)
    last = getattr(node, "end_lineno", None) or first
    return (first, column), (last, column + 1 if end_column is None else end_column)


def _within(spans: Iterable[Span], line: int, column: int) -> bool:
    if column < 0:
        return any(start[0] <= line <= end[0] for start, end in spans)
    return any(start <= (line, column) < end for start, end in spans)


def _header(text: Sequence[str], start: Position, end: Position) -> str:
    """The source between two positions and the closing brackets after it, on one line, with a colon."""
    lines = [line.encode() for line in text[start[0] - 1 : end[0]]]
    closing = lines[-1][end[1] :].partition(b":")[0]
    lines[-1] = lines[-1][: end[1]] + (b"" if closing.strip(b") ") else closing)
    lines[0] = lines[0][start[1] :]
    return " ".join(line.decode(errors="replace").strip() for line in lines) + ":"
