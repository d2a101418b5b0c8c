"""How devices were used, as text: what they ran, and how much of the run they were busy or idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sightline.notation import time_text
from sightline.trace.data import WORK_KINDS, DeviceWorkColumns
from sightline.trace.device_time import DeviceUsage, device_usage
from sightline.trace.index import Index

_PLURALS = {"kernel": "kernels", "copy": "copies", "fill": "fills"}


@dataclass(frozen=True)
class DeviceUse:
    """What devices did in a recording that has device time."""

    work: DeviceWorkColumns
    unowned: int  #: ns of work that no recorded op launched
    busy: tuple[DeviceUsage, ...]

    @property
    def total(self) -> int:
        """Nanoseconds of everything that ran, added up."""
        return int(self.work.duration.sum())

    @property
    def ran(self) -> str:
        """``5,213 kernels, 12 copies on cuda:0``."""
        counts = np.bincount(self.work.kind, minlength=len(WORK_KINDS)).tolist()
        texts = [
            f"{count:,} {kind if count == 1 else _PLURALS[kind]}"
            for kind, count in zip(WORK_KINDS, counts, strict=True)
            if count
        ]
        devices = ", ".join(device_name(each.device) for each in self.busy)
        return f"{', '.join(texts)} on {devices}" if texts else "no kernels"

    def texts(self) -> list[str]:
        """A line for each device: ``busy 71 %, waiting for the host 24 %``."""
        several = len(self.busy) > 1
        return [(f"{device_name(each.device)} " if several else "") + busy_text(each) for each in self.busy]


def device_use(index: Index) -> DeviceUse | None:
    """How devices were used; None where device time was not recorded."""
    if index.device_own is None:
        return None
    work = index.raw.device_work
    unowned = int(work.duration[index.device_work_ops < 0].sum())
    return DeviceUse(work, unowned, tuple(device_usage(index.raw)))


def device_name(device: int) -> str:
    """``cuda:0``."""
    return f"cuda:{device}"


def busy_text(each: DeviceUsage) -> str:
    """How a device spent the run, with idle time and overlapping streams where there are any.

    >>> busy_text(DeviceUsage(0, 100_000_000, 71_000_000, 24_000_000, 74_000_000, 2))
    'busy 71 %, waiting for the host 24 %, between kernels 5 %; 2 streams overlap by 3.00 ms'
    """
    parts = [("busy", each.busy), ("waiting for the host", each.waiting)]
    if round(100 * each.pending / max(each.total, 1)):
        parts.append(("between kernels", each.pending))
    text = ", ".join(f"{what} {100 * time / max(each.total, 1):.0f} %" for what, time in parts)
    if each.streams > 1:
        over = f"overlap by {time_text(each.overlap)}" if each.overlap else "never overlap"
        text += f"; {each.streams} streams {over}"
    return text
