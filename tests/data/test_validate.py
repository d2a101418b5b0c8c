"""What `validate` finds that cannot have been: a kernel that ran on tensors it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sightline.errors import InvalidTrace
from tests.builders import TraceBuilder


def matmul(**weight: Any) -> TraceBuilder:
    b = TraceBuilder()
    x, w = b.value(2, 4), b.value(4, 4, kind="parameter", name="w", **weight)
    b.op("mm", x, w, out=(2, 4))
    return b


@pytest.mark.parametrize("weight", [{"dtype": "bfloat16"}, {"device": "cuda:0"}])
def test_matrices_of_two_dtypes_or_devices(weight: dict[str, str]) -> None:
    with pytest.raises(InvalidTrace, match="op 0 has tensors of two dtypes or devices, which it cannot"):
        matmul(**weight).build().validate()


def test_a_view_of_another_dtype() -> None:
    b = TraceBuilder()
    b.op("t", b.value(2, 4), out=(4, 2), dtype="bfloat16")
    with pytest.raises(InvalidTrace, match="op 0 has tensors of two dtypes"):
        b.build().validate()


def test_what_is_possible() -> None:
    matmul().build().validate()
    b = TraceBuilder()
    half = b.op("_to_copy", b.value(2, 4), out=(2, 4), dtype="bfloat16")
    b.op("mul.Tensor", half, b.value(2, 4), out=(2, 4))  # promotes
    b.op("view.dtype", half, out=(2, 4), dtype="float16")
    with b.api("F.linear", half, b.value(4, 4)):  # autocast casts inside it
        b.op("mm", half, b.value(4, 4, dtype="bfloat16"), out=(2, 4), dtype="bfloat16")
    b.build().validate()
