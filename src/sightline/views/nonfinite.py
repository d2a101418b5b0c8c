"""``t.nonfinite()``: the op that made the first NaN or infinity, where it came from and how far it went."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from sightline.analysis.nonfinite import (
    Finding,
    brought,
    call_text,
    findings,
    first_call,
    measured_all,
    reached_from,
)
from sightline.analysis.unmatched import measured_nothing
from sightline.notation import value_text
from sightline.options import Globs
from sightline.trace.index import Index, Op, Value
from sightline.views.lineage import lineage_lines
from sightline.views.outline import Line, View, cut, line

if TYPE_CHECKING:
    from sightline.api import Trace

_WIDTH: Final = 100
_LATER: Final = 6  #: as many later ones are listed
_FOLDERS: Final = re.compile(r"\b(?:site|dist)-packages/(?:[^\s:]*/)?")
_BACKWARD: Final = ("Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")


def nonfinite(trace: Trace, *, allow: Globs = ()) -> View:
    """Where the first NaN or infinity was made; see `Trace.nonfinite`."""
    index = trace.index
    globs = (allow,) if isinstance(allow, str) else tuple(allow or ())
    count = len(index.raw.stats)
    if not count and index.raw.info.get("check") and index.raw.info.get("checked") == 0:
        return View((line("nothing was checked: no op with a floating result was recorded"),))
    if not count and index.raw.info.get("check"):
        return View((line("no NaN or Inf in the results of the ops that were checked"),))
    if not count:
        return View((line(f"Nothing was measured: {measured_nothing(index.raw)}."),))
    found = findings(index, globs)
    given = [line((str(each), "error"), hang=2) for each in brought(index)]
    if not found:
        return View((*given, _nothing(index, bool(given))))
    behind = reached_from(index, found[0].value.id)
    others = [each for each in found[1:] if not _is_behind(each, found[0], behind)]
    later = (*_out_of(found, behind), *_later(others))
    spread = line(_spread(index, found[0], behind), hang=2)

    def made(room: int) -> list[Line]:
        return [*given, *_first(found[0], room), *later, spread]

    return View(tuple(made(_WIDTH)), fit=made)


def _nothing(index: Index, given: bool) -> Line:
    """No op is to blame: because all is well, or because what ran was not recorded."""
    hidden = first_call(index)
    if hidden is not None:
        return line((call_text(*hidden), "error"), '; ops="both" records the op that made it', hang=2)
    stats = index.raw.stats
    count = f"{len(stats):,} measured value{'' if len(stats) == 1 else 's'}"
    odd = stats.value[(stats.nans > 0) | (stats.infs > 0)].tolist()
    if given:
        return line(f"no op made a NaN or Inf in {count}")
    if not odd:
        return line(f"no NaN or Inf in {count}")
    maker = index.values[odd[0]].producer
    first = f", the first from {maker.name}" if maker is not None else ""
    return line(f"no NaN or Inf in {count} but {len(odd):,} given, meant or allowed{first}")


def _first(finding: Finding, room: int) -> Iterator[Line]:
    yield line((finding.headline(), "error"), hang=2)
    for given in finding.inputs:
        yield line(str(given), prefix="  ", hang=4)
    if finding.hint:
        yield line((finding.hint, "dim"), prefix="  ", hang=4)
    yield line()
    yield from lineage_lines(finding.lineage, room)
    yield line()


def _is_behind(finding: Finding, first: Finding, behind: set[int]) -> bool:
    """Whether what an op made was made of what the first one made, and not of something finite since."""
    given = [value for value in finding.op.inputs if value.stats is not None and not value.stats.finite]
    return any(value.id == first.value.id or value.id in behind for value in given)


def _out_of(found: Sequence[Finding], behind: set[int]) -> Iterator[Line]:
    """Where the first infinity became a NaN."""
    made = [each for each in found[1:] if _is_behind(each, found[0], behind)]
    if made:
        yield line(("the first NaN that came of it:", "title"))
        yield line(cut(_shortened(made[0]), _WIDTH - 2), prefix="  ", hang=4)
        yield line()


def _shortened(finding: Finding) -> str:
    """The sentence, with the file by its name alone: a path of a package would fill the line."""
    return _FOLDERS.sub("", finding.headline())


def _later(found: Sequence[Finding]) -> Iterator[Line]:
    if not found:
        return
    many = "one more op" if len(found) == 1 else f"{len(found):,} more ops"
    yield line((f"{many} made one later, not out of this one:", "title"))
    told = Counter(map(_shortened, found))  # in a loop they are alike
    for text, times in list(told.items())[:_LATER]:
        mark = f" ×{times:,}" if times > 1 else ""
        yield line(cut(text, _WIDTH - 2 - len(mark)), (mark, "number"), prefix="  ", hang=4)
    if len(told) > _LATER:
        yield line((f"… {sum(list(told.values())[_LATER:]):,} more", "dim"), prefix="  ")
    yield line()


def _spread(index: Index, finding: Finding, behind: set[int]) -> str:
    """How many of the values measured later have it from there, and what matters most among them."""
    stats, values = index.raw.stats, index.raw.values
    bad = stats.nans > 0 if finding.nans else (stats.nans > 0) | (stats.infs > 0)
    later = values.producer[stats.value] > finding.op.id
    many = int(later.sum())
    if not many:
        return "no value was measured after it" if measured_all(index) else "it went no further"
    reached = [value for value in stats.value[bad & later].tolist() if value in behind]
    if not reached:
        return f"it went no further: none of the {many:,} values measured later has it from there"
    whole = f" of {many:,}" if measured_all(index) else ""
    told = f"then in {len(reached):,}{whole} later value{'s' if max(many, len(reached)) > 1 else ''}"
    gradients = sum(index.values[value].name.endswith(".grad") for value in reached)
    ends = [f"{gradients:,} gradient{'s' if gradients > 1 else ''}"] if gradients else []
    loss = _loss(index)
    if loss is not None and loss.id in reached:
        ends.insert(0, "the loss")
    if not ends:
        ends = [_told(index.values[max(reached, key=lambda value: int(values.producer[value]))])]
    return f"{told}, up to {' and '.join(ends)}"


def _loss(index: Index) -> Value | None:
    """What ``backward`` was called on."""
    ops = index.raw.ops
    names = [id for id, name in enumerate(index.raw.names) if name in _BACKWARD]
    starts = np.flatnonzero(np.isin(ops.name, names)).tolist()
    if not starts:
        starts = np.flatnonzero((ops.phase == 1) & (np.diff(ops.input_offsets) > 0)).tolist()[:1]
    for start in starts:
        op: Op = index.ops[start]
        if len(op.inputs) and op.inputs[0].meta.numel == 1:
            return op.inputs[0]
    return None


def _told(value: Value) -> str:
    maker = value.producer
    return f"{value_text(value.id)} {value}" + (f" of {maker.name}" if maker is not None else "")
