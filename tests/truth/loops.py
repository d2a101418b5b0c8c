"""The training loops of generated programs. A new kind is a function with `@loop` that returns a `Loop`.

The text of a loop is what stands in ``main``: ``setup`` before the recorded block, ``body`` in it. Functions
that stand beside ``main`` may use ``batch(n)``, which every program has. A line that ends with
``# evaluation`` runs modules that belong to no training step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from textwrap import indent

from tests.truth.architectures import Architecture


@dataclass(frozen=True)
class Content:
    """What one training step does."""

    calls: dict[str, int]  #: outermost calls by variable
    backwards: int = 1
    optimizers: tuple[int, ...] = (0,)  #: which of them step, numbered in the order of their first steps


@dataclass(frozen=True)
class Facts:
    """The truth about a program that follows from its text."""

    steps: int
    calls: dict[str, int] = field(default_factory=dict)  #: outermost calls in one step, by variable
    types: dict[str, str] = field(default_factory=dict)  #: classes of these variables but `model`
    backwards: int = 1  #: in one step
    optimizers: tuple[str, ...] = ()  #: classes
    loss_divisor: float = 1  #: by which losses are divided before `backward`
    loss_read: bool = False  #: whether the program reads the loss of each backward pass as a number
    collected: bool = (
        False  #: whether the program's own floats are the losses, in the order of backward passes
    )
    norm_read: bool = False  #: whether gradients are clipped by their norm in every step
    step_names: tuple[str, ...] = ()  #: of `sl.step`
    skipped: tuple[int, ...] = ()  #: steps that a gradient scaler skips
    raises: str = ""  #: the class of the exception that ends the block
    healthy: bool = True  #: whether nothing is wrong with it
    unused: bool = False  #: whether a part of the model has no gradient
    gradients: int = 0  #: calls of `torch.autograd.grad`
    compiled: bool = False  #: whether `torch.compile` runs inside
    parts: int = 0  #: modules that an outermost call of a program with compiled code calls in plain sight
    distributed: bool = False  #: whether torch wraps the model for several processes
    parallel: bool = False  #: whether several threads run modules
    contents: tuple[Content, ...] = ()  #: of each step, where they differ

    def content(self, step: int) -> Content:
        """What a step does."""
        if self.contents:
            return self.contents[step]
        return Content(self.calls, self.backwards, tuple(range(len(self.optimizers))))

    def passes(self, step: int) -> slice:
        """Which of all backward passes a step makes."""
        first = sum(self.content(each).backwards for each in range(step))
        return slice(first, first + self.content(step).backwards)

    def optimizer_steps(self, step: int) -> slice:
        """Which of all steps of optimizers it makes; none where a scaler skips it."""
        counts = [
            0 if each in self.skipped else len(self.content(each).optimizers) for each in range(step + 1)
        ]
        return slice(sum(counts[:-1]), sum(counts))


@dataclass(frozen=True)
class Loop:
    """The text of a loop, and the truth about it."""

    setup: str
    body: str
    facts: Facts
    functions: str = ""
    model: str = "model"  #: the argument of ``trace``; empty for none


LOOPS: dict[str, Callable[[random.Random, Architecture], Loop]] = {}


def loop(
    function: Callable[[random.Random, Architecture], Loop],
) -> Callable[[random.Random, Architecture], Loop]:
    """Register a kind of loop by the name of its function."""
    LOOPS[function.__name__] = function
    return function


def text(*lines: str) -> str:
    """The lines that are not empty."""
    return "\n".join(each for each in lines if each.strip())


def block(head: str, *lines: str) -> str:
    """A compound statement."""
    return f"{head}\n{indent(text(*lines), '    ')}"
