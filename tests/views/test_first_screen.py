"""The first screen of a long run is there before the last line is made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from sightline.analysis.fold import Variation
from sightline.views import code, log
from sightline.views.code_fold import OpWindow
from sightline.views.rendering import Line
from tests.growth import calls_of
from tests.views.long_run import long_run

OPS = 8_000
SCREEN = 40


def screen(lines: Iterator[Line]) -> list[str]:
    return [line.text for line in islice(lines, SCREEN)]


def test_the_code_of_a_long_run_reads_the_ops_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = OpWindow.__init__

    def counted(self: Any, data: Any, ids: Any) -> None:
        seen.append(len(ids))
        read(self, data, ids)

    monkeypatch.setattr(OpWindow, "__init__", counted)
    assert len(screen(code.code_lines(long_run(OPS).index, fold=False))) == SCREEN
    assert sum(seen) < OPS / 10


def test_folded_code_looks_once_at_ops_that_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    op_key = Variation.op_key

    def counted(self: Any, op: int) -> Any:
        seen.append(op)
        return op_key(self, op)

    monkeypatch.setattr(Variation, "op_key", counted)
    assert "×4000" in str(long_run(OPS).code())
    assert len(seen) == 2 * 7  # ops in a batch, sizes of batches


def test_the_source_of_a_longer_run_is_no_more_work() -> None:
    short, long = long_run(OPS // 4), long_run(OPS)
    assert "×4000" in str(long.source())
    assert calls_of(lambda: str(long.source())) < 1.1 * calls_of(lambda: str(short.source()))


@pytest.mark.parametrize("fold", [False, True])
def test_the_log_of_a_long_run_draws_the_blocks_it_shows(monkeypatch: pytest.MonkeyPatch, fold: bool) -> None:
    drawn = []
    lines = log._LogBuilder.lines

    def counted(self: Any, block: Any, style: Any) -> Any:
        drawn.append(block)
        return lines(self, block, style)

    monkeypatch.setattr(log._LogBuilder, "lines", counted)
    story = log.log_lines(long_run(OPS).index, fold=fold, inside=True)
    assert len(screen(story)) == SCREEN
    assert len(drawn) <= SCREEN
    assert next(story, None) is not None  # and it goes on


def test_a_folded_log_of_a_long_run_is_short() -> None:
    text = str(long_run(OPS).log())
    assert len(text.splitlines()) < 2000
