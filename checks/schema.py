"""Files derived from the schema: ``python checks/schema.py`` writes them, ``--check`` lists stale ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from sightline.schema.documents import column_tables  # noqa: E402  # the package of this checkout
from sightline.schema.native_header import native_header  # noqa: E402
from sightline.schema.row_properties import row_properties  # noqa: E402

PACKAGE = ROOT / "src" / "sightline"
FORMAT = ROOT / "docs" / "format.md"
_BEGIN, _END = "<!-- columns, written by `make schema` -->\n", "<!-- end of columns -->\n"


def derived() -> dict[Path, str]:
    """The text that each derived file should have."""
    document = FORMAT.read_text("utf-8")
    between = re.compile(f"(?<={re.escape(_BEGIN)}).*?(?={re.escape(_END)})", re.DOTALL)
    return {
        PACKAGE / "recording" / "native" / "row_layout.h": native_header(),
        PACKAGE / "data" / "row_properties.py": row_properties(),
        FORMAT: between.sub(lambda _: f"\n{column_tables()}\n", document),
    }


def main() -> int:
    """Write the files, or with ``--check`` list those that are not current."""
    stale = [path for path, text in derived().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: run `make schema`")
        return bool(stale)
    for path in stale:
        path.write_text(derived()[path], "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
