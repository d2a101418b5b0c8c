"""The C++ headers of versions of torch, taken from their wheels and kept in a folder.

A wheel is a gigabyte, its headers are 60 MB. All builds of one version share them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: A CPython that all supported versions of torch have wheels for; their headers do not depend on it.
_PYTHON = "312"
_INCLUDE = "torch/include/"


def torch_headers(minor: str, machine: str, folder: Path) -> Path:
    """The include folder of the newest patch release of a minor version, downloaded at first."""
    include = folder / f"torch-{minor}-{machine}" / "include"
    if include.is_dir():
        return include
    with tempfile.TemporaryDirectory(prefix="torch-", dir=folder) as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wheel_of = ["--only-binary=:all:", "--implementation=cp", f"--python-version={_PYTHON}"]
        wheel_of += [f"--abi=cp{_PYTHON}", f"--platform=manylinux_2_28_{machine}"]
        subprocess.run([*pip, *wheel_of, f"--dest={work}", f"torch=={minor}.*"], check=True)
        (wheel,) = Path(work).glob("torch-*.whl")
        extracted = Path(work) / "extracted"
        with zipfile.ZipFile(wheel) as file:
            names = [name for name in file.namelist() if name.startswith(_INCLUDE)]
            file.extractall(extracted, names)
        include.parent.mkdir(exist_ok=True)
        (extracted / _INCLUDE).rename(include)
    return include
