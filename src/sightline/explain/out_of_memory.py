"""The note on an out-of-memory error: the size requested, and the tensors that hold the memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import numpy as np

from sightline.analysis.held_memory import USES, HeldMemory, held_memory
from sightline.analysis.op_text import api_call_of, backward_suffix, short_name, with_location
from sightline.data.index import Index, Op, Value
from sightline.data.user_frames import user_frame
from sightline.notation import bytes_text

#: The messages of allocators: ``Tried to allocate 20.00 MiB``, ``you tried to allocate 4096 bytes``.
REQUESTED_SIZE: Final = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
CPU_ALLOCATOR: Final = "DefaultCPUAllocator"
_LINES: Final = 3
_LARGEST: Final = 3


def out_of_memory_lines(index: Index, message: str, op: Op | None) -> list[str]:
    """The note: the size requested, by which op; the memory held, by kind and line; the largest tensors."""
    requested, size = REQUESTED_SIZE.search(message), "memory"
    if requested is not None:
        number, unit = requested.groups()
        size = bytes_text(int(float(number))) if unit.lower() == "bytes" else f"{number} {unit}"
    by = "" if op is None else f" by {with_location(short_name(op), op)}"
    lines = [f"sightline: out of memory: {size} was requested{by}"]
    held = held_memory(index.raw)
    now = np.flatnonzero(held.end >= held.over)
    device = _device(held, now, message)
    now = now[held.device[now] == device]
    if not len(now):
        return [*lines, "  nothing is held by the tensors of this recording"]
    whole = int(held.nbytes[now].sum())
    where = "" if device == "cpu" else f" on {device}"
    kinds = Counter[str]()
    for use, nbytes in zip(held.use[now].tolist(), held.nbytes[now].tolist(), strict=True):
        kinds[USES[use]] += nbytes
    lines.append(
        f"  held now{where} by the tensors recorded: {bytes_text(whole)}: {_sizes_text(kinds, len(USES))}"
    )
    lines.append(f"  made by {_sizes_text(_bytes_by_line(index, held, now.tolist()), _LINES)}")
    largest = now[np.argsort(-held.nbytes[now], kind="stable")][:_LARGEST].tolist()
    lines += [f"  {bytes_text(int(held.nbytes[row]))} {_tensor_text(index, held, row)}" for row in largest]
    allocator = (index.raw.info.get("allocator") or {}).get(device)
    if allocator:
        sizes = [f"{bytes_text(allocator[name][1])} {name}" for name in ("allocated", "reserved")]
        lines.append(f"  the allocator of {device}: {', '.join(sizes)}")
    return lines


def _device(held: HeldMemory, now: Any, message: str) -> str:
    """The device that ran out: the host if the message says so, else the device that holds most."""
    if CPU_ALLOCATOR in message:
        return "cpu"
    sizes = Counter[str]()
    for name, nbytes in zip(held.device[now].tolist(), held.nbytes[now].tolist(), strict=True):
        sizes[name] += nbytes if name != "cpu" else 0
    return sizes.most_common(1)[0][0] if sizes else "cpu"


def _bytes_by_line(index: Index, held: HeldMemory, rows: list[int]) -> Counter[str]:
    sizes = Counter[str]()
    for row in rows:
        value = int(held.value[row])
        op = Value(index, value).producer if value >= 0 else None
        frame = None if op is None else user_frame(op)
        name = "what was there before" if frame is None else f"{frame.position} in {frame.function}"
        sizes[name] += int(held.nbytes[row])
    return sizes


def _sizes_text(sizes: Counter[str], count: int) -> str:
    shown = sizes.most_common(count)
    rest = sum(sizes.values()) - sum(size for _, size in shown)
    texts = [f"{name} {bytes_text(size)}" for name, size in shown]
    return ", ".join([*texts, *([f"others {bytes_text(rest)}"] if rest else [])])


def _tensor_text(index: Index, held: HeldMemory, row: int) -> str:
    if held.value[row] < 0:
        return "of an op that is no longer kept"
    value = Value(index, int(held.value[row]))
    if value.producer is None:
        return f"{value} {value.kind} {value.name}".rstrip()
    op = api_call_of(value.producer)
    return f"{value} = {with_location(short_name(op) + backward_suffix(op), op, short=True)}"
