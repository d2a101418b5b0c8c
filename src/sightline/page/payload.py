"""The data of the page of a recording: `payload(index)` packs it into one block of bytes.

Tables are columns, and texts are kept once. All analysis happens here: repeats, the line of each op,
problems. The viewer draws, searches and navigates. It needs no torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np

from sightline._version import __version__
from sightline.analysis.memory import usage_of
from sightline.analysis.op_text import argument_names, short_name
from sightline.analysis.problems import find, gap_texts
from sightline.analysis.problems.problem import Problem
from sightline.analysis.row_groups import flat_positions
from sightline.analysis.select import model_part
from sightline.analysis.value_names import value_names
from sightline.convert.context import TableContext
from sightline.convert.timeline import CALL, device_slices, host_slices, phases
from sightline.data.device_time import device_name
from sightline.data.index import Index
from sightline.data.rows import Op
from sightline.data.trace_data import FLAVOURS, I32, KINDS, LEVELS, PHASES, TraceData
from sightline.graph.graph import gc_paused
from sightline.page.captures import MOST_TENSORS, add_captures
from sightline.page.kept_rows import Kept, KeptRows
from sightline.page.sections import Sections, Strings
from sightline.page.source_tables import character_columns, file_rows
from sightline.page.tree import OP, ROW_KINDS, tree_of
from sightline.views.problems import SURE

#: The page of a recording with more ops holds the folded run: the first of each repeat.
MOST_OPS: Final = 250_000
_CURVE: Final = 1200  #: points of the curve of memory: as many as a wide screen has columns
_SLOT: Final = "\x00"  #: marks a tensor in the arguments of an op
_WORTH_SKIPPING: Final = 10  #: the time before the model runs is left out if it is more than this part of all
_LONGEST: Final = 2000  #: characters of the arguments of an op; they have no limit


def payload(index: Index, most_ops: int | None = MOST_OPS) -> bytes:
    """Everything the page shows of a recording; of one with more than ``most_ops`` ops the folded run."""
    return packed_recording(index, most_ops)[0]


def packed_recording(index: Index, most_ops: int | None = MOST_OPS) -> tuple[bytes, KeptRows]:
    """The payload of a recording, and the rows of it that the payload holds."""
    context, strings, sections = TableContext(index), Strings(), Sections()
    with gc_paused():
        tree = tree_of(context)
    is_long = most_ops is not None and len(index.raw.ops) > most_ops
    kept = (KeptRows.folded if is_long else KeptRows.all)(index.raw, tree)
    files = file_rows(context)
    _add_ops(sections, context, strings, kept)
    _add_values(sections, context, strings, kept)
    _add_calls(sections, context, strings, kept)
    _add_timeline(sections, context, strings, kept)
    _add_frames(sections, context, strings, files)
    tree = kept.tree
    sections.column("tree.kind", tree.kind)
    sections.column("tree.ref", tree.ref, grows=True)
    sections.column("tree.depth", tree.depth)
    sections.column("tree.inside", tree.end - np.arange(len(tree)) - 1)
    sections.column("tree.count", tree.count)
    sections.column("tree.label", strings.all_of(tree.label))
    sections.column("tree.time", np.where(tree.kind == OP, 0, tree.time))  # the ops have theirs
    sections.column("tree.memory", tree.memory)
    sections.column("tree.flops", tree.flops)
    add_captures(sections, index.raw, kept.values, strings)
    sections.table("files", files)
    sections.table("run", _run(index, kept))
    problems = [
        problem_row(problem) | {"op": kept.ops.one(problem.op), "value": kept.values.one(problem.value)}
        for problem in find(index)
    ]
    sections.table("problems", {"found": problems, "notLookedAt": gap_texts(index)})
    sections.table("strings", strings.texts())
    return sections.bytes(), kept


def _add_ops(sections: Sections, context: TableContext, strings: Strings, kept: KeptRows) -> None:
    ops, rows = context.raw.ops, kept.ops.rows
    sections.column("ops.name", (strings.all_of(context.raw.names)[ops.name] if len(ops) else ops.name)[rows])
    for name in ("level", "phase", "flags", "thread"):
        sections.column(f"ops.{name}", getattr(ops, name)[rows])
    sections.column("ops.call", kept.calls.numbers[ops.call][rows], grows=True)
    for name in ("parent", "forward"):
        sections.column(f"ops.{name}", kept.ops.numbers[getattr(ops, name)][rows], grows=True)
    sections.column("ops.start", ops.start[rows], grows=True)
    sections.column("ops.duration", ops.duration[rows])
    sections.column("ops.flops", ops.flops[rows])
    sections.column("ops.line", context.op_lines[rows], grows=True)
    sections.column("ops.form", _forms(context, strings)[rows])
    spent = context.index.device_durations
    sections.column("ops.device", np.zeros(0) if spent is None else spent[rows])
    sections.column("ops.id", rows if _is_folded(context.raw, kept) else np.zeros(0), grows=True)
    _add_lists(sections, "ops", ops, kept.ops, kept.values)


def _add_lists(sections: Sections, name: str, table: Any, of: Kept, values: Kept) -> None:
    """The inputs and outputs of ops or calls: how many there are, and all of them in one column."""
    for each in ("input", "output"):
        places, lengths = flat_positions(getattr(table, f"{each}_offsets"), of.rows)
        sections.column(f"{name}.{each}_count", lengths)
        sections.column(f"{name}.{each}s", values.numbers[getattr(table, f"{each}s")[places]], grows=True)


def _is_folded(data: TraceData, kept: KeptRows) -> bool:
    return len(kept.ops.rows) < len(data.ops)


def _forms(context: TableContext, strings: Strings) -> I32:
    """For each op the text of its arguments, with a NUL for each tensor, then the names of the tensors.

    A subscript has the tensor before it.
    """
    ops = context.raw.ops
    if not len(ops):
        return ops.form
    keys = ops.name.astype(np.int64) * (int(ops.form.max()) + 2) + ops.form
    _, first, same = np.unique(keys, return_index=True, return_inverse=True)
    texts = []
    for id in first.tolist():
        op = Op(context.index, id)
        names = argument_names(op)
        name, arguments = op.form.written(op.name, [_SLOT] * len(names))
        text = arguments[1:-1] if name == op.name else f"{name}{arguments}"
        texts.append("\n".join([text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…", *names]))
    forms: I32 = strings.all_of(texts)[same.reshape(-1)]
    return forms


def _add_values(sections: Sections, context: TableContext, strings: Strings, kept: KeptRows) -> None:
    data, rows = context.raw, kept.values.rows
    values = data.values
    metas = strings.all_of(str(meta) for meta in data.metas)
    sections.column("values.meta", (metas[values.meta] if len(metas) else values.meta)[rows])
    sections.column("values.kind", values.kind[rows])
    sections.column("values.producer", kept.ops.numbers[values.producer][rows], grows=True)
    for name in ("base", "previous"):
        sections.column(f"values.{name}", kept.values.numbers[getattr(values, name)][rows], grows=True)
    names = np.append(strings.all_of(data.names), np.int32(0))[values.name]
    for value, name in value_names(context.index).items():
        if not names[value]:  # the variable it was assigned to; a parameter has its path
            names[value] = strings.add(name)
    sections.column("values.name", names[rows])
    sizes = np.append(data.storages, 0)
    sections.column("values.bytes", sizes[values.storage][rows])
    sections.column("values.id", rows if _is_folded(data, kept) else np.zeros(0), grows=True)
    stats = data.stats
    measured = np.isin(stats.value, rows)
    sections.column("stats.value", kept.values.numbers[stats.value][measured], grows=True)
    for name in ("min", "max", "mean", "std", "l2"):
        sections.floats(f"stats.{name}", getattr(stats, name)[measured])
    for name in ("zeros", "nans", "infs"):
        sections.column(f"stats.{name}", getattr(stats, name)[measured])


def _add_calls(sections: Sections, context: TableContext, strings: Strings, kept: KeptRows) -> None:
    calls, rows = context.raw.calls, kept.calls.rows
    for name in ("module", "index", "phase", "flags"):
        sections.column(f"calls.{name}", getattr(calls, name)[rows])
    sections.column("calls.parent", kept.calls.numbers[calls.parent][rows], grows=True)
    sections.column("calls.start", calls.start[rows], grows=True)
    sections.column("calls.duration", calls.duration[rows])
    sections.column("calls.line", context.call_lines[rows])
    _add_lists(sections, "calls", calls, kept.calls, kept.values)
    modules = context.raw.modules
    sections.column("modules.path", strings.all_of(module.path for module in modules))
    sections.column("modules.type", strings.all_of(module.type for module in modules))
    sections.column("modules.extra", strings.all_of(module.extra for module in modules))
    parameters = [
        [[info.name, str(list(info.shape)), info.numel, info.trainable, info.buffer]
         for info in module.parameters]
        for module in modules
    ]  # fmt: skip
    sections.table("parameters", parameters)


def _add_timeline(sections: Sections, context: TableContext, strings: Strings, kept: KeptRows) -> None:
    """Lengths of calls and ops as drawn, the work of devices by stream, phases and steps, memory."""
    data = context.raw
    host = host_slices(data)
    for name, rows, of in (("ops", host.kind != CALL, kept.ops), ("calls", host.kind == CALL, kept.calls)):
        span = np.zeros(len(of.numbers) - 1, dtype=np.int64)
        span[host.id[rows]] = (host.end - host.start)[rows]
        sections.column(f"{name}.span", span[of.rows])
    work = device_slices(data)
    owner = context.index.device_work_ops[work.id]
    shown = (owner < 0) | np.isin(owner, kept.ops.rows)
    names = strings.all_of(data.names[name] for name in data.device_work.name[work.id[shown]].tolist())
    sections.column("device.name", names)
    sections.column("device.lane", work.lane[shown])
    sections.column("device.op", kept.ops.numbers[owner[shown]])
    sections.column("device.start", work.start[shown], grows=True)
    sections.column("device.span", (work.end - work.start)[shown])
    of_device = Counter(device for device, _ in work.streams)
    streams = [
        f"{device_name(device)} #{number}" if of_device[device] > 1 else device_name(device)
        for device, number in work.streams
    ]
    sections.table("streams", streams)
    timeline = {
        "phases": [[each.name, each.start, each.end, each.lane] for each in phases(data, host)],
        "steps": [[step.name, step.start, step.duration] for step in context.index.step_infos],
        "memory": _memory(context.index, kept),
    }
    sections.table("timeline", timeline)


def _memory(index: Index, kept: KeptRows) -> dict[str, Any] | None:
    """The memory of the device that held most: its curve, its peak, and the tensors held at the peak."""
    usages = usage_of(index)
    if not usages:
        return None
    usage = usages[0]
    curve, over = usage.curve(_CURVE)
    held = [
        [each.name or ("" if each.value is None else str(each.value)), each.nbytes, each.use,
         f"{each.why} {short_name(each.for_op)}" if each.for_op is not None else each.why,
         -1 if each.value is None else kept.values.one(each.value.id)]
        for each in usage.largest(12)
    ]  # fmt: skip
    return {
        "device": usage.device, "exact": usage.exact, "curve": curve.tolist(), "over": over,
        "peak": usage.peak.nbytes, "moment": usage.peak.moment,
        "op": -1 if usage.peak_op is None else kept.ops.one(usage.peak_op.id),
        "kinds": [[each.name, each.nbytes] for each in usage.by_kind()], "largest": held,
    }  # fmt: skip


def _add_frames(
    sections: Sections, context: TableContext, strings: Strings, files: list[dict[str, Any]]
) -> None:
    """Frames, each with its file among those that are shown (-1 for torch's own) and its caller."""
    data = context.raw
    places = {row["path"]: at for at, row in enumerate(files)}
    of_code = np.array([places.get(code.file, -1) for code in data.codes] or [0], dtype=np.int32)
    functions = strings.all_of(code.function for code in data.codes)
    # The caller is the next frame further out that is not torch's.
    sections.column("frames.parent", context.index.user_frames[data.frames.parent])
    sections.column("frames.file", of_code[data.frames.code])
    sections.column("frames.function", functions[data.frames.code] if len(functions) else data.frames.code)
    sections.column("frames.line", data.frames.line)
    begins, ends = character_columns(data)
    sections.column("frames.column", np.array(begins, dtype=np.int32))
    sections.column("frames.end_column", np.array(ends, dtype=np.int32))


def _run(index: Index, kept: KeptRows) -> dict[str, Any]:
    """Facts about the run as a whole, and the names of the numbers in the columns."""
    data = index.raw
    info = data.info
    timed = [
        table.start + np.maximum(table.duration, 0) for table in (data.ops, data.calls, data.device_work)
    ]
    duration = max((int(end.max()) for end in timed if len(end)), default=0)
    # When the model first runs: imports and the building of the model may take most of the time.
    starts = data.ops.start[~model_part(index).excluded]
    begin = int(starts[0]) if len(starts) else 0
    return {
        "name": str(info.get("name", "")),
        "version": __version__,
        "ops": len(kept.ops.rows),
        "values": len(kept.values.rows),
        "recordedOps": len(data.ops),
        "capturesLeftOut": max(0, len(data.captures) - MOST_TENSORS),
        "begin": begin if begin * _WORTH_SKIPPING > duration else 0, "duration": duration,
        "parameters": sum({info.key: info.numel for module in data.modules for info in module.parameters
                           if not info.buffer}.values()),
        "unfinished": bool(info.get("unfinished")),
        "levels": list(LEVELS), "phases": list(PHASES), "kinds": list(KINDS), "flavours": list(FLAVOURS),
        "rows": list(ROW_KINDS),
    }  # fmt: skip


def problem_row(problem: Problem) -> dict[str, Any]:
    """A problem in the words of the terminal."""
    return {
        "kind": problem.kind, "severity": problem.severity.word, "title": problem.title,
        "why": f"{SURE[problem.confidence]}{problem.why}", "module": problem.module, "place": problem.place,
        "called": problem.called, "detail": problem.detail, "times": problem.times,
    }  # fmt: skip
