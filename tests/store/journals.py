"""Journals put together by hand."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from sightline.store.journal import HEAD, JOURNAL


def written(folder: Path, *frames: bytes, head: bytes = HEAD) -> Path:
    (folder / JOURNAL).write_bytes(b"".join([head, *frames]))
    return folder


def frame(head: dict[str, Any], *streams: bytes) -> bytes:
    """A frame that says of itself whatever it likes, with the right checksum."""
    told = {"streams": [], "end": 0, "news": {}, "info": json.dumps({"d": []}), "learned": [], "steps": [],
            "captures": [], **head}  # fmt: skip
    packed = zlib.compress(json.dumps(told).encode())
    rest = struct.pack("<I", len(packed)) + packed + b"".join(streams)
    return struct.pack("<4sIII", b"SGJB", len(rest), zlib.crc32(rest), 0) + rest
