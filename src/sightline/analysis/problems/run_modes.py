"""Modules that run in the wrong mode: training where it is evaluated, evaluation where it is trained."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import BACKWARD, FORWARD, Mask, ProblemContext
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.analysis.problems.trained_parameters import Training
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.data.op_groups import BATCH_NORMS
from sightline.data.trace_data import EVALUATION, KIND, MUTATES, NO_GRAD, TRAINING

_LEAST_STEPS: Final = 3
_PARAMETER: Final = KIND["parameter"]
_DROPS: Final = frozenset("native_dropout _fused_dropout dropout bernoulli_ bernoulli".split())


class RunModes:
    """The calls of models from outside, and which ops in them dropped out or normalised by the batch."""

    def __init__(self, context: ProblemContext) -> None:
        self._context = context
        calls = context.data.calls
        self.outermost: list[int] = np.flatnonzero((calls.parent < 0) & (calls.phase == FORWARD)).tolist()
        self.drops = np.flatnonzero(_drops(context))
        self.norms = np.flatnonzero(_norms(context))

    def active(self, call: int) -> tuple[list[int], list[int]]:
        """The ops of a call that drop out, and those that take statistics of the batch."""
        calls = self._context.data.calls
        first, end = int(calls.first_op[call]), int(calls.end_op[call])
        drops, norms = (rows[(rows >= first) & (rows < end)].tolist() for rows in (self.drops, self.norms))
        return drops, norms

    def sensitive(self, root: int) -> list[int]:
        """The modules below a root that are different in training: dropout that drops, batch norms."""
        modules = self._context.data.modules
        top = modules[root].root
        sensitive = []
        for id, info in enumerate(modules):
            if "BatchNorm" in info.type:
                differs = "track_running_stats=False" not in info.extra
            else:
                probable = "p=" in info.extra and not info.extra.startswith(("p=0.0", "p=0,"))
                differs = "Dropout" in info.type and probable
            if info.root == top and differs:
                sensitive.append(id)
        return sensitive


def _drops(context: ProblemContext) -> Mask:
    """Ops that drop elements out: random ones inside a dropout function or module."""
    data = context.data
    parents, calls = data.ops.parent, data.ops.call
    names = np.array(["dropout" in name for name in data.names] or [False], dtype=np.bool_)
    in_function = (parents >= 0) & names[data.ops.name[np.maximum(parents, 0)]]
    types = np.array(["drop" in info.type.lower() for info in data.modules] or [False], dtype=np.bool_)
    modules = data.calls.module[np.maximum(calls, 0)] if len(data.calls) else 0
    in_module = (calls >= 0) & types[np.where(calls >= 0, modules, 0)]
    mask = context.forward & context.named(_DROPS) & (in_function | in_module)
    for op in np.flatnonzero(
        mask
    ).tolist():  # dropout(x, p, train=False), as a mode sees it in inference mode
        mask[op] = not any(arg is False for arg in context.args(op))
    return mask


def _norms(context: ProblemContext) -> Mask:
    """Batch norms that normalise by the batch; instance norms use the same op and are left out."""
    mask = context.forward & context.named(BATCH_NORMS)
    for op in np.flatnonzero(mask).tolist():
        name = context.written(op)
        batch_norm = "batch_norm" in name or "BatchNorm" in context.module_type(context.module(op))
        training = any(arg is True for arg in context.args(op))
        mask[op] = training and batch_norm and "instance" not in name
    return mask


@check(
    "training-mode-in-evaluation",
    Severity.WARNING,
    "Call model.eval() before, and model.train() after.",
)
def training_mode_in_evaluation(context: ProblemContext) -> Iterator[Finding]:
    """A trained model runs without gradients in training mode, and its results are not trained on."""
    record, modes = context.derived(LoopRecord), context.derived(RunModes)
    if not record.steps:
        return
    calls, first = context.data.calls, min(step.position for step in record.steps)
    leads = context.derived(Training).leads
    for call in modes.outermost:
        flags = int(calls.flags[call])
        if not (flags & NO_GRAD and flags & TRAINING) or int(calls.first_op[call]) < first:
            continue
        drops, norms = modes.active(call)
        outputs = call_outputs(context, call)
        used = any(len(context.index.consumers(value)) for value in outputs)
        if not (drops or norms) or not used or any(leads[value] for value in outputs):
            continue
        root = int(calls.module[call])
        if not _is_trained(context, record, root) or (not norms and _is_repeated(context, record, call)):
            continue
        yield _in_training_mode(context, call, drops, norms, " and model.train() after.")


def _in_training_mode(
    context: ProblemContext, call: int, drops: list[int], norms: list[int], after: str
) -> Finding:
    """The finding for a call without gradients in which these ops drop out and use the batch."""
    root = int(context.data.calls.module[call])
    one_drop, one_norm = len(drops) == 1, len(norms) == 1
    did = [f"{len(drops)} dropout{' drops' if one_drop else 's drop'}"] if drops else []
    did += [f"{len(norms)} batch norm{' uses' if one_norm else 's use'} the batch"] if norms else []
    title = f"{context.module_type(root)} runs without gradients but in training mode: {' and '.join(did)}"
    effects = ["Dropout changes the results at random."] if drops else []
    effects += ["Batch norms learn from what they are tested on."] if norms else []
    why = f"{' '.join(effects)} Call model.eval() before{after}"
    return Finding(title, root, int(context.data.calls.frame[call]), (drops or norms)[0], why=why)


@check(
    "training-mode-in-evaluation",
    Severity.NOTE,
    "Call model.eval() before.",
    Confidence.GUESS,
)
def training_mode_of_untrained_model(context: ProblemContext) -> Iterator[Finding]:
    """A model that nothing trains runs without gradients in training mode: all of a program, or a teacher."""
    record, modes = context.derived(LoopRecord), context.derived(RunModes)
    data, calls = context.data, context.data.calls
    trains = bool(record.steps)
    if not trains and (data.ops.phase == BACKWARD).any():
        return
    leads = context.derived(Training).leads if trains else None
    changed: dict[int, bool] = {}
    for call in modes.outermost:
        flags, root = int(calls.flags[call]), int(calls.module[call])
        if not (flags & NO_GRAD and flags & TRAINING):
            continue
        drops, norms = modes.active(call)
        outputs = call_outputs(context, call)
        if leads is not None:  # the batch norms of a teacher may use the batch on purpose
            norms = []
            teaches = any(leads[value] for value in outputs)
            if not teaches or _is_trained(context, record, root):
                continue
            if root not in changed:
                changed[root] = _is_changed(context, call)
            if changed[root]:
                continue
        elif not any(len(context.index.consumers(value)) for value in outputs):
            continue
        if not (drops or norms) or (not norms and _is_repeated(context, record, call)):
            continue
        yield _in_training_mode(context, call, drops, norms, ".")


def _is_changed(context: ProblemContext, call: int) -> bool:
    """Whether anything writes parameters of a model after a call, as a moving average of weights does."""
    data = context.data
    top = data.modules[int(data.calls.module[call])].root
    names = {info.path for module in data.modules if module.root == top for info in module.parameters}
    values = data.values
    named = np.array([name in names for name in data.names] or [False], dtype=np.bool_)
    own = (values.kind == _PARAMETER) & (values.name >= 0) & named[np.maximum(values.name, 0)]
    writers = np.flatnonzero(data.ops.flags & MUTATES)
    later = writers[writers >= int(data.calls.end_op[call])]
    written = [value for op in later.tolist() for value in data.ops.outputs_of(op)]
    return bool(np.isin(values.storage[written], values.storage[own]).any())


def _is_repeated(context: ProblemContext, record: LoopRecord, call: int) -> bool:
    """Whether a model is called several times on the same inputs between two steps: Monte Carlo dropout."""
    calls, modes = context.data.calls, context.derived(RunModes)
    steps = sorted(step.position for step in record.steps)

    def key(one: int) -> tuple[int, ...]:
        inputs = calls.inputs_of(one)
        return int(calls.module[one]), bisect_right(steps, int(calls.first_op[one])), *inputs

    return sum(key(other) == key(call) for other in modes.outermost) > 1


@check(
    "evaluation-mode-in-training",
    Severity.WARNING,
    "There dropout does nothing, and batch norms learn no statistics. Call model.train() before the training "
    "steps, also after every evaluation.",
)
def evaluation_mode_in_training(context: ProblemContext) -> Iterator[Finding]:
    """A model in evaluation mode whose parameters an optimizer then changes."""
    record, modes = context.derived(LoopRecord), context.derived(RunModes)
    if not record.steps:
        return
    calls = context.data.calls
    leads = context.derived(Training).leads
    by_root: dict[int, list[int]] = {}
    for call in modes.outermost:
        if not int(calls.flags[call]) & NO_GRAD and any(
            leads[value] for value in call_outputs(context, call)
        ):
            by_root.setdefault(int(calls.module[call]), []).append(call)
    last = max(step.position for step in record.steps)
    for root, trained in by_root.items():
        evaluated = [
            call for call in trained if int(calls.flags[call]) & EVALUATION and calls.first_op[call] < last
        ]
        training = [call for call in trained if int(calls.flags[call]) & TRAINING]
        sensitive = modes.sensitive(root)
        evaluated = [call for call in evaluated if not _precedes(context, record, call, training)]
        if not evaluated or not sensitive or not _is_trained(context, record, root):
            continue
        training_calls = np.flatnonzero(((calls.flags & TRAINING) != 0) & np.isin(calls.module, sensitive))
        first_ops, end_ops = calls.first_op[training_calls], calls.end_op[training_calls]
        if any(
            ((first_ops >= calls.first_op[call]) & (end_ops <= calls.end_op[call])).any()
            for call in evaluated
        ):
            continue  # some modules are in training mode, so the others are frozen on purpose
        off = " and ".join(sorted({context.module_type(module) for module in sensitive}))
        since = " since an evaluation" if training and training[0] < evaluated[0] else ""
        title = f"{context.module_type(root)} is trained in evaluation mode{since}: its {off} are off"
        frame, op = int(calls.frame[evaluated[0]]), int(calls.first_op[evaluated[0]])
        confidence = Confidence.CERTAIN if since else Confidence.LIKELY
        yield Finding(title, root, frame, op, confidence=confidence)


def _precedes(context: ProblemContext, record: LoopRecord, call: int, training: list[int]) -> bool:
    """Whether a call in training mode comes between a call and the next step: an attack on the inputs."""
    first = context.data.calls.first_op
    begin = int(first[call])
    end = min((step.position for step in record.steps if step.position > begin), default=begin)
    return any(begin < int(first[other]) < end for other in training)


def call_outputs(context: ProblemContext, call: int) -> list[int]:
    """The values that a call returned."""
    calls = context.data.calls
    outputs: list[int] = calls.outputs_of(call)
    return outputs


def _is_trained(context: ProblemContext, record: LoopRecord, root: int) -> bool:
    """Whether an optimizer holds parameters of a model."""
    top = context.data.modules[root].root
    return any(
        info.path in record.optimized
        for module in context.data.modules
        if module.root == top
        for info in module.parameters
    )


@check(
    "dropout-in-evaluation",
    Severity.WARNING,
    "Two runs on the same input differ. Write F.dropout(x, p, training=self.training), or use nn.Dropout.",
)
def dropout_in_evaluation(context: ProblemContext) -> Iterator[Finding]:
    """Dropout drops inside a module that is in evaluation mode."""
    calls, ops = context.data.calls, context.data.ops
    for op in context.derived(RunModes).drops.tolist():
        call = int(ops.call[op])
        if call < 0 or not int(calls.flags[call]) & EVALUATION:
            continue
        module = context.module_type(context.module(op))
        yield context.finding(f"{context.written(op)} drops, though {module} is in evaluation mode", op)


@check(
    "batch-of-one",
    Severity.NOTE,
    "One sample's statistics are far from the running ones that evaluation uses. Take larger batches, or "
    "a norm without batches: GroupNorm, LayerNorm.",
    Confidence.GUESS,
)
def batch_of_one(context: ProblemContext) -> Iterator[Finding]:
    """A trained batch norm that normalises by a batch of one sample, in every call."""
    record, modes = context.derived(LoopRecord), context.derived(RunModes)
    if len(record.steps) < _LEAST_STEPS:
        return
    leads = context.derived(Training).leads
    by_module: dict[int, list[int]] = {}
    for op in modes.norms.tolist():
        by_module.setdefault(context.module(op), []).append(op)
    for module, ops in by_module.items():
        shape = context.meta(context.inputs(ops[0])[0]).shape
        single = all(context.meta(context.inputs(op)[0]).shape[:1] == (1,) for op in ops)
        if single and len(ops) >= _LEAST_STEPS and any(leads[value] for value in context.outputs(ops[0])):
            sample = f"one sample, {list(shape)}, in {len(ops)} of {len(ops)} calls"
            title = f"{context.module_type(module)} takes mean and variance of {sample}"
            yield context.finding(title, ops[0], context.inputs(ops[0])[0])
