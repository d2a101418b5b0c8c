"""Numbers of what a recording has met: right though an interrupt or another thread comes in between."""

from __future__ import annotations

import pytest
import torch

from sightline.recording.atomic import append_numbered
from sightline.recording.native.api_names import ApiNames
from sightline.recording.operations import OpInfo


class Contended(list[str]):
    """A list to which another thread appends just before."""

    def append(self, item: str) -> None:
        super().append("other")
        super().append(item)


def test_the_number_is_the_place_whatever_others_append() -> None:
    items = Contended(["first"])
    number = append_numbered(items, "own")
    assert (items[number], number) == ("own", 2)


def test_an_interrupt_leaves_no_number_without_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    infos: list[OpInfo] = []
    names = ApiNames(infos)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OpInfo, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            names.of(torch.relu)
    assert infos[names.of(torch.tanh)].name == "torch.tanh"
    assert infos[names.of(torch.relu)].name == "torch.relu"
