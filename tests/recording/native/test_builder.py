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
from pathlib import Path

import pytest
import torch

from sightline.recording.native import builder as compilation
from sightline.recording.native import compiler as toolchain
from sightline.recording.native.builder import NAME, import_extension, try_in_a_process
from sightline.recording.native.compiler import Toolchain
from tests.recording.native.stand_in import FakeCompiler, builder, mode, sentence, start_build, write_sources

pytestmark = pytest.mark.usefixtures("own_environment")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, toolchain.COMPILERS)), reason="no C++ compiler is on PATH"
)


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
            rf"sightline: building the native engine for torch {version}, once \(15 to 60 s\) … \d+ s\.\n",
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
            f"The native engine in {path.parent} is not loaded, because another user owns {path.name} or "
            "can write it: remove it, or set SIGHTLINE_CACHE to a folder of your own."
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
            f"The native engine is for CPython 3.8 to 3.9, and this is Python {version}; "
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
