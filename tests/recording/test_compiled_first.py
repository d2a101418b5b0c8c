"""Programs that compile for the first time inside the block: Dynamo is imported there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sightline as sl
from tests.recording.engines import needs_native

PROGRAM = """
import json, sys, warnings
import torch
import sightline as sl
from torch import nn

warnings.simplefilter("ignore")
what, options = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
x = torch.ones(3, 8)
given = net
if what == "given":
    given = torch.compile(net, backend="aot_eager")
else:
    assert "torch._dynamo" not in sys.modules
if what == "function":
    given, net = None, lambda x: x.sin().sum()
with sl.trace(given, **options) as t:
    compiled = given if what == "given" else torch.compile(net, backend="aot_eager")
    for _ in range(3):
        compiled(x).sum().backward() if given else compiled(x)
t.validate()
print(json.dumps({
    "ops": [op.name for op in t.ops if op.flavour == "opaque"],
    "inside": [op.name for op in t.ops if op.name.startswith("addmm") or op.name.startswith("sin")],
    "roots": [module.path for module in t.modules if module.parent is None],
    "paths": [module.path for module in t.modules],
    "calls": [call.module.path for call in t.module_calls],
    "compilations": t.info["compilations"], "compile_ns": t.info["compile_ns"],
    "faults": t.info["faults"],
    "longest": max(op.duration for op in t.ops if op.phase == "forward"),
    "longest_call": max([call.duration for call in t.module_calls], default=0),
    "summary": str(t.summary()), "overview": str(t),
}))
"""


def run(what: str, engine: str, kept: str, folder: Path) -> dict[str, Any]:
    """What a program of its own has recorded."""
    options: dict[str, Any] = {"engine": engine}
    options |= (
        {"path": str(folder / "run.sight")} if kept == "path" else {"last": 5000} if kept == "last" else {}
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sl.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, what, json.dumps(options)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert found.returncode == 0, found.stderr
    told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    assert not told["faults"]
    return told


@pytest.mark.parametrize(
    ("engine", "kept"),
    [
        pytest.param("native", "path", marks=needs_native),
        pytest.param("native", "memory", marks=needs_native),
        ("python", "last"),
    ],
)
def test_a_module_is_opaque_from_its_first_call(engine: str, kept: str, tmp_path: Path) -> None:
    told = run("module", engine, kept, tmp_path)
    assert told["ops"] == ["compiled Sequential", "compiled backward"] * 3
    assert not told["inside"]
    assert told["roots"] == [""]
    assert told["calls"] == [""] * 3
    assert told["compilations"] == 1  # with its backward pass
    assert told["longest"] < told["compile_ns"]
    assert told["longest_call"] < told["compile_ns"]
    assert "in compiled code" in told["summary"]
    assert "not called" not in told["summary"]
    assert "compiled    1 region in" in told["summary"]


@pytest.mark.parametrize("what", ["given", "function"])
@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "python"])
def test_a_compiled_model_is_one_root(engine: str, what: str, tmp_path: Path) -> None:
    told = run(what, engine, "memory", tmp_path)
    assert not told["inside"]
    if what == "given":
        assert told["paths"] == ["", "0", "1", "2"]
        assert told["calls"] == [""] * 3
    else:
        assert len(told["ops"]) == 3
        assert "modules   0 called; compiled code runs without calling any" in told["overview"]


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "python"])
def test_a_region_is_counted_once_with_its_backward_pass(engine: str, tmp_path: Path) -> None:
    """As torch counts its graphs."""
    assert run("given", engine, "memory", tmp_path)["compilations"] == 1
