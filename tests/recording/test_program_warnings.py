"""Warnings of the run are recorded, and what the user sees of them stays as it is."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._logging._internal import hide_warnings

import sightline as sl
from tests.recording.engines import BOTH_ENGINES, EVERY_WAY, options
from tests.recording.problematic import found, kinds

RESIZED = "An output with one or more elements was resized"


def odd(x: Tensor) -> Tensor:
    warnings.warn("this is odd", RuntimeWarning, stacklevel=1)
    return x.relu()


def run() -> None:
    x = torch.ones(3)
    odd(x)
    torch.add(x, x, out=torch.ones(5))
    F.softmax(x)


@EVERY_WAY
def test_they_are_recorded_with_their_op_and_line(engine: str, kept: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True), sl.trace(**options(engine, kept, tmp_path)) as t:
        warnings.simplefilter("always")
        run()
        run()
    if kept == "path":
        t = sl.load(tmp_path / "run.sight")
    rows = t.info["warnings"]
    assert [(row[0], row[1][:20], row[-1]) for row in rows] == [
        ("RuntimeWarning", "this is odd", 2), ("UserWarning", RESIZED[:20], 2),
        ("UserWarning", "Implicit dimension c", 2),
    ]  # fmt: skip
    problems = {each.title[: each.title.index(":")]: each for each in found(t)}
    assert list(problems) == [
        "UserWarning during torch.add (×2)", "UserWarning during F.softmax (×2)", "RuntimeWarning (×2)",
    ]  # fmt: skip
    assert problems["RuntimeWarning (×2)"].place.endswith(" in odd")
    assert all(
        "test_program_warnings.py" in each.place and each.kind == "python-warning" for each in found(t)
    )


@BOTH_ENGINES
def test_the_user_sees_the_same_warnings_once_as_before(engine: str) -> None:
    script = (
        "import sys, warnings, torch\n"
        "from contextlib import nullcontext\n"
        "def go():\n"
        "    for _ in range(3):\n"
        "        warnings.warn('again', UserWarning)\n"
        "        torch.add(torch.ones(3), 1, out=torch.ones(5))\n"
        "    warnings.warn('old', DeprecationWarning)\n"
        "import sightline as sl\n"
        "before = warnings._showwarnmsg\n"
        f"with sl.trace(engine={engine!r}) if sys.argv[1] == 'traced' else nullcontext():\n"
        "    go()\n"
        "go()\n"
        "assert warnings._showwarnmsg is before\n"
        "print(sorted(__warningregistry__, key=str), warnings.filters)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, *flags, "-c", script, how],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        for flags in ([], ["-W", "ignore"], ["-W", "always::DeprecationWarning"], ["-W", "error:again"])
        for how in ("plain", "traced")
    ]
    for plain, traced in zip(runs[::2], runs[1::2], strict=True):
        assert traced.returncode == plain.returncode
        assert traced.stdout == plain.stdout
        if engine == "native":  # the plain one stands between the line and C++
            error = traced.stderr.partition("\nsightline:")[0].rstrip()
            assert error == plain.stderr.rstrip()


def test_a_warning_that_is_an_error_is_raised_at_its_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="this is odd"), sl.trace() as t:
            odd(torch.ones(2))
    assert t.info["warnings"] == []


def test_those_of_other_threads_and_after_the_block_are_not_its_own() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with sl.trace() as t:
            thread = threading.Thread(target=odd, args=(torch.ones(1),))
            thread.start()
            thread.join()
        odd(torch.ones(1))
    assert len(shown) == 2
    assert t.info["warnings"] == []


def test_a_function_of_the_user_that_shows_warnings_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: seen.append(str(message)))
        with sl.trace() as t:
            odd(torch.ones(1))
    assert seen == ["this is odd"]
    assert [row[1] for row in t.info["warnings"]] == ["this is odd"]


@BOTH_ENGINES
def test_one_that_is_only_collected_inside_was_not_shown(engine: Any) -> None:
    with warnings.catch_warnings(record=True) as around:
        warnings.simplefilter("always")
        with sl.trace(engine=engine) as t:
            with warnings.catch_warnings(record=True) as inside:
                warnings.simplefilter("always")
                odd(torch.ones(1))
            assert len(inside) == 1
            warnings.warn(str(inside[0].message), UserWarning, stacklevel=1)  # now it is
    assert [each.category for each in around] == [UserWarning]
    assert [row[:2] for row in t.info["warnings"]] == [["UserWarning", "this is odd"]]


def test_a_function_installed_inside_is_given_what_is_shown() -> None:
    seen: list[Any] = []
    with warnings.catch_warnings(), sl.trace() as t:
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: seen.append(str(message))
        odd(torch.ones(1))
    assert seen == ["this is odd"]
    assert [row[1] for row in t.info["warnings"]] == ["this is odd"]


@pytest.mark.parametrize("hidden", [True, False])
def test_one_that_a_filter_of_torch_drops_was_not_shown(hidden: bool) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with sl.trace() as t, hide_warnings(lambda *_: not hidden):
            odd(torch.ones(1))
    assert len(shown) == len(t.info["warnings"]) == (not hidden)


def test_a_replacement_that_was_installed_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    real = warnings._showwarnmsg  # type: ignore[attr-defined]  # what C calls
    try:
        with sl.trace():
            ours = warnings._showwarnmsg  # type: ignore[attr-defined]
            out = io.StringIO()
            other = lambda message: (out.write(str(message.message)), ours(message))  # noqa: E731
            warnings._showwarnmsg = other  # type: ignore[attr-defined]
        assert warnings._showwarnmsg is other  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            odd(torch.ones(1))
        assert (out.getvalue(), len(shown)) == ("this is odd", 1)
    finally:
        warnings._showwarnmsg = real  # type: ignore[attr-defined]


def test_a_problem_at_the_same_line_explains_it() -> None:
    model = torch.nn.Linear(4, 1)
    with warnings.catch_warnings(record=True) as shown, sl.trace(model) as t:
        warnings.simplefilter("always")
        F.mse_loss(model(torch.ones(6, 4)), torch.ones(6)).backward()
    assert len(shown) == len(t.info["warnings"]) == 1
    assert kinds(t) == ["broadcast"]


def test_a_problem_of_another_call_at_the_line_explains_nothing() -> None:
    model = torch.nn.Linear(4, 1)
    with warnings.catch_warnings(record=True), sl.trace(model) as t:
        warnings.simplefilter("always")
        # fmt: off
        loss = F.mse_loss(model(torch.ones(6, 4)), torch.ones(6)); F.softmax(loss.expand(2)); odd(loss)  # noqa: E702
        # fmt: on
        loss.backward()
    assert [problem.title[:26] for problem in found(t)] == [
        "F.mse_loss of f32[6, 1] an", "UserWarning during F.softm", "RuntimeWarning: this is od",
    ]  # fmt: skip


def test_a_deprecation_is_a_note_and_a_step_has_its_own() -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with sl.trace() as t:
            for number in range(2):
                with sl.step(f"step{number}"):
                    torch.ones(2).relu()
                    if number:
                        warnings.warn("will go", FutureWarning, stacklevel=1)
    assert [(each.severity.word, each.title) for each in found(t)] == [("note", "FutureWarning: will go")]
    assert [kinds(t._at(number, None)) for number in (0, 1)] == [[], ["python-warning"]]


def test_the_line_is_the_one_that_the_warning_is_about() -> None:
    def deep() -> None:
        warnings.warn("called wrongly", UserWarning, stacklevel=2)

    def caller() -> None:
        deep()

    with warnings.catch_warnings(record=True) as shown, sl.trace() as t:
        warnings.simplefilter("always")
        caller()
    assert t.info["warnings"][0][2][1] == shown[0].lineno
    assert found(t)[0].place.endswith("caller")


def test_damaged_rows_are_left_out() -> None:
    with sl.trace() as t:
        torch.ones(2)
    damaged: list[Any] = [[1, None, []], [[1, 2, 3, 4, 5, 6]], [["A", "b", [], "c", 0, 1]], "no list"]
    for rows in damaged:
        t.data.info["warnings"] = rows
        assert len(found(t)) <= 1
    del t.data.info["warnings"]
    assert kinds(t) == [], "a recording of an earlier version"
