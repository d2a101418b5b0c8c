"""A recording asked in SQL: tables in memory, filled with what the query mentions, for one SELECT to read.

The query is compiled twice. First against empty tables, with an authorizer that notes which columns it reads
and refuses everything that is not reading; then, the noted columns filled in, under the same authorizer, with
limits on time and memory. Nothing of the query reaches the files of the recording.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any, Final, Self

from sightline.convert.context import TableContext
from sightline.convert.encoding import LONGEST_BYTES, storable
from sightline.convert.table_columns import Table
from sightline.convert.tables import ALIASES, TABLES
from sightline.errors import UsageError
from sightline.trace.index import Index

#: Every name a query can use for a table.
NAMED: Final[dict[str, Table]] = TABLES | {alias: TABLES[name] for alias, name in ALIASES.items()}

SECONDS: Final = 30.0  #: a query may take
MEMORY: Final = 1 << 30  #: bytes it may need beyond the tables
_QUERY: Final = 100_000  #: characters of a query
_TOGETHER: Final = 32  #: rows that one statement inserts; old builds of SQLite take 999 values
_BATCH: Final = 256  #: rows that are fetched together
_STEPS: Final = 2000  #: of SQLite's machine between two looks at the clock

_FORBIDDEN_FUNCTIONS: Final = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
#: What a statement begins with that changes something. SQLite names the steps of one, not the statement.
_STATEMENTS: Final = frozenset(
    """ALTER ANALYZE ATTACH BEGIN COMMIT CREATE DELETE DETACH DROP END INSERT PRAGMA REINDEX RELEASE REPLACE
    ROLLBACK SAVEPOINT UPDATE VACUUM""".split()
)


def _silent(_done: int, _total: int) -> None:
    """Nobody watches."""


class QueryResult:
    """The columns and the rows of an answer. Rows come as they are asked for, under the limits."""

    def __init__(self, connection: sqlite3.Connection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._used = 0.0
        self._began = 0.0  #: when SQLite was last given the word; 0 while it waits
        self.names: list[str] = []
        self.late = False
        connection.set_progress_handler(self._is_late, _STEPS)

    @property
    def spent(self) -> float:
        """Seconds SQLite has worked; what the reader of the rows takes does not count."""
        return self._used + (time.monotonic() - self._began if self._began else 0.0)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """SQLite is at work here."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._used, self._began = self.spent, 0.0

    def _is_late(self) -> bool:
        self.late = self.late or self.spent > self._seconds
        return self.late

    def rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """The rows of the answer; the names of its columns are known when this returns."""
        with self.working():
            cursor = self._connection.execute(query)
        self.names = _distinct([column[0] for column in cursor.description or ()])
        return self._fetched(cursor)

    def _fetched(self, cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
        while True:
            with self.working():
                rows = cursor.fetchmany(_BATCH)
            if not rows:
                return
            yield from rows


class Query:
    """Where one query is asked: ``with Desk(index, query) as desk: desk.names; for row in desk.rows: …``."""

    def __init__(
        self,
        index: Index,
        query: str,
        *,
        seconds: float = SECONDS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._context = TableContext(index)
        self._query = query
        self._seconds = seconds
        self._progress = progress or _silent
        self._reads: set[tuple[str, str]] = set()
        self._denied = ""
        self._ends = contextlib.ExitStack()
        self._answer: QueryResult | None = None
        self.names: Sequence[str] = ()
        self.rows: Iterator[tuple[Any, ...]] = iter(())

    @property
    def spent(self) -> float:
        """Seconds SQLite has worked on the query."""
        return self._answer.spent if self._answer else 0.0

    def __enter__(self) -> Self:
        if not self._query.strip():
            raise UsageError(_NO_QUERY)
        if len(self._query) > _QUERY:
            raise UsageError(f"A query may have {_QUERY:,} characters; this one has {len(self._query):,}.")
        connection = sqlite3.connect(":memory:", isolation_level=None)
        self._ends.callback(connection.close)
        try:
            self._prepared(connection)
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _prepared(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for pragma in ("journal_mode = OFF", "temp_store = MEMORY", "trusted_schema = OFF"):
            connection.execute(f"PRAGMA {pragma}")
        for name, table in NAMED.items():
            connection.execute(_create(name, table))
        for function in ("json_each", "json_tree"):  # made on first use, which the authorizer would not allow
            with contextlib.suppress(sqlite3.OperationalError):  # an SQLite without them
                connection.execute(f"SELECT 1 FROM {function}('[]')").close()  # noqa: S608 — the names above
        for limit, most in ((sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_BYTES), (sqlite3.SQLITE_LIMIT_ATTACHED, 0)):
            connection.setlimit(limit, most)
        self._answer = QueryResult(connection, self._seconds)
        with self._told():
            connection.set_authorizer(self._authorized)
            explain = "" if _first_word(self._query) == "explain" else "EXPLAIN "
            with _memory(MEMORY), self._answer.working():  # compiling alone can take all there is
                connection.execute(explain + self._query).close()
            connection.set_authorizer(None)
        connection.set_progress_handler(None, 0)
        self._fill(connection)
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(self._authorized)
        self._answer = QueryResult(connection, self._seconds)
        self._ends.enter_context(_memory(MEMORY))
        with self._told():
            found = self._answer.rows(self._query)
        self.names = self._answer.names
        if not self.names:
            raise UsageError(_NO_QUERY)
        self.rows = self._watched(found)

    def _watched(self, rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        with self._told():
            yield from rows

    def _authorized(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        denied = ""
        if action == sqlite3.SQLITE_READ:
            denied = (first or "") if (first or "").startswith("pragma_") else ""
            self._reads.add((first or "", second or ""))
        elif action == sqlite3.SQLITE_FUNCTION:
            denied = f"{second}()" if (second or "").lower() in _FORBIDDEN_FUNCTIONS else ""
        elif action not in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            denied = "Anything but reading"
        self._denied = self._denied or denied
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    def _fill(self, connection: sqlite3.Connection) -> None:
        """Fill the tables the query reads, with the columns it reads."""
        wanted = {name: {column for table, column in self._reads if table == name} for name, _ in self._reads}
        chosen = {name: columns for name, columns in wanted.items() if name in NAMED}
        total = sum(NAMED[name].count(self._context) for name in chosen)
        done = 0
        connection.execute("BEGIN")
        for name, columns in chosen.items():
            table = NAMED[name]
            picked = [column for column in table.columns if column.name in columns]
            picked = picked or [table.columns[0]]  # only counted: rows there must be
            for batch in table.batches(self._context, picked):
                _put(connection, name, [column.name for column in picked], batch)
                done += len(batch[0])
                self._progress(done, total)
        connection.execute("COMMIT")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What SQLite says against a query, as a sentence."""
        try:
            yield
        except MemoryError:
            raise UsageError(_TOO_MUCH) from None
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise UsageError(self._sentence(str(error))) from None

    def _sentence(self, said: str) -> str:
        if self._denied:
            words = re.findall(r"\w+", self._query.upper())
            denied = next((word for word in words if word in _STATEMENTS), self._denied)
            denied = self._denied if self._denied.endswith("()") else denied
            return f"{denied} is not allowed here: a recording is read, with one SELECT, and never changed."
        if self._answer is not None and self._answer.late:
            return f"The query took longer than {self._seconds:g} s and was stopped; --timeout gives it more."
        if "one statement at a time" in said:
            return "Ask one query at a time: there is more after the first one."
        if "out of memory" in said:
            return _TOO_MUCH
        if said.startswith("no such column: "):
            return f"There is no column {said[16:]!r}{self._nearest(said[16:], self._columns())}."
        if said.startswith("no such table: "):
            return f"There is no table {said[15:]!r}{self._nearest(said[15:], NAMED)}."
        if "syntax error" in said and re.search(r"\b(from|join)\s+values\b", self._query, re.IGNORECASE):
            return 'VALUES is a word of SQL: write "values" in double quotes, or its other name, vals.'
        if "incomplete input" in said:
            return "The query ends too early."
        return f"SQLite does not take this query: {said.rstrip('.')}."

    def _columns(self) -> list[str]:
        """The columns of the tables the query names, or of all."""
        words = set(re.findall(r"\w+", self._query.lower()))
        named = [table for name, table in NAMED.items() if name in words] or list(NAMED.values())
        return sorted({column.name for table in named for column in table.columns})

    def _nearest(self, wanted: str, known: Sequence[str] | dict[str, Table]) -> str:
        bare = wanted.rpartition(".")[2].lower()
        near = get_close_matches(bare, known, 3, 0.6) or [name for name in known if bare and bare in name][:3]
        if near:
            return f"; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
        return f"; there are {', '.join(sorted(known))}"


_NO_QUERY: Final = "There is no question in this query: write select … from …."
_TOO_MUCH: Final = (
    f"The query needs more than {MEMORY >> 30} GiB of memory: ask for fewer rows, or for less in each."
)


def _create(name: str, table: Table) -> str:
    kinds = {"integer": "INTEGER", "boolean": "INTEGER", "real": "REAL", "text": "TEXT"}
    columns = ", ".join(
        f'"{column.name}" {kinds[column.type]}{" PRIMARY KEY" if column.name == "id" else ""}'
        for column in table.columns
    )
    return f'CREATE TABLE "{name}"({columns})'


def _put(connection: sqlite3.Connection, name: str, columns: Sequence[str], items: list[list[Any]]) -> None:
    (last,) = connection.execute(f'SELECT coalesce(max(rowid), -1) FROM "{name}"').fetchone()  # noqa: S608
    try:
        _insert(connection, name, columns, items)
    except (UnicodeEncodeError, OverflowError, sqlite3.DataError):
        # Names that are no Unicode, numbers of more than 64 bits, texts beyond all limits: as well as can be.
        connection.execute(f'DELETE FROM "{name}" WHERE rowid > ?', (last,))  # noqa: S608
        _insert(connection, name, columns, [[storable(item) for item in column] for column in items])


def _insert(
    connection: sqlite3.Connection, name: str, columns: Sequence[str], items: list[list[Any]]
) -> None:
    """Insert rows, several by one statement: that is three times as fast as one by one."""
    wide, listed = len(columns), ", ".join(f'"{column}"' for column in columns)
    flat = list(chain.from_iterable(zip(*items, strict=True)))
    row = f"({', '.join('?' * wide)})"
    whole = len(flat) - len(flat) % (wide * _TOGETHER)
    for begin, end, rows in ((0, whole, _TOGETHER), (whole, len(flat), 1)):
        insert = f'INSERT INTO "{name}"({listed}) VALUES {", ".join([row] * rows)}'  # noqa: S608 — our names
        size = wide * rows
        connection.executemany(insert, (flat[at : at + size] for at in range(begin, end, size)))


def _first_word(query: str) -> str:
    """The word a query begins with, after comments.

    >>> _first_word("-- why\\n/* how */ Select 1")
    'select'
    """
    text = query.lstrip()
    while text.startswith(("--", "/*")):
        _, _, rest = text[2:].partition("\n" if text[0] == "-" else "*/")
        text = rest.lstrip()
    word = re.match(r"\w*", text)
    return word[0].lower() if word else ""


def _distinct(names: Sequence[str]) -> list[str]:
    """Names of columns, each once: a second ``id`` is ``id_2``."""
    found: list[str] = []
    for name in names:
        count, distinct = 1, name
        while distinct in found:
            count += 1
            distinct = f"{name}_{count}"
        found.append(distinct)
    return found


@contextlib.contextmanager
def _memory(most: int) -> Iterator[None]:
    """So much more memory for this process, where the system can say how much it has and hold it to that."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            held = int(statm.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        soft = held + most if before[1] < 0 else min(held + most, before[1])
        if before[0] >= 0:
            soft = min(soft, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    except (ImportError, OSError, ValueError):  # no such limit here: the one on time remains
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
