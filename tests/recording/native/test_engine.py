"""Which engine records: what is asked for, what can be built, and what ``sightline engine`` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from sightline.cli import main
from sightline.errors import UsageError
from sightline.recording import engine_choice
from sightline.recording.native import engine as build
from sightline.recording.native.builder import NAME
from sightline.recording.native.trusted_files import CACHE
from tests.recording.native.stand_in import FakeCompiler, builder, sentence

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture(autouse=True)
def stand_in(fake: FakeCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "_checked", lambda module: module)  # a stand-in records nothing


class TestTheChoice:
    def test_auto_is_native_where_it_can_be_built(self) -> None:
        assert engine_choice.resolve_engine("auto") == engine_choice.resolve_engine("native") == "native"
        assert build.load().answer() == 42
        assert sys.modules[NAME] is build.load()

    def test_python_builds_nothing(self, fake: FakeCompiler) -> None:
        assert engine_choice.resolve_engine("python") == "python"
        assert fake.calls == 0

    def test_auto_is_python_where_it_cannot(self, fake: FakeCompiler) -> None:
        fake.does("exit 1")
        assert engine_choice.resolve_engine("auto") == "python"
        assert "did not compile with fake++ 1.0" in sentence(lambda: engine_choice.resolve_engine("native"))
        assert fake.calls == 1

    @pytest.mark.parametrize("engine", ["native", "python"])
    def test_auto_follows_the_environment(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(engine_choice.ENGINE, engine)
        assert engine_choice.resolve_engine("auto") == engine
        assert engine_choice.resolve_engine("python") == "python"
        assert engine_choice.resolve_engine("native") == "native"

    def test_native_in_the_environment_is_held_to(
        self, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake.does("exit 1")
        monkeypatch.setenv(engine_choice.ENGINE, "native")
        assert "did not compile" in sentence(lambda: engine_choice.resolve_engine("auto"))
        assert engine_choice.engine_status().reason.startswith(
            "SIGHTLINE_ENGINE=native is set, so that nothing can be recorded. The native engine did not "
        )

    def test_a_wrong_word_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match=r"^engine='fast' is not a choice; engine is one of 'auto', "):
            engine_choice.resolve_engine("fast")
        monkeypatch.setenv(engine_choice.ENGINE, "fast")
        text = r"^SIGHTLINE_ENGINE='fast' is not a choice; it is one of 'auto', 'native', 'python'\.$"
        with pytest.raises(UsageError, match=text):
            engine_choice.resolve_engine("auto")
        assert engine_choice.resolve_engine("python") == "python"

    def test_a_fault_of_the_build_does_not_end_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise ZeroDivisionError("oh")

        monkeypatch.setattr(build, "_builder", fail)
        assert engine_choice.resolve_engine("auto") == "python"
        assert sentence(build.load) == "The native engine cannot be built (ZeroDivisionError: oh)."


class TestStatus:
    def test_before_and_after_a_build(self, fake: FakeCompiler, cache: Path) -> None:
        before = engine_choice.engine_status()
        assert (before.engine, before.path, fake.calls) == ("native", None, 0)
        assert before.reason == (
            "It is built when it is first used, in 15 to 60 s; `sightline engine --build` builds it now."
        )
        after = engine_choice.engine_status(build=True)
        assert after.engine == "native"
        assert after.reason == "It was built here for this torch and this Python, and its self-test passed."
        assert after.path is not None
        assert after.path.is_relative_to(cache)
        assert (after.torch, after.compiler, after.cache) == (torch.__version__, "fake++ 1.0", cache)
        assert engine_choice.engine_status() == after
        assert fake.calls == 1

    def test_of_a_failure_until_it_is_built_again(
        self, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake.does("exit 1")
        failed = engine_choice.engine_status(build=True)
        assert (failed.engine, failed.path) == ("python", None)
        assert "did not compile" in failed.reason
        monkeypatch.setattr(build, "_outcome", None)  # as in another process
        assert engine_choice.engine_status() == failed
        assert fake.calls == 1
        fake.does()
        assert engine_choice.engine_status(build=True).path is not None

    def test_of_a_full_disk_is_not_that_it_will_be_built(self, fake: FakeCompiler) -> None:
        fake.does("echo 'No space left on device'; exit 1")
        assert "(No space left on device)" in engine_choice.engine_status(build=True).reason

    def test_a_file_that_does_not_load_is_built_again_when_asked(
        self, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = builder(sources, cache).build()
        path.write_bytes(b"no library")
        assert "cannot be loaded" in engine_choice.engine_status().reason
        monkeypatch.setattr(build, "_outcome", None)
        assert engine_choice.engine_status(build=True).path == path

    def test_where_python_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(engine_choice.ENGINE, "python")
        found = engine_choice.engine_status()
        assert (found.engine, found.reason) == ("python", "SIGHTLINE_ENGINE=python is set.")

    def test_where_nothing_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
        monkeypatch.delenv(CACHE)
        monkeypatch.setenv("CXX", "no-such-compiler")
        found = engine_choice.engine_status()
        assert (found.engine, found.compiler, found.cache) == ("python", None, None)
        assert found.reason == (
            "The native engine has no folder to be built in, because this user has no home: set "
            "SIGHTLINE_CACHE."
        )


class TestTheCommand:
    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["engine", *arguments])

    def test_says_which_engine_is_used(self, fake: FakeCompiler, cache: Path) -> None:
        result = self.run()
        assert result.exit_code == 0
        assert result.output == (
            "engine    native\n"
            "why       It is built when it is first used, in 15 to 60 s; `sightline engine --build` builds "
            "it now.\n"
            "wheel     has no engines\n"
            f"torch     {torch.__version__}\n"
            f"python    {sys.version.split()[0]}\n"
            "compiler  fake++ 1.0\n"
            f"cache     {cache}\n"
        )
        assert fake.calls == 0

    def test_builds(self, cache: Path) -> None:
        result = self.run("--build")
        assert result.exit_code == 0
        assert result.stdout.startswith(
            "engine    native\n"
            "why       It was built here for this torch and this Python, and its self-test passed.\n"
            f"file      {cache / 'native'}"
        )
        assert result.stderr.startswith("sightline: building the native engine for torch ")
        assert self.run("--build").stderr == ""

    def test_a_failure_is_one_sentence(self, fake: FakeCompiler) -> None:
        fake.does("exit 1")
        result = self.run("--build")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "Error: The native engine did not compile with fake++ 1.0: " in result.stderr
        again = self.run()
        assert again.exit_code == 0
        assert again.stdout.startswith("engine    python\nwhy       The native engine did not compile")

    def test_a_wrong_choice_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(engine_choice.ENGINE, "fast")
        result = self.run()
        assert result.exit_code == 1
        assert result.output.startswith("Error: SIGHTLINE_ENGINE='fast' is not a choice; ")


def test_the_command_needs_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from sightline.cli import main; main(['engine'], prog_name='sightline')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: Recording needs torch, which is not installed here")
