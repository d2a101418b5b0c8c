"""The variable a line assigns to: given when it is certain, and never an error."""

from __future__ import annotations

import pytest

from sightline.analysis.value_names import assigned_name, value_names
from sightline.data.source_files import SourceFiles
from tests.builders import make_trace


def name_in(text: str, expr: str, path: str = "") -> str | None:
    """The name that ``expr``, found in the text, is assigned to."""
    before = text[: text.index(expr)]
    line = before.count("\n") + 1
    column = len(before.rpartition("\n")[2].encode())
    end_line = line + expr.count("\n")
    last = expr.rpartition("\n")[2]
    end = len(last.encode()) + (column if end_line == line else 0)
    return assigned_name(SourceFiles({"net.py": text}), "net.py", line, end_line, column, end, path)


@pytest.mark.parametrize(
    ("text", "expr", "path", "name"),
    [
        ("h = self.fc(x)", "self.fc(x)", "", "h"),
        ("h = self.fc(x).relu()", "self.fc(x)", "", None),
        ("h = self.fc(x).relu()", "self.fc(x).relu()", "", "h"),
        ("return self.fc(x)", "self.fc(x)", "", None),
        ("self.cache.k = f(x)", "f(x)", "", "self.cache.k"),
        ("cache[0] = f(x)", "f(x)", "", None),
        ("f().k = g(x)", "g(x)", "", None),
        ("q, k, v = f(x)", "f(x)", "[1]", "k"),
        ("q, k, v = f(x)", "f(x)", "[3]", None),
        ("q, k, v = f(x)", "f(x)", "", None),
        ("q, (k, v) = f(x)", "f(x)", "[1][0]", "k"),
        ("q, *rest = f(x)", "f(x)", "[0]", None),
        ("a, b = f(x), g(x)", "g(x)", "", "b"),
        ("out = f(x)", "f(x)", "[2]", "out[2]"),
        ("out = f(x)", "f(x)", ".logits", "out.logits"),
        ("a = b = f(x)", "f(x)", "", "a"),
        ("x += 1", "x += 1", "", "x"),
        ("self.n -= g(y)", "self.n -= g(y)", "", "self.n"),
        ("self.n -= g(y)", "g(y)", "", None),
        ("h: Tensor = f(x)", "f(x)", "", "h"),
        ("h: Tensor", "Tensor", "", None),
        ("if (n := f(x)) is None: pass", "f(x)", "", "n"),
        ("höhe = f('ä', x)", "f('ä', x)", "", "höhe"),
        ("h = f(\n    x,\n)", "f(\n    x,\n)", "", "h"),
        ("h = (f(x)\n     .relu())", "relu()", "", "h"),
        ("h = [f(x) for _ in y]", "f(x)", "", None),
    ],
)
def test_a_name_only_for_the_whole_value(text: str, expr: str, path: str, name: str | None) -> None:
    assert name_in(text, expr, path) == name


@pytest.mark.parametrize("text", ["h = = f(x)", "\0 f(x)", "(" * 5000 + "f(x)", ""])
def test_unreadable_source_gives_no_name(text: str) -> None:
    assert assigned_name(SourceFiles({"net.py": text}), "net.py", 1, 1, 4, 8) is None


def test_a_missing_file_gives_no_name() -> None:
    assert assigned_name(SourceFiles(), "/nowhere/net.py", 1, 1, 0, 4) is None


def test_values_are_named_by_api_calls_and_module_calls() -> None:
    t = make_trace(1, backward=False)
    named = {name: str(t.values[id]) for id, name in value_names(t.index).items()}
    assert named == {
        "x": "f32[2, 8, 4]", "h": "f32[2, 8, 4]", "q": "f32[2, 8, 4]", "k": "f32[2, 8, 4]",
        "v": "f32[2, 8, 4]", "scores": "f32[2, 8, 8]", "loss": "f32[]",
    }  # fmt: skip
