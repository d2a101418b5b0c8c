"""What one step of a run does: the modules it calls, its backward passes, its optimizers and their rates.

Without steps, as when text is generated, the calls themselves are what repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.loop_record import LoopRecord
from sightline.analysis.variable_names import root_names
from sightline.notation import number_text, time_text
from sightline.patterns import bare_name
from sightline.trace.data import LEVELS, StepInfo
from sightline.trace.index import Index

_API = LEVELS.index("api")
_MAX_MODULES = 6


def step_content(index: Index, steps: Sequence[StepInfo]) -> str:
    """What most steps do, in the words of the program: ``G, D ×3; backward ×2; Adam (lr 0.001)``.

    Empty where steps call no module.
    """
    names = root_names(index)
    backwards = [id for id, name in enumerate(index.raw.names) if bare_name(name, "api") == "backward"]
    called = Counter(_called(index, step, names, backwards) for step in steps)
    if not called:
        return ""
    modules, backward = called.most_common(1)[0][0]
    if not modules:
        return ""
    shown = [_times(name, count) for name, count in modules[:_MAX_MODULES]]
    shown += [f"{len(modules) - _MAX_MODULES} more"] if len(modules) > _MAX_MODULES else []
    parts = [", ".join(shown), *([_times("backward", backward)] if backward else [])]
    return "; ".join([*parts, *_optimizers(index)])


def repeated_calls(index: Index) -> str:
    """The modules that were called several times, where nothing was trained: ``Llama ×50, 37 ms each``."""
    data, names, texts = index.raw, root_names(index), []
    roots = np.flatnonzero(data.calls.parent < 0)
    for module in dict.fromkeys(data.calls.module[roots].tolist()):
        calls = roots[data.calls.module[roots] == module]
        times = data.calls.duration[calls]
        if len(times) > 1:
            usual, first = time_text(int(np.median(times))), time_text(int(times[0]))
            name = names.get(module) or data.modules[module].label
            given = [_input(index, int(call)) for call in (calls[0], calls[-1])]
            sizes = [f", on {given[0]}", f"; the last on {given[1]}"] if given[0] != given[1] else ["", ""]
            texts.append(f"{name} ×{len(times):,}, {usual} at the median; the first {first}{''.join(sizes)}")
    return "; ".join(texts[:_MAX_MODULES])


def _input(index: Index, call: int) -> str:
    """The first tensor that a call was given."""
    given = index.raw.calls.inputs_of(call)[:1]
    return index.meta_texts[int(index.raw.values.meta[given[0]])] if given else "nothing"


def _called(
    index: Index, step: StepInfo, names: dict[int, str], backwards: Sequence[int]
) -> tuple[tuple[tuple[str, int], ...], int]:
    """The modules that a step calls, with how often, in the order of their first call; backward passes."""
    data = index.raw
    calls = np.arange(max(step.first_call, 0), min(step.end_call, len(data.calls)))
    outermost = data.calls.module[calls[data.calls.parent[calls] < 0]].tolist()
    counts = Counter(names.get(module) or data.modules[module].label for module in outermost)
    ops = slice(max(step.first_op, 0), step.end_op)
    backward = (data.ops.level[ops] == _API) & np.isin(data.ops.name[ops], backwards)
    return tuple(counts.items()), int(backward.sum())


def _optimizers(index: Index) -> list[str]:
    """The optimizers that stepped, each with its learning rate in the first and the last step."""
    loop = LoopRecord(ProblemContext(index))
    texts: Counter[str] = Counter()
    for number, optimizer in enumerate(loop.optimizers):
        rates = [step.highest for step in loop.steps_of(number) if step.highest is not None]
        ends = [number_text(rate) for rate in (rates[0], rates[-1])] if rates else []
        rate = f" (lr {' → '.join(dict.fromkeys(ends))})" if ends else ""
        texts[f"{optimizer.type}{rate}"] += 1
    return [", ".join(_times(text, count) for text, count in texts.items())] if texts else []


def _times(text: str, count: int) -> str:
    return f"{text} ×{count}" if count > 1 else text
