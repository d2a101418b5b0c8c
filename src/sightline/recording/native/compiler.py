"""The toolchain of the native engine: the compiler, its flags, and all that a built file depends on.

Nothing here writes a file; a missing part is a `NativeUnavailable` that says the fix.
`torch.utils.cpp_extension` is not used: it trusts whatever lies in its cache folder, and needs ninja.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from sightline.errors import NativeUnavailable

SANITIZE: Final = "SIGHTLINE_SANITIZE"
COMPILERS: Final = ("g++", "c++", "clang++")
#: The native engine reads the interpreter's frames, whose layout it knows for these versions.
PYTHONS: Final = ((3, 11), (3, 12), (3, 13), (3, 14))

_WARNINGS: Final = ("-Wall", "-Wextra")
_SHAPE: Final = ("-std=c++20", "-fPIC", "-fvisibility=hidden")
# torch's wheels are compiled with NDEBUG, and some of their structs have a member less with it. Without it
# here, offsets into those structs would be wrong and nothing would say so.
_LAYOUT: Final = ("-DNDEBUG",)
_FAST: Final = ("-O2",)
#: Flags of an engine for everyday use.
OPTIMIZED: Final = (*_FAST, *_LAYOUT, *_SHAPE)
# g++ collects garbage while it compiles, which takes a tenth of its time and saves memory that is there.
_NO_COLLECTION: Final = ("--param", "ggc-min-expand=1000", "--param", "ggc-min-heapsize=524288")
_SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
# With its checks in between, g++ takes variables of torch's headers for uninitialized.
_SANITIZED: Final = (*_SANITIZERS, "-fno-omit-frame-pointer", "-g", "-O1", "-Wno-maybe-uninitialized")
_LIBRARIES: Final = ("torch_cpu", "c10", "torch_python")
_VERSION_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that runs."""

    command: tuple[str, ...]  #: the program with an absolute path, then arguments that ``$CXX`` gave it
    version: str  #: all that it prints for ``--version``

    @property
    def name(self) -> str:
        """Its version in one line: ``g++ (Debian 12.2.0-14) 12.2.0``."""
        return self.version.partition("\n")[0].strip() or self.command[0]

    @property
    def is_gcc(self) -> bool:
        """Whether it is GCC's; clang may be installed under the name of ``g++``."""
        return "Free Software Foundation" in self.version


@dataclass(frozen=True)
class Toolchain:
    """Everything a built file depends on, except the sources. ``compiler`` is None where there is none."""

    compiler: Compiler | None
    torch: str
    torch_folder: Path
    torch_build: tuple[str, ...]  #: tells builds of one version apart
    cxx11_abi: bool
    python: str
    soabi: str
    includes: tuple[Path, ...]  #: of Python
    sanitize: bool

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Toolchain:
        """The toolchain of this process; raises where the native engine cannot work at all."""
        environment = os.environ if environment is None else environment
        _check_supported()
        folder = Path(torch.__file__).parent
        version = torch.version
        # Wheels of one version for other devices come from one commit, and a torch that somebody compiles
        # again keeps its commit: the sizes of the libraries tell them apart, wherever they are installed.
        sizes = []
        for name in _LIBRARIES:
            path = folder / "lib" / f"lib{name}.so"
            # A torch may be laid out in another way; its version and commit still count.
            sizes.append(str(path.stat().st_size if path.is_file() else 0))
        build = (str(version.git_version), str(version.cuda), str(version.hip), *sizes)
        paths = (sysconfig.get_path("include"), sysconfig.get_path("platinclude"))
        return cls(
            compiler=find_compiler(environment),
            torch=str(torch.__version__),
            torch_folder=folder,
            torch_build=build,
            cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
            python=sys.version.split()[0],
            soabi=str(sysconfig.get_config_var("SOABI")),
            includes=tuple(dict.fromkeys(map(Path, paths))),
            sanitize=environment.get(SANITIZE, "") not in ("", "0"),
        )

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for a source, without paths and without the effect of warnings."""
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(self.cxx11_abi)}"
        return (*(_SANITIZED if self.sanitize else _FAST), *_LAYOUT, *_SHAPE, *_WARNINGS, abi)

    def command(self, source: Path, target: Path, *, strict: bool) -> list[str]:
        """The command that makes an extension of a file; ``strict`` makes a warning an error."""
        assert self.compiler is not None
        ours = [*self.compiler.command, *self.flags, *(("-Werror",) if strict else ())]
        if self.compiler.is_gcc:
            ours += _NO_COLLECTION
        # As system headers, torch's and Python's own are not held to our warnings.
        include = self.torch_folder / "include"
        of_torch = include, include / "torch" / "csrc" / "api" / "include"
        folders = [*of_torch, *self.includes, self.includes[0] / "internal"]
        system = [part for folder in folders for part in ("-isystem", str(folder))]
        libraries = self.torch_folder / "lib"
        named = [f"-l{name}" for name in _LIBRARIES]
        # -Xlinker takes a path with commas in it, -Wl does not.
        linked = [f"-L{libraries}", *named, "-Xlinker", "-rpath", "-Xlinker", str(libraries)]
        return [*ours, *system, "-shared", str(source), "-o", str(target), *linked]

    def facts(self, sources: Path) -> dict[str, object]:
        """All that a built file depends on, as JSON; equal facts make equal files."""
        compiler = self.compiler
        return {
            "torch": self.torch,
            "torch_build": list(self.torch_build),
            "cxx11_abi": self.cxx11_abi,
            "soabi": self.soabi,
            "flags": list(self.flags),
            "sources": sources_digest(sources),
            "compiler": None if compiler is None else [*compiler.command, compiler.version],
        }

    def key(self, sources: Path) -> str:
        """The name of the folder a build goes into: readable first, then exact."""
        text = json.dumps(self.facts(sources), sort_keys=True)
        exact = hashlib.sha256(text.encode()).hexdigest()[:16]
        readable = re.sub(r"[^\w.+-]", "_", f"torch-{self.torch}-{self.soabi}")
        return f"{readable}-{exact}"

    def check_can_compile(self) -> None:
        """Raise where a file cannot be compiled, although one that was built before could be loaded."""
        if self.compiler is None:
            raise NativeUnavailable(
                f"The native engine needs a C++ compiler, and none of {', '.join(COMPILERS)} is on PATH: "
                "install one (`apt-get install g++`, `dnf install gcc-c++`) or set CXX."
            )
        # pyconfig.h may be in another folder, Python.h and the internal headers are in this one.
        for header in ("Python.h", "internal/pycore_frame.h"):
            if not any((folder / header).is_file() for folder in self.includes):
                raise NativeUnavailable(
                    f"The native engine needs Python's C headers, and {self.includes[0]} has no {header}: "
                    "install them (`apt-get install python3-dev`, `dnf install python3-devel`)."
                )
        if not (self.torch_folder / "include" / "ATen" / "record_function.h").is_file():
            raise NativeUnavailable(
                f"The native engine needs torch's C++ headers, and {self.torch_folder / 'include'} has none: "
                "install a torch that has them, as the official wheels do."
            )


def find_compiler(environment: Mapping[str, str]) -> Compiler | None:
    """``$CXX``, or the first compiler on ``$PATH``; None where there is none."""
    path = environment.get("PATH", os.defpath)
    command = environment.get("CXX", "").strip()
    if command:
        try:
            program, *arguments = shlex.split(command)  # "ccache g++" is two words
        except ValueError:  # a quote without its partner
            program, *arguments = command.split()
        where = shutil.which(program, path=path)
        if where is None:
            raise NativeUnavailable(
                f"The native engine needs a C++ compiler, and CXX={command!r} is not a program on PATH: "
                "set CXX to one that is, or unset it."
            )
        return _compiler_of((str(Path(where).absolute()), *arguments))
    for program in COMPILERS:
        where = shutil.which(program, path=path)
        if where is not None:
            return _compiler_of((str(Path(where).absolute()),))
    return None


@functools.cache
def _compiler_of(command: tuple[str, ...]) -> Compiler:
    # In English whatever the locale, because the answer is part of the key.
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 — the user's own compiler
            [*command, "--version"], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_VERSION_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(
            f"The native engine needs a C++ compiler, and `{shlex.join(command)} --version` fails "
            f"({one_line(error)}): set CXX to another one."
        ) from error
    return Compiler(command, done.stdout.strip())


def _check_supported() -> None:
    if sys.platform != "linux":
        raise NativeUnavailable(
            f"The native engine is for Linux, and this is {sys.platform}; the Python engine records here."
        )
    version = sys.version_info[:2]
    (_, first), (_, last) = PYTHONS[0], PYTHONS[-1]
    supported = f"3.{first}" if first == last else f"3.{first} to 3.{last}"
    if sys.implementation.name != "cpython" or version not in PYTHONS:
        name = "Python" if sys.implementation.name == "cpython" else sys.implementation.name
        raise NativeUnavailable(
            f"The native engine is for CPython {supported}, and this is {name} {version[0]}.{version[1]}; "
            "the Python engine records here."
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NativeUnavailable(
            "The native engine needs the GIL, and this is a free-threaded Python; "
            "the Python engine records here."
        )
    if torch.version.debug:
        raise NativeUnavailable(
            "The native engine is for release builds of torch, and this is a debug build, whose structs "
            "differ; the Python engine records here."
        )


def source_files(folder: Path, *endings: str) -> list[Path]:
    """The files of the extension with these endings, in order of their names."""
    return sorted(path for path in folder.glob("*") if path.suffix in endings and path.is_file())


def sources_digest(folder: Path) -> str:
    """A digest of all sources of the extension."""
    digest = hashlib.sha256()
    for path in source_files(folder, ".cpp", ".h"):
        text = path.read_bytes()
        digest.update(f"{path.name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def one_line(error: BaseException) -> str:
    """The message of an error, or its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
