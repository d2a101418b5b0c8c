"""The native engine is built once, for what is installed, and whatever is in the way is one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner, Result

from sightline.cli import main
from sightline.errors import NativeUnavailable, UsageError
from sightline.recording.native import builder as compilation
from sightline.recording.native import compiler as toolchain
from sightline.recording.native import engine as build
from sightline.recording.native.builder import NAME, import_extension, try_in_a_process
from sightline.recording.native.compiler import Toolchain
from tests.recording.native.stand_in import FakeCompiler, builder, mode, start_build, write_sources

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, toolchain.COMPILERS)), reason="no C++ compiler is on PATH"
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's cache or choices, nor what another test has loaded."""
    for name in ("CXX", "XDG_CACHE_HOME", build.ENGINE, toolchain.SANITIZE, "STAND_IN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(compilation.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))  # restores what was there


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, really compiled, once for all tests."""
    if not any(map(shutil.which, toolchain.COMPILERS)):
        pytest.skip("no C++ compiler is on PATH")
    folder = tmp_path_factory.mktemp("stand-in")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        patch.delenv(toolchain.SANITIZE, raising=False)
        patch.setattr(compilation, "try_in_a_process", lambda path: None)
        return builder(write_sources(folder / "sources"), folder / "cache").build()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def fake(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Stands where the compiler stands, and nothing is tried in a process of its own."""
    monkeypatch.setattr(compilation, "try_in_a_process", lambda path: None)
    compiler = FakeCompiler(tmp_path / "fake++", built).does()
    monkeypatch.setenv("CXX", str(compiler.program))
    return compiler


def sentence(call: Callable[[], object]) -> str:
    """Why the native engine is not there: one sentence."""
    with pytest.raises(NativeUnavailable) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("The native engine ")
    assert text.endswith(".")
    assert "\n" not in text
    return text


class TestABuild:
    @needs_compiler
    def test_compiles_is_tried_and_loads(
        self, sources: Path, cache: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = builder(sources, cache).build()
        printed = capfd.readouterr()
        assert printed.out == ""
        version = re.escape(torch.__version__)
        assert re.fullmatch(
            rf"sightline: building the native engine for torch {version}, once \(about 15 s\) … \d+ s\.\n",
            printed.err,
        )
        module = import_extension(path)
        assert module.__name__ == NAME
        assert module.answer() == 42

    def test_is_kept_for_its_owner_alone(self, fake: FakeCompiler, sources: Path, cache: Path) -> None:
        old = os.umask(0o002)
        try:
            path = builder(sources, cache).build()
        finally:
            os.umask(old)
        assert [mode(folder) for folder in (cache, cache / "native", path.parent)] == [0o700] * 3
        assert mode(path) == 0o755
        assert sorted(each.name for each in path.parent.iterdir()) == [
            "_observer.so", "build.log", "facts.json", "lock",
        ]  # fmt: skip
        assert json.loads((path.parent / "facts.json").read_text("utf-8"))["torch"] == torch.__version__

    def test_is_found_the_second_time(self, fake: FakeCompiler, sources: Path, cache: Path) -> None:
        first = builder(sources, cache).build()
        assert builder(sources, cache).build() == first
        assert fake.calls == 1

    def test_all_sources_are_one_to_the_compiler(
        self, fake: FakeCompiler, sources: Path, cache: Path
    ) -> None:
        for name in ("b.cpp", "c.cpp", "notes.txt"):
            (sources / name).write_text("", "utf-8")
        fake.does('cat "$(dirname "$target")/observer.cpp"')
        builder(sources, cache).build()
        log = builder(sources, cache).folder.joinpath("build.log").read_text("utf-8")
        included = [line.split('"')[1] for line in log.splitlines() if line.startswith("#include")]
        assert [Path(each).name for each in included] == ["b.cpp", "c.cpp", "module.cpp"]
        assert fake.calls == 1

    def test_a_file_that_others_can_write_is_not_loaded(
        self, fake: FakeCompiler, sources: Path, cache: Path
    ) -> None:
        path = builder(sources, cache).build()
        path.chmod(0o777)
        assert sentence(builder(sources, cache).existing) == (
            f"The native engine in {path.parent} is not loaded, because another user owns it or can write "
            "it: remove it, or set SIGHTLINE_CACHE to a folder of your own."
        )

    def test_processes_wait_for_the_one_that_builds(
        self, fake: FakeCompiler, sources: Path, cache: Path
    ) -> None:
        fake.does("sleep 2")
        started = [start_build(sources, cache) for _ in range(3)]
        outputs = [process.communicate(timeout=120) for process in started]
        assert {out for out, _ in outputs} == {f"{builder(sources, cache).folder / '_observer.so'}\n"}
        assert fake.calls == 1
        assert sum("building" in said for _, said in outputs) == 1

    def test_another_process_that_never_finishes_is_not_waited_for_forever(
        self, fake: FakeCompiler, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import fcntl

        monkeypatch.setattr(compilation, "_WAIT_SECONDS", 0.2)
        folder = builder(sources, cache).folder
        folder.mkdir(parents=True)
        with (folder / "lock").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert sentence(builder(sources, cache).build) == (
                "The native engine is being built by another process that does not finish: end it, then run "
                f"`sightline engine --build` (it holds {folder / 'lock'})."
            )

    def test_that_is_killed_leaves_nothing_that_looks_built(
        self, fake: FakeCompiler, sources: Path, cache: Path, tmp_path: Path
    ) -> None:
        began = tmp_path / "began"
        fake.does(f'echo half > "$target"; echo $$ > "{began}.part"; mv "{began}.part" "{began}"; sleep 60')
        process = start_build(sources, cache)
        while not began.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.communicate()
        os.killpg(int(began.read_text("utf-8")), signal.SIGKILL)  # the compiler outlives it
        fake.does()
        again = builder(sources, cache)
        assert again.existing() is None
        assert again.failure() is None
        assert [each.name[:5] for each in again.folder.iterdir() if each.is_dir()] == ["work-"]
        assert import_extension(again.build()).answer() == 42
        assert not [each for each in again.folder.iterdir() if each.is_dir()]

    def test_that_is_interrupted_ends_its_compiler_and_is_not_a_failure(
        self, fake: FakeCompiler, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        fake.does("sleep 60")
        building = builder(sources, cache)  # asks the compiler for its version, and may sleep
        waiting: list[subprocess.Popen[bytes]] = []
        wait = subprocess.Popen.wait

        def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
            waiting.append(process)
            if len(waiting) == 1:
                raise KeyboardInterrupt
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            building.build()
        assert waiting[-1].returncode == -signal.SIGKILL
        assert builder(sources, cache).failure() is None
        assert capfd.readouterr().err.endswith("… stopped.\n")


class TestTheKey:
    def test_is_the_same_for_the_same_sources_elsewhere(
        self, fake: FakeCompiler, sources: Path, tmp_path: Path
    ) -> None:
        other = write_sources(tmp_path / "other")
        assert Toolchain.here().key(sources) == Toolchain.here().key(other)

    @pytest.mark.parametrize("name", ["module.cpp", "answer.h", "new.h"])
    def test_changes_with_every_source(self, fake: FakeCompiler, sources: Path, name: str) -> None:
        before = Toolchain.here().key(sources)
        with (sources / name).open("a") as file:
            file.write("\n// changed\n")
        assert Toolchain.here().key(sources) != before

    def test_changes_with_torch_python_compiler_and_flags(
        self, fake: FakeCompiler, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [
            builder(sources, cache, **changes).folder.name
            for changes in (
                {}, {"torch": "2.99"}, {"torch_build": ("other",)}, {"soabi": "cpython-399"},
                {"cxx11_abi": False}, {"sanitize": True},
            )
        ]  # fmt: skip
        monkeypatch.setenv("CXX", f"{fake.program} -fother")
        keys.append(builder(sources, cache).folder.name)
        assert len(set(keys)) == len(keys)
        assert keys[0].startswith(f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-")

    def test_sanitizers_are_asked_for_in_the_environment(
        self, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "-O2" in Toolchain.here().flags
        monkeypatch.setenv(toolchain.SANITIZE, "1")
        assert {"-fsanitize=address,undefined", "-g", "-O1", "-DNDEBUG"} <= set(Toolchain.here().flags)
        assert "-O2" not in Toolchain.here().flags

    def test_the_command_has_what_torch_needs(self, fake: FakeCompiler) -> None:
        here = Toolchain.here()
        command = here.command(Path("a.cpp"), Path("a.so"), strict=True)
        abi = int(torch.compiled_with_cxx11_abi())
        assert {"-DNDEBUG", "-std=c++20", "-Werror", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"} <= set(command)
        include = Path(torch.__file__).parent / "include"
        assert command[command.index("-isystem") + 1] == str(include)


class TestAFailedBuild:
    def test_says_where_the_log_is_and_is_remembered(
        self, fake: FakeCompiler, sources: Path, cache: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        fake.does("echo 'module.cpp:3: error: no such thing' >&2; exit 1")
        log = builder(sources, cache).folder / "build.log"
        said = sentence(builder(sources, cache).build)
        assert said == (
            "The native engine did not compile with fake++ 1.0: set CXX to another compiler with C++20 and "
            f"run `sightline engine --build`; the compiler's messages are in {log}."
        )
        assert capfd.readouterr().err.endswith("… failed.\n")
        assert "error: no such thing" in log.read_text("utf-8")
        assert f"$ {fake.program} " in log.read_text("utf-8")
        assert sentence(builder(sources, cache).build) == said
        assert fake.calls == 1
        fake.does()
        assert import_extension(builder(sources, cache).build(again=True)).answer() == 42
        assert builder(sources, cache).failure() is None

    @needs_compiler
    def test_of_a_real_compiler(self, sources: Path, cache: Path) -> None:
        (sources / "module.cpp").write_text("int main() { return no_such_thing; }", "utf-8")
        assert "did not compile with" in sentence(builder(sources, cache).build)
        assert "no_such_thing" in (builder(sources, cache).folder / "build.log").read_text("utf-8")

    def test_of_the_linker_is_one_too(self, fake: FakeCompiler, sources: Path, cache: Path) -> None:
        fake.does('case "$given" in *-shared*) echo "cannot find -lc10"; exit 1;; esac')
        assert "did not compile with fake++ 1.0" in sentence(builder(sources, cache).build)
        assert "cannot find -lc10" in (builder(sources, cache).folder / "build.log").read_text("utf-8")

    def test_a_new_warning_is_no_reason_to_be_without_the_engine(
        self, fake: FakeCompiler, sources: Path, cache: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        body = 'case "$given" in *-Werror*) echo "error: new [-Werror=new]"; exit 1;; *) echo "new";; esac'
        fake.does(body)
        assert import_extension(builder(sources, cache).build()).answer() == 42
        log = builder(sources, cache).folder / "build.log"
        assert capfd.readouterr().err.endswith(f" s, with warnings: {log}.\n")
        assert "did not compile" in sentence(builder(sources, cache, sanitize=True).build)

    def test_a_compiler_that_hangs_is_ended(
        self, fake: FakeCompiler, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compilation, "_COMPILE_SECONDS", 0.2)
        fake.does("sleep 60")
        assert "did not compile" in sentence(builder(sources, cache).build)

    def test_a_full_disk_is_said_and_not_remembered(
        self, fake: FakeCompiler, sources: Path, cache: Path
    ) -> None:
        fake.does("echo 'fatal error: error writing to a.o: No space left on device'; exit 1")
        assert sentence(builder(sources, cache).build) == (
            f"The native engine cannot be built in {cache} (No space left on device): set SIGHTLINE_CACHE "
            "to a folder with room that can be written."
        )
        fake.does()
        assert import_extension(builder(sources, cache).build()).answer() == 42


class TestWhatIsMissing:
    def test_a_compiler(self, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert sentence(lambda: builder(sources, cache).build()) == (
            "The native engine needs a C++ compiler, and none of g++, c++, clang++ is on PATH: install one "
            "(`apt-get install g++`, `dnf install gcc-c++`) or set CXX."
        )

    def test_the_compiler_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler -x")
        assert sentence(Toolchain.here) == (
            "The native engine needs a C++ compiler, and CXX='no-such-compiler -x' is not a program on PATH: "
            "set CXX to one that is, or unset it."
        )

    def test_a_compiler_that_answers(self, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "false")
        assert re.fullmatch(
            r"The native engine needs a C\+\+ compiler, and `/.*/false --version` fails \(.*\): "
            r"set CXX to another one\.",
            sentence(Toolchain.here),
        )

    def test_a_compiler_where_it_was_built_before(
        self, fake: FakeCompiler, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = builder(sources, cache).build()
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", "")
        assert builder(sources, cache).build() == path
        assert builder(sources, cache, torch="2.99").existing() is None

    def test_the_headers_of_python(self, fake: FakeCompiler, sources: Path, cache: Path) -> None:
        bare = sources.parent
        missing = builder(sources, cache, includes=(bare,))
        assert sentence(missing.build) == (
            f"The native engine needs Python's C headers, and {bare} has no Python.h: install them "
            "(`apt-get install python3-dev`, `dnf install python3-devel`)."
        )
        builder(sources, cache).build()
        assert missing.build().is_file()  # what is built needs none

    def test_the_headers_of_torch(self, fake: FakeCompiler, sources: Path, cache: Path) -> None:
        bare = sources.parent
        assert sentence(builder(sources, cache, torch_folder=bare).build) == (
            f"The native engine needs torch's C++ headers, and {bare / 'include'} has none: "
            "install a torch that has them, as the official wheels do."
        )

    def test_the_sources(self, fake: FakeCompiler, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert sentence(builder(tmp_path / "empty", cache).build) == (
            f"The native engine has no sources in {tmp_path / 'empty'}: install sightline again."
        )
        assert not cache.exists()

    @pytest.mark.parametrize("below", [True, False])
    def test_a_folder_that_can_be_written(self, fake: FakeCompiler, sources: Path, below: bool) -> None:
        file = sources / "answer.h"
        cache = file / "cache" if below else file
        assert sentence(builder(sources, cache).build) == (
            f"The native engine cannot be built in {cache} (Not a directory): set SIGHTLINE_CACHE to a "
            "folder with room that can be written."
        )

    def test_a_cache_on_a_disk_that_is_read_only(
        self, fake: FakeCompiler, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(self: Path, mode: int = 0o777) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
        assert "(Read-only file system)" in sentence(builder(sources, cache).build)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_the_right_to_write(self, fake: FakeCompiler, sources: Path, cache: Path) -> None:
        cache.mkdir(0o500)
        assert "(Permission denied)" in sentence(builder(sources, cache).build)


class TestWhereItCannotBe:
    def test_another_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "PYTHONS", ((3, 8), (3, 9)))
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        assert sentence(Toolchain.here) == (
            f"The native engine is for CPython 3.8 and 3.9, and this is Python {version}; "
            "the Python engine records here."
        )

    def test_another_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            said = sentence(Toolchain.here)
        assert said == "The native engine is for Linux, and this is darwin; the Python engine records here."

    def test_a_free_threaded_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
        assert sentence(Toolchain.here) == (
            "The native engine needs the GIL, and this is a free-threaded Python; "
            "the Python engine records here."
        )

    def test_a_debug_build_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "debug", True)
        assert sentence(Toolchain.here) == (
            "The native engine is for release builds of torch, and this is a debug build, whose structs "
            "differ; the Python engine records here."
        )


class TestAnExtension:
    def test_that_is_cut_short(self, tmp_path: Path) -> None:
        (tmp_path / "_observer.so").write_bytes(b"no library")
        said = sentence(lambda: import_extension(tmp_path / "_observer.so"))
        assert said.startswith("The native engine was built but cannot be loaded (")
        assert said.endswith("): run `sightline engine --build` to build it again.")

    @pytest.mark.parametrize(
        ("complaint", "shown"),
        [("frames are laid out differently",) * 2, ("raise", "RuntimeError: no frames here")],
    )
    def test_that_finds_itself_wrong(
        self, built: Path, monkeypatch: pytest.MonkeyPatch, complaint: str, shown: str
    ) -> None:
        monkeypatch.setenv("STAND_IN", complaint)
        assert sentence(lambda: import_extension(built)) == (
            f"The native engine does not work with torch {torch.__version__} and Python "
            f"{sys.version.split()[0]} ({shown}); the Python engine records here."
        )

    def test_is_tried_in_a_process_of_its_own(self, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN", "crash")
        assert sentence(lambda: try_in_a_process(built)) == (
            "The native engine was built but crashes when it is loaded (SIGABRT); "
            "the Python engine records here."
        )
        monkeypatch.setenv("STAND_IN", "no luck")
        assert "(no luck)" in sentence(lambda: try_in_a_process(built))
        monkeypatch.setattr(sys, "executable", "/opt/host-program")
        try_in_a_process(built)  # not started


class TestTheChoice:
    @pytest.fixture(autouse=True)
    def stand_in(self, fake: FakeCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "SOURCES", sources)

    def test_auto_is_native_where_it_can_be_built(self) -> None:
        assert build.resolve_engine("auto") == build.resolve_engine("native") == "native"
        assert build.load().answer() == 42
        assert sys.modules[NAME] is build.load()

    def test_python_builds_nothing(self, fake: FakeCompiler) -> None:
        assert build.resolve_engine("python") == "python"
        assert fake.calls == 0

    def test_auto_is_python_where_it_cannot(self, fake: FakeCompiler) -> None:
        fake.does("exit 1")
        assert build.resolve_engine("auto") == "python"
        assert "did not compile with fake++ 1.0" in sentence(lambda: build.resolve_engine("native"))
        assert fake.calls == 1

    @pytest.mark.parametrize("engine", ["native", "python"])
    def test_auto_follows_the_environment(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(build.ENGINE, engine)
        assert build.resolve_engine("auto") == engine
        assert build.resolve_engine("python") == "python"
        assert build.resolve_engine("native") == "native"

    def test_native_in_the_environment_is_held_to(
        self, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake.does("exit 1")
        monkeypatch.setenv(build.ENGINE, "native")
        assert "did not compile" in sentence(lambda: build.resolve_engine("auto"))
        assert build.status().reason.startswith(
            "SIGHTLINE_ENGINE=native is set, so that nothing can be recorded. The native engine did not "
        )

    def test_a_wrong_word_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match=r"^engine='fast' is not a choice; engine is one of 'auto', "):
            build.resolve_engine("fast")
        monkeypatch.setenv(build.ENGINE, "fast")
        text = r"^SIGHTLINE_ENGINE='fast' is not a choice; it is one of 'auto', 'native', 'python'\.$"
        with pytest.raises(UsageError, match=text):
            build.resolve_engine("auto")
        assert build.resolve_engine("python") == "python"

    def test_a_fault_of_the_build_does_not_end_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise ZeroDivisionError("oh")

        monkeypatch.setattr(build, "_builder", fail)
        assert build.resolve_engine("auto") == "python"
        assert sentence(build.load) == "The native engine cannot be built (ZeroDivisionError: oh)."


class TestStatus:
    @pytest.fixture(autouse=True)
    def stand_in(self, fake: FakeCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "SOURCES", sources)

    def test_before_and_after_a_build(self, fake: FakeCompiler, cache: Path) -> None:
        before = build.status()
        assert (before.engine, before.path, fake.calls) == ("native", None, 0)
        assert before.reason == (
            "It is built when it is first used, in about 15 s; `sightline engine --build` builds it now."
        )
        after = build.status(build=True)
        assert after.engine == "native"
        assert after.reason == "It is built for this torch and this Python, and loads."
        assert after.path is not None
        assert after.path.is_relative_to(cache)
        assert (after.torch, after.compiler, after.cache) == (torch.__version__, "fake++ 1.0", cache)
        assert build.status() == after
        assert fake.calls == 1

    def test_of_a_failure_until_it_is_built_again(
        self, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake.does("exit 1")
        failed = build.status(build=True)
        assert (failed.engine, failed.path) == ("python", None)
        assert "did not compile" in failed.reason
        monkeypatch.setattr(build, "_outcome", None)  # as in another process
        assert build.status() == failed
        assert fake.calls == 1
        fake.does()
        assert build.status(build=True).path is not None

    def test_of_a_full_disk_is_not_that_it_will_be_built(self, fake: FakeCompiler) -> None:
        fake.does("echo 'No space left on device'; exit 1")
        assert "(No space left on device)" in build.status(build=True).reason

    def test_a_file_that_does_not_load_is_built_again_when_asked(
        self, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = builder(sources, cache).build()
        path.write_bytes(b"no library")
        assert "cannot be loaded" in build.status().reason
        monkeypatch.setattr(build, "_outcome", None)
        assert build.status(build=True).path == path

    def test_where_python_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(build.ENGINE, "python")
        found = build.status()
        assert (found.engine, found.reason) == ("python", "SIGHTLINE_ENGINE=python is set.")

    def test_where_nothing_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
        monkeypatch.delenv(compilation.CACHE)
        monkeypatch.setenv("CXX", "no-such-compiler")
        found = build.status()
        assert (found.engine, found.compiler, found.cache) == ("python", None, None)
        assert found.reason == (
            "The native engine has no folder to be built in, because this user has no home: set "
            "SIGHTLINE_CACHE."
        )


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SIGHTLINE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"SIGHTLINE_CACHE": "c"}, Path.cwd() / "c"),
        ({"SIGHTLINE_CACHE": "~/c"}, Path.home() / "c"),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/sightline")),
        ({"XDG_CACHE_HOME": "x"}, Path.home() / ".cache" / "sightline"),
        ({}, Path.home() / ".cache" / "sightline"),
    ],
)
def test_the_cache_folder(environment: dict[str, str], folder: Path) -> None:
    assert compilation.cache_folder(environment) == folder


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def stand_in(self, fake: FakeCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "SOURCES", sources)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["engine", *arguments])

    def test_says_which_engine_is_used(self, fake: FakeCompiler, cache: Path) -> None:
        result = self.run()
        assert result.exit_code == 0
        assert result.output == (
            "engine    native\n"
            "why       It is built when it is first used, in about 15 s; `sightline engine --build` builds "
            "it now.\n"
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
            "engine    native\nwhy       It is built for this torch and this Python, and loads.\n"
            f"built     {cache / 'native'}"
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
        monkeypatch.setenv(build.ENGINE, "fast")
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
