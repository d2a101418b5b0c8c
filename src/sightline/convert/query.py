"""`Query`: one SELECT over a recording, whose tables are built in memory with the columns it reads.

The query is compiled twice. First against empty tables, with an authorizer that notes which columns it reads
and denies everything but reading; then against the filled tables, under the same authorizer, with limits on
time and memory. Nothing of the query reaches the files of the recording.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any, Final, Self

from sightline.convert.context import TableContext
from sightline.convert.encoding import LONGEST_BYTES, storable
from sightline.convert.table_columns import Table
from sightline.convert.tables import ALIASES, TABLES
from sightline.data.index import Index
from sightline.errors import UsageError

#: Every table by every name a query can use for it.
TABLES_BY_NAME: Final[dict[str, Table]] = TABLES | {alias: TABLES[name] for alias, name in ALIASES.items()}

SECONDS: Final = 30.0  #: a query may take
MEMORY: Final = 1 << 30  #: bytes it may need beyond the tables
_LONGEST_QUERY: Final = 100_000  #: characters
_INSERTED_ROWS: Final = 32  #: by one statement; old builds of SQLite take 999 values
_FETCHED_ROWS: Final = 256
_INSTRUCTIONS: Final = 2000  #: of SQLite's virtual machine between two checks of the time

_FORBIDDEN_FUNCTIONS: Final = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
#: First words of statements that change something: SQLite reports the steps of a statement, not its name.
_STATEMENTS: Final = frozenset(
    """ALTER ANALYZE ATTACH BEGIN COMMIT CREATE DELETE DETACH DROP END INSERT PRAGMA REINDEX RELEASE REPLACE
    ROLLBACK SAVEPOINT UPDATE VACUUM""".split()
)


class _TimeLimit:
    """Measures how long SQLite works, and stops a query after ``seconds``."""

    def __init__(self, connection: sqlite3.Connection, seconds: float) -> None:
        self._seconds = seconds
        self._spent_before = 0.0
        self._started = 0.0  #: when SQLite began to work; 0 while it is idle
        self.exceeded = False
        connection.set_progress_handler(self._check, _INSTRUCTIONS)

    @property
    def spent(self) -> float:
        """Seconds SQLite has worked; the time of the reader of the rows does not count."""
        return self._spent_before + (time.monotonic() - self._started if self._started else 0.0)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """A block in which SQLite works."""
        self._started = time.monotonic()
        try:
            yield
        finally:
            self._spent_before, self._started = self.spent, 0.0

    def _check(self) -> bool:
        self.exceeded = self.exceeded or self.spent > self._seconds
        return self.exceeded


class Query:
    """One query: ``with Query(index, sql) as query: query.names; for row in query.rows: …``."""

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
        self._progress = progress
        self._reads: set[tuple[str, str]] = set()
        self._denied = ""
        self._exit_stack = contextlib.ExitStack()
        self._limit: _TimeLimit | None = None
        self.names: Sequence[str] = ()
        self.rows: Iterator[tuple[Any, ...]] = iter(())

    @property
    def spent(self) -> float:
        """Seconds SQLite has worked on the query."""
        return self._limit.spent if self._limit else 0.0

    def __enter__(self) -> Self:
        if not self._query.strip():
            raise UsageError(_NO_QUERY)
        if len(self._query) > _LONGEST_QUERY:
            raise UsageError(
                f"A query may have {_LONGEST_QUERY:,} characters; this one has {len(self._query):,}."
            )
        connection = sqlite3.connect(":memory:", isolation_level=None)
        self._exit_stack.callback(connection.close)
        try:
            self._execute(connection)
        except BaseException:
            self._exit_stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def _execute(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for pragma in ("journal_mode = OFF", "temp_store = MEMORY", "trusted_schema = OFF"):
            connection.execute(f"PRAGMA {pragma}")
        types = {"integer": "INTEGER", "boolean": "INTEGER", "real": "REAL", "text": "TEXT"}
        for name, table in TABLES_BY_NAME.items():
            columns = ", ".join(
                f'"{column.name}" {types[column.type]}{" PRIMARY KEY" if column.name == "id" else ""}'
                for column in table.columns
            )
            connection.execute(f'CREATE TABLE "{name}"({columns})')
        for function in ("json_each", "json_tree"):  # created on first use, which the authorizer would deny
            with contextlib.suppress(sqlite3.OperationalError):  # an SQLite without them
                connection.execute(f"SELECT 1 FROM {function}('[]')").close()  # noqa: S608 — the names above
        for limit, most in ((sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_BYTES), (sqlite3.SQLITE_LIMIT_ATTACHED, 0)):
            connection.setlimit(limit, most)
        self._limit = _TimeLimit(connection, self._seconds)
        with self._usage_errors():
            connection.set_authorizer(self._authorize)
            explain = "" if _first_word(self._query) == "explain" else "EXPLAIN "
            with _memory_limit(MEMORY), self._limit.timed():  # compiling alone can take all memory
                connection.execute(explain + self._query).close()
            connection.set_authorizer(None)
        connection.set_progress_handler(None, 0)
        self._fill(connection)
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(self._authorize)
        self._limit = _TimeLimit(connection, self._seconds)
        self._exit_stack.enter_context(_memory_limit(MEMORY))
        with self._usage_errors(), self._limit.timed():
            cursor = connection.execute(self._query)
        names: list[str] = []
        for name, *_ in cursor.description or ():
            count, distinct = 1, name
            while distinct in names:  # a second ``id`` is ``id_2``
                count += 1
                distinct = f"{name}_{count}"
            names.append(distinct)
        if not names:
            raise UsageError(_NO_QUERY)
        self.names, self.rows = names, self._fetch(cursor, self._limit)

    def _fetch(self, cursor: sqlite3.Cursor, limit: _TimeLimit) -> Iterator[tuple[Any, ...]]:
        """The rows of the result, fetched on demand within the time limit."""
        with self._usage_errors():
            while True:
                with limit.timed():
                    rows = cursor.fetchmany(_FETCHED_ROWS)
                if not rows:
                    return
                yield from rows

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
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
        reads: dict[str, set[str]] = {}
        for name, column in self._reads:
            if name in TABLES_BY_NAME:
                reads.setdefault(name, set()).add(column)
        total = sum(TABLES_BY_NAME[name].count(self._context) for name in reads)
        done = 0
        connection.execute("BEGIN")
        for name, names in reads.items():
            table = TABLES_BY_NAME[name]
            columns = [column for column in table.columns if column.name in names]
            columns = columns or [table.columns[0]]  # ``count(*)`` reads no column but needs the rows
            for batch in table.batches(self._context, columns):
                _insert_batch(connection, name, [column.name for column in columns], batch)
                done += len(batch[0])
                if self._progress is not None:
                    self._progress(done, total)
        connection.execute("COMMIT")

    @contextlib.contextmanager
    def _usage_errors(self) -> Iterator[None]:
        """Turn SQLite's errors about the query into a `UsageError`."""
        try:
            yield
        except MemoryError:
            raise UsageError(_TOO_MUCH) from None
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise UsageError(self._error_text(str(error))) from None

    def _error_text(self, message: str) -> str:
        """One sentence for an error message of SQLite."""
        if self._denied:
            words = re.findall(r"\w+", self._query.upper())
            denied = next((word for word in words if word in _STATEMENTS), self._denied)
            denied = self._denied if self._denied.endswith("()") else denied
            return f"{denied} is not allowed here: a recording is read, with one SELECT, and never changed."
        if self._limit is not None and self._limit.exceeded:
            return f"The query took longer than {self._seconds:g} s and was stopped; --timeout gives it more."
        if "one statement at a time" in message:
            return "Ask one query at a time: there is more after the first one."
        if "out of memory" in message:
            return _TOO_MUCH
        if message.startswith("no such column: "):
            mentioned = set(re.findall(r"\w+", self._query.lower()))
            tables = [table for name, table in TABLES_BY_NAME.items() if name in mentioned]
            columns = {column.name for table in tables or TABLES.values() for column in table.columns}
            return f"There is no column {message[16:]!r}{_nearest_text(message[16:], sorted(columns))}."
        if message.startswith("no such table: "):
            return f"There is no table {message[15:]!r}{_nearest_text(message[15:], TABLES_BY_NAME)}."
        if "syntax error" in message and re.search(r"\b(from|join)\s+values\b", self._query, re.IGNORECASE):
            return 'VALUES is a word of SQL: write "values" in double quotes, or its other name, vals.'
        if "incomplete input" in message:
            return "The query ends too early."
        return f"SQLite does not take this query: {message.rstrip('.')}."


def _nearest_text(name: str, names: Collection[str]) -> str:
    """The end of a sentence about a name that does not exist."""
    bare = name.rpartition(".")[2].lower()
    near = get_close_matches(bare, names, 3, 0.6) or [each for each in names if bare and bare in each][:3]
    if near:
        return f"; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
    return f"; there are {', '.join(sorted(names))}"


_NO_QUERY: Final = "The query is empty: write select … from …."
_TOO_MUCH: Final = (
    f"The query needs more than {MEMORY >> 30} GiB of memory: ask for fewer rows, or for less in each."
)


def _insert_batch(
    connection: sqlite3.Connection, name: str, columns: Sequence[str], items: list[list[Any]]
) -> None:
    (last,) = connection.execute(f'SELECT coalesce(max(rowid), -1) FROM "{name}"').fetchone()  # noqa: S608
    try:
        _insert(connection, name, columns, items)
    except (UnicodeEncodeError, OverflowError, sqlite3.DataError):
        # Names that are not Unicode, integers of more than 64 bits, texts that are too long.
        connection.execute(f'DELETE FROM "{name}" WHERE rowid > ?', (last,))  # noqa: S608
        _insert(connection, name, columns, [[storable(item) for item in column] for column in items])


def _insert(
    connection: sqlite3.Connection, name: str, columns: Sequence[str], items: list[list[Any]]
) -> None:
    """Insert rows, several per statement, which is three times as fast as one by one."""
    width, names = len(columns), ", ".join(f'"{column}"' for column in columns)
    flat = list(chain.from_iterable(zip(*items, strict=True)))
    row = f"({', '.join('?' * width)})"
    whole = len(flat) - len(flat) % (width * _INSERTED_ROWS)
    for begin, end, rows in ((0, whole, _INSERTED_ROWS), (whole, len(flat), 1)):
        insert = f'INSERT INTO "{name}"({names}) VALUES {", ".join([row] * rows)}'  # noqa: S608 — our names
        size = width * rows
        connection.executemany(insert, (flat[at : at + size] for at in range(begin, end, size)))


def _first_word(query: str) -> str:
    """The first word of a query, after comments.

    >>> _first_word("-- why\\n/* how */ Select 1")
    'select'
    """
    text = query.lstrip()
    while text.startswith(("--", "/*")):
        _, _, rest = text[2:].partition("\n" if text[0] == "-" else "*/")
        text = rest.lstrip()
    word = re.match(r"\w*", text)
    return word[0].lower() if word else ""


@contextlib.contextmanager
def _memory_limit(most: int) -> Iterator[None]:
    """Limit this process to ``most`` bytes more than it has now, if the system supports that."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        soft = used + most if before[1] < 0 else min(used + most, before[1])
        if before[0] >= 0:
            soft = min(soft, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    except (ImportError, OSError, ValueError):  # no such limit on this system; the time limit remains
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
