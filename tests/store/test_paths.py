"""What is there already: ``t.save`` and ``path=`` treat it alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.errors import UsageError
from sightline.store.journal import JOURNAL
from tests.builders import make_trace
from tests.recording.engines import BOTH_ENGINES


def recorded(**options: object) -> sl.Trace:
    with sl.trace(**options) as t:  # type: ignore[arg-type]
        torch.ones(2).relu()
    return t


@BOTH_ENGINES
@pytest.mark.parametrize("last", [None, 5])
def test_a_recording_is_replaced_only_if_that_is_asked_for(
    tmp_path: Path, engine: str, last: int | None
) -> None:
    place = tmp_path / "run.sight"
    t = recorded(path=place, name="first", engine=engine, last=last)
    with pytest.raises(sl.UsageError) as saving:
        t.save(place)
    assert str(saving.value) == (
        f"{place} already holds a recording: save under another name, or give overwrite=True to replace it."
    )
    with pytest.raises(sl.UsageError) as writing:
        recorded(path=place, engine=engine)
    assert str(writing.value) == (
        f"{place} already holds a recording: give path= another name, or "
        "path=sl.Bundle(…, overwrite=True) to replace it."
    )
    assert sl.load(place).info["name"] == "first"
    recorded(path=sl.Bundle(place, overwrite=True), name="second", engine=engine, last=last)
    assert sl.load(place).info["name"] == "second"
    recorded(name="third", engine=engine).save(place, overwrite=True)
    assert sl.load(place).info["name"] == "third"


def test_what_is_no_finished_recording_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    running = sl.trace(path=tmp_path / "running.sight")
    running.start()
    try:
        with pytest.raises(
            sl.UsageError, match=r"running\.sight is still being recorded, or its process was k"
        ):
            recorded(path=sl.Bundle(tmp_path / "running.sight", overwrite=True))
        with pytest.raises(
            sl.UsageError, match=r"is a folder with other things in it, such as 'rank0\.journal'"
        ):
            recorded().save(tmp_path / "running.sight", overwrite=True)
    finally:
        torch.ones(2)
        running.stop()
    assert sl.load(tmp_path / "running.sight").validate().ops >= 1
    for write in (lambda place: recorded(path=sl.Bundle(place, overwrite=True)),
                  lambda place: recorded().save(place, overwrite=True)):  # fmt: skip
        with pytest.raises(
            sl.UsageError, match=r"notes is a folder with other things in it, such as 'todo\.txt'"
        ):
            write(tmp_path / "notes")
    assert (tmp_path / "notes" / "todo.txt").exists()


def test_a_recording_that_was_cut_off_is_neither_replaced_nor_promised_to_be(tmp_path: Path) -> None:
    place = tmp_path / "run.sight"
    recorded(path=place)
    (place / "rank0.db").rename(place / JOURNAL)
    for overwrite in (False, True):
        with pytest.raises(UsageError) as caught:
            make_trace(1).save(place, overwrite=overwrite)
        assert "overwrite" not in str(caught.value)
    assert (place / JOURNAL).exists()
