"""``sightline tensors``: the kept tensors of a recording as a table, or one of them as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import click

from sightline.cli.command import Command, examples, filter_options, open_recording, recording_argument
from sightline.cli.row_output import Column, Row, format_options, write_rows
from sightline.cli.screen import Screen, screen_options
from sightline.errors import NotCaptured, UsageError
from sightline.notation import bytes_text, tensor_text, value_text
from sightline.views.rendering import Line, View, fact_line, line

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.data.tensors import CapturedTensor

_NAMES: Final = ("key", "step", "module", "name", "call", "slot", "role", "path", "value", "tensor", "shape",
                 "dtype", "bytes", "whole")  # fmt: skip
_NUMBERS: Final = ("min", "max", "mean", "std", "nans", "infs")


@click.command(
    "tensors",
    cls=Command,
    epilog=examples(
        "sightline tensors run.sight",
        "sightline tensors run.sight --module 'blocks.*' --role output",
        "sightline tensors run.sight blocks.0.attn/output/0/0",
        "sightline tensors run.sight blocks.0.attn.q --slice 0,2",
        "sightline tensors run.sight --json | jq 'select(.nans > 0)'",
    ),
)
@recording_argument
@click.argument("key", metavar="[KEY]", required=False)
@filter_options("module")
@click.option("--name", metavar="GLOB", help="Only tensors of these names: 'output', 'q', '*.grad'.")
@filter_options("step")
@click.option(
    "--role", type=click.Choice(["input", "output", "op", "spy", "gradient"]), help="Only this role."
)
@click.option("--call", metavar="N", type=click.IntRange(0), help="Only call N of each module or op, from 0.")
@filter_options("head", "tail")
@click.option(
    "--stats/--no-stats", default=True, help="Range, mean and deviation; reads every listed tensor."
)
@click.option(
    "--slice", "part", metavar="I,J…", help="With KEY: draw this slice, given by its first indices."
)
@format_options
@screen_options
def command(recording: str, key: str | None, head: int | None, tail: int | None, stats: bool,
            part: str | None, form: str | None, screen: Screen, **filters: Any) -> None:  # fmt: skip
    """List the kept tensors, or draw one of them.

    KEY is the full key of one tensor, or a name: of a module (its outputs), of a variable or op in a module,
    or of a value given to sl.spy. One tensor is drawn; several are listed in a table.
    """
    if head is not None and tail is not None:
        raise click.UsageError("--head and --tail do not go together; give one of them.")
    if part is not None and key is None:
        raise click.UsageError("--slice needs a KEY: it chooses a part of that tensor to draw.")
    trace = open_recording(recording)
    if not any(fnmatchcase(info.step, filters["step"] or "*") for info in trace.data.captures):
        # Not the step of a tensor, nor a glob of some: a step of the run.
        trace = open_recording(recording, filters.pop("step"))
    tensors = _select_tensors(trace, key, filters)
    tensors = tensors[:head] if head is not None else tensors[-tail:] if tail is not None else tensors
    if key is not None and len(tensors) == 1 and form is None:
        from sightline.cli.tensor_plot import tensor_lines

        try:
            indices = [int(index) for index in part.split(",")] if part else []
        except ValueError:
            raise click.BadParameter(
                f"{part!r} is not a list of whole numbers; write 0,2.", param_hint="--slice"
            ) from None
        drawing = tensor_lines(tensors[0].numpy(), indices, screen.room)
        screen.show(View((*_heading(trace, tensors[0]), *drawing)).within(screen.room))
        return
    if part is not None:
        keys = ", ".join([repr(tensor.key) for tensor in tensors[:3]] + ["…"] * (len(tensors) > 3))
        raise UsageError(f"--slice is for one tensor; {key!r} means {len(tensors)}: give {keys}.")
    names = (*_NAMES, *_NUMBERS) if stats else _NAMES
    columns = _COLUMNS if stats else _COLUMNS[:-3]
    if form is None and not tensors:
        from sightline.analysis.unmatched_globs import capture_text

        why = capture_text(trace.data) or "record with sightline run --capture GLOB"
        screen.show([line((f"(no tensors were kept: {why})", "dim"), hang=1)])
        return
    write_rows(form, (_row(tensor, stats) for tensor in tensors), names, columns, screen)


def _select_tensors(trace: Trace, key: str | None, filters: dict[str, Any]) -> list[CapturedTensor]:
    """The tensors that the key and the filters select; a filter that selects none is an error."""
    tensors = trace.tensors
    selected = list(tensors.where(**filters))
    given = [f"--{name} {value}" for name, value in filters.items() if value is not None]
    if key is not None:
        if "/" in key and key not in tensors:  # a misspelt key; a name has no slash
            from sightline.patterns import did_you_mean

            raise NotCaptured(f"No tensor was captured as {key!r}{did_you_mean(key, tensors)}")
        named: Any = tensors[key]
        keys = {named.key} if hasattr(named, "key") else set(named.keys())
        selected = [tensor for tensor in selected if tensor.key in keys]
    if given and not selected:
        raise UsageError(f"{' '.join(given)} matches none of the {len(tensors)} kept tensors.")
    return selected


def _row(tensor: CapturedTensor, stats: bool) -> Row:
    info = tensor.info
    row: dict[str, Any] = {
        "key": tensor.key, "step": info.step or None, "module": info.module or None, "name": info.name,
        "call": info.call, "slot": info.slot, "role": info.role, "path": info.path or None,
        "value": value_text(info.value) if info.value >= 0 else None,
        "tensor": tensor_text(tensor.shape, tensor.dtype), "shape": list(tensor.shape),
        "dtype": tensor.dtype, "bytes": tensor.nbytes, "whole": info.whole,
    }  # fmt: skip
    if stats:
        import numpy as np

        from sightline.cli.tensor_plot import array_statistics

        try:
            numbers = array_statistics(tensor.numpy())
        except UsageError:  # a dtype that numpy has no numbers for
            numbers = array_statistics(np.zeros(0))
        row |= {"min": numbers.low, "max": numbers.high, "mean": numbers.mean, "std": numbers.std,
                "nans": numbers.nans, "infs": numbers.infs, "_range": numbers.range,
                "_spread": numbers.spread,
                "_wrong": "".join(span.text for span in numbers.wrong)}  # fmt: skip
    return row


_COLUMNS: Final = (
    Column("key", lambda row: row["key"], "module", least=24, end=True),
    Column("tensor", lambda row: row["tensor"] + ("" if row["whole"] else " (a sample)"), "shape"),
    Column("size", lambda row: bytes_text(row["bytes"]), "dim", right=True, spare=3),
    Column("value", lambda row: row["value"] or "", "dim", spare=2),
    Column("range", lambda row: row["_range"], "number"),
    Column("mean ± std", lambda row: " ± ".join(row["_spread"]) if row["_spread"][1] else "", spare=1),
    Column("NaN, Inf", lambda row: row["_wrong"], "error"),
)


def _heading(trace: Trace, tensor: CapturedTensor) -> Iterator[Line]:
    """The key, shape and size of a tensor, and the op that produced it."""
    info = tensor.info
    sample = "" if info.whole else "  (a sample of its elements)"
    yield line(
        (tensor.key, "title"), "  ", (tensor_text(tensor.shape, tensor.dtype), "shape"),
        (f"  {bytes_text(tensor.nbytes)}{sample}", "dim"), hang=2,
    )  # fmt: skip
    if info.value < 0:
        return
    value = trace.values[info.value]
    text = f"{value_text(value.id)} {value.kind}{f' {value.name}' if value.name else ''}"
    producer = value.producer
    if producer is not None:
        text += f", made by op {producer.id} {producer.name}"
        frame = int(trace.index.op_user_frames[producer.id])
        text += f" at {trace.frames[frame].position}" if frame >= 0 else ""
    yield fact_line("value", text)
