"""Whose a source file is: torch's, Python's, another installed package's, the user's, or a notebook cell."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Final

__all__ = ["inside_torch", "installed_file", "python_file", "torch_file"]

_PACKAGE: Final = re.compile(r"/(?:site|dist)-packages/")
_TORCH: Final = re.compile(r"/(?:site|dist)-packages/torch/")
_PLUMBING: Final = re.compile(r"/(?:site|dist)-packages/(?:torch|torchgen|functorch|sightline)/")
_PYTHON: Final = re.compile(r"/lib/python3\.\d+/")


def _slashed(path: str) -> str:
    return path.replace("\\", "/")


def _folders(file: str) -> tuple[str, ...]:
    """The folder a file is in, as it was imported and as it is on the disk."""
    found = {os.path.dirname(file), os.path.dirname(os.path.realpath(file))}
    return tuple(_slashed(folder) + "/" for folder in found)


@cache
def _torch_folders() -> tuple[str, ...]:
    """Where torch is, if it is here; looking for it does not import it."""
    try:
        found = find_spec("torch")
    except (ImportError, ValueError):
        return ()
    return () if found is None or found.origin is None else _folders(found.origin)


_OWN: Final = _folders(os.path.dirname(__file__))
_STANDARD: Final = _folders(os.__file__)


@lru_cache(maxsize=4096)
def inside_torch(path: str) -> str | None:
    """The path of a file of torch's inside its package; None of any other.

    >>> inside_torch("/venv/lib/site-packages/torch/nn/functional.py"), inside_torch("/home/me/torch/net.py")
    ('nn/functional.py', None)
    """
    path = _slashed(path)
    for folder in _torch_folders():
        if path.startswith(folder):
            return path[len(folder) :]
    found = _TORCH.search(path)
    return None if found is None else path[found.end() :]


@lru_cache(maxsize=4096)
def torch_file(path: str) -> bool:
    """Whether a file is torch's own, or sightline's: nothing the user wrote or calls by name.

    >>> torch_file("/venv/lib/site-packages/torch/nn/modules/linear.py"), torch_file("/home/me/torch/net.py")
    (True, False)
    """
    if inside_torch(path) is not None:
        return True
    path = _slashed(path)
    return path.startswith((*_OWN, "<frozen ")) or bool(_PLUMBING.search(path))


@lru_cache(maxsize=4096)
def python_file(path: str) -> bool:
    """Whether a file belongs to Python itself."""
    path = _slashed(path)
    if _PACKAGE.search(path):
        return False
    return path.startswith((*_STANDARD, "<frozen ")) or bool(_PYTHON.search(path))


@lru_cache(maxsize=4096)
def installed_file(path: str) -> bool:
    """Whether a file belongs to an installed package or to Python itself, and not to the user's project."""
    return torch_file(path) or python_file(path) or bool(_PACKAGE.search(_slashed(path)))


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
