"""Runs a program twice, observed and recorded, and collects the false statements about it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import sightline as sl
from tests.truth.ground_truth import Observer, Truth
from tests.truth.program import Program

_numbers = itertools.count()


@dataclass
class Run:
    """A program with its truth and its recording."""

    program: Program
    path: Path
    truth: Truth
    trace: Any
    wall: int  #: nanoseconds of the recorded run
    losses: list[float]  #: that the program read
    name: str = ""  #: that the recording adds to its name
    number: int = 0  #: of its first step
    same: bool = True  #: whether both runs ended with the same weights and losses, to the last bit


def run(program: Program, folder: Path) -> Run:
    """Write the program to ``folder``, observe a run of it, and record another."""
    path = folder / f"{program.name}.py"
    path.write_text(program.source, "utf-8")
    observer = Observer(str(path), hooks=not program.facts.compiled)
    _, first, losses = _main(_imported(path), observer, lambda name: nullcontext())
    options = program.options | (
        {"path": folder / f"{program.name}.sight"} if "path" in program.options else {}
    )
    began = time.perf_counter_ns()
    trace, second, again = recorded(path, options)
    wall = time.perf_counter_ns() - began
    same = repr(losses) == repr(again) and all(map(torch.equal, first, second))
    return Run(program, path, observer.truth, trace, wall, losses, same=same)


def recorded(path: Path, options: dict[str, Any]) -> tuple[Any, list[torch.Tensor], list[float]]:
    """A recorded run of the program in a file: the recording, its weights, and its losses."""
    return _main(_imported(path), partial(sl.trace, **options), sl.step)


def _main(module: ModuleType, trace: Any, step: Any) -> tuple[Any, list[torch.Tensor], list[float]]:
    """Runs ``main``; what it recorded, the weights of the model afterwards, and the losses that it read."""
    recorded, model, losses = module.main(trace, step)
    flat = [loss for each in losses for loss in (each if isinstance(each, tuple) else (each,))]
    weights = [each.detach().clone() for each in model.state_dict().values()]
    return recorded, weights, flat


def _imported(path: Path) -> ModuleType:
    """The program as a new module."""
    name = f"truth_program_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
