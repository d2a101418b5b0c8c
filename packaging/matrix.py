"""Runs the recorder's tests with pairs of a CPython and a torch, and prints a table for docs/recording.md.

    python packaging/matrix.py 3.11:2.8 3.13:2.15 --folder build/matrix

Each pair has an environment that is kept. Environments share the libraries of CUDA, which torch loads when it
is imported: there is one copy for each major version.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIRS = ("3.11:2.8", "3.11:2.10", "3.12:2.12", "3.13:2.15", "3.14:2.15")
#: Tests that show whether a version is supported: rows, names, bits, architectures, programs.
TESTS = (
    "tests/recording/native", "tests/recording/test_architectures.py", "tests/recording/test_compiled.py",
    "tests/recording/test_engine_parity_backward.py", "tests/recording/test_exceptions.py",
    "tests/recording/test_holds_up.py", "tests/recording/test_phases.py", "tests/recording/test_records.py",
    "tests/recording/streaming", "tests/views", "tests/truth",
)  # fmt: skip
#: Packages of the tests that depend on torch: installed without it, because its version is chosen here.
_ON_TORCH = ("accelerate", "transformers")
_OTHERS = (
    "click", "expecttest", "filelock", "fsspec", "huggingface_hub", "hypothesis", "jinja2", "networkx",
    "numpy", "packaging", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "regex", "requests",
    "rich",
    "safetensors", "setuptools", "sympy", "tokenizers", "tqdm", "typing_extensions",
)  # fmt: skip


class Environment:
    """An environment with one CPython and one torch."""

    def __init__(self, python: str, torch: str, folder: Path) -> None:
        self.python, self.torch = python, torch
        self.path = folder / f"{python}-{torch}"
        self.program = self.path / "bin" / "python"
        self._cuda = folder

    def make(self) -> None:
        """Install what is missing."""
        ready = self.path / ".ready"
        if ready.exists():
            return
        interpreter = shutil.which(f"python{self.python}")
        if interpreter is None:
            raise SystemExit(
                f"CPython {self.python} is not installed here: install it, or leave out its pairs."
            )
        subprocess.run([interpreter, "-m", "venv", str(self.path)], check=True)
        self._install("--no-deps", f"torch=={self.torch}.*")
        self._share_cuda()
        pinned = (ROOT / "constraints.txt").read_text("utf-8")
        constraints = self.path / "constraints.txt"
        constraints.write_text(re.sub(r"^torch==.*\n", "", pinned, flags=re.MULTILINE), "utf-8")
        self._install(f"--constraint={constraints}", *_OTHERS)
        self._install(f"--constraint={constraints}", "--no-deps", *_ON_TORCH)
        self._install("--no-deps", "--editable", str(ROOT))
        ready.touch()

    def _install(self, *arguments: str) -> None:
        pip = [str(self.program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *arguments], check=True)

    def _share_cuda(self) -> None:
        """Install the packages of NVIDIA that this torch asks for into a folder of their major version."""
        packages = next((self.path / "lib").glob("python*")) / "site-packages"
        metadata = next(packages.glob("torch-*.dist-info"))
        needed = [
            re.split(r"[;\s]", text, maxsplit=1)[0]
            for text in Distribution.at(metadata).requires or []
            if text.startswith(("nvidia-", "cuda-toolkit"))
        ]
        if not needed:
            return
        major = "12" if any("cu12" in name for name in needed) else "13"
        shared = self._cuda / f"cuda-{major}"
        here = {re.sub(r"[-_.]+", "-", path.name.split("-")[0]) for path in shared.glob("*.dist-info")}
        missing = [text for text in needed if re.split(r"[\[=<>~]", text)[0] not in here]
        if missing:
            pip = [str(self.program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "--upgrade", f"--target={shared}", *missing], check=True)
        (packages / "nvidia").symlink_to(shared / "nvidia")

    def run(self, engine: str, tests: list[str], jobs: int) -> str:
        """Run tests on an engine; returns pytest's last line."""
        environment = os.environ | {
            "SIGHTLINE_ENGINE": engine, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"),
        }  # fmt: skip
        command = [
            str(self.program),
            "-m",
            "pytest",
            "-q",
            f"-n{jobs}",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "--timeout=600",  # to import a torch with CUDA takes seconds, in each process that a test starts
        ]
        log = self.path / f"{engine}.log"
        with log.open("w") as file:
            subprocess.run(
                [*command, *tests], cwd=ROOT, env=environment, stdout=file, stderr=file, check=False
            )
        last = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
        return re.sub(r"^=+ | in [\d.]+s.*$", "", last.strip("= "))


def main() -> None:
    """Make the environments, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="CPYTHON:TORCH")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| CPython | torch | native engine | plain engine | on |\n|---|---|---|---|---|", flush=True)
    failed = False
    for pair in options.pairs:
        python, _, torch = pair.partition(":")
        environment = Environment(python, torch, options.folder.absolute())
        environment.make()
        outcomes = [
            environment.run(engine, list(options.tests), options.jobs) for engine in ("native", "python")
        ]
        failed |= any("failed" in text or "error" in text or "passed" not in text for text in outcomes)
        today = dt.datetime.now(tz=dt.UTC).date()
        print(f"| {python} | {torch} | {' | '.join(outcomes)} | {today} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
