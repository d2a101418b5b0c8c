"""Builds all files of a release: a wheel with native engines for each CPython, a pure wheel, and the sources.

    python packaging/wheels.py --python python3.11 --python python3.13 --torch 2.13 --out dist

Each wheel has an engine for every minor version of torch. An engine needs the headers of torch and of
CPython, and no library of theirs: it is linked against empty ones of the same names, and finds torch's in the
process that loads it.
Two builds of the same sources are the same to the byte.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch_headers import torch_headers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from sightline.recording.native.compiler import (  # noqa: E402 — found by the line before
    OPTIMIZED,
    PYTHONS,
    source_files,
)
from sightline.recording.native.prebuilt import FACTS, facts_of_wheel, file_name  # noqa: E402

SOURCES = ROOT / "src" / "sightline" / "recording" / "native"
TORCHES = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
#: An engine may need no newer symbols than these, those of the manylinux that torch's own wheels are for.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
_LIBRARIES = ("torch_cpu", "c10", "torch_python")
_DESCRIBE = """
import json, sys, sysconfig
paths = sysconfig.get_path("include"), sysconfig.get_path("platinclude")
print(json.dumps([sys.version_info[:2], sysconfig.get_config_var("SOABI"), paths]))
"""


@dataclass(frozen=True)
class Python:
    """A CPython to build for: its version, its name in file names, and its headers."""

    version: tuple[int, int]
    soabi: str
    includes: tuple[Path, ...]

    @classmethod
    def of(cls, program: str) -> Python:
        """The one that a program is."""
        done = subprocess.run([program, "-c", _DESCRIBE], capture_output=True, text=True, check=True)
        version, soabi, includes = json.loads(done.stdout)
        found = cls(tuple(version), soabi, tuple(dict.fromkeys(map(Path, includes))))
        if found.version not in PYTHONS or not soabi.startswith(f"cpython-{found.tag[2:]}-"):
            raise SystemExit(
                f"{program} is {soabi}, and engines are for CPython 3.{PYTHONS[0][1]} and newer."
            )
        if not any((folder / "Python.h").is_file() for folder in found.includes):
            raise SystemExit(f"{program} has no C headers in {found.includes[0]}: install them.")
        return found

    @property
    def tag(self) -> str:
        """``cp311``."""
        return f"cp{self.version[0]}{self.version[1]}"


def main() -> None:
    """Build everything, and say what was built."""
    options = read_options()
    out, cache = Path(options.out).absolute(), Path(options.headers).absolute()
    out.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    pythons = [Python.of(program) for program in options.python or available_pythons()]
    headers = {minor: torch_headers(minor, options.machine, cache) for minor in options.torch}
    machine = options.machine
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for python in pythons:
            folder = Path(work) / python.tag
            folder.mkdir()
            facts = facts_of_wheel(SOURCES, python.soabi.replace(os.uname().machine, machine), machine)
            facts["tag"] = f"{python.tag}-{python.tag}-manylinux_2_28_{machine}"
            (folder / FACTS).write_text(json.dumps(facts, indent=1), "utf-8")
            for minor, include in headers.items():
                jobs.append(pool.submit(compile_engine, python, include, machine, folder / file_name(minor)))
        for job in jobs:
            print(job.result(), flush=True)
        for python in pythons:
            print(build("wheel", out, Path(work) / python.tag))
    if machine == os.uname().machine:
        print(build("wheel", out), build("sdist", out), sep="\n")


def read_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--python", action="append", metavar="PROGRAM", help="a CPython to build for; else all on PATH"
    )
    parser.add_argument(
        "--torch", nargs="+", default=TORCHES, metavar="MINOR", help="minor versions of torch"
    )
    parser.add_argument("--machine", choices=COMPILERS, default=os.uname().machine)
    parser.add_argument(
        "--headers", default=ROOT / "build" / "headers", help="where the headers of torch are kept"
    )
    parser.add_argument("--out", default=ROOT / "dist")
    return parser.parse_args()


def available_pythons() -> list[str]:
    """The supported versions of CPython that are installed here; the others are named and left out."""
    found: list[str] = []
    missing: list[str] = []
    for major, minor in PYTHONS:
        program = shutil.which(f"python{major}.{minor}")
        tried = ["false"] if program is None else [program, "-c", ""]  # pyenv has programs that only complain
        works = subprocess.run(tried, capture_output=True, check=False).returncode == 0
        (found if works else missing).append(program if works and program else f"{major}.{minor}")
    if missing:
        print(f"left out, because they are not installed here: CPython {', '.join(missing)}")
    return found


def compile_engine(python: Python, torch: Path, machine: str, target: Path) -> str:
    """Compile one engine; returns a line about it."""
    compiler = COMPILERS[machine]
    with tempfile.TemporaryDirectory() as work:
        sources = [*source_files(SOURCES, ".cpp"), Path(__file__).with_name("old_symbols.cpp")]
        unit = "".join(f'#include "{path.name}"\n' for path in sources)
        (Path(work) / "observer.cpp").write_text(unit, "utf-8")
        for name in _LIBRARIES:
            empty = ["-x", "c", "/dev/null", f"-Wl,-soname,lib{name}.so", "-o", f"lib{name}.so"]
            subprocess.run([compiler, "-shared", *empty], cwd=work, check=True)
        folders = [torch, torch / "torch/csrc/api/include", *python.includes, python.includes[0] / "internal"]
        system = [part for folder in folders for part in ("-isystem", str(folder))]
        # No path of this machine is in the file, nor anything that differs between two builds.
        same = [f"-ffile-prefix-map={folder}=." for folder in (*folders, SOURCES, Path(__file__).parent)]
        same += ["-frandom-seed=sightline", "-Wl,--build-id=none", "-s"]
        linked = ["-L.", "-Wl,--no-as-needed", *(f"-l{name}" for name in _LIBRARIES)]
        ours = [f"-I{SOURCES}", f"-I{Path(__file__).parent}"]
        command = [compiler, *OPTIMIZED, "-D_GLIBCXX_USE_CXX11_ABI=1", *same, *ours, *system, "-shared"]
        subprocess.run([*command, "observer.cpp", "-o", str(target), *linked], cwd=work, check=True)
    newest = check_symbols(target)
    return f"{python.tag} {target.name}: {target.stat().st_size / 1e6:.2f} MB, needs {newest}"


def check_symbols(engine: Path) -> str:
    """The newest versions of symbols that an engine needs; ends where they are newer than torch's own."""
    done = subprocess.run(["objdump", "-T", engine], capture_output=True, text=True, check=True)
    needed: dict[str, tuple[int, ...]] = {}
    for library, text in re.findall(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)", done.stdout):
        version = tuple(map(int, text.split(".")))
        needed[library] = max(needed.get(library, ()), version)
    text = ", ".join(
        f"{library} {'.'.join(map(str, version))}" for library, version in sorted(needed.items())
    )
    if any(version > NEWEST[library] for library, version in needed.items()):
        raise SystemExit(f"{engine.name} needs newer libraries than torch's wheels do: {text}.")
    return text


def build(target: str, out: Path, prebuilt: Path | None = None) -> str:
    """Have hatchling build a wheel or the source distribution; returns its name."""
    when = ["git", "log", "-1", "--format=%ct"]
    committed = subprocess.run(when, cwd=ROOT, capture_output=True, text=True, check=False)
    environment = os.environ | {"SOURCE_DATE_EPOCH": committed.stdout.strip() or "1700000000"}
    environment.pop("SIGHTLINE_PREBUILT", None)
    if prebuilt is not None:
        environment["SIGHTLINE_PREBUILT"] = str(prebuilt)
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or done.stdout.strip())
    path = Path((done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2])
    return f"{path.name}: {(out / path.name).stat().st_size / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
