"""What an out-of-memory exception gains: what was asked for, by which line, and who holds the memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import numpy as np
import torch

from sightline.notation import bytes_text
from sightline.trace.held_memory import USES, HeldMemory, held_memory
from sightline.trace.origins import backward_of, bare_name, placed, user_frame, written
from sightline.trace.tables import Index, Op, Value

#: What allocators say: ``Tried to allocate 20.00 MiB``, ``you tried to allocate 4096 bytes``.
_ASKED: Final = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
_CPU: Final = "DefaultCPUAllocator"
_LINES: Final = 3
_LARGEST: Final = 3


def is_out_of_memory(error: BaseException, message: str) -> bool:
    """Whether an exception says that memory has run out, on a device or on the host."""
    if issubclass(type(error), torch.OutOfMemoryError):
        return True
    return issubclass(type(error), RuntimeError) and _CPU in message and _ASKED.search(message) is not None


def out_of_memory_lines(index: Index, message: str, op: Op | None) -> list[str]:
    """The note: what was asked, by which op, what is held, by kind and by line, and the largest tensors."""
    asked = _ASKED.search(message)
    size = _size_text(*asked.groups()) if asked is not None else "memory"
    by = "" if op is None else f" by {placed(bare_name(op), op)}"
    lines = [f"sightline: out of memory: {size} was asked for{by}"]
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
    lines.append(f"  held now{where} by the tensors recorded: {bytes_text(whole)}: {_listed(kinds, 5)}")
    lines.append(f"  made by {_listed(_lines(index, held, now.tolist()), _LINES)}")
    largest = now[np.argsort(-held.nbytes[now], kind="stable")][:_LARGEST].tolist()
    lines += [f"  {bytes_text(int(held.nbytes[row]))} {_told(index, held, row)}" for row in largest]
    return [*lines, *_allocator(index.raw.info, device)]


def _size_text(number: str, unit: str) -> str:
    return bytes_text(int(float(number))) if unit.lower() == "bytes" else f"{number} {unit}"


def _device(held: HeldMemory, now: Any, message: str) -> str:
    """The device that has none left: the one of ours that holds most, the host where it says so."""
    if _CPU in message:
        return "cpu"
    there = Counter[str]()
    for name, nbytes in zip(held.device[now].tolist(), held.nbytes[now].tolist(), strict=True):
        there[name] += nbytes if name != "cpu" else 0
    return there.most_common(1)[0][0] if there else "cpu"


def _lines(index: Index, held: HeldMemory, rows: list[int]) -> Counter[str]:
    found = Counter[str]()
    for row in rows:
        value = int(held.value[row])
        op = Value(index, value).producer if value >= 0 else None
        frame = None if op is None else user_frame(op)
        name = "what was there before" if frame is None else f"{frame.position} in {frame.function}"
        found[name] += int(held.nbytes[row])
    return found


def _listed(sizes: Counter[str], count: int) -> str:
    shown = sizes.most_common(count)
    rest = sum(sizes.values()) - sum(size for _, size in shown)
    told = [f"{name} {bytes_text(size)}" for name, size in shown]
    return ", ".join([*told, *([f"others {bytes_text(rest)}"] if rest else [])])


def _told(index: Index, held: HeldMemory, row: int) -> str:
    if held.value[row] < 0:
        return "of an op that is no longer kept"
    value = Value(index, int(held.value[row]))
    if value.producer is None:
        return f"{value} {value.kind} {value.name}".rstrip()
    made = written(value.producer)
    return f"{value} = {placed(bare_name(made) + backward_of(made), made, short=True)}"


def _allocator(info: dict[str, Any], device: str) -> list[str]:
    numbers = (info.get("allocator") or {}).get(device)
    if not numbers:
        return []
    allocated, reserved = numbers["allocated"][1], numbers["reserved"][1]
    return [
        f"  the allocator of {device}: {bytes_text(allocated)} allocated, {bytes_text(reserved)} reserved"
    ]
