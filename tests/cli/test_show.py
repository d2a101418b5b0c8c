"""``sightline show``: every view, with the filters it takes, on a pipe and on a terminal."""

from __future__ import annotations

import io
import subprocess
import threading
from pathlib import Path

import pytest

import sightline as sl
from sightline.cli.screen import wait_message
from sightline.cli.show import VIEWS, command, options_of
from sightline.hints import for_command_line
from tests.cli.recorded import COMMAND, cli, environment, misused, on_terminal, refused


def test_without_options_it_is_the_overview(run: Path) -> None:
    shown = cli("show", run)
    with for_command_line():
        overview = str(sl.load(run)._overview())
    assert ": --view nonfinite" in overview
    assert shown.splitlines()[:-1] == overview.splitlines()[:-1]
    last = shown.splitlines()[-1]
    assert last == "more      --view code, log, order, summary, memory, source, problems or nonfinite"


@pytest.mark.parametrize("view", ["code", "log", "summary", "source", "problems", "nonfinite"])
def test_a_view_is_that_of_the_trace(run: Path, view: str) -> None:
    with for_command_line():
        shown = getattr(sl.load(run), view)()
    assert cli("show", run, "--view", view) == f"{shown}\n"


def test_the_order_of_calls(run: Path) -> None:
    trace = sl.load(run)
    assert cli("show", run, "--view", "order") == f"{trace.call_order()}\n"
    assert cli("show", run, "--view", "order", "--order", "completion", "--no-fold", "--depth", 1) == (
        f"{trace.call_order(order='completion', fold=False, depth=1)}\n"
    )


def test_filters_are_those_of_the_views(run: Path) -> None:
    trace = sl.load(run)
    code = ["--view", "code", "--module", "blocks.*", "--op", "*mm*", "--phase", "forward"]
    wanted = trace.code(
        module="blocks.*", op="*mm*", phase="forward", names=True, torch_frames=True, fold=False
    )
    assert cli("show", run, *code, "--names", "--torch-frames", "--no-fold") == f"{wanted}\n"
    wanted = trace.code(level="api", stats=False, tail=9, depth=2)
    options = ["--level", "api", "--no-stats", "--tail", 9, "--depth", 2]
    assert cli("show", run, "--view", "code", *options) == f"{wanted}\n"
    assert cli("show", run, "--view", "log", "--inside", "--tail", 4) == f"{trace.log(inside=True, tail=4)}\n"
    with for_command_line():
        narrow = trace.summary(width=60, depth=1)
    assert cli("show", run, "--view", "summary", "--width", 60, "--depth", 1) == f"{narrow}\n"
    held = trace.memory(module="blocks.*", phase="forward", depth=2)
    options = ["--module", "blocks.*", "--phase", "forward", "--depth", 2]
    assert cli("show", run, "--view", "memory", *options) == f"{held}\n"
    source = trace.source(file="recorded.py", op="relu")
    assert cli("show", run, "--view", "source", "--file", "recorded.py", "--op", "relu") == f"{source}\n"
    with for_command_line():
        found = trace.problems(kind="non-finite", module="blocks.0")
    assert (
        cli("show", run, "--view", "problems", "--kind", "non-finite", "--module", "blocks.0") == f"{found}\n"
    )
    allowed = trace.nonfinite(allow=["linear", "addmm"])
    assert cli("show", run, "--view", "nonfinite", "--allow", "linear", "--allow", "addmm") == f"{allowed}\n"


def test_filters_alone_mean_the_code(run: Path) -> None:
    assert cli("show", run, "--tail", 3) == f"{sl.load(run).code(tail=3)}\n"


def test_every_argument_of_a_view_is_an_option() -> None:
    declared = {parameter.name for parameter in command.params}
    for view in VIEWS:
        assert set(options_of(view)) <= declared, view
    assert options_of("overview") == []
    assert options_of("source")[:2] == ["file", "level"]


def test_an_option_the_view_does_not_take_is_one_sentence(run: Path) -> None:
    assert misused("show", run, "--view", "problems", "--tail", 3) == (
        "--tail does not go with --view problems, which takes --module and --kind; "
        "it goes with --view code, log, order or source."
    )
    assert misused("show", run, "--view", "overview", "--stats") == (
        "--stats does not go with --view overview, which takes no filters; "
        "it goes with --view code, log, summary or source."
    )
    assert "Invalid value for '--tail': 0 is not in the range" in misused("show", run, "--tail", 0)


def test_what_matches_nothing_names_what_is_near(run: Path) -> None:
    sentence = refused("show", run, "--module", "block")
    assert sentence.startswith("--module 'block' matches no module of this trace; did you mean 'blocks'")


def test_what_is_no_recording_is_one_sentence(run: Path, tmp_path: Path) -> None:
    assert refused("show", tmp_path / "none") == f"There is no recording {tmp_path / 'none'}."
    assert refused("show", tmp_path) == (f"{tmp_path} is no sightline recording: it is an empty folder.")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert refused("show", text).startswith(f"{text} is no sightline recording: it is not a database")
    database = tmp_path / "rank0.db"
    database.write_bytes((run / "rank0.db").read_bytes()[:-4096])
    assert refused("show", tmp_path).startswith(f"{database} is damaged: ")


def test_an_altered_recording_is_one_sentence(run: Path, tmp_path: Path) -> None:
    whole = bytearray((run / "rank0.db").read_bytes())
    for at in range(len(whole) // 2, len(whole) // 2 + 2000, 7):
        whole[at] ^= 0xFF
    (tmp_path / "rank0.db").write_bytes(whole)
    assert refused("validate", tmp_path).startswith(f"{tmp_path / 'rank0.db'} ")


def test_a_pipe_that_closes_ends_it_quietly(run: Path) -> None:
    for arguments in (["show", str(run), "--view", "code"], ["ops", str(run), "--json"]):
        with subprocess.Popen(
            [*COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            assert running.stdout.readline()
            running.stdout.close()
            assert running.stderr.read() == b""


def test_a_terminal_has_a_pager_and_colour(run: Path) -> None:
    options = ("show", run, "--view", "order")
    paged, status = on_terminal(*options, PAGER="sed s/^/paged:/")
    assert status == 0
    assert paged.startswith("paged:\x1b[1mNet\x1b[0m")
    assert all(line.startswith("paged:") for line in paged.splitlines())
    plain = cli(*options)
    assert on_terminal(*options, PAGER="cat", NO_COLOR="1") == (plain, 0)
    assert on_terminal(*options, "--color", "never", PAGER="cat") == (plain, 0)
    direct, _ = on_terminal(*options, "--no-pager", PAGER="sed s/^/paged:/")
    assert direct.startswith("\x1b[1mNet")


def test_a_pager_that_is_left_early_ends_it(run: Path) -> None:
    seen, status = on_terminal("show", run, "--view", "code", PAGER="head -n 1")
    assert status == 0
    assert "Traceback" not in seen


def test_an_error_comes_before_the_pager(run: Path) -> None:
    seen, status = on_terminal("show", run, "--op", "nothing", PAGER="sed s/^/paged:/")
    assert status == 1
    assert seen.startswith("Error: --op 'nothing' matches no aten op of this trace")


def test_colour_can_be_asked_for_on_a_pipe(run: Path) -> None:
    assert "\x1b[" not in cli("show", run, "--tail", 3)
    assert "\x1b[36m" in cli("show", run, "--tail", 3, "--color", "always")


def test_a_long_wait_is_spoken_of_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            written.set()
            return super().write(text)

    written = threading.Event()
    monkeypatch.setattr("sightline.cli.screen._MESSAGE_DELAY", 0.0)
    for stream, wanted in ((Terminal(), "reading …\r         \r"), (io.StringIO(), "")):
        monkeypatch.setattr("sys.stderr", stream)
        with wait_message():
            assert written.wait(10) or not wanted
        assert stream.getvalue() == wanted
