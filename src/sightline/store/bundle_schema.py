"""The format of a bundle's database: its header, tables, columns and limits.

The reader and the writer are both driven by these constants; ``docs/format.md`` describes them.
"""

from __future__ import annotations

from typing import Final

from sightline.schema.columns import COLUMN_TABLES, all_columns

#: The database of the first process; others are ``rank1.db`` and so on.
DATABASE: Final = "rank0.db"
TENSORS: Final = "tensors"  #: the folder of the shards

APPLICATION_ID: Final = 0x53474854  #: "SGHT", in the header of the database
VERSION: Final = 1
PAGE: Final = 4096

#: Tables of texts: row ``id`` of each is one piece of JSON.
TEXTS: Final = (
    "names",
    "codes",
    "files",
    "metas",
    "forms",
    "schemas",
    "modules",
    "steps",
    "captures",
    "shards",
)
#: The whole schema. A file with anything else in it is refused.
TABLES: Final = {
    "facts": "CREATE TABLE facts(name TEXT PRIMARY KEY, data TEXT) WITHOUT ROWID",
    "chunks": "CREATE TABLE chunks(kind TEXT, name TEXT, number INTEGER, rows INTEGER, data BLOB, "
    "PRIMARY KEY(kind, name, number))",
    "sources": "CREATE TABLE sources(id INTEGER PRIMARY KEY, file TEXT, whole INTEGER, size INTEGER, "
    "data BLOB)",
    **{name: f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, data TEXT)" for name in TEXTS},
}  # fmt: skip
#: The index SQLite makes for a key of several columns.
INDEXES: Final = frozenset({"sqlite_autoindex_chunks_1"})

CHUNK_ROWS: Final = 1 << 16  #: rows of one chunk; a writer may end one earlier, a reader accepts any size

#: Decoded, all columns together may be this much larger than the file: no small file fills the memory.
#: The times of a recording alone keep it far below: 50,000 ops decode to six times their file.
FREE_BYTES: Final = 64 << 20
GROWTH: Final = 100

MAX_SOURCE: Final = 2 << 20  #: characters of a source file; of a longer one only the lines that ran are kept
MAX_SOURCES: Final = 16 << 20  #: characters of all source files together
MAX_DEPTH: Final = 64  #: how deep nested arguments may be
MAX_NESTING: Final = 4000  #: how deep modules may be inside each other, and module calls
MAX_LINKS: Final = 1 << 24  #: the lengths of all stacks of frames, or of module calls, together

#: The tables of columns.
KINDS: Final = COLUMN_TABLES
#: The revision of the columns: it rises with each column that is added; a file that states none has 1.
REVISION: Final = max(column.meaning.since for column in all_columns())
#: Tables that bundles of earlier versions do not have: they are empty there.
ADDED: Final = frozenset({"allocations", "device_work"})
#: The one column that stands alone.
STORAGES: Final = ("storages", "nbytes")


def columns_of(kind: str) -> dict[str, str]:
    """The columns of a table and the dtype of each."""
    return KINDS[kind].dtypes()


def came_later(kind: str, name: str, revision: int) -> bool:
    """Whether a file of this revision was written before the column was declared."""
    return kind in KINDS and KINDS[kind].declared[name].meaning.since > revision


def length_name(kind: str, name: str) -> str:
    """The key of a column's length in the counts: its table, or the column itself."""
    return f"{kind}.{name}" if kind in KINDS and KINDS[kind].declared[name].is_flat else kind


def decoded_bytes(counts: dict[str, int]) -> int:
    """Bytes of all columns together, once they are decoded."""
    total = counts["storages"] * 8
    for kind in KINDS:
        for name, dtype in columns_of(kind).items():
            total += counts[length_name(kind, name)] * int(dtype[-1])
    return total


def allowed_bytes(size: int) -> int:
    """The most bytes of columns that a file of this size may decode to."""
    return FREE_BYTES + GROWTH * size


#: Every length that a file must state.
COUNTS: Final = (
    *KINDS, "storages", "sources", *TEXTS,
    *(length_name(one.table, one.name) for one in all_columns() if one.is_flat),
)  # fmt: skip
