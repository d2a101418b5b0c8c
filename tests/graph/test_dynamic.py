"""Expressions over sizes out of an archive: worked out, and nothing in them is run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sightline.errors import DamagedFile
from sightline.graph.exported.dynamic import evaluate

SIZES = {"s0": 6, "s1": 9, "u2": 4}


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("s0", 6), ("2*s0 + 1", 13), ("s0 // 4", 1), ("(s0 % 4) == 2", True), ("-s1", -9), ("s0**2", 36),
        ("max(s0, s1) <= 9", True), ("math.floor(s1 / 2)", 4), ("2 < s0 < 7", True), ("int(s0 / 4)", 1),
        ("s0 if s1 > 3 else 0", 6), ("s0 > 3 and s1 < 3", False), ("not (s0 == 6)", False), ("1.5*s0", 9.0),
        ("math.inf > s0", True), ("s0 / 0", None), ("s0 << 2", 24), ("s1**(10**9)", None),
    ],
)  # fmt: skip
def test_arithmetic(code: str, wanted: Any) -> None:
    assert evaluate(code, SIZES) == wanted


@pytest.mark.parametrize(
    "code",
    ["__import__('os').system('true')", "().__class__.__bases__", "math.__dict__", "[s0 for _ in (1,)]", "s9",
     "lambda: 0", "s0.real", "'a' * 9", "max(*[s0])", "open('x')", "math.floor.__self__", "(" * 5000, "",
     "s0; s1", "int('9' * 9)", "max(s0, key=s1)", f"s0 + {'1' * 20_000}"],
)  # fmt: skip
def test_anything_else_is_refused(code: str) -> None:
    with pytest.raises(DamagedFile, match=r"The archive was altered: .* is no expression over sizes"):
        evaluate(code, {**SIZES, "math": math})  # type: ignore[dict-item]
