"""The golden-file fixture itself: what it accepts, what it says, what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import compare_golden


def test_the_same_text_passes_whatever_its_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "view.txt"
    compare_golden(path, "one\ntwo", update=True)
    compare_golden(path, "one\ntwo", update=False)
    compare_golden(path, "one\ntwo\n", update=False)
    assert path.read_text("utf-8") == "one\ntwo\n"


def test_another_text_fails_with_a_diff_and_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "view.txt"
    compare_golden(path, "one\ntwo\n", update=True)
    with pytest.raises(pytest.fail.Exception) as failed:
        compare_golden(path, "one\nthree\n", update=False)
    assert "-two\n+three" in str(failed.value)
    assert "make goldens" in str(failed.value)


def test_trailing_spaces_count(tmp_path: Path) -> None:
    path = tmp_path / "view.txt"
    compare_golden(path, "one", update=True)
    with pytest.raises(pytest.fail.Exception):
        compare_golden(path, "one ", update=False)


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no golden file view\.txt"):
        compare_golden(tmp_path / "view.txt", "one", update=False)
