"""The intermediate form of all views: lines of styled spans, and tables of them; as text and as HTML."""

from __future__ import annotations

import html
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any, Final

from sightline.argument_checks import argument_text, check_arguments
from sightline.errors import UsageError
from sightline.text_encoding import encodable, encoding_of, for_output

if TYPE_CHECKING:
    from rich.console import Console


#: Columns of a view as text; on a terminal it has the terminal's width, where that is less.
WIDTH: Final = 100
#: Columns for the title of a fact.
MARGIN: Final = 11
#: The meaning of a span, and how it looks in the terminal (rich) and in HTML (CSS).
STYLES: Final = {
    "": ("", ""),
    "code": ("", "color:inherit"),
    "mark": ("bold", "font-weight:bold"),
    "dim": ("dim", "color:#8a8f98"),
    "op": ("cyan", "color:#0b7285"),
    "shape": ("green", "color:#2b8a3e"),
    "module": ("bold", "font-weight:bold"),
    "title": ("bold", "font-weight:bold"),
    "number": ("magenta", "color:#862e9c"),
    "warn": ("yellow", "color:#b35900"),
    "error": ("bold red", "color:#c92a2a;font-weight:bold"),
}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters, which could move a cursor or reverse a line, as ``\\x1b``."""
    if text.isascii() and text.isprintable():  # the fast path: a table has millions of cells
        return text
    text = text.replace("\n", "\\n").replace("\t", "    ")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text and its style, a key of ``STYLES``."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line: spans after a prefix for its depth."""

    spans: tuple[Span, ...] = ()
    prefix: str = ""
    hang: int = -1  #: indentation of the lines it is wrapped to; -1 for a line that is not wrapped

    @property
    def text(self) -> str:
        return (self.prefix + "".join(printable(span.text) for span in self.spans)).rstrip()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False  #: aligned right and never cut, for numbers
    least: int = 0  #: how many columns a text keeps when it is cut; 0 for all of it
    spare: int = 0  #: the higher, the sooner it is dropped for lack of room; 0 stays
    end: bool = False  #: cut at the beginning: the end of a path matters more


#: A cell of a table: one span, or several that form one text.
Cell = Span | tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: columns, rows of cells, and an optional last row below a rule."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    footer: tuple[Cell, ...] = ()


Block = Line | Grid


def line(*parts: str | Span | tuple[str, str], prefix: str = "", hang: int = -1) -> Line:
    """A line from texts, spans and (text, style) pairs.

    >>> line("x ", ("f32[2]", "shape"), prefix="│ ").text
    '│ x f32[2]'
    """
    return Line(tuple(_span(part) for part in parts), prefix, hang)


def comment_lines(notes: Iterable[str]) -> list[Line]:
    """Sentences beside a view, a dim line each; empty ones are left out.

    >>> [row.text for row in comment_lines(["", "compiled code ran"])]
    ['# compiled code ran']
    """
    return [line((f"# {note}", "dim")) for note in notes if note]


def fact_line(title: str, *parts: str | Span | tuple[str, str], margin: int = MARGIN) -> Line:
    """A fact as a line of prose: its title, and its text from column ``margin`` on.

    >>> fact_line("verdict", "the same").text
    'verdict    the same'
    """
    return line((f"{title:<{margin}}", "dim"), *parts, hang=margin)


def fact_lines(title: str, parts: Sequence[str], margin: int, room: int) -> list[Line]:
    """A fact about a view in as many dim lines as it needs; none without parts.

    >>> [row.text for row in fact_lines("key", ["+N: N more", "×N: N times"], 5, 20)]
    ['key  +N: N more', '     ×N: N times']
    """
    rows: list[str] = []
    for part in parts:
        if rows and width(f"{rows[-1]} · {part}") <= room - margin:
            rows[-1] += f" · {part}"
        else:
            rows.append(part)
    return [
        line((f"{'' if at else title:<{margin}}{row}", "dim"), hang=margin) for at, row in enumerate(rows)
    ]


def _span(part: str | Span | tuple[str, str]) -> Span:
    if isinstance(part, Span):
        return part
    return Span(part) if isinstance(part, str) else Span(*part)


def grid(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell | tuple[str, str]]],
         footer: Sequence[str | Cell | tuple[str, str]] = ()) -> Grid:  # fmt: skip
    """A table from rows of cells."""
    return Grid(
        tuple(columns),
        tuple(tuple(_cell(cell) for cell in row) for row in rows),
        tuple(_cell(cell) for cell in footer),
    )


def _cell(part: str | Cell | tuple[str, str]) -> Cell:
    if isinstance(part, tuple):
        return tuple(item for item in part if isinstance(item, Span)) or Span(*map(str, part))
    return _span(part)


def _spans(cell: Cell) -> tuple[Span, ...]:
    return (cell,) if isinstance(cell, Span) else cell


def cell_width(cell: Cell) -> int:
    """Columns the text of a cell takes."""
    return sum(width(printable(span.text)) for span in _spans(cell))


@dataclass(frozen=True)
class View:
    """A finished view: ``str(v)`` is plain text, ``v.print()`` goes to the terminal.

    The text has only characters that standard output can write, so that ``print(v)`` never fails. It is 100
    columns wide, so that it is the same everywhere; on a terminal it has the width of that. ``fit`` makes the
    blocks for a width, where wrapping lines and cutting cells is not enough.

    >>> print(View((line("hello"),)))
    hello
    """

    blocks: tuple[Block, ...] = field(repr=False)
    fit: Callable[[int], Iterable[Block]] | None = field(
        default=None, repr=False, compare=False, kw_only=True
    )
    #: Whether it keeps its width on every terminal.
    fixed: bool = field(default=False, repr=False, compare=False, kw_only=True)

    def within(self, room: int | None) -> Iterable[Block]:
        """The blocks for a screen of ``room`` columns; None for no limit."""
        if room is None or self.fixed:
            return self.blocks
        if not isinstance(room, int):
            raise UsageError(f"room={argument_text(room)} must be a number of columns, or None.")
        from sightline.views.table_layout import NARROWEST, fit_blocks

        room = max(room, NARROWEST)
        return fit_blocks(self.blocks if self.fit is None else self.fit(room), room)

    def __str__(self) -> str:
        return for_output("\n".join(text for block in self.blocks for text in _text(block)))

    def __repr__(self) -> str:
        return str(self)

    @check_arguments
    def print(self, color: bool | None = None, file: IO[str] | None = None) -> None:
        """Write it to the terminal, with colour only on a TTY unless ``color`` says otherwise."""
        if file is not None and not callable(getattr(file, "write", None)):
            raise UsageError(f"file={argument_text(file)} must be a file that is open for writing.")
        printer = Printer(file, color)
        for block in self.within(printer.room):
            printer.write(block)

    def _repr_html_(self) -> str:
        body = ""
        for prose, group in groupby(_html_blocks(self.blocks), lambda block: isinstance(block, Line)):
            blocks: list[Any] = list(group)
            if prose:  # HTML ignores the newline after the tag
                rows = (_html_spans((Span(each.prefix, "dim"), *each.spans)) for each in blocks)
                body += "\n".join([_PRE, *rows]) + "</pre>"
            else:
                body += "".join(map(_html_table, blocks))
        return (
            '<div class="sightline" style="font-family:ui-monospace,Menlo,Consolas,monospace;'
            f'font-size:12px;line-height:1.45;overflow-x:auto">{body}</div>'
        )


class Printer:
    """Writes blocks to a stream one after the other: a finished view, or a live one line by line."""

    def __init__(self, file: IO[str] | None = None, color: bool | None = None, encoding: str = "") -> None:
        self._out = sys.stdout if file is None else file
        self._console = _console(self._out, color)
        self._encoding = encoding or encoding_of(self._out)

    @property
    def room(self) -> int | None:
        """The width of the terminal; None for a stream that is not a terminal."""
        return shutil.get_terminal_size().columns if _is_terminal(self._out) else None

    def write(self, block: Block) -> None:
        """Write one block; nothing in it is interpreted as markup."""
        if self._console is None:
            for text in _text(block):
                self._out.write(self._encodable(text) + "\n")
            return
        from rich.text import Text

        for parts in _parts(block):
            row = Text(no_wrap=True, overflow="ignore", end="\n")
            for span in parts:
                row.append(self._encodable(printable(span.text)), STYLES[span.style][0] or None)
            self._console.print(row, soft_wrap=True)

    def flush(self) -> None:
        """Show it before the next op runs."""
        self._out.flush()

    def _encodable(self, text: str) -> str:
        return encodable(text, self._encoding)


def _is_terminal(out: IO[str]) -> bool:
    return hasattr(out, "isatty") and out.isatty()


def _console(out: IO[str], color: bool | None) -> Console | None:
    """A rich console for colour; None for plain text, as with NO_COLOR or in a pipe."""
    import os

    if color is None:
        color = _is_terminal(out) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not color:
        return None
    from rich.console import Console

    return Console(file=out, force_terminal=True, color_system="standard", highlight=False, markup=False,
                   emoji=False, no_color=False)  # fmt: skip


@lru_cache(maxsize=4096)
def width(text: str) -> int:
    """Columns a text takes in a terminal: wide characters count two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def cut(text: str, room: int) -> str:
    """The printable text in ``room`` columns, with ``…`` where something is missing.

    >>> cut("MultiheadAttention", 10)
    'Multihead…'
    """
    text = printable(text)
    if width(text) <= room:
        return text
    kept, room = "", room - 1
    for char in text:
        room -= width(char)
        if room < 0:
            break
        kept += char
    return f"{kept}…"


def cut_end(text: str, room: int) -> str:
    """The end of the printable text, in ``room`` columns.

    >>> cut_end("blocks.0.attn.qkv", 10)
    '….attn.qkv'
    """
    return cut(printable(text)[::-1], room)[::-1]


def height(block: Block) -> int:
    """How many lines a block has."""
    return len(_text(block))


def _text(block: Block) -> list[str]:
    if isinstance(block, Line):
        return [block.text]
    return ["".join(printable(span.text) for span in parts).rstrip() for parts in _parts(block)]


def _parts(block: Block) -> list[tuple[Span, ...]]:
    """The lines of a block as spans; cells of a table are padded."""
    if isinstance(block, Line):
        return [(Span(block.prefix, "dim"), *block.spans)]
    head = tuple(Span(column.title, "dim") for column in block.columns)
    rows = [head, *block.rows, *([block.footer] if block.footer else [])]
    widths = column_widths(block)
    rule = (Span("─" * (sum(widths) + 2 * (len(widths) - 1)), "dim"),)
    lines: list[tuple[Span, ...]] = []
    for row in rows:
        parts: list[Span] = []
        for at, (column, size) in enumerate(zip(block.columns, widths, strict=True)):
            cell = row[at] if at < len(row) else Span("")
            pad = Span(" " * (size - cell_width(cell)))
            parts += [pad, *_spans(cell)] if column.right else [*_spans(cell), pad]
            parts += [Span("  ")] * (at < len(widths) - 1)
        lines.append(tuple(parts))
    lines.insert(1, rule)
    if block.footer:
        lines.insert(len(lines) - 1, rule)
    return lines


def column_widths(table: Grid) -> list[int]:
    """The widths of the columns of a table."""
    rows = [*table.rows, *([table.footer] if table.footer else [])]
    return [
        max([width(column.title), *(cell_width(row[at]) for row in rows if at < len(row))])
        for at, column in enumerate(table.columns)
    ]


#: Limits of a page, in lines and rows and in characters: with more, a notebook is slow or does not open.
_HTML_LINES: Final = 4000
_HTML_CHARACTERS: Final = 1 << 20


def _html_blocks(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks a page shows: all, or the first ones and a line with the number of the others."""
    lines = characters = 0
    for at, block in enumerate(blocks):
        room = _HTML_LINES - lines if characters <= _HTML_CHARACTERS else 0
        if _rows(block) > room:
            shown = 0
            if isinstance(block, Grid) and room:
                yield replace(block, rows=block.rows[:room], footer=())
                shown = room
            left = sum(map(_rows, blocks[at:])) - shown
            yield line((f"… {left:,} more lines are left out here; print() shows all, filters fewer", "warn"))
            return
        lines += _rows(block)
        if isinstance(block, Line):
            characters += len(block.prefix) + sum(len(span.text) for span in block.spans)
        yield block


def _rows(block: Block) -> int:
    return 1 if isinstance(block, Line) else len(block.rows)


#: If a page's styles are stripped, the tag still keeps the indentation.
_PRE: Final = '<pre style="margin:0;padding:0;border:0;background:none;font:inherit;color:inherit">'


def _html_table(block: Any) -> str:
    cell = 'style="padding:1px 10px 1px 0;text-align:{align}{rule}"'

    def cells(tag: str, row: Sequence[Cell], rule: str = "") -> str:
        parts = []
        for column, part in zip(block.columns, row, strict=False):
            style = cell.format(align="right" if column.right else "left", rule=rule)
            parts.append(f"<{tag} {style}>{_PRE}{_html_spans(_spans(part))}</pre></{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    head = cells("th", [Span(column.title) for column in block.columns], ";border-bottom:1px solid #ccc")
    body = "".join(cells("td", row) for row in block.rows)
    foot = cells("td", block.footer, ";border-top:1px solid #ccc") if block.footer else ""
    return f'<table style="border-collapse:collapse;font:inherit">{head}{body}{foot}</table>'


def _html_spans(spans: Iterable[Span]) -> str:
    """The one place where text becomes HTML."""
    parts = []
    for span in spans:
        if not span.text:
            continue
        text = html.escape(printable(span.text))
        css = STYLES[span.style][1]
        parts.append(f'<span style="{css}">{text}</span>' if css else text)
    return "".join(parts)
