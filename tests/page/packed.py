"""Reads the data of a page, as the browser does."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np


def unpacked(block: bytes) -> dict[str, Any]:
    """The sections of a block by their names."""
    size = int.from_bytes(block[:4], "little")
    header = json.loads(block[4 : 4 + size])
    assert header["format"] == 1
    found: dict[str, Any] = {}
    at = 4 + size
    for entry in header["sections"]:
        data = zlib.decompress(block[at : at + entry["size"]], -zlib.MAX_WBITS)
        at += entry["size"]
        found[entry["name"]] = json.loads(data) if entry["type"] == "json" else _column(data, entry)
    assert at == len(block)
    return found


def _column(data: bytes, entry: dict[str, Any]) -> Any:
    dtype = np.dtype(f"<{entry['type']}")
    planes = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, entry["length"])
    column = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    return np.cumsum(column.astype(np.float64)) if entry.get("grows") else column


def recording_in(page: str) -> dict[str, Any]:
    """The sections of the recording that a page carries."""
    found: dict[str, Any] = blocks_in(page)["recording"]
    return found


def blocks_in(page: str) -> dict[str, dict[str, Any]]:
    """The sections of every block that a page carries, by the ids of the blocks."""
    found = re.findall(r'octet-stream" id="([\w-]+)">([^<]*)</script>', page)
    return {id: unpacked(base64.b64decode(data)) for id, data in found}
