"""`SourceFiles`: the source text that belongs to a recording; views and analyses read source only through it.

The source of a recording made in this process is read from files, through `linecache`, which also has the
cells of a notebook. A loaded recording has only the text that was saved with it: its file names come from
another machine, so no file is opened for them, and its text is never given to `linecache`, where `inspect`
and `torch.jit` would take it for the code that runs.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Collection, Mapping
from typing import Final

from sightline.data.file_owners import cell_file

_LONGEST: Final = 1000  #: characters of a line that is shown by itself
_MOST_TEXT: Final = 1 << 20  #: characters of a file that is parsed
_MOST_WORDS: Final = 1 << 18  #: of such a file; each becomes objects of the syntax tree
_WORD: Final = re.compile(r"\w+|[^\w\s]")


class SourceFiles:
    """The lines of source files as one recording knows them; empty where it does not.

    >>> lines = SourceFiles({"net.py": "a = 1\\nb = 2"})
    >>> lines.line("net.py", 2), lines.line("net.py", 3), lines.line("other.py", 1)
    ('b = 2\\n', '', '')
    """

    def __init__(self, texts: Mapping[str, str] | None = None, whole: Collection[str] | None = None) -> None:
        #: The text that was saved with the recording; None for one made in this process.
        self.texts = texts
        #: The files whose text is complete; others have only the lines that ran, with blank lines between.
        self.whole = frozenset((texts or ()) if whole is None else whole)
        self._split: dict[str, list[str]] = {}

    def lines(self, file: str) -> list[str]:
        """The lines of a file, each with its newline; of a removed file the lines in `linecache`."""
        if self.texts is None:
            file = cell_file(file)
            try:
                if os.path.exists(file):
                    linecache.checkcache(file)  # else an edited file would keep its first text
                return linecache.getlines(file)
            except (OSError, ValueError):  # not a possible file name
                return []
        lines = self._split.get(file)
        if lines is None:
            lines = self._split[file] = _split(self.texts[file]) if file in self.texts else []
        return lines

    def line(self, file: str, number: int) -> str:
        """One line, counted from 1; a very long one is cut."""
        lines = self.lines(file)
        return lines[number - 1][:_LONGEST] if 0 < number <= len(lines) else ""

    def text(self, file: str) -> str:
        """The whole text."""
        return "".join(self.lines(file))


def indent_of(line: str) -> int:
    """The bytes of white space that a line begins with; columns include them.

    >>> indent_of("    x = 1"), indent_of("\u3000x = 1")
    (4, 3)
    """
    return len(line[: len(line) - len(line.lstrip())].encode())


def syntax_tree(text: str) -> ast.Module | None:
    """The syntax tree of a file; None where it is not Python, or too large to be parsed.

    >>> type(syntax_tree("a = 1")).__name__, syntax_tree("a ="), syntax_tree("a\\n" * (1 << 20))
    ('Module', None, None)
    """
    if len(text) > _MOST_TEXT or len(_WORD.findall(text)) > _MOST_WORDS:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or too deep for the parser
        return None


def _split(text: str) -> list[str]:
    """The lines of a text as a file would give them: only a newline ends one."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line + "\n" for line in lines]
