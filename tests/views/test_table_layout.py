"""Views on terminals of all widths, and on streams that cannot hold their signs."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sightline as sl
from sightline.views.rendering import Column, Grid, Printer, Span, View, grid, line, width
from sightline.views.table_layout import fit_blocks, narrow_columns, wrap_line


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection_of_everything = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection_of_everything(x).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / 0.0
        weights = torch.softmax(scores - scores.amax(-1, keepdim=True), dim=-1)
        made: Tensor = weights @ value
        return made


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.never = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture(scope="module")
def t() -> sl.Trace:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LanguageModel()
        with sl.trace(model, stats=True) as t:
            for _ in range(2):
                model(torch.arange(12).reshape(2, 6)).sum().backward()
    return t


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


VIEWS: dict[str, Any] = {
    "overview": lambda t: t._overview(),
    "summary": lambda t: t.summary(),
    "problems": lambda t: t.problems(),
    "nonfinite": lambda t: t.nonfinite(),
    "lineage": lambda t: t.lineage("LanguageModel", depth=20),
    "source": lambda t: t.source(),
    "order": lambda t: t.call_order(),
}


@pytest.mark.parametrize("columns", [60, 72, 80, 99, 100, 140])
@pytest.mark.parametrize("name", VIEWS)
def test_no_line_is_wider_than_the_terminal(
    t: sl.Trace, name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    VIEWS[name](t).print(file=out, color=False)
    lines = out.getvalue().splitlines()
    assert len(lines) > 2
    assert max(map(width, lines)) <= columns


@pytest.mark.parametrize("name", VIEWS)
def test_the_text_does_not_depend_on_the_terminal(
    t: sl.Trace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = str(VIEWS[name](t))
    monkeypatch.setenv("COLUMNS", "60")
    assert str(VIEWS[name](t)) == before
    file = io.StringIO()  # a file, not a terminal
    VIEWS[name](t).print(file=file)
    assert file.getvalue() == before + "\n"


def test_a_width_that_was_asked_for_is_the_most(t: sl.Trace) -> None:
    wide = t.summary(width=None)
    assert wide.within(60) == wide.blocks
    narrow = t.summary(width=70)
    assert list(narrow.within(100)) == list(narrow.blocks)


def test_source_lines_are_never_broken(t: sl.Trace) -> None:
    view = t.code(op="_softmax")
    assert list(view.within(60)) == list(view.blocks)
    assert max(map(width, str(view).splitlines())) > 60


def test_prose_is_wrapped_between_words_and_keeps_its_styles() -> None:
    prose = line(("title  ", "dim"), "some words and ", ("others in colour", "warn"), hang=7)
    made = wrap_line(prose, 22)
    assert [each.text for each in made] == ["title  some words and", "       others in", "       colour"]
    assert [span.style for span in made[1].spans] == ["warn", "warn"]
    assert wrap_line(prose, 80) == [prose]
    assert [each.text for each in wrap_line(line("a" * 90, hang=2), 60)] == ["a" * 59 + "…"]


def test_a_table_gives_up_spare_columns_before_it_cuts_texts() -> None:
    columns = (Column("name", least=20), Column("note", least=10, spare=1), Column("time", right=True))
    table = grid(columns, [["n" * 40, "o" * 40, "1.23 ms"]])
    (made,) = fit_blocks([table], 80)
    assert isinstance(made, Grid)
    assert [column.title for column in made.columns] == ["name", "note", "time"]
    assert narrow_columns([40, 40, 7], columns, 41) == [20, 10, 7]
    assert narrow_columns([40, 40, 7], columns, 38) == [29, -1, 7]
    assert narrow_columns([40, 40, 7], columns, 20) == [11, -1, 7]


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("ascii", "| v 12 us ---- ## x3 ?\n"), ("latin-1", "| v 12 µs ---- ## ×3 ?\n"), ("utf-8", None)],
)
@pytest.mark.parametrize("color", [False, True])
def test_signs_that_a_stream_cannot_hold(encoding: str, expected: str | None, color: bool) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    text = "│ ⬇️ 12 µs ──── ▇▇ ×3 名"
    View((line(text),)).print(color, out)
    out.flush()
    assert raw.getvalue().decode(encoding) == (expected or f"{text}\n")


def test_an_encoding_may_be_given_or_be_unknown() -> None:
    out = io.StringIO()
    Printer(out, False, "ascii").write(line(Span("├ a")))
    Printer(out, False, "no-such-encoding").write(line(Span("├ b")))
    Printer(out, False).write(line(Span("├ c")))
    assert out.getvalue() == "+ a\n+ b\n├ c\n"


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert Printer(io.StringIO()).room is None
    assert Printer(Terminal()).room == 77
