"""A generated program: source text from a seed, and how it is to be recorded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from tests.truth import loops_of_kinds, loops_of_models, loops_of_training
from tests.truth.architectures import ARCHITECTURES, Architecture
from tests.truth.loops import LOOPS, Facts, Loop

_TEXT = '''"""Program {seed}: {loop} loop, {architecture} model. `sl.trace` is called with {options}."""

import contextlib
import copy
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

{classes}

def batch(n):
    return {inputs}, {target}

{functions}
def main(trace, step):
    torch.manual_seed({seed})
    losses, norms, total = [], [], 0.0
    model = {build}
{setup}
{block}
    return t, model, losses


if __name__ == "__main__":
    import sightline as sl

    print(main(lambda *models: sl.trace(*models, {options}), sl.step)[0])
'''

#: The modules that register the kinds of loops.
REGISTERED = (loops_of_training, loops_of_models, loops_of_kinds)


@dataclass(frozen=True)
class Program:
    """A program, the options of its recording, and the truth that follows from its text."""

    seed: int
    loop: str
    architecture: str
    source: str
    facts: Facts
    type: str  #: the class of ``model``
    traced: str  #: the arguments of ``trace``
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the names of tests and files."""
        return f"{self.loop}_{self.architecture}_{self.seed}"


def generate(seed: int, loop: str | None = None, architecture: str | None = None) -> Program:
    """The program of a seed; ``loop`` and ``architecture`` choose their kinds."""
    rng = random.Random(seed)
    chosen_loop, chosen_net = rng.choice(list(LOOPS)), rng.choice(list(ARCHITECTURES))
    loop, architecture = loop or chosen_loop, architecture or chosen_net
    net = ARCHITECTURES[architecture](rng)
    made, options = LOOPS[loop](rng, net), _options(rng)
    if not made.facts.healthy:  # the check would end it
        options.pop("check", None)
    return program_of(seed, (loop, architecture), net, made, options, rng)


def program_of(
    seed: int,
    names: tuple[str, str],
    net: Architecture,
    made: Loop,
    options: dict[str, Any],
    rng: random.Random,
) -> Program:
    """The program of a loop around a model."""
    source = _source(seed, names, net, made, options, _block(made, rng))
    kind = made.facts.types.get("model", net.type)
    return Program(seed, *names, source, made.facts, kind, made.model, options)


def _options(rng: random.Random) -> dict[str, Any]:
    """Options of `sl.trace`: mostly none."""
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["engine"] = "python"
    options |= rng.choice(
        [{}, {}, {}, {"stats": True}, {"ops": "api"}, {"ops": "aten"}, {"check": "nonfinite"}]
    )
    options |= rng.choice([{}, {}, {}, {"path": True}, {"last": 100_000}])
    return options


def _block(made: Loop, rng: random.Random) -> str:
    """The recorded block, entered in one of the ways that there are."""
    guard = f"contextlib.suppress({made.facts.raises}), " if made.facts.raises else ""
    way = rng.choice(["with", "with", "with", "stack", "start"])
    if way == "with" or guard:
        return f"with {guard}trace({made.model}) as t:\n{indent(made.body, '    ')}"
    if way == "stack":
        enter = f"t = stack.enter_context(trace({made.model}))\n{made.body}"
        return f"with contextlib.ExitStack() as stack:\n{indent(enter, '    ')}"
    return f"recorder = trace({made.model})\nrecorder.start()\n{made.body}\nt = recorder.stop()"


def _source(
    seed: int, names: tuple[str, str], net: Architecture, made: Loop, options: dict[str, Any], block: str
) -> str:
    return _TEXT.format(
        seed=seed,
        loop=names[0],
        architecture=names[1],
        classes=net.source and f"\n{net.source}\n",
        inputs=net.inputs.format(n="n"),
        target=net.target.format(n="n"),
        functions=made.functions and f"{made.functions}\n",
        build=net.build,
        setup=indent(made.setup, " " * 4),
        block=indent(block, " " * 4),
        options=", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options",
    ).replace(", no options)", ")")
