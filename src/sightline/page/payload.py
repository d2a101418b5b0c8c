"""What the page of a recording holds: `payload(index)` packs it into one block of bytes.

Tables are columns, texts are kept once, and what a person would have to work out is worked out here: what
is folded, which line an op belongs to, what looks wrong. The viewer draws, searches and navigates. It needs
no torch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sightline._version import __version__
from sightline.analysis.memory import usage_of
from sightline.analysis.model_part import model_part
from sightline.analysis.problems import find, not_looked_at
from sightline.analysis.variable_names import value_names
from sightline.convert.context import TableContext
from sightline.convert.timeline import CALL, Slices, host_slices, phases
from sightline.graph.graph import gc_paused
from sightline.page.sections import Sections
from sightline.page.source_tables import character_columns, file_rows, user_stack
from sightline.page.strings import Strings
from sightline.page.tree import OP, ROW_KINDS, tree_of
from sightline.trace.data import FLAVOURS, I32, KINDS, LEVELS, PHASES, ParameterInfo, TraceData
from sightline.trace.index import Index
from sightline.trace.rows import Op
from sightline.trace.user_frames import argument_names, short_name

_CURVE: Final = 1200  #: points of the curve of memory: as many as a wide screen has columns
_SLOT: Final = "\x00"  #: where a tensor stands in the arguments of an op
_WORTH_SKIPPING: Final = 10  #: time before the model runs is left out where it is more than such a part
_LONGEST: Final = 2000  #: characters of the arguments of an op; they can be anything


def payload(index: Index) -> bytes:
    """Everything the page shows of a recording."""
    facts, strings, made = TableContext(index), Strings(), Sections()
    files = file_rows(facts)
    _add_ops(made, facts, strings)
    _add_values(made, facts, strings)
    _add_calls(made, facts, strings)
    drawn = host_slices(index.raw)
    _add_ends(made, facts, drawn)
    _add_frames(made, facts, strings, files)
    _add_tree(made, facts, strings)
    made.table("files", files)
    made.table("run", _run(index))
    made.table("problems", _problems(index))
    made.table("timeline", _timeline(facts, drawn))
    made.table("strings", strings.texts())
    return made.bytes()


def _add_ops(made: Sections, facts: TableContext, strings: Strings) -> None:
    ops = facts.raw.ops
    made.column("ops.name", strings.all_of(facts.raw.names)[ops.name] if len(ops) else ops.name)
    for name in ("level", "phase", "flags", "thread"):
        made.column(f"ops.{name}", getattr(ops, name))
    for name in ("call", "parent", "forward", "start"):
        made.column(f"ops.{name}", getattr(ops, name), grows=True)
    made.column("ops.duration", ops.duration)
    made.column("ops.flops", ops.flops)
    made.column("ops.line", facts.op_lines, grows=True)
    made.column("ops.form", _forms(facts, strings))
    spent = facts.index.device_durations
    made.column("ops.device", np.zeros(0) if spent is None else spent)
    for name in ("input", "output"):
        made.column(f"ops.{name}_count", np.diff(getattr(ops, f"{name}_offsets")))
        made.column(f"ops.{name}s", getattr(ops, f"{name}s"), grows=True)


def _forms(facts: TableContext, strings: Strings) -> I32:
    """For each op the text of its arguments, a NUL where a tensor stands, then the name of each tensor."""
    ops = facts.raw.ops
    if not len(ops):
        return ops.form
    keys = ops.name.astype(np.int64) * (int(ops.form.max()) + 2) + ops.form
    _, first, same = np.unique(keys, return_index=True, return_inverse=True)
    texts = []
    for id in first.tolist():
        op = Op(facts.index, id)
        names = argument_names(op)
        text = op.form.fill([_SLOT] * len(names))
        texts.append("\n".join([text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…", *names]))
    found: I32 = strings.all_of(texts)[same.reshape(-1)]
    return found


def _add_values(made: Sections, facts: TableContext, strings: Strings) -> None:
    data = facts.raw
    values = data.values
    metas = strings.all_of(str(meta) for meta in data.metas)
    made.column("values.meta", metas[values.meta] if len(metas) else values.meta)
    made.column("values.kind", values.kind)
    for name in ("producer", "base", "previous"):
        made.column(f"values.{name}", getattr(values, name), grows=True)
    made.column("values.name", _value_names(facts, strings))
    sizes = np.append(data.storages, 0)
    made.column("values.bytes", sizes[values.storage])
    stats = data.stats
    made.column("stats.value", stats.value, grows=True)
    for name in ("min", "max", "mean", "std", "l2"):
        made.floats(f"stats.{name}", getattr(stats, name))
    for name in ("zeros", "nans", "infs"):
        made.column(f"stats.{name}", getattr(stats, name))


def _value_names(facts: TableContext, strings: Strings) -> I32:
    """The name of each value: of a parameter its path, else the variable it was assigned to."""
    own = np.append(strings.all_of(facts.raw.names), np.int32(0))
    names: I32 = own[facts.raw.values.name]
    for value, name in value_names(facts.index).items():
        if not names[value]:
            names[value] = strings.add(name)
    return names


def _add_calls(made: Sections, facts: TableContext, strings: Strings) -> None:
    calls = facts.raw.calls
    for name in ("module", "index", "phase", "flags"):
        made.column(f"calls.{name}", getattr(calls, name))
    for name in ("parent", "start", "first_op", "end_op"):
        made.column(f"calls.{name}", getattr(calls, name), grows=True)
    made.column("calls.duration", calls.duration)
    made.column("calls.line", facts.call_lines)
    for name in ("input", "output"):
        made.column(f"calls.{name}_count", np.diff(getattr(calls, f"{name}_offsets")))
        made.column(f"calls.{name}s", getattr(calls, f"{name}s"), grows=True)
    modules = facts.raw.modules
    made.column("modules.path", strings.all_of(module.path for module in modules))
    made.column("modules.type", strings.all_of(module.type for module in modules))
    made.column("modules.extra", strings.all_of(module.extra for module in modules))
    made.table("parameters", [[_parameter(each) for each in module.parameters] for module in modules])


def _parameter(info: ParameterInfo) -> list[Any]:
    return [info.name, str(list(info.shape)), info.numel, info.trainable, info.buffer]


def _add_ends(made: Sections, facts: TableContext, drawn: Slices) -> None:
    """How long calls and ops are drawn on the timeline: to the end of all that ran inside them."""
    for name, rows, count in (("ops", drawn.kind != CALL, len(facts.raw.ops)),
                              ("calls", drawn.kind == CALL, len(facts.raw.calls))):  # fmt: skip
        span = np.zeros(count, dtype=np.int64)
        span[drawn.id[rows]] = (drawn.end - drawn.start)[rows]
        made.column(f"{name}.span", span)


def _add_frames(made: Sections, facts: TableContext, strings: Strings, files: list[dict[str, Any]]) -> None:
    """Frames, each with its file among those that are shown (-1 for torch's own) and its caller."""
    data = facts.raw
    places = {row["path"]: at for at, row in enumerate(files)}
    of_code = np.array([places.get(code.file, -1) for code in data.codes] or [0], dtype=np.int32)
    functions = strings.all_of(code.function for code in data.codes)
    made.column("frames.parent", user_stack(facts))
    made.column("frames.file", of_code[data.frames.code])
    made.column("frames.function", functions[data.frames.code] if len(functions) else data.frames.code)
    made.column("frames.line", data.frames.line)
    begins, ends = character_columns(data)
    made.column("frames.column", np.array(begins, dtype=np.int32))
    made.column("frames.end_column", np.array(ends, dtype=np.int32))


def _add_tree(made: Sections, facts: TableContext, strings: Strings) -> None:
    with gc_paused():
        tree = tree_of(facts)
    made.column("tree.kind", tree.kind)
    made.column("tree.ref", tree.ref, grows=True)
    made.column("tree.depth", tree.depth)
    made.column("tree.inside", tree.end - np.arange(len(tree)) - 1)
    made.column("tree.count", tree.count)
    made.column("tree.label", strings.all_of(tree.label))
    made.column("tree.time", np.where(tree.kind == OP, 0, tree.time))  # the ops have theirs
    made.column("tree.memory", tree.memory)
    made.column("tree.flops", tree.flops)


def _run(index: Index) -> dict[str, Any]:
    data = index.raw
    info = data.info
    return {
        "name": str(info.get("name", "")),
        "version": __version__,
        "ops": len(data.ops),
        "values": len(data.values),
        "begin": _begin(index), "duration": _duration(data),
        "parameters": sum({info.key: info.numel for module in data.modules for info in module.parameters
                           if not info.buffer}.values()),
        "unfinished": bool(info.get("unfinished")),
        "levels": list(LEVELS), "phases": list(PHASES), "kinds": list(KINDS), "flavours": list(FLAVOURS),
        "rows": list(ROW_KINDS),
    }  # fmt: skip


def _begin(index: Index) -> int:
    """When the model first runs: what is imported and built before may take most of the time."""
    starts = index.raw.ops.start[~model_part(index).excluded]
    begin = int(starts[0]) if len(starts) else 0
    return begin if begin * _WORTH_SKIPPING > _duration(index.raw) else 0


def _duration(data: TraceData) -> int:
    ends = [table.start + np.maximum(table.duration, 0) for table in (data.ops, data.calls)]
    return max((int(end.max()) for end in ends if len(end)), default=0)


def _problems(index: Index) -> dict[str, Any]:
    found = [
        {
            "kind": problem.kind, "severity": problem.severity.word, "confidence": problem.confidence.word,
            "title": problem.title, "why": problem.why, "module": problem.module, "place": problem.place,
            "called": problem.called, "detail": problem.detail, "count": problem.count,
            "op": -1 if problem.op is None else problem.op,
            "value": -1 if problem.value is None else problem.value,
        }
        for problem in find(index)
    ]  # fmt: skip
    return {"found": found, "notLookedAt": not_looked_at(index)}


def _timeline(facts: TableContext, drawn: Slices) -> dict[str, Any]:
    """The stretches of phases and steps, and the curve of memory on the device that held most."""
    stretches = phases(facts.raw, drawn) if len(facts.raw.ops) else []
    return {
        "phases": [[each.name, each.start, each.end, each.lane] for each in stretches],
        "steps": [[step.name, step.start, step.duration] for step in facts.index.step_infos],
        "memory": _memory(facts.index),
    }


def _memory(index: Index) -> dict[str, Any] | None:
    usages = usage_of(index)
    if not usages:
        return None
    usage = usages[0]
    curve, over = usage.curve(_CURVE)
    held = [
        [each.name or ("" if each.value is None else str(each.value)), each.nbytes, each.use,
         f"{each.why} {short_name(each.for_op)}" if each.for_op is not None else each.why,
         -1 if each.value is None else each.value.id]
        for each in usage.largest(12)
    ]  # fmt: skip
    return {
        "device": usage.device, "exact": usage.exact, "curve": curve.tolist(), "over": over,
        "peak": usage.peak.nbytes, "moment": usage.peak.moment,
        "op": -1 if usage.peak_op is None else usage.peak_op.id,
        "kinds": [[each.name, each.nbytes] for each in usage.by_kind()], "largest": held,
    }  # fmt: skip
