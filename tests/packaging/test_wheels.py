"""Wheels: what is in them, that two builds are the same, and that none is without the viewer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packaging"))

import hatch_build  # noqa: E402 — found by the line before
import wheels  # noqa: E402

VIEWER = ROOT / "src" / "sightline" / "page" / "viewer.js"
needs_viewer = pytest.mark.skipif(not VIEWER.is_file(), reason="the viewer is not built")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@needs_viewer
def test_a_wheel_with_engines(tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    engines.mkdir()
    (engines / "facts.json").write_text(json.dumps({"tag": "cp313-cp313-manylinux_2_28_x86_64"}))
    (engines / "torch-2.9.so").write_bytes(b"an engine")
    lines = [wheels.build("wheel", tmp_path / each, engines) for each in ("first", "second")]
    assert lines[0] == lines[1]
    name = lines[0].partition(": ")[0]
    assert name.endswith("-cp313-cp313-manylinux_2_28_x86_64.whl")
    first, second = (tmp_path / each / name for each in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as file:
        assert file.read("sightline/recording/native/engines/torch-2.9.so") == b"an engine"
        names = file.namelist()
    assert {"sightline/page/viewer.js", "sightline/page/viewer.css", "sightline/recording/native/rows.h"} <= {
        *names
    }


@needs_viewer
def test_a_pure_wheel_has_no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGHTLINE_PREBUILT", str(tmp_path / "of another build"))
    name = wheels.build("wheel", tmp_path).partition(": ")[0]
    assert name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(tmp_path / name) as file:
        assert not [each for each in file.namelist() if each.endswith(".so")]


def test_without_node_there_is_no_wheel_without_a_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs Node 20: install Node and try again"):
        hatch_build.build_viewer(tmp_path)


def test_the_viewer_is_built_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "src" / "sightline" / "page"
    (tmp_path / "viewer").mkdir()
    page.mkdir(parents=True)
    npm = tmp_path / "npm"
    npm.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SystemExit, match="has not written the viewer"):
        hatch_build.build_viewer(tmp_path)
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == ["install", "run"]
    for kind in ("js", "css"):
        (page / f"viewer.{kind}").write_text("")
    hatch_build.build_viewer(tmp_path)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@needs_compiler
def test_an_engine_that_needs_newer_libraries_than_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text("#include <string.h>\nvoid *f(void *a, void *b) { return memcpy(a, b, 99999); }\n")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    assert "GLIBC 2." in wheels.check_symbols(library)
    monkeypatch.setattr(wheels, "NEWEST", {"GLIBC": (2, 1)})
    with pytest.raises(SystemExit, match=r"a\.so needs newer libraries than torch's wheels do: GLIBC 2\."):
        wheels.check_symbols(library)


def test_a_python_without_headers_or_of_another_version(tmp_path: Path) -> None:
    program = tmp_path / "python"
    for version, message in ([3, 9], "engines are for CPython"), ([3, 11], "has no C headers"):
        tag = f"cpython-{version[0]}{version[1]}-x86_64-linux-gnu"
        program.write_text(f"#!/bin/sh\necho '{json.dumps([version, tag, [str(tmp_path)]])}'\n")
        program.chmod(0o755)
        with pytest.raises(SystemExit, match=message):
            wheels.Python.of(str(program))
