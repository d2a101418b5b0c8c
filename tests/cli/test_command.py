"""What all verbs that view a recording promise: no torch, no escape codes out of it, help with examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.cli import VERBS, main
from sightline.hints import Hint, for_command_line
from tests.cli.recorded import WITHOUT_TORCH, cli, environment, invoke, misused, process, refused
from tests.recording.architectures import ZOO

VIEWING: dict[str, list[list[str]]] = {
    "show": [[], *(["--view", view] for view in ("code", "log", "order", "summary", "source", "problems"))],
    "ops": [[], ["--json"], ["--csv"]],
    "tensors": [[], ["--json"], ["--csv"], ["--no-stats"]],
    "lineage": [["$3"], ["1"]],
    "graph": [[], ["--to", "dot"], ["--to", "json"], ["--to", "list"]],
    "validate": [[]],
}
CASES = [(verb, options) for verb, cases in VIEWING.items() for options in cases]


@pytest.mark.parametrize(("verb", "options"), CASES, ids=lambda part: part if isinstance(part, str) else None)
def test_nothing_of_a_recording_reaches_the_terminal_raw(
    hostile: list[Path], verb: str, options: list[str]
) -> None:
    for path in hostile:
        result = invoke(verb, path, *options)
        assert result.exit_code == 0 or verb == "validate", result.output
        raw = [character for character in result.output if not character.isprintable() and character != "\n"]
        assert not raw
        if verb in ("show", "ops", "tensors", "lineage"):
            colored = invoke(verb, path, *options, "--color", "always").output
            assert "\x1b[31mred" not in colored
            assert "\x1b[31m'" not in colored


def test_names_are_shown_as_they_are(hostile: list[Path]) -> None:
    shown = cli("ops", hostile[0], "--color", "always")
    assert "\\x1b[31mred\\x1b[0m" in shown
    assert "torch.<script>alert(1)</script>" in shown
    assert "[bold]x[/bold]" in cli("show", hostile[0], "--view", "order", "--color", "always")
    assert "../../etc/passwd/0/0" in cli("tensors", hostile[1])
    drawn = cli("tensors", hostile[1], "\x1b[31m/'; DROP TABLE ops; --/0/0")
    assert drawn.startswith("\\x1b[31m/'; DROP TABLE ops; --/0/0")


def test_an_error_says_nothing_raw(hostile: list[Path]) -> None:
    for arguments in (
        ["show", "\x1b[31mred"],
        ["tensors", hostile[1], "\x1b[31m"],
        ["lineage", hostile[0], "\x1b[31mred"],
        ["ops", hostile[0], "--op", "\x1b[31mred"],
        ["show", hostile[0], "--view", "problems", "--kind", "\x1b[31mred"],
        ["graph", hostile[0], "-o", "\x1b[31mred"],
    ):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert "\x1b" not in result.output


def test_viewing_imports_no_torch(run: Path) -> None:
    calls = [
        ["show", run], ["show", run, "--view", "code"], ["show", run, "--view", "source"],
        ["show", run, "--view", "problems"], ["show", run, "--view", "summary"], ["ops", run],
        ["tensors", run], ["tensors", run, "step0/head/output/0/0"], ["lineage", run, "blocks.1"],
        ["graph", run, "--fold"], ["validate", run],
    ]  # fmt: skip
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from sightline.cli import main\n"
        f"for call in {[[str(part) for part in call] for call in calls]!r}:\n"
        "    main(call, standalone_mode=False)\n"
        "    assert not [name for name in sys.modules if name.startswith('torch.')], call\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "is sound" in done.stdout


def test_the_command_works_without_torch(run: Path) -> None:
    done = process("show", run, "--tail", 3, command=WITHOUT_TORCH)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{sl.load(run).code(tail=3)}\n", "")
    done = process("show", run.parent, command=WITHOUT_TORCH)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom sightline.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "heavy = ('numpy', 'rich', 'torch', 'sqlite3', 'sightline.views')\n"
        "print(*(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VIEWING)
def test_help_has_examples(verb: str) -> None:
    shown = cli(verb, "--help")
    assert "\n  Examples:\n" in shown
    assert f"    sightline {verb} run.sight" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_verb_that_is_not_there_yet_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "not-written", "Nothing yet.")
    assert "not-written" in cli("--help")
    assert main.get_command(None, "not-written") is None  # type: ignore[arg-type]
    assert invoke("not-written").exit_code == 2


def test_a_misspelt_verb_or_recording_names_what_is_near(run: Path) -> None:
    assert misused("shwo", run) == "No such command 'shwo'; did you mean 'show'?"
    assert misused("zzz").startswith("No such command 'zzz'; it has 'run', 'show'")
    near = f"; did you mean {run}?"
    assert (
        refused("show", run.with_name("rnu.sigth"))
        == f"There is no recording {run.with_name('rnu.sigth')}{near}"
    )
    assert refused("ops", run.with_name("run")) == f"There is no recording {run.with_name('run')}{near}"
    assert (
        refused("show", run.with_name("other.sight"))
        == f"There is no recording {run.with_name('other.sight')}."
    )


@pytest.mark.parametrize("verb", ["ops", "tensors"])
def test_two_forms_do_not_go_together(run: Path, verb: str) -> None:
    assert misused(verb, run, "--csv", "--json") == "--csv and --json do not go together; give one of them."


def test_what_is_allowed_but_is_not_there_is_said(run: Path) -> None:
    result = invoke("show", run, "--view", "nonfinite", "--allow", "adm", "--allow", "head")
    assert result.exit_code == 0
    assert result.stderr == "sightline: --allow 'adm' matched nothing; near: addmm, add\n"


def test_the_command_line_speaks_of_its_own_options(tmp_path: Path) -> None:
    with sl.trace(ops="api") as bare:
        torch.ones(2).relu().log()
    bare.save(tmp_path / "bare.sight")
    with sl.trace(ops="none", stats=True) as calls:
        torch.nn.Threshold(9, float("nan"))(torch.ones(2))
    calls.save(tmp_path / "calls.sight")
    sentence = [cli("show", file, "--view", view) for view in ("overview", "problems", "nonfinite")
            for file in (tmp_path / "bare.sight", tmp_path / "calls.sight")]  # fmt: skip
    sentence += [
        refused("show", tmp_path / "bare.sight", "--stats"),
        refused("tensors", tmp_path / "bare.sight", "q"),
    ]
    text = "\n".join(sentence)
    for words in ("--ops both finds", "--stats finds", "--capture '**'", "--stats or --check."):
        assert f"sightline run {words}" in text
    assert ": --view nonfinite" in text
    assert not re.search(r"\bt\.\w+\(|stats=|capture=|path=|sl\.|ops=\"|check=", text)


def test_what_comes_out_of_a_recording_is_never_rewritten() -> None:
    with sl.trace(ops="api", name="stats=True finds: t.problems()") as t:
        torch.ones(2).relu()
    with for_command_line():
        shown = str(t)
    assert "stats=True finds: t.problems()" in shown


def test_a_hint_is_spelled_for_who_reads_it() -> None:
    hints = (
        Hint.option("fold", False),
        Hint.option("module", "a b"),
        Hint.recording("ops", "both"),
        Hint.view("memory"),
    )
    assert [str(each) for each in hints] == ["fold=False", "module='a b'", 'ops="both"', "t.memory()"]
    with for_command_line():
        assert [str(each) for each in hints] == [
            "--no-fold", "--module 'a b'", "sightline run --ops both", "--view memory",
        ]  # fmt: skip
    assert str(hints[0]) == "fold=False"


@pytest.fixture(scope="module")
def gpt2() -> sl.Trace:
    """A forward of a tiny GPT-2; the first model transformers builds adds a method to nn.Module, for good."""
    architecture = next(each for each in ZOO if each.name == "gpt2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = architecture.build()
        with sl.trace(model.eval(), capture="**.attn", stats=True) as trace, torch.no_grad():
            model(**inputs)
    return trace


def test_a_real_architecture(gpt2: sl.Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    gpt2.save(path)
    with for_command_line():
        summary = f"{gpt2.summary()}\n"
    assert cli("show", path, "--view", "summary") == summary
    assert "modeling_gpt2.py" in cli("show", path, "--view", "code")
    assert cli("ops", path, "--json").count("\n") == len(gpt2.ops)
    key = next(iter(gpt2.tensors))
    assert key in cli("tensors", path)
    assert "rows 0 … " in cli("tensors", path, key)
    assert cli("validate", path).startswith(f"{path} is sound: {len(gpt2.ops):,} ops")
    assert " ×" in cli("graph", path, "--fold", "--level", "module", "--to", "list")
