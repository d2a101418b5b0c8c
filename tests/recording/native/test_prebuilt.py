"""The engines of a wheel: which one is chosen, and that one that records wrongly is not used."""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sightline.errors import NativeUnavailable
from sightline.recording.native import engine, prebuilt, self_test, trusted_files
from sightline.recording.native.engine import SOURCES, find_extension, load
from tests.recording.engines import needs_native

SOABI = str(sysconfig.get_config_var("SOABI"))
MINOR = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Engines as a wheel would have them."""
    folder = tmp_path / "engines"
    folder.mkdir(mode=0o755)
    facts = prebuilt.facts_of_wheel(SOURCES, SOABI, platform.machine())
    (folder / prebuilt.FACTS).write_text(json.dumps(facts | {"tag": "cp311-cp311-linux"}))
    for minor in ("2.9", "2.10", MINOR):
        (folder / prebuilt.file_name(minor)).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.9.0", "torch-2.9.so"),
        ("2.9.1+cpu", "torch-2.9.so"),
        ("2.10.0+cu128", "torch-2.10.so"),
        ("2.10.0+rocm7.1", "torch-2.10.so"),
        ("2.1.0", None),  # no engine for it
        ("2.9.0a0+git1234567", None),  # compiled by somebody
        ("2.9.0.dev20260101+cpu", None),
        ("2.9.0a0+nv25.06", None),
    ],
)
def test_the_engine_for_a_version_of_torch(folder: Path, version: str, expected: str | None) -> None:
    found = prebuilt.find_prebuilt(version, SOURCES, folder)
    assert (found and found.name) == expected


def test_the_minors_are_in_order(folder: Path) -> None:
    assert prebuilt.minors(folder) == sorted({"2.9", "2.10", MINOR}, key=lambda one: int(one[2:]))
    assert prebuilt.minors(folder / "nothing") == []


@pytest.mark.parametrize(
    "other",
    [{"sources": "of another state"}, {"soabi": "cpython-310-x86_64-linux-gnu"}, {"machine": "riscv64"}],
)
def test_engines_of_other_sources_or_another_python_are_not_used(folder: Path, other: dict[str, str]) -> None:
    facts = json.loads((folder / prebuilt.FACTS).read_text())
    (folder / prebuilt.FACTS).write_text(json.dumps(facts | other))
    assert prebuilt.find_prebuilt("2.9.0", SOURCES, folder) is None


@pytest.mark.parametrize("facts", ["", "[]", "{", "{}", "null"])
def test_damaged_facts(folder: Path, facts: str) -> None:
    (folder / prebuilt.FACTS).write_text(facts)
    assert prebuilt.find_prebuilt("2.9.0", SOURCES, folder) is None


def test_one_that_another_user_may_change_is_refused(folder: Path) -> None:
    (folder / "torch-2.9.so").chmod(0o777)
    with pytest.raises(NativeUnavailable, match=r"another user owns torch-2\.9\.so or can write it"):
        prebuilt.find_prebuilt("2.9.0", SOURCES, folder)


@pytest.mark.parametrize("name", ["torch-2.9.so", "", ".."])
def test_the_advice_about_an_installed_engine_is_about_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another cache changes nothing about the files of the package."""
    (folder / name).chmod(0o777)

    def sentence() -> str:
        with pytest.raises(NativeUnavailable) as caught:
            prebuilt.find_prebuilt("2.9.0", SOURCES, folder)
        return str(caught.value)

    assert "set SIGHTLINE_CACHE" in sentence()
    monkeypatch.setattr(trusted_files, "_PACKAGE", folder.parent)
    text = sentence()
    assert "SIGHTLINE_CACHE" not in text
    assert "built" not in text
    assert str(folder) in text
    assert "chmod go-w" in text
    changed = name if name.endswith(".so") else os.path.normpath(folder / name)
    assert re.search(rf"another user owns (or can change )?{re.escape(changed)}\b", text)


def test_the_advice_about_an_installed_engine_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    for package, expected in ((Path("/elsewhere"), True), (folder.parent, False)):
        monkeypatch.setattr(trusted_files, "_PACKAGE", package)
        with pytest.raises(
            NativeUnavailable, match=r"cannot be read by this user: .* `chmod -R a\+rX`"
        ) as caught:
            trusted_files.open_file(folder / "torch-2.9.so")
        assert ("SIGHTLINE_CACHE" in str(caught.value)) is expected


@needs_native
def test_the_self_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    assert self_test.failed_check(load()) == ""
    assert torch.equal(before, torch.get_rng_state())


@needs_native
def test_the_self_test_leaves_every_recording_free() -> None:
    gc.disable()
    try:
        assert [self_test.failed_check(load()) for _ in range(20)] == [""] * 20
    finally:
        gc.enable()


@needs_native
def test_the_self_test_names_an_op_that_is_recorded_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    level, _, line = self_test._EXPECTED[1]
    wrong = [*self_test._EXPECTED]
    wrong[1] = (level, "mul.Tensor(f32[2, 3], 3.0) -> f32[2, 3]", line)
    monkeypatch.setattr(self_test, "_EXPECTED", wrong)
    assert self_test.failed_check(load()) == (
        "it recorded 'mul.Tensor(f32[2, 3], 2.0) -> f32[2, 3]' at line 3 in place of "
        "'mul.Tensor(f32[2, 3], 3.0) -> f32[2, 3]' at line 3"
    )
    monkeypatch.setattr(self_test, "_EXPECTED", wrong[:1])
    assert self_test.failed_check(load()) == "it recorded 6 ops in place of 1"


@needs_native
def test_a_program_that_replaced_functions_of_torch_keeps_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the self-test called it")

    for name in ("cat", "sum", "mul", "addcmul", "full", "zeros", "empty"):
        monkeypatch.setattr(torch, name, mine)
    assert self_test.failed_check(load()) == ""


@needs_native
def test_the_self_test_adds_nothing_to_a_profile() -> None:
    observer = load()
    with torch.profiler.profile() as profile:
        assert self_test.failed_check(observer) == ""
    assert not [event for event in profile.events() if event.name.startswith("aten::")]


_PROGRAM = """
import sys, torch, sightline as sl
from pathlib import Path
from sightline.recording.native import engine, prebuilt
prebuilt.FOLDER = Path(sys.argv[1])
with sl.trace() as t:
    torch.ones(2) + 1
print(t.info["engine"], t.info["engine_reason"], engine.refused_prebuilt, sep="|")
"""


def recorded_with(folder: Path, tmp_path: Path) -> tuple[str, ...]:
    """The engine of a recording in a process with this folder of engines, an empty cache and no compiler."""
    environment: dict[str, Any] = os.environ | {
        "SIGHTLINE_CACHE": str(tmp_path / "cache"),
        "PATH": str(tmp_path),
    }
    environment.pop("CXX", None)
    environment.pop("SIGHTLINE_ENGINE", None)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(done.stdout.strip().split("|"))


@needs_native
def test_without_a_compiler_the_engine_of_the_wheel_records(folder: Path, tmp_path: Path) -> None:
    built = find_extension(build=True)
    assert built is not None
    shutil.copyfile(built, folder / prebuilt.file_name(MINOR))
    assert recorded_with(folder, tmp_path) == ("native", "", "")
    assert not (tmp_path / "cache").exists()


@needs_native
@pytest.mark.parametrize("content", [b"", b"\x7fELF and nothing else"])
def test_one_that_does_not_load_leaves_the_plain_engine(folder: Path, tmp_path: Path, content: bytes) -> None:
    (folder / prebuilt.file_name(MINOR)).write_bytes(content)
    name, reason, refused = recorded_with(folder, tmp_path)
    assert name == "python"
    assert reason.startswith("The native engine needs a C++ compiler")
    assert refused.startswith(f"The engine in {folder / prebuilt.file_name(MINOR)} is not used: ")


@needs_native
def test_one_that_fails_its_self_test_is_not_used(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    observer = load()
    monkeypatch.setattr(engine, "_find_prebuilt", lambda: folder / prebuilt.file_name(MINOR))
    monkeypatch.setattr(engine, "import_extension", lambda path: observer)
    monkeypatch.setattr(engine, "refused_prebuilt", "")

    def wrong(module: ModuleType) -> str:
        return "it recorded nothing"

    monkeypatch.setattr(self_test, "failed_check", wrong)
    assert engine._load_prebuilt() is None
    assert "(in its self-test it recorded nothing)" in engine.refused_prebuilt
