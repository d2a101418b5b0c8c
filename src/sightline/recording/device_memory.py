"""What the allocators of CUDA devices say of a run: read at its start and at its end, and never reset.

CUDA is not initialised for it: a process that has not used it has nothing there.
"""

from __future__ import annotations

import torch

#: Of each device what is allocated and reserved, and the most that was ever allocated since the statistics of
#: the process began; bytes.
Reading = dict[str, dict[str, int]]
_STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "most": "allocated_bytes.all.peak",
}


def read_allocators() -> Reading:
    """What is held on each device that holds anything."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    found: Reading = {}
    for device in range(torch.cuda.device_count()):
        told = torch.cuda.memory_stats(device)
        numbers = {name: int(told.get(key, 0)) for name, key in _STATISTICS.items()}
        if any(numbers.values()):
            found[f"cuda:{device}"] = numbers
    return found


def before_and_after(before: Reading, after: Reading) -> dict[str, dict[str, list[int]]]:
    """Both readings of each device.

    >>> before_and_after({}, {"cuda:0": {"allocated": 512, "reserved": 2048, "most": 1024}})
    {'cuda:0': {'allocated': [0, 512], 'reserved': [0, 2048], 'most': [0, 1024]}}
    """
    return {
        device: {
            name: [before.get(device, {}).get(name, 0), after.get(device, {}).get(name, 0)]
            for name in _STATISTICS
        }
        for device in sorted(before.keys() | after.keys())
    }
