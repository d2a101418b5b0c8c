"""What a cell of a notebook is called: ``In[2]``, and not by the file name that its code carries.

IPython compiles each cell under a name of its own, such as ``/tmp/ipykernel_123/4233183378.py``, and only the
process that did it knows which cell that was. So a recording has the name people see from the start, and a
bundle needs to know nothing else. Here is kept which file a name stands for, to find its text.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any, Final

_INPUT: Final = re.compile(r"<ipython-input-(\d+)-\w+>")
_files: dict[str, str] = {}  # the name of a cell -> the file that `linecache` knows


def cell_name(file: str) -> str:
    """The name of the cell that was compiled as this file; of any other file its own.

    >>> cell_name("<ipython-input-2-0123456789ab>"), cell_name("net.py")
    ('In[2]', 'net.py')
    """
    called = _called_by_ipython(file)
    if called is None:
        return file
    name, number = called, 1
    while _files.setdefault(name, file) != file:  # a cell that is not in the history has a number, too
        number += 1
        name = f"{called}.{number}"
    return name


def cell_file(name: str) -> str:
    """The file that a cell was compiled as; of any other name the name itself."""
    return _files.get(name, name)


def _called_by_ipython(file: str) -> str | None:
    ipython: Any = sys.modules.get("IPython")
    with suppress(Exception):  # of another version, or not imported to its end
        shell = ipython and ipython.get_ipython()
        found = shell and shell.compile.format_code_name(file)
        if found and isinstance(found[1], str) and found[1].startswith("In["):
            return str(found[1])
    by_name = _INPUT.fullmatch(file)
    return None if by_name is None else f"In[{by_name[1]}]"
