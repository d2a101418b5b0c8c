"""``sightline ops``: every API call and aten op of a recording, a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from sightline.cli.command import Command, examples, filter_options, open_recording, recording_argument
from sightline.cli.row_output import Column, Row, format_options, write_rows
from sightline.cli.screen import Screen, screen_options
from sightline.errors import UsageError
from sightline.notation import count_text, position_text, time_text, value_text

if TYPE_CHECKING:
    from sightline.convert.context import Lists, Objects, TableContext
    from sightline.convert.table_columns import Reader
    from sightline.data.index import Index
    from sightline.data.trace_data import I32, I64

#: Rows built at a time, which bounds the memory of a listing of any length.
_CHUNK: Final = 1024

NAMES: Final = (
    "id", "name", "level", "flavour", "phase", "parent", "forward", "module", "module_type", "module_call",
    "file", "line", "function", "arguments", "inputs", "result", "outputs", "start_ns", "exclusive_ns",
    "duration_ns", "exclusive_device_ns", "device_ns", "flops", "raised",
)  # fmt: skip

#: The columns that the table shows.
_TABLE_NAMES: Final = ("id", "phase", "parent", "call_text", "result", "raised", "module", "file",
                    "line", "duration_ns", "device_ns", "flops")  # fmt: skip


@click.command(
    "ops",
    cls=Command,
    epilog=examples(
        "sightline ops run.sight --tail 20",
        "sightline ops run.sight --module 'blocks.*.attn' --op '*matmul*'",
        "sightline ops run.sight --level aten --sort time --head 10",
        "sightline ops run.sight --json | jq -r 'select(.flops) | .name'",
        "sightline ops run.sight --csv > ops.csv",
    ),
)
@recording_argument
@click.option("--level", type=click.Choice(["api", "aten"]), help="Only calls as written, or only aten ops.")
@filter_options("step", "module", "op", "phase", "depth", "head", "tail")
@click.option(
    "--sort",
    type=click.Choice(["time", "device", "flops"]),
    help="The most expensive first: in host time, device time or FLOPs.",
)
@format_options
@screen_options
def command(recording: str, level: str | None, step: str | None, head: int | None, tail: int | None,
            sort: str | None, form: str | None, screen: Screen, **filters: Any) -> None:  # fmt: skip
    """List the operations, as a table, JSON or CSV.

    A row is a torch call as written, or an aten op, indented under the call it came from. `sightline
    lineage` takes the number of a row.
    """
    if head is not None and tail is not None:
        raise click.UsageError("--head and --tail do not go together; give one of them.")
    index = open_recording(recording, step).index
    ids = _select_ops(index, level, sort, filters)
    ids = ids[:head] if head is not None else ids[-tail:] if tail is not None else ids
    names = NAMES if form is not None else _TABLE_NAMES
    phases = len(np.unique(index.raw.ops.phase[ids])) > 1
    last = int(ids.max()) if len(ids) else 0
    columns = _columns(
        level is None and sort is None, phases, flops=sort == "flops", last=last,
        device=index.device_durations is not None,
    )  # fmt: skip
    write_rows(form, op_rows(index, ids, names), names, columns, screen)


def _select_ops(index: Index, level: str | None, sort: str | None, filters: dict[str, Any]) -> I64:
    """The ids of the ops that the filters select, the most expensive first if they are sorted."""
    from sightline.analysis.select import Selection

    ids = np.flatnonzero(Selection(**filters).ops(index, level))
    if sort is None:
        return ids
    cost = {"time": index.raw.ops.duration, "flops": index.raw.ops.flops, "device": index.device_durations}[
        sort
    ]
    if cost is None:
        raise UsageError("--sort device needs device time: record with `sightline run --time device`.")
    return ids[np.argsort(-cost[ids], kind="stable")]


def op_rows(index: Index, ids: I64, names: Sequence[str] = NAMES) -> Iterator[Row]:
    """A row for each of these ops as a plain dict, read a chunk at a time.

    A column that is not requested is never read: with a million ops each one takes time.
    """
    from sightline.convert.context import TableContext

    context, readers = TableContext(index), _readers()
    for at in range(0, len(ids), _CHUNK):
        chunk = ids[at : at + _CHUNK]
        for row in zip(*(readers[name](context, chunk) for name in names), strict=True):
            yield dict(zip(names, row, strict=True))


def _readers() -> dict[str, Reader]:
    """The reader of each column: that of the table ``ops`` of ``sightline sql``, if it has the column."""
    from sightline.convert.table_columns import lookup, reference
    from sightline.convert.tables import OPS, op_inputs, op_outputs

    def text(form: str, lists: Callable[[TableContext, I64], Lists]) -> Reader:
        def read(context: TableContext, ids: I64) -> list[Any]:
            tensors = lists(context, ids)
            metas = context.raw.values.meta[tensors.items].tolist()
            return list(
                map(context.form_text, getattr(context.raw.ops, form)[ids].tolist(), tensors.split(metas))
            )

        return read

    def calls(context: TableContext, ids: I64) -> list[Any]:
        ops, tensors = context.raw.ops, op_inputs(context, ids)
        metas = tensors.split(context.raw.values.meta[tensors.items].tolist())
        texts = zip(ops.name[ids].tolist(), ops.form[ids].tolist(), metas, strict=True)
        return [context.op_text(name, form, -1, inputs, ()) for name, form, inputs in texts]

    def values(lists: Callable[[TableContext, I64], Lists]) -> Reader:
        def read(context: TableContext, ids: I64) -> list[Any]:
            tensors = lists(context, ids)
            texts = context.metas[context.raw.values.meta[tensors.items]].tolist()
            pairs = zip(tensors.items.tolist(), texts, strict=True)
            return list(tensors.split([{"value": value_text(id), "tensor": text} for id, text in pairs]))

        return read

    def module_types(context: TableContext) -> Objects:
        return context.of_modules(lambda module: module.type)

    def user_frames(context: TableContext) -> I32:
        return context.index.op_user_frames

    return {column.name: column.read for column in OPS.columns} | {
        "module_type": lookup(module_types, lambda context: context.index.op_modules),
        "module_call": reference(lambda context: context.call_numbers),
        "file": lookup(lambda context: context.files, user_frames),
        "line": lookup(lambda context: context.lines, user_frames),
        "function": lookup(lambda context: context.functions, user_frames),
        "arguments": text("form", op_inputs),
        "call_text": calls,
        "inputs": values(op_inputs),
        "result": text("result", op_outputs),
        "outputs": values(op_outputs),
    }


def _columns(nested: bool, phases: bool, *, flops: bool, last: int, device: bool) -> list[Column]:
    """The columns of the table, the longest text last.

    ``nested`` indents aten ops under their calls, ``phases`` adds their phases, ``flops`` their FLOPs,
    ``device`` their device time; ``last`` is the largest id.
    """

    def device_text(row: Row) -> str:
        return time_text(row["device_ns"]) if row["device_ns"] else ""

    def flops_text(row: Row) -> str:
        return count_text(row["flops"]) if row["flops"] is not None else ""

    def position(row: Row) -> str:
        return position_text(row["file"], row["line"]).rpartition("/")[2] if row["file"] else ""

    def op_text(row: Row) -> str:
        return f"{'  ' if nested and row['parent'] is not None else ''}{row['call_text']}"

    columns = [
        Column("id", lambda row: str(row["id"]), "dim", right=True, widest=len(str(last))),
        Column("phase", lambda row: row["phase"], "dim", least=8, spare=2),
        Column(
            "host time" if device else "time", lambda row: time_text(row["duration_ns"]), "number",
            right=True, spare=3 * flops, widest=len("12.3 ms"),
        ),
        Column("device time", device_text, "number", right=True, widest=len("device time")),
        Column("FLOPs", flops_text, "number", right=True),
        Column("module", lambda row: row["module"] or "", least=12, end=True),
        Column("line", position, "dim", least=12, end=True, spare=1),
        Column("result", lambda row: "raised" if row["raised"] else row["result"], "shape", least=13),
        Column("op", op_text, "op", least=20),
    ]  # fmt: skip
    optional = {"phase": phases, "device time": device, "FLOPs": flops}
    return [column for column in columns if optional.get(column.title, True)]
