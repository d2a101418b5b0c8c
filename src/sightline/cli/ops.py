"""``sightline ops``: every API call and aten op of a recording, a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache as cached
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from sightline.cli.command import Command, examples, filters, opened, recording
from sightline.cli.row_output import Column, Row, formats, write
from sightline.cli.screen import Screen, screen_options
from sightline.errors import UsageError
from sightline.notation import count_text, position_text, time_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sightline.api import Trace
    from sightline.trace.data import I32, I64, ModuleInfo

#: Rows made at one time: the memory a listing takes, however long it is.
_CHUNK: Final = 1024

NAMES: Final = (
    "id", "name", "level", "flavour", "phase", "parent", "forward", "module", "module_type", "module_call",
    "file", "line", "function", "arguments", "inputs", "result", "outputs", "start_ns", "duration_ns",
    "device_ns", "flops", "raised",
)  # fmt: skip

#: What the table is made of.
_IN_TABLE: Final = ("id", "phase", "parent", "name", "arguments", "result", "raised", "module", "file",
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
@recording
@click.option("--level", type=click.Choice(["api", "aten"]), help="Only calls as written, or only aten ops.")
@filters("step", "module", "op", "phase", "depth", "head", "tail")
@click.option(
    "--sort",
    type=click.Choice(["time", "device", "flops"]),
    help="The most expensive first: in host time, device time or FLOPs.",
)
@formats
@screen_options
def command(file: str, level: str | None, step: str | None, head: int | None, tail: int | None,
            sort: str | None, form: str | None, screen: Screen, **chosen: Any) -> None:  # fmt: skip
    """List the operations, as a table, JSON or CSV.

    A row is a call of torch as it was written, or an aten op, which stands indented under the call it came
    from. The number of a row is what `sightline lineage` takes.
    """
    if head is not None and tail is not None:
        raise click.UsageError("--head and --tail do not go together; give one of them.")
    trace = opened(file, step)
    ids = _chosen(trace, level, sort, chosen)
    ids = ids[:head] if head is not None else ids[-tail:] if tail is not None else ids
    names = NAMES if form is not None else _IN_TABLE
    phases = len(np.unique(trace.data.ops.phase[ids])) > 1
    last = int(ids.max()) if len(ids) else 0
    columns = _columns(
        level is None and sort is None, phases, flops=sort == "flops", last=last,
        device=trace.index.device_durations is not None,
    )  # fmt: skip
    write(form, OpRows(trace, names).rows(ids), names, columns, screen)


def _chosen(trace: Trace, level: str | None, sort: str | None, filters: dict[str, Any]) -> I64:
    from sightline.analysis.select import Selection

    ids = np.flatnonzero(Selection(**filters).ops(trace.index, level))
    if sort is not None:
        cost = _costs(trace, sort)
        ids = ids[np.argsort(-cost[ids], kind="stable")]
    return ids


def _costs(trace: Trace, sort: str) -> I64:
    if sort != "device":
        return trace.data.ops.duration if sort == "time" else trace.data.ops.flops
    if trace.index.device_durations is None:
        raise UsageError("--sort device needs device time: record with `sightline run --time device`.")
    return trace.index.device_durations


class OpRows:
    """The ops of a recording as plain dicts, made a chunk at a time, with the facts asked for.

    A fact that nobody asks for is never read: a column of a million ops takes its time.
    """

    def __init__(self, trace: Trace, names: Sequence[str] = NAMES) -> None:
        from sightline.trace.user_frames import Chains, torch_file

        self._data = trace.data
        self._device = trace.index.device_durations
        self._names = names
        self._metas = [str(meta) for meta in trace.data.metas]
        self._chains = Chains(trace.data, torch_file)
        self._places: dict[int, dict[str, Any]] = {}
        self._filled: dict[tuple[Any, ...], str] = {}

    def rows(self, ids: I64) -> Iterator[Row]:
        """A row for each op, in the order given."""
        for at in range(0, len(ids), _CHUNK):
            facts = self._facts(ids[at : at + _CHUNK])
            for row in zip(*(facts[name]() for name in self._names), strict=True):
                yield dict(zip(self._names, row, strict=True))

    def _facts(self, ids: I64) -> dict[str, Callable[[], Iterable[Any]]]:
        """How each fact about some ops is read."""
        from sightline.trace.data import FLAVOURS, LEVELS, PHASES, RAISED

        data, ops = self._data, self._data.ops
        inputs = cached(lambda: self._ids(ids, ops.input_offsets, ops.inputs))
        outputs = cached(lambda: self._ids(ids, ops.output_offsets, ops.outputs))
        calls = cached(lambda: ops.call[ids])
        places = cached(lambda: self._placed(ids))

        def each(column: NDArray[Any], names: Sequence[str]) -> list[str]:
            return [names[number] for number in column[ids].tolist()]

        return {
            "id": ids.tolist,
            "name": lambda: each(ops.name, data.names),
            "level": lambda: each(ops.level, LEVELS),
            "flavour": lambda: each(ops.flavour, FLAVOURS),
            "phase": lambda: each(ops.phase, PHASES),
            "parent": lambda: _some(ops.parent[ids]),
            "forward": lambda: _some(ops.forward[ids]),
            "module": lambda: self._modules(calls(), lambda module: module.path or module.type),
            "module_type": lambda: self._modules(calls(), lambda module: module.type),
            "module_call": lambda: _some(np.append(data.calls.index, -1)[calls()]),  # no call is -1
            "file": lambda: [place["file"] for place in places()],
            "line": lambda: [place["line"] for place in places()],
            "function": lambda: [place["function"] for place in places()],
            "arguments": lambda: self._texts(ops.form[ids], inputs()[1]),
            "inputs": lambda: self._values(*inputs()),
            "result": lambda: self._texts(ops.result[ids], outputs()[1]),
            "outputs": lambda: self._values(*outputs()),
            "start_ns": lambda: _plain(ops.start, ids),
            "duration_ns": lambda: _plain(ops.duration, ids),
            "device_ns": lambda: [None] * len(ids) if self._device is None else _plain(self._device, ids),
            "flops": lambda: _some(ops.flops[ids]),
            "raised": lambda: [bool(flags & RAISED) for flags in _plain(ops.flags, ids)],
        }

    def _ids(self, ids: I64, offsets: I64, values: I32) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """The values of each op, and what they look like."""
        found = [values[start:end] for start, end in zip(offsets[ids], offsets[ids + 1], strict=True)]
        metas = self._data.values.meta
        return [each.tolist() for each in found], [tuple(metas[each].tolist()) for each in found]

    def _values(self, ids: list[list[int]], metas: list[tuple[int, ...]]) -> Iterator[list[dict[str, str]]]:
        texts = self._metas
        for values, looks in zip(ids, metas, strict=True):
            yield [{"value": f"${id}", "tensor": texts[meta]} for id, meta in zip(values, looks, strict=True)]

    def _texts(self, forms: I32, metas: list[tuple[int, ...]]) -> Iterator[str]:
        """Arguments or results as text; ops mostly look like others before them."""
        for key in zip(forms.tolist(), metas, strict=True):
            known = self._filled.get(key)
            if known is None:
                form, looks = key
                tensors = [self._metas[meta] for meta in looks]
                known = self._filled[key] = self._data.forms[form].fill(tensors) if form >= 0 else ""
            yield known

    def _modules(self, calls: I32, text: Callable[[ModuleInfo], str]) -> list[str | None]:
        texts = [*map(text, self._data.modules), None]  # no call is -1: the last entry
        known = np.append(self._data.calls.module, -1)
        return [texts[module] for module in known[calls].tolist()]

    def _placed(self, ids: I64) -> list[dict[str, Any]]:
        from sightline.trace.user_frames import shown_frames

        return [
            self._places.get(frame) or self._place(frame) for frame in shown_frames(self._data, ids).tolist()
        ]

    def _place(self, frame: int) -> dict[str, Any]:
        """The line the user wrote, innermost, on the way to a frame."""
        chain = self._chains.of(frame)
        known: dict[str, Any] = {"file": None, "line": None, "function": None}
        if chain:
            frames = self._data.frames
            code = self._data.codes[frames.code[chain[-1]]]
            known = {"file": code.file, "line": int(frames.line[chain[-1]]), "function": code.function}
        self._places[frame] = known
        return known


def _plain(column: NDArray[Any], ids: I64) -> list[int]:
    found: list[int] = column[ids].tolist()
    return found


def _some(numbers: NDArray[Any]) -> list[int | None]:
    """Numbers with None for what is -1: nothing."""
    return [number if number >= 0 else None for number in numbers.tolist()]


def _columns(nested: bool, phases: bool, *, flops: bool, last: int, device: bool) -> list[Column]:
    """The columns of the table, the longest text last.

    ``nested`` sets aten ops under their calls, ``phases`` names their phases, ``flops`` has their FLOPs,
    ``device`` their device time; ``last`` is the largest id.
    """
    return [
        Column("id", lambda row: str(row["id"]), "dim", right=True, widest=len(str(last))),
        *([Column("phase", lambda row: row["phase"], "dim", least=8, spare=2)] if phases else []),
        Column(
            "host time" if device else "time",
            lambda row: time_text(row["duration_ns"]),
            "number",
            right=True,
            spare=3 * flops,
            widest=len("12.3 ms"),
        ),
        *(
            [Column("device time", _device_text, "number", right=True, widest=len("device time"))]
            if device
            else []
        ),
        *([Column("FLOPs", _flops_text, "number", right=True)] if flops else []),
        Column("module", lambda row: row["module"] or "", least=12, end=True),
        Column("line", _place_text, "dim", least=12, end=True, spare=1),
        Column("result", lambda row: "raised" if row["raised"] else row["result"], "shape", least=13),
        Column("op", lambda row: _op_text(row, nested), "op", least=20),
    ]


def _device_text(row: Row) -> str:
    return time_text(row["device_ns"]) if row["device_ns"] else ""


def _flops_text(row: Row) -> str:
    return count_text(row["flops"]) if row["flops"] is not None else ""


def _op_text(row: Row, nested: bool) -> str:
    return f"{'  ' if nested and row['parent'] is not None else ''}{row['name']}({row['arguments']})"


def _place_text(row: Row) -> str:
    return position_text(row["file"], row["line"]).rpartition("/")[2] if row["file"] else ""
