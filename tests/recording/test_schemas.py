"""What a recording knows of the arguments of its operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sightline as sl
from sightline.recording.operations import arguments_of


def python(first: Any, *rest: Any, setting: object = object(), table: str = "x" * 200, **more: Any) -> None:
    pass


class Broken:
    """A callable whose signature is nobody's business."""

    __name__ = 3

    @property
    def __signature__(self) -> Any:
        raise RuntimeError("no")

    def __call__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.ops.aten.addmm.default, ("self", "mat1", "mat2", "beta=1", "alpha=1")),
        (torch.ops.aten.gelu.default, ("self", "approximate='none'")),
        (F.dropout, ("input", "p=0.5", "training=True", "inplace=False")),
        (torch.tril, ("self", "diagonal=0")),
        (torch.sum, ()),  # it can be called in several ways
        (torch.Tensor.__eq__, ()),
        (object(), ()),
        (Broken(), ()),
    ],
)
def test_names_and_defaults(function: Any, arguments: tuple[str, ...]) -> None:
    assert arguments_of(function) == arguments


def test_a_default_that_is_no_setting_is_cut_short() -> None:
    first, rest, setting, table = arguments_of(python)
    assert (first, rest, table) == ("first", "*rest", "table=…")
    assert setting == "setting=<object>"


def test_a_recording_has_them() -> None:
    with sl.trace() as t:
        F.dropout(torch.ones(2, 2), 0.1).addmm(torch.ones(2, 2), torch.ones(2, 2))
    schemas = t.data.schemas
    assert schemas["addmm"] == ("self", "mat1", "mat2", "beta=1", "alpha=1")
    assert schemas["F.dropout"] == ("input", "p=0.5", "training=True", "inplace=False")
    addmm = next(op for op in t.ops if op.name == "addmm")
    assert list(addmm.args) == ["self", "mat1", "mat2"]
