"""Whose a source file is: by where the packages are, never by the name of a folder of the user's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.data import file_owners
from sightline.data.file_owners import inside_torch, installed_file, python_file, torch_file
from sightline.store import load

TORCH = os.path.dirname(torch.__file__)
OURS = os.path.dirname(str(sl.__file__))


@pytest.mark.parametrize(
    ("file", "torchs", "pythons", "installed"),
    [
        (f"{TORCH}/nn/functional.py", True, False, True),
        (f"{OURS}/tracing.py", True, False, True),
        ("/elsewhere/lib/python3.12/site-packages/torch/nn/functional.py", True, False, True),
        ("/elsewhere/lib/python3/dist-packages/sightline/tracing.py", True, False, True),
        (r"C:\Python312\Lib\site-packages\torch\nn\functional.py", True, False, True),
        ("<frozen importlib._bootstrap>", True, True, True),
        (json.__file__, False, True, True),
        ("/usr/lib/python3.12/json/__init__.py", False, True, True),
        ("/venv/lib/python3.12/site-packages/transformers/gpt2.py", False, False, True),
        ("/venv/lib/python3.12/site-packages/torchvision/ops.py", False, False, True),
        ("/home/me/torch/net.py", False, False, False),
        ("/home/me/torch/nn/functional.py", False, False, False),
        ("/home/me/torch/sightline/tests/test_net.py", False, False, False),
        ("/home/me/sightline/train.py", False, False, False),
        (f"{TORCH}2/net.py", False, False, "site-packages" in TORCH),
        ("net.py", False, False, False),
        ("<stdin>", False, False, False),
    ],
)
def test_whose_a_file_is(file: str, torchs: bool, pythons: bool, installed: bool) -> None:
    assert (torch_file(file), python_file(file), installed_file(file)) == (torchs, pythons, installed)


def test_where_in_torch_a_file_is() -> None:
    assert inside_torch(f"{TORCH}/nn/functional.py") == "nn/functional.py"
    assert inside_torch("/home/me/torch/nn/.venv/site-packages/torch/fx/node.py") == "fx/node.py"
    assert inside_torch("/home/me/torch/nn/net.py") is None


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A torch that was built where its sources are, and never installed."""
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "pytorch" / "torch" / "__init__.py")
    monkeypatch.setattr(file_owners, "find_spec", lambda name: spec)
    cached = (file_owners._torch_folders, torch_file, inside_torch, installed_file)
    for function in cached:
        function.cache_clear()
    yield tmp_path / "pytorch"
    for function in cached:
        function.cache_clear()


def test_a_torch_that_is_not_in_site_packages(elsewhere: Path) -> None:
    assert torch_file(f"{elsewhere}/torch/nn/functional.py")
    assert inside_torch(f"{elsewhere}/torch/nn/functional.py") == "nn/functional.py"
    assert not torch_file(f"{elsewhere}/train.py")


NET = """\
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        y = x.relu()
        raise KeyError("mine")
"""


@pytest.fixture
def net(tmp_path: Path) -> nn.Module:
    """A model in a folder with the worst of names."""
    path = tmp_path / "torch" / "nn" / "sightline" / "net.py"
    path.parent.mkdir(parents=True)
    path.write_text(NET)
    found = importlib.util.spec_from_file_location("net_in_a_folder_named_torch", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    made = module.Net()
    assert isinstance(made, nn.Module)
    return made


def test_a_project_in_a_folder_named_torch(net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught, sl.trace(net) as t:
        net(torch.ones(2))
    assert re.search(r"raised at \S*net\.py:6 in Net\.forward \(Net\)", caught.value.__notes__[0])
    assert "y = x.relu()" in str(t.code())
    assert "y = x.relu()" in str(t.source(file="net.py"))
    t.save(tmp_path / "run.sight")
    loaded = load(tmp_path / "run.sight")
    assert loaded.sources[str(tmp_path / "torch" / "nn" / "sightline" / "net.py")] == NET


def test_looking_for_torch_does_not_import_it() -> None:
    script = (
        "import sys; from sightline.data.file_owners import torch_file\n"
        f"print(torch_file({TORCH + '/nn/functional.py'!r}), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONPATH": os.path.dirname(OURS)})  # fmt: skip
    assert run.stdout == "True False\n"
