"""``t.nonfinite()``: the op that made the first NaN or infinity, where it came from and how far it went."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sightline.analysis.nonfinite import (
    NonFiniteOp,
    call_text,
    findings,
    first_call,
    measured_all,
    nonfinite_sources,
)
from sightline.analysis.nonfinite_spread import Spread
from sightline.analysis.unmatched_globs import missing_statistics_text
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.hints import Hint
from sightline.notation import value_text
from sightline.options import Globs
from sightline.views.lineage import lineage_lines
from sightline.views.rendering import WIDTH, Line, View, comment_lines, cut, line

if TYPE_CHECKING:
    from sightline.api import Trace

_MAX_LATER: Final = 6  #: how many later ops are listed
_PACKAGE_FOLDERS: Final = re.compile(r"\b(?:site|dist)-packages/(?:[^\s:]*/)?")


def nonfinite(trace: Trace, *, allow: Globs = ()) -> View:
    """Where the first NaN or infinity was made; see `Trace.nonfinite`."""
    shown, beside = _nonfinite(trace, allow), comment_lines([other_threads(trace.index.raw)])
    return View((*shown.blocks, *beside), fit=lambda room: [*shown.within(room), *beside])


def _nonfinite(trace: Trace, allow: Globs) -> View:
    index = trace.index
    globs = (allow,) if isinstance(allow, str) else tuple(allow or ())
    count = len(index.raw.stats)
    if not count and index.raw.info.get("check") and index.raw.info.get("checked") == 0:
        return View((line("nothing was checked: no op with a floating result was recorded"),))
    if not count and index.raw.info.get("check"):
        return View((line("no NaN or Inf in the results of the ops that were checked"),))
    if not count:
        return View((line(f"Nothing was measured: {missing_statistics_text(index.raw)}."),))
    ops = findings(index, globs)
    sources = [line((str(source), "error"), hang=2) for source in nonfinite_sources(index)]
    if not ops:
        return View((*sources, _no_op_line(index, bool(sources))))
    first, spread = ops[0], Spread(index, ops[0])
    consequences = [op for op in ops[1:] if spread.includes(op)]
    others = [op for op in ops[1:] if not spread.includes(op)]
    later = (*_consequence_lines(consequences), *_later_lines(others))
    end = line(_spread_text(index, spread), hang=2)

    def fit(room: int) -> list[Line]:
        return [*sources, *_first_lines(first, room), *later, end]

    return View(tuple(fit(WIDTH)), fit=fit)


def _no_op_line(index: Index, sources: bool) -> Line:
    """No op is to blame: all is finite, or the ops that ran were not recorded."""
    hidden = first_call(index)
    if hidden is not None:
        return line(
            (call_text(*hidden), "error"),
            f"; {Hint.recording('ops', 'both')} records the op that made it",
            hang=2,
        )
    stats = index.raw.stats
    count = f"{len(stats):,} measured value{'' if len(stats) == 1 else 's'}"
    bad = stats.value[(stats.nans > 0) | (stats.infs > 0)].tolist()
    if sources:
        return line(f"no op made a NaN or Inf in {count}")
    if not bad:
        return line(f"no NaN or Inf in {count}")
    producer = index.values[bad[0]].producer
    first = f", the first from {producer.name}" if producer is not None else ""
    return line(f"no NaN or Inf in {count} but {len(bad):,} given, meant or allowed{first}")


def _first_lines(finding: NonFiniteOp, room: int) -> Iterator[Line]:
    yield line((finding.headline(), "error"), hang=2)
    for note in finding.inputs:
        yield line(str(note), prefix="  ", hang=4)
    if finding.hint:
        yield line((finding.hint, "dim"), prefix="  ", hang=4)
    yield line()
    yield from lineage_lines(finding.lineage, room)
    yield line()


def _consequence_lines(consequences: Sequence[NonFiniteOp]) -> Iterator[Line]:
    """Where the first infinity became a NaN."""
    if consequences:
        yield line(("the first NaN that came of it:", "title"))
        yield line(cut(_short_headline(consequences[0]), WIDTH - 2), prefix="  ", hang=4)
        yield line()


def _short_headline(finding: NonFiniteOp) -> str:
    """The headline without the folders of a package, which would fill the line."""
    return _PACKAGE_FOLDERS.sub("", finding.headline())


def _later_lines(others: Sequence[NonFiniteOp]) -> Iterator[Line]:
    if not others:
        return
    many = "one more op" if len(others) == 1 else f"{len(others):,} more ops"
    yield line((f"{many} made one later, not out of this one:", "title"))
    counts = Counter(map(_short_headline, others))  # those of a loop are equal
    for text, times in list(counts.items())[:_MAX_LATER]:
        mark = f" ×{times:,}" if times > 1 else ""
        yield line(cut(text, WIDTH - 2 - len(mark)), (mark, "number"), prefix="  ", hang=4)
    if len(counts) > _MAX_LATER:
        yield line((f"… {sum(list(counts.values())[_MAX_LATER:]):,} more", "dim"), prefix="  ")
    yield line()


def _spread_text(index: Index, spread: Spread) -> str:
    """How many of the values measured later hold it, and the most important of them."""
    later, count, whole = spread.measured_later, len(spread.values), measured_all(index)
    if not later:
        return "no value was measured after it" if whole else "it went no further"
    if not count:
        return f"it went no further: none of the {later:,} values measured later has it from there"
    total = f" of {later:,}" if whole else ""
    text = f"then in {count:,}{total} later value{'s' if max(later, count) > 1 else ''}"
    ends = ["the loss"] if spread.reaches_loss else []
    if spread.gradients:
        ends.append(f"{spread.gradients:,} gradient{'s' if spread.gradients > 1 else ''}")
    if not ends:
        producer = spread.last.producer
        name = f" of {producer.name}" if producer is not None else ""
        ends = [f"{value_text(spread.last.id)} {spread.last}{name}"]
    return f"{text}, up to {' and '.join(ends)}"
