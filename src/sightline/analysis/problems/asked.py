"""Problems of the recording itself: what was asked for and is not in it."""

from __future__ import annotations

from collections.abc import Iterator

from sightline.analysis.asked import unmatched
from sightline.analysis.problems.facts import Facts
from sightline.analysis.problems.problem import Finding, Severity, check


@check(
    "unmatched",
    Severity.WARNING,
    "What it asks for is not in this recording: correct the glob, and record again.",
)
def matched_nothing(facts: Facts) -> Iterator[Finding]:
    """A glob of ``Capture``, ``Stats`` or ``Check`` that means no module, op or name of the run."""
    for each in unmatched(facts.data):
        yield Finding(str(each))
