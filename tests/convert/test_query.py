"""A query reads the columns it mentions, and nothing else happens."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.api import Trace
from sightline.convert import query as module
from sightline.convert.query import TABLES_BY_NAME, Query
from sightline.convert.tables import TABLES
from sightline.data.trace_data import TensorMeta
from sightline.errors import UsageError
from tests.builders import make_trace
from tests.store.bundles import ZOO

TRACE = make_trace()
NOT_ALLOWED = "is not allowed here: a recording is read, with one SELECT, and never changed."


def answer(query: str, trace: Trace = TRACE, **options: Any) -> list[tuple[Any, ...]]:
    with Query(trace.index, query, **options) as desk:
        return list(desk.rows)


def refusal(query: str, trace: Trace = TRACE, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        answer(query, trace, **options)
    return str(caught.value)


def test_a_query_is_answered() -> None:
    counted = answer("select phase, count(*) from ops group by phase order by phase")
    phases = [op.phase for op in TRACE.ops]
    assert counted == [(phase, phases.count(phase)) for phase in sorted(set(phases))]


def test_the_names_of_columns_are_distinct() -> None:
    with Query(TRACE.index, "select id, id, name as id from ops") as desk:
        assert list(desk.names) == ["id", "id_2", "id_3"]
        assert next(desk.rows) == (0, 0, "F.embedding")


@pytest.mark.parametrize("name", TABLES_BY_NAME)
def test_every_table_can_be_read_whole(name: str) -> None:
    for trace in (make() for make in ZOO.values()):
        with Query(trace.index, f'select * from "{name}"') as desk:
            assert list(desk.names) == [column.name for column in TABLES_BY_NAME[name].columns]
            assert len(list(desk.rows)) == answer(f'select count(*) from "{name}"', trace)[0][0]


def test_joins_subqueries_windows_and_json_work() -> None:
    readers = answer(
        "select o.name, json_extract(v.shape, '$[0]') from vals v join inputs i on i.value = v.id "
        "join ops o on o.id = i.op where v.name = 'embed.weight' and o.level = 'aten'"
    )
    assert readers == [("embedding", 16), ("_foreach_add_", 16)]
    assert answer("select value from json_each('[1, 2]')") == [(1,), (2,)]
    assert answer(
        "with recursive c(x) as (select 1 union all select x + 1 from c where x < 4) select sum(x) from c"
    ) == [(10,)]
    assert answer(
        "select max(row_number) from (select row_number() over (order by id) row_number from calls)"
    ) == [(len(TRACE.module_calls),)]


def test_only_columns_in_the_query_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[tuple[str, Sequence[str]]] = []
    really = module._insert_batch

    def seen(
        connection: sqlite3.Connection, name: str, columns: Sequence[str], items: list[list[Any]]
    ) -> None:
        put.append((name, columns))
        really(connection, name, columns, items)

    monkeypatch.setattr(module, "_insert_batch", seen)
    answer("select name from ops where duration_ns > 5 order by start_ns")
    answer("select count(*) from steps")  # there are none
    answer("select count(*) from frames")
    assert put == [("ops", ["name", "start_ns", "duration_ns"]), ("frames", ["id"])]


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("attach 'x.db' as x", "ATTACH"),
        ("detach main", "DETACH"),
        ("pragma table_info(ops)", "PRAGMA"),
        ("pragma writable_schema = 1", "PRAGMA"),
        ("insert into ops(id) values(99)", "INSERT"),
        ("replace into ops(id) values(1)", "REPLACE"),
        ("with a as (select 1) insert into ops(id) select * from a", "INSERT"),
        ("update ops set name = 'x'", "UPDATE"),
        ("delete from ops", "DELETE"),
        ("create table x(a)", "CREATE"),
        ("create temp table x as select 1", "CREATE"),
        ("create view x as select 1", "CREATE"),
        ("create trigger x after insert on ops begin select 1; end", "CREATE"),
        ("create virtual table x using fts5(a)", "CREATE"),
        ("drop table ops", "DROP"),
        ("alter table ops rename to x", "ALTER"),
        ("vacuum", "VACUUM"),
        ("vacuum into 'x.db'", "VACUUM"),
        ("analyze", "ANALYZE"),
        ("begin", "BEGIN"),
        ("savepoint x", "SAVEPOINT"),
        ("explain delete from ops", "DELETE"),
        ("select load_extension('x')", "load_extension()"),
    ],
)
def test_anything_but_reading_is_refused(query: str, named: str) -> None:
    assert refusal(query) == f"{named} {NOT_ALLOWED}"
    assert refusal(f"-- first\n  {query.upper()}") in (
        f"{named} {NOT_ALLOWED}",
        f"{named.upper()} {NOT_ALLOWED}",
    )


def test_pragmas_by_the_back_door_are_refused() -> None:
    assert refusal("select * from pragma_table_info('ops')").endswith(NOT_ALLOWED)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select nme from ops", "There is no column 'nme'; the nearest is name."),
        ("select o.durration from ops o", "There is no column 'o.durration'; the nearest is duration_ns."),
        ("select q from info", "There is no column 'q'; there are key, value."),
        ("select * from op", "There is no table 'op'; the nearest is ops."),
        ("select * from values",
         'VALUES is a word of SQL: write "values" in double quotes, or its other name, vals.'),
        ("select 1; select 2", "Ask one query at a time: there is more after the first one."),
        ("select 1; drop table ops", "Ask one query at a time: there is more after the first one."),
        ("select", "The query ends too early."),
        ("selec 1", 'SQLite does not take this query: near "selec": syntax error.'),
        ("select nosuch(1)", "SQLite does not take this query: no such function: nosuch."),
        ("", "The query is empty: write select … from …."),
        ("-- nothing", "The query ends too early."),
        ("select randomblob(1000000000)", "SQLite does not take this query: string or blob too big."),
        ("select '" + "x" * 100_000 + "'", "A query may have 100,000 characters; this one has 100,009."),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(query: str, said: str) -> None:
    assert refusal(query) == said


def test_a_query_without_end_is_stopped() -> None:
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
    assert (
        refusal(endless, seconds=0.2)
        == "The query took longer than 0.2 s and was stopped; --timeout gives it more."
    )
    rows = "with recursive c(x) as (select 1 union all select x + 1 from c) select x from c"
    assert "took longer" in refusal(rows, seconds=0.2)


def _doubling(times: int) -> str:
    """A query whose plan is twice as large with each of its parts."""
    parts = (
        f"a{at} as (select x from a{at - 1} union all select x from a{at - 1})" for at in range(1, times)
    )
    return f"with a0 as (select 1 x union all select 2), {', '.join(parts)} select count(*) from a{times - 1}"


BLOBS = "select randomblob(3000000) union all select randomblob(3000000) from c"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is held to no amount of memory")
@pytest.mark.parametrize(
    "query", [f"with recursive c(x) as ({BLOBS}) select x from c order by x", _doubling(40)]
)
def test_a_query_cannot_take_all_memory(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY", 200 << 20)
    before = _limit()
    assert (
        refusal(query, seconds=60)
        == "The query needs more than 1 GiB of memory: ask for fewer rows, or for less in each."
    )
    assert _limit() == before


def _limit() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)


def test_long_texts_of_functions_stay_small() -> None:
    assert answer("select printf('%.*c', 50000000, 'x')") == [(None,)]
    assert "string or blob too big" in refusal("select group_concat(hex(zeroblob(1000000))) from ops")


def test_strings_are_data() -> None:
    hostile = ZOO["hostile"]()
    assert answer("select name from ops order by id", hostile) == [(op.name,) for op in hostile.ops]
    found = answer("select name from steps", ZOO["measured"]())
    assert found[0] == ("step\0'\"; DROP TABLE ops; --",)


def test_names_that_are_no_unicode_and_numbers_beyond_64_bits_are_kept_as_well_as_can_be() -> None:
    data = make_trace(1).data
    huge = TensorMeta((1 << 40, 1 << 40), None, "float32", "cpu")
    names = list(data.names)
    names[data.ops.name[0]] = "a\ud800b"
    trace = Trace(replace(data, names=names, metas=[huge, *data.metas[1:]]))
    assert answer("select count(*), count(distinct id) from ops", trace) == [(len(trace.ops),) * 2]
    assert answer("select id from ops where name = 'a?b'", trace) == [(0,)]
    assert answer("select max(numel) from vals", trace) == [(float(1 << 80),)]
    assert len(answer('select * from inputs, "values" where "values".id = value', trace)) == len(
        data.ops.inputs
    )


def test_text_that_sql_makes_of_bytes_is_shown() -> None:
    assert answer("select cast(x'ff41' as text)") == [("\ufffdA",)]


def test_progress_is_told_row_by_row() -> None:
    told: list[tuple[int, int]] = []
    answer("select name from ops, frames", progress=lambda done, total: told.append((done, total)))
    count = len(TRACE.ops) + len(TRACE.frames)
    assert told[-1] == (count, count)


WORDS = st.sampled_from(
    """select * from ops values vals where id name = ( ) , ; ' " -- /* */ 1 'x' null and or not in union all
    group by order limit count(*) with recursive as c join on like glob || + - insert into delete update set
    create table temp drop attach pragma table_info begin commit vacuum explain query plan exists case when
    then end cast text blob x'00' ? :a $b json_each pragma_table_list sqlite_master load_extension""".split()
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(WORDS, max_size=14).map(" ".join)
    | st.text(max_size=30)
    | st.lists(WORDS, max_size=8).map(lambda words: "select " + " ".join(words))
)
def test_any_text_is_answered_or_refused_in_one_sentence(text: str) -> None:
    threads = threading.active_count()
    said: list[str] = []
    try:
        with Query(TRACE.index, text, seconds=1) as desk:
            for _, row in zip(range(100), desk.rows, strict=False):
                assert len(row) == len(desk.names)
    except UsageError as error:
        said.append(str(error))
    assert "" not in said
    assert threading.active_count() == threads
    assert answer("select count(*) from ops") == [(len(TRACE.ops),)]


def test_the_recording_is_as_it_was() -> None:
    before = TRACE.data.ops.name.copy()
    refusal("update ops set name = 'x'")
    assert np.array_equal(TRACE.data.ops.name, before)
    assert set(TABLES_BY_NAME) >= set(TABLES)
