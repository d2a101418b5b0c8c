"""Sends and receives that do not match: a rank waits for what another never sends, or never takes.

What one rank sends to another arrives in order, so that the nth receive belongs to the nth send. Only ranks
that were stuck when their recording ended are looked at: a message may be on its way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.notation import bytes_text
from sightline.ranks.desync import whereabouts
from sightline.ranks.merge import Run
from sightline.ranks.record import GroupCalls, RankRecord

_WHY = "Every send needs a receive of the same size on the other rank, in the same order."


def message_problems(run: Run) -> list[Problem]:
    """The first message of each two ranks that only one of them knows of, or that has two sizes."""
    return [problem for pair in _pairs(run) for problem in _mismatch(run, *pair)]


def _pairs(run: Run) -> Iterator[tuple[int, int, GroupCalls | None, GroupCalls | None]]:
    """Each sender and receiver, and their calls."""
    found: dict[tuple[int, int, str], None] = {}
    for rank, record in run.records.items():
        for name in record.groups:
            group, _, rest = name.partition(":")
            kind, _, peer = rest.partition(":")
            ranks = _ranks(record, group)
            if kind and peer.isdecimal() and int(peer) < len(ranks):
                other = ranks[int(peer)]
                found[(rank, other, group) if kind == "send" else (other, rank, group)] = None
    for sender, receiver, group in found:
        ranks = _ranks(run.records[sender], group) if sender in run.records else []
        if receiver in run.records and sender in ranks and receiver in ranks:
            sent = run.records[sender].groups.get(f"{group}:send:{ranks.index(receiver)}")
            taken = run.records[receiver].groups.get(f"{group}:recv:{ranks.index(sender)}")
            yield sender, receiver, sent, taken


def _ranks(record: RankRecord, group: str) -> list[int]:
    told = ((record.info.get("groups") or {}).get(group) or {}).get("ranks") or ()
    return [each for each in told if type(each) is int]


def _mismatch(
    run: Run, sender: int, receiver: int, sent: GroupCalls | None, taken: GroupCalls | None
) -> Iterator[Problem]:
    if not any(run.records[rank].failed or run.records[rank].unfinished for rank in (sender, receiver)):
        return
    first = max(0 if calls is None else calls.first for calls in (sent, taken))
    ends = [0 if calls is None else calls.first + len(calls) for calls in (sent, taken)]
    if sent is not None and taken is not None and first < min(ends):
        sizes, expected = (
            calls.bytes[first - calls.first : min(ends) - calls.first] for calls in (sent, taken)
        )
        differs = np.flatnonzero(sizes != expected)
        if len(differs):
            at = int(differs[0])
            title = (
                f"Rank {sender} sends {bytes_text(int(sizes[at]))} to rank {receiver}, which receives "
                f"{bytes_text(int(expected[at]))} (message #{first + at})"
            )
            here, there = (
                run.names.places.all[calls.place[first - calls.first + at]] for calls in (sent, taken)
            )
            yield _problem("desync", title, here, f"rank {receiver}: {there}")
            return
    if ends[0] == ends[1]:
        return
    is_unsent = ends[1] > ends[0]
    waits, absent = (receiver, sender) if is_unsent else (sender, receiver)
    calls = taken if is_unsent else sent
    record = run.records[waits]
    at = min(ends) - (calls.first if calls is not None else 0)
    if calls is None or at < 0 or not (record.failed or record.unfinished):
        return
    what = f"receive #{min(ends)} from rank {absent}" if is_unsent else f"send #{min(ends)} to rank {absent}"
    never = "never sends it" if is_unsent else "never receives it"
    yield _problem(
        "hang", f"Rank {waits} waits in {what}, which {never}", run.names.places.all[calls.place[at]],
        f"rank {absent}: {whereabouts(run, run.records[absent])}",
        Confidence.LIKELY if run.records[absent].unfinished else Confidence.CERTAIN,
    )  # fmt: skip


def _problem(
    kind: str, title: str, place: str, detail: str, confidence: Confidence = Confidence.LIKELY
) -> Problem:
    return Problem(
        kind=kind, severity=Severity.ERROR, title=title, why=_WHY, module="", modules=(), place=place,
        detail=detail, confidence=confidence,
    )  # fmt: skip
