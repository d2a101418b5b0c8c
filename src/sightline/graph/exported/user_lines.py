"""Which line of the model is running while torch exports it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

from sightline.notation import position_text
from sightline.trace.file_owners import cell_name, inside_torch, torch_file

_OURS: Final = str(Path(__file__).parents[2]) + "/"
_PYTHON: Final = sysconfig.get_path("stdlib") + "/"
_SYMBOLIC: Final = re.compile(r"-packages/(sympy|mpmath)/")  #: torch computes sizes with these


def running_line(frame: FrameType | None) -> str:
    """The line of the model at which a frame is: the innermost one that is neither torch's nor ours.

    "" where there is none.
    """
    layer = ""  # the line of torch.nn, where the model is one of its own layers
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        file = frame.f_code.co_filename
        text = f"{position_text(cell_name(file), frame.f_lineno)} in {frame.f_code.co_qualname}"
        if is_user_file(file):
            return text
        if not layer and is_layer_file(file) and frame.f_code.co_name == "forward":
            layer = text
        frame = frame.f_back
    return layer


def is_user_file(file: str) -> bool:
    """Whether a file is the model's: not torch's, Python's, or of the packages torch computes sizes with.

    >>> import torch
    >>> [is_user_file(file) for file in (torch.__file__, "net.py", "<string>", sysconfig.__file__)]
    [False, True, False, False]
    """
    if file.startswith("<"):
        return file.startswith(("<stdin", "<ipython", "<doctest"))
    standard = file.startswith(_PYTHON) and "-packages" not in file
    return not standard and not torch_file(file) and not _SYMBOLIC.search(file)


def is_layer_file(file: str) -> bool:
    """Whether a file is one of ``torch.nn``."""
    return (inside_torch(file) or "").startswith("nn/")
