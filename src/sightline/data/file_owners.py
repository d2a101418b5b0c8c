"""Owners of source files: torch, Python, another installed package or the user; names of notebook cells."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Final

_PACKAGE: Final = re.compile(r"/(?:site|dist)-packages/")
_TORCH: Final = re.compile(r"/(?:site|dist)-packages/torch/")
_PLUMBING: Final = re.compile(r"/(?:site|dist)-packages/(?:torch|torchgen|functorch|sightline)/")
_PYTHON: Final = re.compile(r"/lib/python3\.\d+/")
_SYMBOLIC: Final = re.compile(r"-packages/(sympy|mpmath)/")  #: torch computes sizes with these


def _slashed(path: str) -> str:
    return path.replace("\\", "/")


def _folders(file: str) -> tuple[str, ...]:
    """The folder of a file, as imported and with links resolved."""
    folders = {os.path.dirname(file), os.path.dirname(os.path.realpath(file))}
    return tuple(_slashed(folder) + "/" for folder in folders)


@cache
def _torch_folders() -> tuple[str, ...]:
    """The folders that torch is installed in, if it is; this does not import it."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return ()
    return () if spec is None or spec.origin is None else _folders(spec.origin)


_OWN: Final = _folders(os.path.dirname(__file__))
_STANDARD: Final = _folders(os.__file__)


@lru_cache(maxsize=4096)
def inside_torch(path: str) -> str | None:
    """The path of a file of torch inside its package; None for any other file.

    >>> inside_torch("/venv/lib/site-packages/torch/nn/functional.py"), inside_torch("/home/me/torch/net.py")
    ('nn/functional.py', None)
    """
    path = _slashed(path)
    for folder in _torch_folders():
        if path.startswith(folder):
            return path[len(folder) :]
    match = _TORCH.search(path)
    return None if match is None else path[match.end() :]


@lru_cache(maxsize=4096)
def torch_file(path: str) -> bool:
    """Whether a file belongs to torch or to sightline.

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


@lru_cache(maxsize=4096)
def model_file(path: str) -> bool:
    """Whether a file is the model's: not torch's, Python's, or of the packages torch computes sizes with.

    >>> [model_file(file) for file in ("/lib/site-packages/torch/nn/functional.py", "net.py", re.__file__)]
    [False, True, False]
    """
    if path.startswith("<"):
        return path.startswith(("<stdin", "<ipython", "<doctest"))
    return not (torch_file(path) or python_file(path) or _SYMBOLIC.search(_slashed(path)))


def layer_file(path: str) -> bool:
    """Whether a file is one of ``torch.nn``."""
    return (inside_torch(path) or "").startswith("nn/")


_INPUT: Final = re.compile(r"<ipython-input-(\d+)-\w+>")
_files: dict[str, str] = {}  # the name of a cell -> its file name in `linecache`


def cell_name(file: str) -> str:
    """The name of the cell that was compiled under this file name; any other file keeps its name.

    >>> cell_name("<ipython-input-2-0123456789ab>"), cell_name("net.py")
    ('In[2]', 'net.py')
    """
    match = _INPUT.fullmatch(file)
    cell = f"In[{match[1]}]" if match else ""
    ipython: Any = sys.modules.get("IPython")
    with suppress(Exception):  # another version, or still being imported
        shell = ipython and ipython.get_ipython()
        kind_and_name = shell and shell.compile.format_code_name(file)
        if kind_and_name and isinstance(kind_and_name[1], str) and kind_and_name[1].startswith("In["):
            cell = kind_and_name[1]
    if not cell:
        return file
    name, number = cell, 1
    while _files.setdefault(name, file) != file:  # a cell that is not in the history has a number too
        number += 1
        name = f"{cell}.{number}"
    return name


def cell_file(name: str) -> str:
    """The file name that a cell was compiled under; any other name is returned unchanged."""
    return _files.get(name, name)
