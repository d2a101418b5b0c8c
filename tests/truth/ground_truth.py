"""The truth about a program, observed on a run that nothing records: plain hooks and counters of torch.

`Observer` stands where the program calls ``trace``. It knows nothing of sightline: module calls come from
torch's global hooks, optimizer steps from torch's optimizer hooks, losses from a wrapped `Tensor.backward`,
dispatcher ops and FLOPs from a dispatch mode.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tests.truth.loops import Facts

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}
#: Products that torch has no formula for.
_UNKNOWN_PRODUCTS = (
    "rnn",
    "lstm",
    "gru",
    "transformer_encoder",
    "attention",
    "multi_head",
    "einsum",
    "bilinear",
    "trilinear",
)
EVALUATION = "# evaluation"


@dataclass
class Call:
    """One call of a module."""

    module: nn.Module
    path: str
    type: str
    index: int
    parent: int  #: into `Truth.calls`; -1 outside of all others
    phase: str
    training: bool
    line: int  #: of the program, where it was made
    evaluation: bool  #: whether it belongs to no training step
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    raised: bool = False


@dataclass
class Backward:
    """One call of `Tensor.backward`: the number it started from, and its line."""

    loss: float
    line: int
    column: int
    updates: int  #: the same for passes whose gradients one step of an optimizer uses together

    @property
    def place(self) -> tuple[int, int]:
        """Where the expression is."""
        return self.line, self.column


@dataclass
class OptimizerStep:
    """One step of an optimizer: its class, the highest rate of its groups, and when it came."""

    optimizer: int
    type: str
    rate: float
    norm: float  #: of the gradients it found, or which its closure made last, before they were clipped
    calls: int = -1  #: module calls made before it ended
    backwards: int = -1


@dataclass
class Truth:
    """What a program did inside the block."""

    file: str = ""
    calls: list[Call] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  #: results of `clip_grad_norm_`
    ops: Counter[str] = field(default_factory=Counter)  #: dispatcher ops by phase
    detached: Counter[str] = field(
        default_factory=Counter
    )  #: `detach` among them: autograd's own where a mode is active
    op_lines: Counter[tuple[str, int]] = field(default_factory=Counter)  #: by phase and line
    flops: Counter[str] = field(default_factory=Counter)  #: by phase, by torch's own formulas
    flops_known: bool = True  #: whether torch has formulas for all products
    lines_known: bool = True  #: whether the dispatch mode sees the ops that run without it
    wall: int = 0  #: nanoseconds
    exception: str = ""
    exception_line: int = 0  #: of the program, where it was raised
    models: tuple[nn.Module, ...] = ()  #: that the program gave to ``trace``
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    numbered: tuple[nn.Module, ...] = ()  #: of one step, the roots of the whole run, which number its names

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that stand in no other, in the order of their first call."""
        return list(dict.fromkeys(self.root_of(call) for call in self.calls))

    def brief_modules(self) -> Counter[str]:
        """Modules without weights and parts, in no model, several of a class called once each at one line."""
        times = Counter(id(call.module) for call in self.calls)
        lines: Counter[tuple[str, int]] = Counter()
        for call in self.calls:
            alone = self.root_of(call) is call.module and not any(call.module.children())
            if alone and times[id(call.module)] == 1 and next(call.module.parameters(), None) is None:
                lines[call.type, call.line] += 1
        brief: Counter[str] = Counter()
        for (type, _), count in lines.items():
            brief[type] += count if count > 1 else 0
        return +brief if brief.total() < len(times) else Counter()

    def root_of(self, call: Call) -> nn.Module:
        """The outermost module around a call's module."""
        for model in self.models:
            if any(each is call.module for each in model.modules()):
                return model
        while call.parent >= 0:
            call = self.calls[call.parent]
        return call.module

    def names(self, call: Call) -> set[str]:
        """The names of a call's module: its path, below the name of its model where that is not the first."""
        root = self.root_of(call)
        known = list(dict.fromkeys([*self.models, *(self.numbered or self.roots)]))
        alike = [each for each in known if type(each) is type(root)]
        number = next(at for at, each in enumerate(alike) if each is root)
        label = f"{type(root).__name__}_{number}" if number else type(root).__name__
        if not call.path:
            return {label}
        return {call.path} if root is known[0] else {f"{label}.{call.path}"}

    def step(self, number: int, facts: Facts) -> Truth:
        """The truth about one training step: its calls, its backward passes, its optimizer steps."""
        starts = [
            at
            for at, call in enumerate(self.calls)
            if call.parent < 0 and call.phase == "forward" and not call.evaluation
        ]
        counts = [sum(facts.content(each).calls.values()) for each in range(number + 1)]
        first, end = starts[sum(counts[:-1])], [*starts, len(self.calls)][sum(counts)]
        chosen = [at for at in range(first, end) if not self._in_evaluation(at)]
        places = {at: place for place, at in enumerate(chosen)} | {-1: -1}
        return replace(
            self,
            calls=[replace(self.calls[at], parent=places[self.calls[at].parent]) for at in chosen],
            backwards=self.backwards[facts.passes(number)],
            steps=self.steps[facts.optimizer_steps(number)],
            ops=Counter(),
            flops_known=False,
            lines_known=False,
            exception="",
            numbered=tuple(self.roots),
        )

    def _in_evaluation(self, call: int) -> bool:
        """Whether a call stands in an outermost call that belongs to no step."""
        while self.calls[call].parent >= 0:
            call = self.calls[call].parent
        return self.calls[call].evaluation

    def parameters(self) -> dict[int, torch.Tensor]:
        """Every parameter of the called models once, by its identity."""
        return {id(each): each for root in [*self.models, *self.roots] for each in root.parameters()}

    def buffers(self) -> dict[int, torch.Tensor]:
        """Every buffer of the called models once."""
        return {id(each): each for root in [*self.models, *self.roots] for each in root.buffers()}


class _OpCounter(TorchDispatchMode):
    """Counts dispatcher ops by phase, and by phase and line of the program."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = self._observer.count_op(func, sys._getframe(1))
        if torch.is_inference_mode_enabled():  # a mode sees composite ops whole then
            self._observer.truth.lines_known = self._observer.truth.flops_known = False
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in flop_registry:
            self._observer.truth.flops[phase] += flop_registry[packet](
                *args, **(kwargs or {}), out_val=result
            )
        elif any(part in str(packet) for part in _UNKNOWN_PRODUCTS):
            self._observer.truth.flops_known = False
        return result


class Observer:
    """Called like ``trace``: the block inside is observed."""

    def __init__(self, file: str, *, hooks: bool = True) -> None:
        self.truth = Truth(file)
        self._hooks = hooks  #: of modules and ops, which Dynamo would compile into the program
        self._thread = threading.get_ident()
        self._open: list[int] = []
        self._indices: Counter[int] = Counter()
        self._in_backward = 0
        self._in_optimizer = 0
        self._paths: dict[int, str] = {}
        self._stack = ExitStack()
        self._began = 0
        self._before_clipping: dict[int, float] = {}  #: norms of gradients since the last backward pass
        self._source = Path(file).read_text("utf-8").splitlines()

    def __call__(self, *models: nn.Module, **_: Any) -> Self:
        self.truth.models = models
        for model in models:
            self._name(model)
        return self

    def __enter__(self) -> Self:
        enter = self._stack.enter_context
        enter(self._hook(register_optimizer_step_pre_hook(self._before_step)))
        enter(self._hook(register_optimizer_step_post_hook(self._after_step)))
        enter(mock.patch.object(torch.Tensor, "backward", self._wrapped_backward(torch.Tensor.backward)))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = getattr(torch.nn.utils, name)
            enter(mock.patch.object(torch.nn.utils, name, self._wrapped_clip(clip)))
        enter(mock.patch.object(torch.autograd, "grad", self._wrapped_grad(torch.autograd.grad)))
        if self._hooks:
            enter(self._hook(nn.modules.module.register_module_forward_pre_hook(self._before)))
            enter(
                self._hook(
                    nn.modules.module.register_module_forward_hook(
                        self._after, with_kwargs=True, always_call=True
                    )
                )
            )
            enter(_OpCounter(self))
        self._began = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.truth.wall = time.perf_counter_ns() - self._began
        self._stack.close()
        if error is not None:
            self.truth.exception = f"{type(error).__name__}: {error}"
            while traceback is not None:
                if traceback.tb_frame.f_code.co_filename == self.truth.file:
                    self.truth.exception_line = traceback.tb_lineno
                traceback = traceback.tb_next
            for at in self._open:
                self.truth.calls[at].raised = True

    @contextmanager
    def _hook(self, handle: Any) -> Iterator[None]:
        try:
            yield
        finally:
            handle.remove()
            nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # which torch forgets

    def start(self) -> Self:
        """As ``trace`` has it."""
        return self.__enter__()

    def stop(self) -> Self:
        """As ``trace`` has it."""
        self.__exit__(None, None, None)
        return self

    # -- modules ---------------------------------------------------------------------------------------------

    def _name(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), path)

    def _before(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if id(module) not in self._paths:
            self._name(module)
        # Torch takes other ops for it where a mode is active, or a mode sees the shards as a whole.
        if isinstance(module, nn.RNNBase) or any(
            hasattr(each, "_local_tensor") for each in module.parameters()
        ):
            self.truth.lines_known = self.truth.flops_known = False
        line, evaluation, _ = self._place(sys._getframe(1))
        calls = self.truth.calls
        parent = self._open[-1] if self._open else -1
        phase = "recompute" if self._in_backward else "forward"
        self._open.append(len(calls))
        calls.append(
            Call(
                module,
                self._paths[id(module)],
                type(module).__name__,
                self._indices[id(module)],
                parent,
                phase,
                module.training,
                line,
                evaluation,
            )
        )
        self._indices[id(module)] += 1

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Torch gives no keywords where the call raised."""
        if threading.get_ident() != self._thread:
            return
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        call = self.truth.calls[self._open.pop()]
        call.raised = len(rest) < 2
        call.inputs, call.outputs = _tensors((args, kwargs)), _tensors(output)

    # -- training --------------------------------------------------------------------------------------------

    def _wrapped_backward(self, original: Any) -> Any:
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(tensor, *args, **kwargs)
            line = self._place(sys._getframe(1))[0]
            loss = float("nan")
            if tensor.numel() == 1:
                loss = _number(tensor)
            updates = sum(step.calls >= 0 for step in self.truth.steps)
            if self._in_optimizer:  # of a closure, whose gradients no other pass adds to
                updates = -len(self.truth.backwards) - 1
            self.truth.backwards.append(Backward(loss, line, self._column(sys._getframe(1)), updates))
            self._before_clipping.clear()
            self._in_backward += 1
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._in_backward -= 1

        return backward

    def _wrapped_grad(self, original: Any) -> Any:
        def grad(*args: Any, **kwargs: Any) -> Any:
            self._in_backward += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward -= 1

        return grad

    def _wrapped_clip(self, original: Any) -> Any:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            clipped = list(parameters)
            for each in clipped:
                if each.grad is not None:
                    self._before_clipping.setdefault(id(each), _number(each.grad, norm=True))
            norm = original(clipped, *args, **kwargs)
            if norm is not None:
                self.truth.norms.append(_number(norm))
            return norm

        return clip

    def _gradient_norm(self, optimizer: Any) -> float:
        """The norm of the gradients of an optimizer, before they were clipped."""
        held = (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        known = self._before_clipping
        return math.hypot(*(known.get(id(each)) or _number(each.grad, norm=True) for each in held))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._in_optimizer += 1
        known = self.truth.optimizers
        if not any(each is optimizer for each in known):
            known.append(optimizer)
        number = next(at for at, each in enumerate(known) if each is optimizer)
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        norm = self._gradient_norm(optimizer)
        self.truth.steps.append(OptimizerStep(number, type(optimizer).__name__, rate, norm))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._in_optimizer -= 1
        step = self.truth.steps[-1]
        if any(callable(each) for each in (*args[1:], *kwargs.values())):  # a closure has made them
            step.norm = self._gradient_norm(optimizer)
        step.calls, step.backwards = len(self.truth.calls), len(self.truth.backwards)

    # -- ops -------------------------------------------------------------------------------------------------

    def count_op(self, func: Any, frame: FrameType | None) -> str:
        """Called for each dispatcher op; its phase."""
        if func.namespace == "profiler":  # marks of torch's own around an optimizer's step
            return ""
        line, _, in_closure = self._place(frame)
        phase = "forward"
        if self._in_optimizer and not in_closure:
            phase = "optimizer"
        elif self._in_backward:
            phase = "recompute" if self._open else "backward"
        self.truth.ops[phase] += 1
        self.truth.detached[phase] += func is torch.ops.aten.detach.default
        self.truth.op_lines[phase, line] += func is not torch.ops.aten.detach.default
        return phase

    def _column(self, frame: FrameType | None) -> int:
        """The column of the innermost expression of the program that runs."""
        while frame is not None and frame.f_code.co_filename != self.truth.file:
            frame = frame.f_back
        positions = [] if frame is None else list(frame.f_code.co_positions())
        return (positions[frame.f_lasti // 2][2] or 0) if frame is not None else 0

    def _place(self, frame: FrameType | None) -> tuple[int, bool, bool]:
        """The innermost line of the program, whether it belongs to an evaluation, or to a closure."""
        line, evaluation, in_closure = 0, False, False
        while frame is not None:
            if frame.f_code.co_filename == self.truth.file:
                line = line or frame.f_lineno
                in_closure = in_closure or frame.f_code.co_name == "closure"
                evaluation = evaluation or self._source[frame.f_lineno - 1].endswith(EVALUATION)
            frame = frame.f_back
        return line, evaluation, in_closure


def _tensors(tree: Any) -> list[str]:
    """The tensors in arguments or results, in order: ``f32[2, 8]``."""
    leaves = tree_leaves(tree)
    return [tensor_text(each) for each in leaves if isinstance(each, torch.Tensor)]


def _number(tensor: torch.Tensor, *, norm: bool = False) -> float:
    """A tensor of one element as a number, or the norm of one, unseen by modes; of a shard its part."""
    local = getattr(tensor, "_local_tensor", tensor)
    with torch._C._DisableTorchDispatch():
        return float(local.detach().double().norm() if norm else local.detach())


def tensor_text(tensor: torch.Tensor) -> str:
    """A tensor as it is written everywhere."""
    return f"{_DTYPES.get(tensor.dtype, str(tensor.dtype))}[{', '.join(map(str, tensor.shape))}]"
