"""Plain data as text: whatever a file holds becomes JSON that parsers take."""

from __future__ import annotations

import json

import pytest

from sightline.convert.encoding import json_text
from sightline.data.trace_data import TraceData
from sightline.store.checks import check_info
from sightline.store.damage import Damage
from sightline.store.environment import environment_of
from tests.builders import TraceBuilder


def test_keys_that_json_lacks_are_written_as_text() -> None:
    value = {"rows": [{(1, 2): float("inf")}, {None: 3}]}
    assert json.loads(json_text(value)) == {"rows": [{"(1, 2)": None}, {"None": 3}]}


def test_globs_of_a_damaged_file_are_a_sentence() -> None:
    with pytest.raises(Damage, match="invalid 'allow': True"):
        check_info({"allow": True})
    check_info({"allow": ["*softmax*"]})
    with pytest.raises(Damage, match=r"invalid dropped collectives: \['c10d::x', '0', 1\]"):
        check_info({"dropped_collectives": [["c10d::x", "0", 1]]})


@pytest.mark.parametrize("found", [3, True, "text"])
def test_an_environment_that_is_none_is_empty(found: object) -> None:
    data: TraceData = TraceBuilder().build().data
    object.__setattr__(data, "environment", found)
    assert environment_of(data) == {}
