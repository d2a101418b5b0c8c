"""A recording shows the source lines that were saved with it, and gives them to nobody else."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sightline.api import Trace
from sightline.store import load, save, sources
from tests.builders import NET, TORCH, TraceBuilder, make_trace
from tests.store.bundles import all_views

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    before = dict(linecache.cache)
    yield
    linecache.cache.clear()
    linecache.cache.update(before)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A real file with the source of the model."""
    path = tmp_path / "project" / "net.py"
    path.parent.mkdir()
    path.write_text(NET)
    return path


def without_notes(text: str) -> str:
    """A view less what it says about the state of files on this machine."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("  This file is missing now"))


def test_on_another_machine_every_view_is_the_same(net: Path, tmp_path: Path) -> None:
    trace = make_trace(file=str(net), write=False)
    views = all_views(trace)
    assert "h = self.norm(x)" in views["source"]
    save(trace.data, tmp_path / "run.sight")
    net.unlink()
    linecache.clearcache()
    theirs = all_views(Trace(load(tmp_path / "run.sight")))
    for view, text in views.items():
        assert without_notes(theirs[view]) == text, view


def test_a_file_that_changed_is_shown_as_it_ran(net: Path, tmp_path: Path) -> None:
    trace = make_trace(file=str(net), write=False)
    code = str(trace.code())
    save(trace.data, tmp_path / "run.sight")
    net.write_text("# something else\n" + NET)
    loaded = Trace(load(tmp_path / "run.sight"))
    assert str(loaded.code()) == code
    assert "changed since" not in str(loaded.source())


def test_nothing_of_a_bundle_is_given_to_the_process(net: Path, tmp_path: Path) -> None:
    save(make_trace(file=str(net), write=False).data, tmp_path / "run.sight")
    net.unlink()
    linecache.clearcache()
    loaded = Trace(load(tmp_path / "run.sight"))
    all_views(loaded)
    assert loaded.frames[0].code == "train(model, tokens)"
    assert str(net) not in linecache.cache
    assert linecache.getlines(str(net)) == []


def test_text_of_a_bundle_does_not_become_code(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text("def f(x):\n    return x + 666\n")
    b = TraceBuilder()
    with b.at(str(path), 2, "f"):
        b.op("relu", b.value(2), out=(2,))
    save(b.build().data, tmp_path / "run.sight")
    path.write_text("def f(x):\n    return x + 111\n")
    os.utime(path, (1, 1))
    found = importlib.util.spec_from_file_location("theirs", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    linecache.clearcache()
    loaded = Trace(load(tmp_path / "run.sight"))
    all_views(loaded)
    assert loaded.frames[0].code == "return x + 666"
    assert "111" in inspect.getsource(module.f)  # what torch.jit.script compiles


def test_two_recordings_of_two_versions_of_a_file_show_each_its_own(net: Path, tmp_path: Path) -> None:
    now = NET.replace("h = self.norm(x)", "n = self.norm(x)")
    codes: list[str] = []
    for name, text in (("old", NET), ("new", now)):
        net.write_text(text)
        os.utime(net, (len(codes), len(codes)))
        trace = make_trace(file=str(net), write=False)  # of the same process: each time as the file is now
        save(trace.data, tmp_path / f"{name}.sight")
        codes.append(str(trace.code(names=True)))
    assert codes[0] != codes[1]
    loaded = [Trace(load(tmp_path / f"{name}.sight")) for name in ("old", "new")]
    for _ in range(2):  # neither looks at the other, nor at what was read before
        assert [str(trace.code(names=True)) for trace in loaded] == codes
    assert [dict(trace.data.source_lines.texts or {})[str(net)] for trace in loaded] == [NET, now]


def test_a_part_of_a_loaded_trace_keeps_its_text(net: Path, tmp_path: Path) -> None:
    save(make_trace(file=str(net), write=False).data, tmp_path / "run.sight")
    net.unlink()
    linecache.clearcache()
    part = replace(load(tmp_path / "run.sight"), captures=[])
    assert Trace(part).frames[0].code == "train(model, tokens)"
    save(part, tmp_path / "again.sight")
    assert load(tmp_path / "again.sight").sources[str(net)] == NET


def test_without_its_text_a_recording_has_empty_lines(net: Path, tmp_path: Path) -> None:
    save(make_trace(file=str(net), write=False).data, tmp_path / "run.sight", source=False)
    loaded = Trace(load(tmp_path / "run.sight"))  # and the file of this machine is another's
    assert {frame.code for frame in loaded.frames} == {""}
    assert "its text was not saved" in str(loaded.source())
    all_views(loaded)


def test_of_torch_only_the_lines_that_ran_are_kept(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(1, 1001)]
    linecache.cache[TORCH] = (1, None, lines, TORCH)
    trace = make_trace()
    views = all_views(trace)
    save(trace.data, tmp_path / "run.sight")
    loaded = load(tmp_path / "run.sight")
    assert loaded.source_lines.whole == {"net.py"}
    assert loaded.sources[TORCH] == "\n" * 133 + "line 134\n"
    linecache.cache.pop(TORCH)
    assert "line 134" in views["code api"]
    assert all_views(Trace(loaded))["code api"] == views["code api"]
    assert "Only the lines that ran were saved" in str(Trace(loaded).source(file=TORCH))


def test_a_file_too_large_is_kept_in_part_and_a_flood_of_files_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_SOURCE", 2000)
    monkeypatch.setattr(sources, "MAX_SOURCES", 5000)
    b = TraceBuilder()
    b.source("large.py", "x = 1\n" * 1000)
    for number in range(10):
        b.source(f"f{number}.py", "y = 2\n" * 200)
    with b.at("large.py", 300, "f"):
        b.op("relu", b.value(2), out=(2,))
    for number in range(10):
        with b.at(f"f{number}.py", 7, "f"):
            b.op("relu", b.value(2), out=(2,))
    trace = b.build()
    save(trace.data, tmp_path / "run.sight")
    loaded = load(tmp_path / "run.sight")
    found = loaded.sources
    assert found["large.py"] == "\n" * 299 + "x = 1\n"
    assert loaded.source_lines.whole
    assert sum(map(len, found.values())) <= 5000
    assert Trace(load(tmp_path / "run.sight")).frames[0].code == "x = 1"


@pytest.mark.parametrize(
    "file", ["<ipython-input-3-abc>", "<stdin>", "gone.py", "a\0b.py", "\ud800.py", "ü.py"]
)
def test_sources_that_are_no_files(file: str, tmp_path: Path) -> None:
    b = TraceBuilder()
    b.source(file, "y = x.relu()\n\x0cz = '\u2028'\nlast = 1")
    for line in (1, 2, 3):
        with b.at(file, line, "<module>"):
            b.op("relu", b.value(2), out=(2,))
    trace = b.build()
    lines = [frame.code for frame in trace.frames]
    save(trace.data, tmp_path / "run.sight")
    linecache.cache.pop(file)
    loaded = Trace(load(tmp_path / "run.sight"))
    assert loaded.frames[0].code == lines[0] == "y = x.relu()"
    assert loaded.frames[2].code == "last = 1"


@pytest.mark.parametrize("file", ["/dev/zero", "/etc/passwd", "{pipe}", "../secret", "a\0b.py", "\ud800.py"])
def test_names_out_of_a_bundle_open_nothing(file: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    file = file.replace("{pipe}", str(tmp_path / "pipe.py"))
    b = TraceBuilder()
    b.source(file, "")
    with b.at(file, 1, "<module>"):
        b.op("relu", b.value(2), out=(2,))
    linecache.cache[file] = (0, None, [], file)
    save(b.build().data, tmp_path / "run.sight")
    linecache.cache.pop(file)
    loaded = Trace(load(tmp_path / "run.sight"))
    assert [frame.code for frame in loaded.frames] == [""]
    all_views(loaded)


def test_text_that_is_no_unicode_is_shown_all_the_same(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.source("a.py", "x = f('\ud800')\n")
    with b.at("a.py", 1, "f", (4, 8)):
        b.op("relu", b.value(2), out=(2,))
    save(b.build().data, tmp_path / "run.sight")
    assert "x = f('" in all_views(Trace(load(tmp_path / "run.sight")))["code"]


def test_a_loaded_trace_saves_the_source_it_came_with(net: Path, tmp_path: Path) -> None:
    save(make_trace(file=str(net), write=False).data, tmp_path / "a.sight")
    net.write_text("# changed\n")
    linecache.clearcache()
    save(load(tmp_path / "a.sight"), tmp_path / "b.sight")
    assert load(tmp_path / "b.sight").sources[str(net)] == NET
    save(load(tmp_path / "a.sight"), tmp_path / "c.sight", source=False)
    assert not load(tmp_path / "c.sight").sources
    assert zlib.compress(NET.encode()) not in (tmp_path / "c.sight" / "rank0.db").read_bytes()


def test_in_a_fresh_process_without_the_file(net: Path, tmp_path: Path) -> None:
    trace = make_trace(file=str(net), write=False)
    save(trace.data, tmp_path / "run.sight")
    code = str(trace.code())
    net.unlink()
    script = (
        "import sys; from sightline.api import Trace; from sightline.store import load\n"
        "print(Trace(load(sys.argv[1])).code())"
    )
    run = subprocess.run([sys.executable, "-c", script, tmp_path / "run.sight"], capture_output=True,
                         text=True, check=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT / "src")})  # fmt: skip
    assert run.stdout.rstrip("\n") == code
