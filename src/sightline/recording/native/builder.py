"""Builds the native engine, once per torch, Python, compiler and state of the sources, in the user's cache.

A built file is first loaded in a process of its own, so that one that crashes does no harm. Nothing is built,
read or loaded where another user could have put something else: see `trusted_files`.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from sightline.errors import NativeUnavailable
from sightline.recording.native import trusted_files
from sightline.recording.native.compiler import Toolchain, one_line, source_files
from sightline.recording.native.trusted_files import CACHE

NAME: Final = "sightline.recording.native._observer"
#: The fix for a build that failed, in error messages.
AGAIN: Final = "`sightline engine --build`"

_TRIAL_SECONDS: Final = 120.0
_TRIAL: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from sightline.recording.native import builder
try:
    builder.import_extension(builder.Path(sys.argv[2]))
except builder.NativeUnavailable as error:
    sys.exit(str(error))
"""


class NotLoadable(NativeUnavailable):
    """The file cannot be imported at all; building it again may help."""


def import_extension(path: Path) -> ModuleType:
    """Import the extension in a file, if it may be trusted, and check that it works here."""
    try:
        file = trusted_files.open_file(path)
    except FileNotFoundError as error:
        raise NotLoadable(f"The native engine is gone from {path}: run {AGAIN} to build it again.") from error
    # Loaded by the descriptor that was checked, which stays open: Python knows extensions by their path.
    opened = f"/proc/self/fd/{file}"
    source = opened if os.path.exists(opened) else str(path)
    loader = ExtensionFileLoader(NAME, source)
    spec = importlib.util.spec_from_file_location(NAME, source, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        module.__file__ = str(path)
    except Exception as error:
        raise NotLoadable(
            f"The native engine was built but cannot be loaded ({one_line(error)}): "
            f"run {AGAIN} to build it again."
        ) from error
    check = getattr(module, "self_check", None)
    try:
        complaint = str(check() or "") if check is not None else ""
    except Exception as error:
        complaint = f"{type(error).__name__}: {one_line(error)}"
    if complaint:
        raise NativeUnavailable(
            f"The native engine does not work with torch {torch.__version__} and Python "
            f"{sys.version.split()[0]} ({complaint}); the Python engine records here."
        )
    return module


def try_in_a_process(path: Path) -> None:
    """Import it in a process of its own first: if it crashes, the user's process does not."""
    program = sys.executable or ""
    if not Path(program).name.startswith("python"):
        return  # Python is embedded in another program, which must not be started for this
    command = [program, "-c", _TRIAL, json.dumps(sys.path), str(path)]
    try:
        done = subprocess.run(  # noqa: S603 — this Python, and the file that was just compiled
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_TRIAL_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(
            f"The native engine was built but did not load within {_TRIAL_SECONDS:.0f} s: "
            f"run {AGAIN} to try again."
        ) from None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise NativeUnavailable(
            f"The native engine was built but crashes when it is loaded ({name}); "
            "the Python engine records here."
        )
    if done.returncode:
        message = done.stderr.strip().rpartition("\n")[2]
        if not message.startswith("The native engine"):  # it failed before it came to the extension
            message = f"The native engine was built but could not be tried ({message}): run {AGAIN}."
        raise NativeUnavailable(message)


_BUILT: Final = "_observer.so"
_FACTS: Final = "facts.json"
_LOG: Final = "build.log"
_FAILED: Final = "failed.txt"  #: the sentence of a build that failed
_LOCK: Final = "lock"
_WORK: Final = "work-"  #: how the folder of a build under way begins
_COMPILE_SECONDS: Final = 600.0  #: on a machine with a lot else to do
_WAIT_SECONDS: Final = 900.0  #: for another process that builds


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """``$SIGHTLINE_CACHE``, else ``sightline`` in the user's cache folder."""
    environment = os.environ if environment is None else environment
    folder = environment.get(CACHE)
    try:
        if folder:
            return Path(folder).expanduser().absolute()
        shared = Path(environment.get("XDG_CACHE_HOME", ""))
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "sightline"
    except RuntimeError as error:  # the user has no entry in the password database, as in some containers
        raise NativeUnavailable(
            f"The native engine has no folder to be built in, because this user has no home: set {CACHE}."
        ) from error


@dataclass(frozen=True)
class Builder:
    """The extension made of these sources with this toolchain, in this cache folder."""

    sources: Path
    cache: Path
    toolchain: Toolchain

    @functools.cached_property  # so that it does not change while the sources are edited
    def folder(self) -> Path:
        """Where this build is kept, with its log."""
        return self.cache / "native" / self.toolchain.key(self.sources)

    def existing(self) -> Path | None:
        """The extension if it was built before, and may be trusted."""
        if self.toolchain.compiler is not None:
            path = self.folder / _BUILT
            return path if trusted_files.exists(path) else None
        # The build of the same sources by any compiler: containers are often run without one.
        expected = self.toolchain.facts(self.sources)
        for path in sorted(self.cache.glob(f"native/*/{_FACTS}")):
            try:
                facts = json.loads(trusted_files.read_text(path) or "")
            except (OSError, ValueError, NativeUnavailable):
                continue
            if isinstance(facts, dict) and facts | {"compiler": None} == expected:
                built = path.parent / _BUILT
                if built.is_file():
                    return built if trusted_files.exists(built) else None
        return None

    def failure(self) -> str | None:
        """The sentence of an earlier build that failed; it is not tried again at every recording."""
        try:
            return (trusted_files.read_text(self.folder / _FAILED) or "").strip() or None
        except OSError:
            return None

    def check(self) -> None:
        """Raise if anything that compiling needs is missing."""
        if not source_files(self.sources, ".cpp"):
            raise NativeUnavailable(
                f"The native engine has no sources in {self.sources}: install sightline again."
            )
        self.toolchain.check_can_compile()
        near = next(each for each in (self.folder, *self.folder.parents) if _exists(each))
        fault = 0 if os.access(near, os.W_OK | os.X_OK) else errno.EACCES
        fault = fault if near.is_dir() else errno.ENOTDIR
        if fault:
            raise _unwritable(self.cache, OSError(fault, os.strerror(fault)))

    def build(self, *, again: bool = False) -> Path:
        """The extension, compiled unless it exists; ``again`` retries a build that failed before."""
        path = self.existing()
        if path is not None:
            return path
        self.check()
        try:
            trusted_files.check_folder(self.folder)
            for each in reversed((self.folder, *self.folder.parents)):  # only their owner may read new ones
                if not _exists(each):
                    with suppress(FileExistsError):  # another process was faster
                        each.mkdir(0o700)
            trusted_files.check_folder(self.folder)  # another user may have been faster
            with _locked(self.folder / _LOCK) as locked:
                path = self.existing()  # another process may have built it meanwhile
                if path is not None:
                    return path
                failed = None if again else self.failure()
                if failed is not None:
                    raise NativeUnavailable(failed)
                if locked:
                    for left in self.folder.glob(f"{_WORK}*"):  # of a process that was killed
                        shutil.rmtree(left, ignore_errors=True)
                return self._build()
        except OSError as error:
            raise _unwritable(self.cache, error) from error

    def _build(self) -> Path:
        """Compile and try it in a temporary folder, then move it to its path in one step."""
        target = self.folder / _BUILT
        began = time.monotonic()
        write_progress(
            f"sightline: building the native engine for torch {self.toolchain.torch}, once (15 to 60 s) … "
        )
        ending = "stopped"
        try:
            with tempfile.TemporaryDirectory(prefix=_WORK, dir=self.folder) as work:
                built = Path(work) / _BUILT
                try:
                    warned = self._compile(built)
                    try_in_a_process(built)
                except NativeUnavailable as error:
                    ending = "failed"
                    trusted_files.write_text(self.folder / _FAILED, f"{error}\n")
                    raise
                facts = json.dumps(self.toolchain.facts(self.sources), indent=1)
                trusted_files.write_text(self.folder / _FACTS, facts)
                built.chmod(0o755)
                built.replace(target)
            (self.folder / _FAILED).unlink(missing_ok=True)
            ending = f"{time.monotonic() - began:.0f} s"
            if warned:
                ending += f", with warnings: {self.folder / _LOG}"
        finally:
            write_progress(f"{ending}.\n")
        return target

    def _compile(self, target: Path) -> bool:
        """Make the extension; returns whether the compiler warned of something."""
        log = self.folder / _LOG
        warned = False
        output = self._run_compiler(target, log, strict=True)
        if "[-Werror" in output and not self.toolchain.sanitize:
            # A compiler newer than ours may warn of more, which is no reason to be without the engine.
            warned = True
            output = self._run_compiler(target, log, strict=False)
        if not output:
            return warned
        if "No space left on device" in output:  # not stored as a failure: there may be room the next time
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        assert self.toolchain.compiler is not None
        raise NativeUnavailable(
            f"The native engine did not compile with {self.toolchain.compiler.name}: set CXX to another "
            f"compiler with C++20 and run {AGAIN}; the compiler's messages are in {log}."
        )

    def _run_compiler(self, target: Path, log: Path, *, strict: bool) -> str:
        """Compile and link; returns the output of a compiler that failed, else an empty text.

        All sources are one to the compiler: most of its time goes into torch's headers.
        """
        work = target.parent
        whole = work / "observer.cpp"
        includes = [f'#include "{source}"\n' for source in source_files(self.sources, ".cpp")]
        whole.write_text("".join(includes), "utf-8")
        command = self.toolchain.command(whole, target, strict=strict)
        environment = os.environ | {"LC_ALL": "C", "TMPDIR": str(work)}
        if self.toolchain.sanitize:
            environment.pop("LD_PRELOAD", None)  # the sanitizer's library is for Python, not for the compiler
        output = work / "output.txt"
        with output.open("wb") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            # In a session of its own, because a compiler is several processes that must end together.
            process = subprocess.Popen(  # noqa: S603 — the user's own compiler
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            failed = process.wait(_COMPILE_SECONDS) != 0
        except subprocess.TimeoutExpired:
            failed = True
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = output.read_text("utf-8", "replace")
        trusted_files.write_text(log, text)
        return text if failed else ""


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # Path.exists raises where a folder above may not be read


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock that a killed process loses; False where the file system has no locks."""
    import fcntl  # not on Windows, where this is never reached

    waited = False
    end = time.monotonic() + _WAIT_SECONDS
    with trusted_files.lock_file(path) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    write_progress("sightline: waiting for another process that builds the native engine.\n")
                waited = True
                if time.monotonic() > end:
                    raise NativeUnavailable(
                        f"The native engine is being built by another process that does not finish: end it, "
                        f"then run {AGAIN} (it holds {path})."
                    ) from None
                time.sleep(0.1)
            except OSError:
                yield False  # the file still appears in one step, only perhaps built twice
                return
            else:
                yield True
                return


def _unwritable(cache: Path, error: OSError) -> NativeUnavailable:
    reason = error.strerror or str(error)
    return NativeUnavailable(
        f"The native engine cannot be built in {cache} ({reason}): set {CACHE} to a folder with room that "
        "can be written."
    )


def write_progress(text: str) -> None:
    """Print progress on standard error, if the process has one."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
