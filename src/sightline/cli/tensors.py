"""``sightline tensors``: the kept tensors of a recording as a table, or one of them as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import click

from sightline.cli.command import Command, examples, filter_options, open_recording, recording_argument
from sightline.cli.row_output import Column, Row, format_options, write_rows
from sightline.cli.screen import Screen, screen_options
from sightline.errors import NotCaptured, UsageError
from sightline.notation import bytes_text, tensor_text, value_text
from sightline.views.rendering import Line, View, line

if TYPE_CHECKING:
    from sightline.api import Trace
    from sightline.data.tensors import CapturedTensor, Tensors

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
@click.option("--name", metavar="GLOB", help="Only of these names: 'output', 'q', '*.grad'.")
@filter_options("step")
@click.option(
    "--role", type=click.Choice(["input", "output", "op", "spy", "gradient"]), help="Only this role."
)
@click.option("--call", metavar="N", type=click.IntRange(0), help="Only the call N of each, from 0.")
@filter_options("head", "tail")
@click.option(
    "--stats/--no-stats", default=True, help="Range, mean and deviation: reads every tensor listed."
)
@click.option(
    "--slice", "chosen", metavar="I,J…", help="With KEY: which slice to draw, by its first indices."
)
@format_options
@screen_options
def command(recording: str, key: str | None, head: int | None, tail: int | None, stats: bool,
            chosen: str | None, form: str | None, screen: Screen, **asked: Any) -> None:  # fmt: skip
    """List the kept tensors, or look at one of them.

    KEY is a full key, which means one tensor, or a name: of a module for what it returned, of a variable or
    op in a module, or of what was spied on. One tensor is drawn; of several there is a table.
    """
    if head is not None and tail is not None:
        raise click.UsageError("--head and --tail do not go together; give one of them.")
    if chosen is not None and key is None:
        raise click.UsageError("--slice goes with a KEY: it says which part of that tensor to draw.")
    trace = open_recording(recording)
    if not any(fnmatchcase(info.step, asked["step"] or "*") for info in trace.data.captures):
        trace = open_recording(recording, asked.pop("step"))  # no name that a tensor has, or a glob of them
    found = _select_tensors(trace, key, asked)
    found = found[:head] if head is not None else found[-tail:] if tail is not None else found
    if key is not None and len(found) == 1 and form is None:
        screen.show(
            View(tuple(_tensor_view(trace, found[0], _indices(chosen), screen.room))).within(screen.room)
        )
        return
    if chosen is not None:
        raise UsageError(f"--slice is for one tensor; {key!r} means {len(found)}: {_keys_text(found)}.")
    names = (*_NAMES, *_NUMBERS) if stats else _NAMES
    columns = _COLUMNS if stats else _COLUMNS[:-3]
    if form is None and not found:
        screen.show([line((_no_tensors_text(trace), "dim"), hang=1)])
        return
    write_rows(form, (_row(tensor, stats) for tensor in found), names, columns, screen)


def _no_tensors_text(trace: Trace) -> str:
    """That there is nothing, and why or how there can be something."""
    from sightline.analysis.unmatched_globs import capture_text

    why = capture_text(trace.data) or "record with sightline run --capture GLOB"
    return f"(no tensors were kept: {why})"


def _select_tensors(trace: Trace, key: str | None, asked: dict[str, Any]) -> list[CapturedTensor]:
    """The tensors that are meant; none is an error where something was asked for."""
    tensors = trace.tensors
    found = list(tensors.where(**asked))
    given = [f"--{name} {value}" for name, value in asked.items() if value is not None]
    if key is not None:
        named = _look_up(tensors, key)
        keys = {named.key} if hasattr(named, "key") else set(named.keys())
        found = [tensor for tensor in found if tensor.key in keys]
    if given and not found:
        raise UsageError(f"{' '.join(given)} matches none of the {len(tensors)} kept tensors.")
    return found


def _look_up(tensors: Tensors, key: str) -> Any:
    """The captures that a key or a name selects; an unknown name with a slash is taken for a misspelt key."""
    if "/" in key and key not in tensors:
        from sightline.patterns import did_you_mean

        raise NotCaptured(f"No tensor was captured as {key!r}{did_you_mean(key, tensors)}")
    return tensors[key]


def _keys_text(found: list[CapturedTensor]) -> str:
    """Some of the keys one may choose from."""
    keys = [repr(tensor.key) for tensor in found[:3]]
    return f"give {', '.join(keys)}{', …' if len(found) > 3 else ''}"


def _indices(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no list of whole numbers; write 0,2.", param_hint="--slice"
        ) from None


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
            seen = array_statistics(tensor.numpy())
        except UsageError:  # a dtype that numpy has no numbers for
            seen = array_statistics(np.zeros(0))
        row |= {"min": seen.low, "max": seen.high, "mean": seen.mean, "std": seen.std, "nans": seen.nans,
                "infs": seen.infs, "_range": seen.range, "_spread": seen.spread,
                "_wrong": "".join(span.text for span in seen.wrong)}  # fmt: skip
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


def _tensor_view(trace: Trace, tensor: CapturedTensor, chosen: list[int], room: int | None) -> Iterable[Line]:
    """A tensor: what it is, its numbers, its picture."""
    from sightline.cli.tensor_plot import tensor_lines

    return [*_heading(trace, tensor), *tensor_lines(tensor.numpy(), chosen, room)]


def _heading(trace: Trace, tensor: CapturedTensor) -> Iterator[Line]:
    info = tensor.info
    sample = "" if info.whole else "  (a sample of its elements)"
    tensor_ = tensor_text(tensor.shape, tensor.dtype)
    yield line(
        (tensor.key, "title"),
        "  ",
        (tensor_, "shape"),
        (f"  {bytes_text(tensor.nbytes)}{sample}", "dim"),
        hang=2,
    )
    if info.value >= 0:
        value = trace.values[info.value]
        made = value.producer
        name = f" {value.name}" if value.name else ""
        told = f"{value_text(value.id)} {value.kind}{name}"
        if made is not None:
            told += f", made by op {made.id} {made.name}{_position(trace, made.id)}"
        yield line((f"{'value':<11}", "dim"), told, hang=11)


def _position(trace: Trace, op: int) -> str:
    """Where the user wrote what ran an op, to end a sentence with."""
    frame = int(trace.index.op_user_frames[op])
    return f" at {trace.frames[frame].position}" if frame >= 0 else ""
