"""Stand-ins for the tests of the build: a small extension, and a compiler that only pretends to compile."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sightline.errors import NativeUnavailable
from sightline.recording.native.builder import Builder
from sightline.recording.native.compiler import Toolchain

SRC = Path(__file__).parents[3] / "src"

#: What is wrong with it can be said from outside, so that one build serves all tests.
EXTENSION = """
#include <Python.h>

#include <cstdlib>
#include <cstring>

#include "answer.h"

namespace {

const char* wanted() {
  const char* found = std::getenv("STAND_IN");
  return found == nullptr ? "" : found;
}

PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(kAnswer); }

PyObject* self_check(PyObject*, PyObject*) {
  if (std::strcmp(wanted(), "raise") == 0) {
    PyErr_SetString(PyExc_RuntimeError, "no frames\\nhere");
    return nullptr;
  }
  return PyUnicode_FromString(std::strcmp(wanted(), "crash") == 0 ? "" : wanted());
}

PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""},
                         {"self_check", self_check, METH_NOARGS, ""},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_observer", "", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__observer() {
  if (std::strcmp(wanted(), "crash") == 0) std::abort();
  return PyModule_Create(&definition);
}
"""


def write_sources(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "module.cpp").write_text(EXTENSION, "utf-8")
    (folder / "answer.h").write_text("#pragma once\nconstexpr long kAnswer = 42;\n", "utf-8")
    return folder


@dataclass(frozen=True)
class FakeCompiler:
    """A script that counts its calls, does what it is told, and writes an extension built before."""

    program: Path
    built: Path

    @property
    def calls(self) -> int:
        counted = self.program.with_suffix(".calls")
        return len(counted.read_text("utf-8").splitlines()) if counted.exists() else 0

    def does(self, body: str = "", version: str = "fake++ 1.0") -> FakeCompiler:
        """Put shell commands before the copy; ``$given`` are the arguments, ``$target`` what to write."""
        self.program.write_text(
            f"""#!/bin/sh
case "$*" in *--version*) echo "{version}"; exit 0;; esac
echo "$*" >> "{self.program.with_suffix(".calls")}"
given="$*"
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then target="$2"; fi; shift; done
{body}
cp "{self.built}" "$target"
""",
            "utf-8",
        )
        self.program.chmod(0o755)
        return self


def builder(sources: Path, cache: Path, **changes: object) -> Builder:
    """For this process and its environment, with some facts changed."""
    return Builder(sources, cache, replace(Toolchain.here(), **changes))  # type: ignore[arg-type]


def start_build(sources: Path, cache: Path) -> subprocess.Popen[str]:
    """A build in a process of its own, which prints the path of what it built."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from sightline.recording.native import builder\n"
        "from sightline.recording.native.compiler import Toolchain\n"
        "builder.try_in_a_process = lambda path: None\n"
        "made = builder.Builder(Path(sys.argv[1]), Path(sys.argv[2]), Toolchain.here())\n"
        "print(made.build())\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, str(sources), str(cache)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def sentence(call: Callable[[], object]) -> str:
    """Why the native engine is not there: one sentence."""
    with pytest.raises(NativeUnavailable) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("The native engine ")
    assert text.endswith(".")
    assert "\n" not in text
    return text
