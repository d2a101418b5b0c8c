"""The tables of columns as Markdown, for ``docs/format.md``."""

from __future__ import annotations

from sightline.schema.columns import ABOUT, COLUMN_TABLES


def column_tables() -> str:
    """A table for each table of columns: name, dtype, reference, meaning."""
    parts = []
    for table, columns in COLUMN_TABLES.items():
        lines = [
            f"**`{table}`**: {ABOUT[table]}",
            "",
            "| column | dtype | refers to | |",
            "|---|---|---|---|",
        ]
        for column in columns.declared.values():
            meaning = column.meaning
            target = f"`{meaning.target}`" if meaning.target else ", ".join(meaning.choices)
            if meaning.flags is not None:
                target = ", ".join(f"{name} {bit}" for name, bit in meaning.flags.items())
            if meaning.optional and meaning.target:
                target += " or -1"
            about = meaning.about + (f" ({meaning.unit})" if meaning.unit else "")
            lines.append(f"| `{column.name}` | {column.dtype.removeprefix('<')} | {target} | {about} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
