"""A fact that is known only when a bundle is there: the note of the exception that ended its run."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path
from typing import Any

from sightline.trace.bundle import plain, schema
from sightline.trace.bundle.database import dump_json
from sightline.trace.bundle.plain import parsed


def amend_info(folder: Path, more: dict[str, Any]) -> None:
    """Add to what a bundle says of the whole recording; nothing happens where there is none."""
    path = folder / schema.DATABASE
    if not path.exists():
        return
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        facts = dict(connection.execute("SELECT name, data FROM facts"))
        info = plain.dumps({**plain.loads(facts["info"]), **more})
        sums = parsed(facts["sums"]) | {"facts.info": zlib.crc32(info.encode())}
        for name, text in (("info", info), ("sums", dump_json(sums))):
            connection.execute("UPDATE facts SET data = ? WHERE name = ?", (text, name))
        connection.execute("COMMIT")
    finally:
        connection.close()
