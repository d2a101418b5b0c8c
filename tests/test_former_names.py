"""Arguments and options under the names of the last version: they work, and a warning says the new name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sightline as sl
from sightline.errors import UsageError
from tests.cli.recorded import invoke


@pytest.fixture
def t() -> sl.Trace:
    with sl.trace() as trace:
        torch.ones(2, 3).relu()
    return trace


@pytest.mark.parametrize(
    ("view", "former", "new"),
    [
        ("code", {"ops": "api"}, {"level": "api"}),
        ("code", {"everything": True}, {"all": True}),
        ("source", {"ops": "aten"}, {"level": "aten"}),
        ("log", {"everything": True}, {"all": True}),
        ("graph", {"everything": True}, {"all": True}),
    ],
)
def test_a_view_under_its_former_argument(
    t: sl.Trace, view: str, former: dict[str, Any], new: dict[str, Any]
) -> None:
    old_name, new_name = next(iter(former)), next(iter(new))
    with pytest.warns(DeprecationWarning, match=f"{old_name}= is called {new_name}= now") as caught:
        shown = getattr(t, view)(**former)
    assert str(shown) == str(getattr(t, view)(**new))
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(UsageError, match=f"{old_name}= is the old name of {new_name}="):
        getattr(t, view)(**former, **new)


def test_a_lineage_under_its_former_argument(t: sl.Trace) -> None:
    with pytest.warns(DeprecationWarning, match="ops= is called level= now"):
        shown = t.lineage(t.values[-1], ops="aten")  # type: ignore[call-arg]
    assert str(shown) == str(t.lineage(t.values[-1], level="aten"))


def test_a_timeline_that_is_written_at_once(t: sl.Trace, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"t\.to_perfetto\(\)\.save\(path\)") as caught:
        t.to_perfetto(tmp_path / "run.json")
    assert [warning.filename for warning in caught] == [__file__]
    assert json.loads((tmp_path / "run.json").read_text()) == json.loads(str(t.to_perfetto()))


def test_options_of_the_bundle_beside_its_path(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    with pytest.warns(
        DeprecationWarning, match=r"is written path=sl\.Bundle\(…, source=False\) now"
    ) as caught:
        tracing = sl.trace(path=path, source=False)  # type: ignore[call-arg]
    assert [warning.filename for warning in caught] == [__file__]
    with tracing:
        torch.ones(2).relu()
    assert "torch.ones(2)" not in str(sl.load(path).source())
    with pytest.raises(
        UsageError, match=r"give path=sl\.Bundle\(…, overwrite=True\), or say it to t\.save\(\)"
    ):
        sl.trace(overwrite=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="sources"):
        sl.trace(path=path, sources=False)  # type: ignore[call-arg]


def test_an_option_of_the_command_line(t: sl.Trace, tmp_path: Path) -> None:
    t.save(tmp_path / "run.sight")
    former = invoke("show", tmp_path / "run.sight", "--view", "source", "--only", Path(__file__).name)
    new = invoke("show", tmp_path / "run.sight", "--view", "source", "--file", Path(__file__).name)
    assert former.stdout == new.stdout
    assert (
        former.stderr == "sightline: --only is called --file now; the old name ends with the next version.\n"
    )
