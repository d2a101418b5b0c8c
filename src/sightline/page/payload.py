"""What the page of a recording holds: `payload(index)` packs it into one block of bytes.

Tables are columns, texts are kept once, and what a person would have to work out is worked out here: what
is folded, which line an op belongs to, what looks wrong. The viewer draws, searches and navigates. It needs
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from sightline.convert.timeline import CALL, Slices, device_slices, host_slices, phases
from sightline.data.device_time import device_name
from sightline.data.index import Index
from sightline.data.rows import Op
from sightline.data.trace_data import FLAVOURS, I32, KINDS, LEVELS, PHASES, ParameterInfo, TraceData
from sightline.graph.graph import gc_paused
from sightline.page.captures import MOST_TENSORS, add_captures
from sightline.page.kept_rows import Kept, KeptRows
from sightline.page.sections import Sections, Strings
from sightline.page.source_tables import character_columns, file_rows, user_stack
from sightline.page.tree import OP, ROW_KINDS, Tree, tree_of
from sightline.views.problems import SURE

#: A page of a recording with more ops holds the folded run: of what repeats, the first.
MOST_OPS: Final = 250_000
_CURVE: Final = 1200  #: points of the curve of memory: as many as a wide screen has columns
_SLOT: Final = "\x00"  #: where a tensor stands in the arguments of an op
_WORTH_SKIPPING: Final = 10  #: time before the model runs is left out where it is more than such a part
_LONGEST: Final = 2000  #: characters of the arguments of an op; they can be anything


def payload(index: Index, most_ops: int | None = MOST_OPS) -> bytes:
    """Everything the page shows of a recording; of one with more than ``most_ops`` ops the folded run."""
    return packed_recording(index, most_ops)[0]


def packed_recording(index: Index, most_ops: int | None = MOST_OPS) -> tuple[bytes, KeptRows]:
    """The payload of a recording, and which of its rows that holds."""
    facts, strings, made = TableContext(index), Strings(), Sections()
    with gc_paused():
        tree = tree_of(facts)
    is_long = most_ops is not None and len(index.raw.ops) > most_ops
    kept = (KeptRows.folded if is_long else KeptRows.all)(index.raw, tree)
    files = file_rows(facts)
    _add_ops(made, facts, strings, kept)
    _add_values(made, facts, strings, kept)
    _add_calls(made, facts, strings, kept)
    drawn = host_slices(index.raw)
    _add_ends(made, drawn, kept)
    _add_device_work(made, facts, strings, kept.ops)
    _add_frames(made, facts, strings, files)
    _add_tree(made, kept.tree, strings)
    add_captures(made, index.raw, kept.values, strings)
    made.table("files", files)
    made.table("run", _run(index, kept))
    made.table("problems", _problems(index, kept))
    made.table("timeline", _timeline(facts, drawn, kept))
    made.table("strings", strings.texts())
    return made.bytes(), kept


def _add_ops(made: Sections, facts: TableContext, strings: Strings, kept: KeptRows) -> None:
    ops, rows = facts.raw.ops, kept.ops.rows
    made.column("ops.name", (strings.all_of(facts.raw.names)[ops.name] if len(ops) else ops.name)[rows])
    for name in ("level", "phase", "flags", "thread"):
        made.column(f"ops.{name}", getattr(ops, name)[rows])
    made.column("ops.call", kept.calls.numbers[ops.call][rows], grows=True)
    for name in ("parent", "forward"):
        made.column(f"ops.{name}", kept.ops.numbers[getattr(ops, name)][rows], grows=True)
    made.column("ops.start", ops.start[rows], grows=True)
    made.column("ops.duration", ops.duration[rows])
    made.column("ops.flops", ops.flops[rows])
    made.column("ops.line", facts.op_lines[rows], grows=True)
    made.column("ops.form", _forms(facts, strings)[rows])
    spent = facts.index.device_durations
    made.column("ops.device", np.zeros(0) if spent is None else spent[rows])
    made.column("ops.id", rows if _is_folded(facts.raw, kept) else np.zeros(0), grows=True)
    _add_lists(made, "ops", ops, kept.ops, kept.values)


def _add_lists(made: Sections, name: str, table: Any, of: Kept, values: Kept) -> None:
    """The inputs and outputs of ops or calls: how many there are, and all of them in one column."""
    for each in ("input", "output"):
        places, lengths = flat_positions(getattr(table, f"{each}_offsets"), of.rows)
        made.column(f"{name}.{each}_count", lengths)
        made.column(f"{name}.{each}s", values.numbers[getattr(table, f"{each}s")[places]], grows=True)


def _is_folded(data: TraceData, kept: KeptRows) -> bool:
    return len(kept.ops.rows) < len(data.ops)


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


def _add_values(made: Sections, facts: TableContext, strings: Strings, kept: KeptRows) -> None:
    data, rows = facts.raw, kept.values.rows
    values = data.values
    metas = strings.all_of(str(meta) for meta in data.metas)
    made.column("values.meta", (metas[values.meta] if len(metas) else values.meta)[rows])
    made.column("values.kind", values.kind[rows])
    made.column("values.producer", kept.ops.numbers[values.producer][rows], grows=True)
    for name in ("base", "previous"):
        made.column(f"values.{name}", kept.values.numbers[getattr(values, name)][rows], grows=True)
    made.column("values.name", _value_names(facts, strings)[rows])
    sizes = np.append(data.storages, 0)
    made.column("values.bytes", sizes[values.storage][rows])
    made.column("values.id", rows if _is_folded(data, kept) else np.zeros(0), grows=True)
    stats = data.stats
    measured = np.isin(stats.value, rows)
    made.column("stats.value", kept.values.numbers[stats.value][measured], grows=True)
    for name in ("min", "max", "mean", "std", "l2"):
        made.floats(f"stats.{name}", getattr(stats, name)[measured])
    for name in ("zeros", "nans", "infs"):
        made.column(f"stats.{name}", getattr(stats, name)[measured])


def _value_names(facts: TableContext, strings: Strings) -> I32:
    """The name of each value: of a parameter its path, else the variable it was assigned to."""
    own = np.append(strings.all_of(facts.raw.names), np.int32(0))
    names: I32 = own[facts.raw.values.name]
    for value, name in value_names(facts.index).items():
        if not names[value]:
            names[value] = strings.add(name)
    return names


def _add_calls(made: Sections, facts: TableContext, strings: Strings, kept: KeptRows) -> None:
    calls, rows = facts.raw.calls, kept.calls.rows
    for name in ("module", "index", "phase", "flags"):
        made.column(f"calls.{name}", getattr(calls, name)[rows])
    made.column("calls.parent", kept.calls.numbers[calls.parent][rows], grows=True)
    made.column("calls.start", calls.start[rows], grows=True)
    made.column("calls.duration", calls.duration[rows])
    made.column("calls.line", facts.call_lines[rows])
    _add_lists(made, "calls", calls, kept.calls, kept.values)
    modules = facts.raw.modules
    made.column("modules.path", strings.all_of(module.path for module in modules))
    made.column("modules.type", strings.all_of(module.type for module in modules))
    made.column("modules.extra", strings.all_of(module.extra for module in modules))
    made.table("parameters", [[_parameter(each) for each in module.parameters] for module in modules])


def _parameter(info: ParameterInfo) -> list[Any]:
    return [info.name, str(list(info.shape)), info.numel, info.trainable, info.buffer]


def _add_ends(made: Sections, drawn: Slices, kept: KeptRows) -> None:
    """How long calls and ops are drawn on the timeline: to the end of all that ran inside them."""
    for name, rows, of in (("ops", drawn.kind != CALL, kept.ops), ("calls", drawn.kind == CALL, kept.calls)):
        span = np.zeros(len(of.numbers) - 1, dtype=np.int64)
        span[drawn.id[rows]] = (drawn.end - drawn.start)[rows]
        made.column(f"{name}.span", span[of.rows])


def _add_device_work(made: Sections, facts: TableContext, strings: Strings, ops: Kept) -> None:
    """What devices ran, stream by stream; of a folded run only what its ops launched."""
    data = facts.raw
    work = device_slices(data)
    owner = facts.index.device_work_ops[work.id]
    shown = (owner < 0) | np.isin(owner, ops.rows)
    names = strings.all_of(data.names[name] for name in data.device_work.name[work.id[shown]].tolist())
    made.column("device.name", names)
    made.column("device.lane", work.lane[shown])
    made.column("device.op", ops.numbers[owner[shown]])
    made.column("device.start", work.start[shown], grows=True)
    made.column("device.span", (work.end - work.start)[shown])
    made.table("streams", [_stream_text(each, work.streams) for each in work.streams])


def _stream_text(stream: tuple[int, int], all: Sequence[tuple[int, int]]) -> str:
    """``cuda:0``, with the number of the stream where the device has several."""
    device, number = stream
    several = sum(other == device for other, _ in all) > 1
    return f"{device_name(device)} #{number}" if several else device_name(device)


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


def _add_tree(made: Sections, tree: Tree, strings: Strings) -> None:
    made.column("tree.kind", tree.kind)
    made.column("tree.ref", tree.ref, grows=True)
    made.column("tree.depth", tree.depth)
    made.column("tree.inside", tree.end - np.arange(len(tree)) - 1)
    made.column("tree.count", tree.count)
    made.column("tree.label", strings.all_of(tree.label))
    made.column("tree.time", np.where(tree.kind == OP, 0, tree.time))  # the ops have theirs
    made.column("tree.memory", tree.memory)
    made.column("tree.flops", tree.flops)


def _run(index: Index, kept: KeptRows) -> dict[str, Any]:
    data = index.raw
    info = data.info
    return {
        "name": str(info.get("name", "")),
        "version": __version__,
        "ops": len(kept.ops.rows),
        "values": len(kept.values.rows),
        "recordedOps": len(data.ops),
        "capturesLeftOut": max(0, len(data.captures) - MOST_TENSORS),
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
    timed = (data.ops, data.calls, data.device_work)
    ends = [table.start + np.maximum(table.duration, 0) for table in timed]
    return max((int(end.max()) for end in ends if len(end)), default=0)


def _problems(index: Index, kept: KeptRows) -> dict[str, Any]:
    found = [
        problem_row(problem) | {"op": kept.ops.one(problem.op), "value": kept.values.one(problem.value)}
        for problem in find(index)
    ]
    return {"found": found, "notLookedAt": gap_texts(index)}


def problem_row(problem: Problem) -> dict[str, Any]:
    """What a problem says, in the words of the terminal."""
    return {
        "kind": problem.kind, "severity": problem.severity.word, "title": problem.title,
        "why": f"{SURE[problem.confidence]}{problem.why}", "module": problem.module, "place": problem.place,
        "called": problem.called, "detail": problem.detail, "times": problem.times,
    }  # fmt: skip


def _timeline(facts: TableContext, drawn: Slices, kept: KeptRows) -> dict[str, Any]:
    """The stretches of phases and steps, and the curve of memory on the device that held most."""
    stretches = phases(facts.raw, drawn) if len(facts.raw.ops) else []
    return {
        "phases": [[each.name, each.start, each.end, each.lane] for each in stretches],
        "steps": [[step.name, step.start, step.duration] for step in facts.index.step_infos],
        "memory": _memory(facts.index, kept),
    }


def _memory(index: Index, kept: KeptRows) -> dict[str, Any] | None:
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
