"""The names of several models in one recording: each has one of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import sightline as sl
from sightline.convert.query import Query
from tests.recording.engines import BOTH_ENGINES


@BOTH_ENGINES
def test_models_of_one_class_have_names_of_their_own(engine: Any) -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    with sl.trace(models[0], engine=engine) as t:
        for model in models:
            model(torch.ones(1, 2))
    assert [module.label for module in t.modules] == ["Linear", "Linear_1", "Linear_2"]
    with Query(t.index, "select count(distinct module) from module_calls") as query:
        assert list(query.rows) == [(3,)]
