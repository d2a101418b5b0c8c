"""Which loops run the code at a position."""

from __future__ import annotations

import pytest

from sightline.analysis.source_loops import header_text, loops_around
from sightline.data.source_files import SourceFiles


def headers(text: str, *spots: tuple[int, int]) -> list[str]:
    """The headers of the loops around all the spots of a source, the innermost first."""
    return [loop.header for loop in loops_around(SourceFiles({"net.py": text}), "net.py", spots)]


NESTED = """\
for a in x:
    while (b
           > 1):
        f(a)
    g(a)
else:
    i(a)
h()
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (1, []),
        (2, ["while (b > 1):", "for a in x:"]),
        (4, ["while (b > 1):", "for a in x:"]),
        (5, ["for a in x:"]),
        (7, []),
        (8, []),
    ],
)
def test_the_loops_around_a_line(line: int, expected: list[str]) -> None:
    assert headers(NESTED, (line, -1)) == expected


def test_only_loops_that_run_all_of_it() -> None:
    assert headers(NESTED, (4, 8), (5, 4)) == ["for a in x:"]
    assert headers(NESTED, (4, 8), (8, 0)) == []


def test_a_comprehension_runs_its_element_and_not_what_it_goes_over() -> None:
    text = "y = [f(a) for a in g(b) if h(a)]\n"
    assert headers(text, (1, text.index("f("))) == ["for a in g(b) if h(a)"]
    assert headers(text, (1, text.index("h("))) == ["for a in g(b) if h(a)"]
    assert headers(text, (1, text.index("g("))) == []


def test_loops_on_one_line() -> None:
    text = "for a in x: y = f(a)  # all: of it\n"
    assert headers(text, (1, text.index("f("))) == ["for a in x:"]
    assert headers(text, (1, 9)) == []


def test_a_function_made_in_a_loop_is_not_run_by_it() -> None:
    text = (
        "for a in x:\n    def f(b):\n        for c in b:\n            g(c)\n"
        "    h = lambda b: g(b)\n    g(a)\n"
    )
    assert headers(text, (4, 12)) == ["for c in b:"]
    assert headers(text, (5, 18)) == []
    assert headers(text, (6, 4)) == ["for a in x:"]


def test_loops_that_hold_nothing_but_each_other_are_told_together() -> None:
    text = "for a in x:\n    f(a)\n    for b in y:\n        for c in z:\n            f(c)\n            g(c)\n"
    loops = loops_around(SourceFiles({"net.py": text}), "net.py", [(5, 12), (6, 12)])
    assert header_text(loops) == "for a in x: … for b in y: for c in z:"
    assert header_text(loops, shown=[loops[1]]) == "for c in z:"
    assert header_text(loops[1:]) == "for a in x: … for b in y:"
    assert header_text([]) == ""


@pytest.mark.parametrize("text", ["for for", "\0", "(" * 5000, ""])
def test_unreadable_source_has_no_loops(text: str) -> None:
    assert headers(text, (1, 0)) == []
