"""How the arguments of calls are written."""

from __future__ import annotations

from typing import Any

import pytest

from sightline.data.forms import SLOT, Form


@pytest.mark.parametrize(
    ("arguments", "tensors", "text"),
    [
        ([SLOT] * 64, ["f32[]"] * 64, "[f32[] ×64]"),
        ([SLOT] * 3, ["f32[]"] * 3, "[f32[], f32[], f32[]]"),
        ([SLOT] * 6, ["i64[2]", *["f32[2]"] * 4, "i64[2]"], "[i64[2], f32[2] ×4, i64[2]]"),
        ([(SLOT, SLOT)] * 12, ["f32[2]"] * 24, "[(f32[2], f32[2]) ×12]"),
        ((SLOT,) * 5, ["f32[2]"] * 5, "(f32[2] ×5)"),
        ([1, 1, 1, 1, 1], [], "[1, 1, 1, 1, 1]"),
        (
            [SLOT] * 4,
            ["a: f32[]", "b: f32[]", "c: f32[]", "d: f32[]"],
            "[a: f32[], b: f32[], c: f32[], d: f32[]]",
        ),
    ],
)
def test_tensors_of_a_list_that_look_alike(arguments: Any, tensors: list[str], text: str) -> None:
    assert Form((arguments, 0)).fill(tensors) == f"{text}, 0"
