"""Every key has a file name, and no two the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sightline.store.shards.file_names import FileNames, file_name


def test_names_that_differ_only_in_case_or_accents_are_two_files(tmp_path: Path) -> None:
    names = FileNames(tmp_path)
    taken = [names.take(name) for name in ("q.pt", "Q.pt", "q.pt", "\u00e9.pt", "e\u0301.pt")]
    assert taken[0] == "q.pt"
    assert len({name.casefold() for name in taken}) == 5
    assert taken[1].startswith("Q~")
    assert all(name.endswith(".pt") for name in taken)


def test_long_names_are_shortened_and_stay_apart(tmp_path: Path) -> None:
    names = FileNames(tmp_path)
    taken = [names.take("é" * 300 + end) for end in ("a.pt", "b.pt")]
    assert taken[0] != taken[1]
    for name in taken:
        assert len(name.encode()) <= 255
        (tmp_path / name).touch()


@given(st.text(max_size=300))
def test_every_key_has_a_file_name(key: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = FileNames(Path(folder)).take(file_name(key))
        (Path(folder) / name).touch()
        assert os.listdir(folder) == [name]
