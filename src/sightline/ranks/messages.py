"""Sends and receives that do not match: a rank waits for a message that another never sends, or never takes.

Messages from one rank to another with one tag arrive in order, so that the nth receive with a tag belongs to
the nth send with it. Only ranks that were stuck when their recording ended are examined: a message may be on
its way. Ranks that receive from any other are not examined, either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.notation import bytes_text
from sightline.ranks.collectives import messages_of, tag_text
from sightline.ranks.merge import Run
from sightline.ranks.rank_ends import whereabouts
from sightline.ranks.record import GroupCalls

_WHY = "Every send needs a receive of the same size and tag on the other rank, in the same order."


def message_problems(run: Run) -> list[Problem]:
    """The first message of each two ranks that only one of them knows of, or that has two sizes."""
    problems: list[Problem] = []
    for pair in _pairs(run):
        if not any(_is_stuck(run, rank) for rank in (pair.sender, pair.receiver)):
            continue
        tags = sorted({*pair.sent, *pair.taken})
        sizes = next(filter(None, (_other_size(run, pair, tag) for tag in tags)), None)
        untaken = [tag for tag in tags if _end(pair.sent.get(tag)) > _end(pair.taken.get(tag))]
        unsent = [tag for tag in tags if _end(pair.taken.get(tag)) > _end(pair.sent.get(tag))]
        if sizes is not None:
            problems.append(sizes)
        elif unsent and untaken and _is_stuck(run, pair.receiver):
            problems += _other_tag(run, pair, untaken[0], unsent[0])
        else:
            for tag in unsent[:1]:
                problems += _unmatched(run, pair, tag, is_unsent=True)
            for tag in untaken[:1]:
                problems += _unmatched(run, pair, tag, is_unsent=False)
    return problems


@dataclass(frozen=True)
class _Pair:
    """The messages that one rank sends to another, and those that the other receives from it, by tag."""

    sender: int
    receiver: int
    sent: dict[int, GroupCalls] = field(default_factory=dict)
    taken: dict[int, GroupCalls] = field(default_factory=dict)


def _pairs(run: Run) -> Iterator[_Pair]:
    pairs: dict[tuple[int, int, str], _Pair] = {}
    takes_any: set[tuple[int, str]] = set()
    for rank, record in run.records.items():
        for name, calls in record.groups.items():
            messages = messages_of(name)
            if messages is None:
                continue
            group, kind, peer, tag = messages
            members = ((record.info.get("groups") or {}).get(group) or {}).get("ranks") or ()
            ranks = [each for each in members if type(each) is int]
            if peer < 0:
                takes_any.add((rank, group))
            elif peer < len(ranks):
                ends = (rank, ranks[peer]) if kind == "send" else (ranks[peer], rank)
                pair = pairs.setdefault((*ends, group), _Pair(*ends))
                (pair.sent if kind == "send" else pair.taken)[tag] = calls
    for (sender, receiver, group), pair in pairs.items():
        if {sender, receiver} <= run.records.keys() and (receiver, group) not in takes_any:
            yield pair


def _is_stuck(run: Run, rank: int) -> bool:
    return run.records[rank].failed or run.records[rank].unfinished


def _end(calls: GroupCalls | None) -> int:
    """How many messages of a tag there were."""
    return 0 if calls is None else calls.first + len(calls)


def _line(run: Run, calls: GroupCalls | None, number: int) -> str | None:
    """The line of the message of a number; None where it is not among the last ops that were kept."""
    at = -1 if calls is None else number - calls.first
    return None if calls is None or not 0 <= at < len(calls) else str(run.names.places.all[calls.place[at]])


def _other_size(run: Run, pair: _Pair, tag: int) -> Problem | None:
    """The first message that is sent with one size and received with another."""
    sent, taken = pair.sent.get(tag), pair.taken.get(tag)
    if sent is None or taken is None:
        return None
    first, end = max(sent.first, taken.first), min(_end(sent), _end(taken))
    if first >= end:
        return None
    sizes, expected = (calls.bytes[first - calls.first : end - calls.first] for calls in (sent, taken))
    differs = np.flatnonzero(sizes != expected)
    if not len(differs):
        return None
    at = int(differs[0])
    title = (
        f"Rank {pair.sender} sends {bytes_text(int(sizes[at]))}{tag_text(tag)} to rank {pair.receiver}, "
        f"which receives {bytes_text(int(expected[at]))} (message #{first + at})"
    )
    here, there = (_line(run, calls, first + at) or "" for calls in (sent, taken))
    return _problem("desync", title, here, f"rank {pair.receiver}: {there}")


def _other_tag(run: Run, pair: _Pair, sent_tag: int, taken_tag: int) -> Iterator[Problem]:
    """A rank waits for a message with one tag, and is sent one with another."""
    sent, taken = pair.sent[sent_tag], pair.taken[taken_tag]
    here = _line(run, taken, _end(pair.sent.get(taken_tag)))
    there = _line(run, sent, _end(pair.taken.get(sent_tag)))
    if here is not None and there is not None:
        title = (
            f"Rank {pair.receiver} waits for a message with tag {taken_tag} from rank {pair.sender}, which "
            f"sends one with tag {sent_tag}"
        )
        yield _problem("hang", title, here, f"rank {pair.sender}: {there}")


def _unmatched(run: Run, pair: _Pair, tag: int, *, is_unsent: bool) -> Iterator[Problem]:
    """A rank waits in a send or a receive that the other one never comes to."""
    waits, absent = (pair.receiver, pair.sender) if is_unsent else (pair.sender, pair.receiver)
    calls, theirs = (pair.taken, pair.sent) if is_unsent else (pair.sent, pair.taken)
    number = _end(theirs.get(tag))
    line = _line(run, calls[tag], number)
    if line is None or not _is_stuck(run, waits):
        return
    call = f"receive #{number}{tag_text(tag)} from" if is_unsent else f"send #{number}{tag_text(tag)} to"
    other = run.records[absent]
    never = ("never sends it", "never receives it", "has not sent it", "has not received it")
    how = never[2 * other.running + (not is_unsent)]
    yield _problem(
        "hang", f"Rank {waits} waits in {call} rank {absent}, which {how}", line,
        f"rank {absent}: {whereabouts(run, other)}",
        Confidence.LIKELY if other.unfinished and not other.running else Confidence.CERTAIN,
        Severity.NOTE if other.running else Severity.ERROR,
    )  # fmt: skip


def _problem(
    kind: str, title: str, place: str, detail: str, confidence: Confidence = Confidence.LIKELY,
    severity: Severity = Severity.ERROR,
) -> Problem:  # fmt: skip
    return Problem(
        kind=kind, severity=severity, title=title, why=_WHY, module="", modules=(), place=place,
        detail=detail, confidence=confidence,
    )  # fmt: skip
