"""A strict reader of trace events: the rules of the format for each phase type, and that slices nest."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

WEEK = 1 << 49  #: nanoseconds; after that, a float is too coarse to be cut
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
FIELDS = {
    "X": {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"},
    "M": {"ph", "pid", "tid", "name", "args"},
    "C": {"ph", "pid", "tid", "ts", "name", "args"},
    "s": {"ph", "pid", "tid", "ts", "id", "name", "cat"},
    "f": {"ph", "pid", "tid", "ts", "id", "name", "cat", "bp"},
    "i": {"ph", "pid", "tid", "ts", "s", "name", "cat", "args"},
}


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file, each of them checked."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    whole = json.loads(text, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_no_twice)
    assert list(whole) == ["traceEvents", "displayTimeUnit", "otherData"]
    assert whole["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(said, str) for said in whole["otherData"].values())
    events: list[dict[str, Any]] = whole["traceEvents"]
    for event in events:
        check(event)
    check_names(events)
    check_nesting(events)
    check_counters(events)
    check_arrows(events)
    return events


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key twice in {pairs}"
    for text in [*found, *(item for item in found.values() if isinstance(item, str))]:
        text.encode()  # no half of a surrogate pair
    return found


def check(event: dict[str, Any]) -> None:
    assert set(event) == FIELDS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert event["ph"] in "sf" or isinstance(event["args"], dict)
    for key in ("pid", "tid"):
        assert type(event[key]) is int
        assert 0 <= event[key] < 1 << 32
    for key in ("ts", "dur"):
        if key in event:
            assert isinstance(event[key], Decimal)
            assert event[key] >= 0
            cut = int(float(event[key]) * 1000)
            assert cut == ns(event[key]) or cut > WEEK  # whole nanoseconds, for those who cut too
    if event["ph"] == "M":
        (key,) = event["args"]
        assert key == METADATA[event["name"]]
        assert type(event["args"][key]) is (int if key == "sort_index" else str)
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")
    if event["ph"] in "Xisf":
        assert isinstance(event["cat"], str)
        assert event["cat"]


def ns(microseconds: Decimal) -> int:
    """A time as those read it who round."""
    return round(float(microseconds) * 1000)


def check_names(events: list[dict[str, Any]]) -> None:
    named = {event["tid"] for event in events if event["name"] == "thread_name" and event["ph"] == "M"}
    assert {event["tid"] for event in events if event["ph"] == "X"} == named
    assert sum(event["name"] == "process_name" and event["ph"] == "M" for event in events) == 1
    assert len({event["pid"] for event in events}) == 1


def check_nesting(events: list[dict[str, Any]]) -> None:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = ns(event["ts"])
            tracks[event["pid"], event["tid"]].append((begin, begin + ns(event["dur"]), event["name"]))
    for slices in tracks.values():
        inside: list[Any] = []
        for begin, end, name in sorted(
            slices, key=lambda one: one[0]
        ):  # stable, as the readers of the format do
            while inside and inside[-1][0] <= begin:
                inside.pop()
            assert not inside or end <= inside[-1][0], f"{name} sticks out of {inside[-1][1]}"
            inside.append((end, name))


def check_counters(events: list[dict[str, Any]]) -> None:
    last: dict[str, Decimal] = {}
    for event in events:
        if event["ph"] == "C":
            assert event["ts"] > last.get(event["name"], Decimal(-1))
            last[event["name"]] = event["ts"]
            args = dict(event["args"])
            assert all(type(number) is int and number >= 0 for number in args.values())
            assert args.pop("total") == sum(args.values())


def check_arrows(events: list[dict[str, Any]]) -> None:
    """Each arrow begins and ends once, in a slice that is open at that time."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    ends = [[event for event in events if event["ph"] == kind] for kind in "sf"]
    assert len({event["id"] for event in ends[0]}) == len(ends[0])
    assert {event["id"] for event in ends[0]} == {event["id"] for event in ends[1]}
    for event in (*ends[0], *ends[1]):
        at = ns(event["ts"])
        assert any(begin <= at < max(end, begin + 1) for begin, end in tracks[event["tid"]]), event


def slices(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    """The slices with all of these categories."""
    return [
        event for event in events if event["ph"] == "X" and set(categories) <= set(event["cat"].split(","))
    ]
