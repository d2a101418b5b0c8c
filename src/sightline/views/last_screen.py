"""The end of ``sightline run``: failures and problems on one screen, and the command to type next.

The most serious and most certain problem comes first. Those that do not fit are counted: ``show --view
problems`` has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from sightline.analysis.problems import FIRST, Problem, find, gap_texts, kinds_text
from sightline.data.index import Index
from sightline.views.problems import MARGIN, SURE, indented, severity_counts, severity_span, wrap_text
from sightline.views.rendering import WIDTH, Block, Line, Span, View, cut, height, line, width
from sightline.views.steps import LOSS

SCREEN: Final = 25  #: lines, with those about the recording's file
_MAX_TITLE: Final = 3  #: lines of a title; one whose names are short may have more
_MESSAGE: Final = 110  #: characters of the message of an exception, which was printed above
_MAX_ADVICE: Final = 3  #: lines of advice
_ENDS: Final = (4, 3, 2)  #: how many parts of a name are left, the more the better
#: A dotted name: of a parameter, a module, an op; not a file with its line, which ends with a colon.
_NAME: Final = re.compile(r"(?:…\.)?\b[A-Za-z_]\w*(?:\.\w+)+\b(?![:/])")
_SENTENCE: Final = re.compile(r"(?<=[.;]) ")


def last_screen(index: Index, where: str, room: int = SCREEN, *, noted: bool = False) -> View:
    """The problems of a run in at most ``room`` lines; ``where`` is the recording as a command takes it.

    ``noted`` says that the exception which ended the run was printed above, with its note.
    """
    problems = find(index)
    if noted:  # without the text of the note
        why = "The note above says why. Nothing after it was looked at."
        problems = [
            replace(each, detail="", why=why) if each.kind == FIRST and each.detail else each
            for each in problems
        ]

    def fit(columns: int) -> list[Line]:
        columns = min(columns, WIDTH)
        if problems:
            return _screen(index, problems, where, room, columns)
        searched = wrap_text(f"looked for {kinds_text()}", columns, "  ")
        return [
            line(("problems: ", "dim"), ("none", "title"), f" found in {len(index.ops):,} ops"),
            *(line((text, "dim")) for text in searched),
            *_unchecked(index, 6, columns),
        ]

    return View(tuple(fit(WIDTH)), fit=fit)


def _screen(index: Index, problems: list[Problem], where: str, room: int, columns: int) -> list[Line]:
    """As many problems as fit, with the number of the others; the first one always."""
    counts = ", ".join(text for _, text in severity_counts(problems))
    blocks: list[Line] = [line(("problems: ", "dim"), (counts, "title"))]
    left = room - 2
    shown = 0
    for each in problems:
        lines = list(_block(each, columns))
        rest = 1 if shown + 1 < len(problems) else 0
        if len(lines) + rest > left:
            advice = sum(any(span.style == "dim" for span in each.spans) for each in lines)
            lines = lines[: len(lines) - advice]
        if shown and len(lines) + rest > left:
            break
        blocks += lines
        left -= len(lines)
        shown += 1
    if shown < len(problems):
        blocks.append(
            line((f"and {len(problems) - shown} more: sightline show {where} --view problems", "dim"))
        )
    return blocks + (_unchecked(index, left - 1, columns) if left > 2 else [])


def first_sections(view: View, room: int) -> View:
    """The sections of a view, which blank lines separate, as far as they fit into ``room`` lines.

    Of the first section, the lines that fit: it describes the recording. A line about losses needs losses on
    the same screen.
    """

    def cut_to_room(blocks: Iterable[Block]) -> list[Block]:
        kept: list[Block] = []
        section: list[Block] = []
        left = room
        for block in [*blocks, line()]:
            if isinstance(block, Line) and not block.spans:
                while not kept and len(section) > 1 and sum(map(height, section)) > left:
                    section.pop()
                left -= sum(map(height, section))
                if left < 0:
                    break
                kept += section
                section = []
            section.append(block)
        return kept if _has_losses(kept) else [block for block in kept if not _is_about_losses(block)]

    return View(tuple(cut_to_room(view.blocks)), fit=lambda columns: cut_to_room(view.within(columns)))


def _is_about_losses(block: Block) -> bool:
    return isinstance(block, Line) and bool(block.spans) and block.spans[0].text.strip() == LOSS


def _has_losses(blocks: Sequence[Block]) -> bool:
    """Whether a column has the losses of steps, or the line about the only step has its loss."""
    columns = [column.title for block in blocks if not isinstance(block, Line) for column in block.columns]
    return LOSS in columns or any(isinstance(block, Line) and "; loss " in block.text for block in blocks)


def next_command(index: Index, where: str) -> str:
    """The command to type next: for the lineage of the first problem, the code around it, or everything."""
    problems = find(index)
    if not problems:
        return f"sightline show {where}"
    first = problems[0]
    if first.kind == "failure":
        return f"sightline show {where} --tail 20"
    if first.kind == "non-finite":
        return f"sightline show {where} --view nonfinite"
    if first.value is not None:
        return f"sightline lineage {where} '${first.value}'"
    return f"sightline show {where} --view problems"


def _unchecked(index: Index, room: int, columns: int) -> list[Line]:
    """The checks that were not possible, in at most ``room`` lines of whole sentences."""
    lines: list[Line] = []
    for each in gap_texts(index):
        texts = wrap_text(each, columns, "  ")
        if len(lines) + len(texts) <= room:
            lines += [line((text, "dim"), hang=2) for text in texts]
    return lines


def _block(problem: Problem, columns: int) -> Iterator[Line]:
    """A problem: its title, its line, and advice. Of a long one the names are shortened, nothing else."""
    room = columns - MARGIN
    text = f"{cut(problem.title, _MESSAGE)} — {problem.detail}" if problem.detail else problem.title
    text = f"{text} [{problem.kind}]"
    # The message of the program's exception is quoted unchanged.
    titles = wrap_text(text if problem.kind == FIRST else shorten_names(text, _MAX_TITLE * room), room)
    style = "warn" if problem.kind == "unmatched" else "title"
    yield line(severity_span(problem), (titles[0], style))
    yield from (indented(Span(text, style)) for text in titles[1:])
    times = problem.times and f"{' ' if problem.times.startswith('×') else ', '}{problem.times}"
    module = f" ({problem.module})" if problem.module else ""
    called = f", called at {problem.called}" if problem.called else ""
    if problem.place or problem.called:
        place = shorten_names(f"at {problem.place}{module}{times}{called}", 2 * room)
        yield from (indented(Span(text, "op")) for text in wrap_text(place, room))
    advice = f"→ {SURE[problem.confidence]}{problem.why}"
    yield from (indented(Span(text, "dim")) for text in _advice_lines(advice, columns))


def shorten_names(text: str, room: int) -> str:
    """The text with its dotted names cut to their ends, as far as ``room`` columns ask for it.

    >>> shorten_names("bert.embeddings.position_embeddings.weight gets no gradient", 45)
    '….position_embeddings.weight gets no gradient'
    """
    for parts in _ENDS:
        if width(text) <= room:
            break
        names = {name: name.split(".") for name in _NAME.findall(text)}
        ends = {name: f"….{'.'.join(words[-parts:])}" for name, words in names.items() if len(words) > parts}
        text = _NAME.sub(lambda name: ends.get(name[0], name[0]), text)  # noqa: B023 — called at once
    return text


def _advice_lines(text: str, columns: int = WIDTH) -> list[str]:
    """Advice in a few lines: whole sentences, and one at least."""
    lines = wrap_text(text, columns - MARGIN, "  ")
    while len(lines) > _MAX_ADVICE and len(sentences := _SENTENCE.split(text)) > 1:
        text = " ".join(sentences[:-1]).rstrip(";")
        lines = wrap_text(text, columns - MARGIN, "  ")
    return lines
