"""A trace that was saved and loaded is the trace it was: every column, every view."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sightline.api import Trace
from sightline.data import trace_data as d
from sightline.data.tensors import Tensors
from sightline.errors import UsageError
from sightline.store import bundle_schema as schema
from sightline.store import load, save
from tests.builders import make_trace
from tests.store.bundles import ZOO, all_views, assert_same, captured, saved

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ZOO)
def test_every_column_and_every_view_is_the_same(name: str, tmp_path: Path) -> None:
    trace = ZOO[name]()
    path = saved(trace, tmp_path)
    assert_same(trace.data, load(path))
    loaded = Trace(load(path))
    for view, text in all_views(trace).items():
        assert all_views(loaded)[view] == text, view
    assert repr(loaded) == repr(trace)


@pytest.mark.parametrize("name", ZOO)
def test_a_loaded_trace_can_be_saved_again_and_over_itself(name: str, tmp_path: Path) -> None:
    trace = ZOO[name]()
    path = saved(trace, tmp_path)
    save(load(path), tmp_path / "second.sight")
    assert_same(trace.data, load(tmp_path / "second.sight"))
    loaded = load(path)
    save(loaded, path)
    assert_same(trace.data, load(path))
    second = Trace(load(path))
    assert [second.tensors[key].raw.tobytes() for key in second.tensors] == [
        trace.tensors[key].raw.tobytes() for key in trace.tensors
    ]


def test_the_example_is_the_same_in_every_view(tmp_path: Path) -> None:
    from examples.tiny_transformer import record

    trace = record()
    loaded = Trace(load(saved(trace, tmp_path)))
    assert_same(trace.data, loaded.data)
    theirs = all_views(loaded)
    for view, text in all_views(trace).items():
        assert theirs[view] == text, view
    assert loaded.validate() == trace.validate()


def test_a_recorded_run_with_everything(tmp_path: Path) -> None:
    import torch

    import sightline as sl

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(5, 3)
    with sl.trace(model, capture=True, stats=True) as trace:
        for step in range(2):
            with sl.step(f"step{step}"):
                sl.spy("x", x)
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    loaded = Trace(load(saved(trace, tmp_path)))
    assert_same(trace.data, loaded.data)
    theirs = all_views(loaded)
    for view, text in all_views(trace).items():
        assert theirs[view] == text, view
    assert torch.equal(loaded.tensors["x"][1].torch(), x)


def test_a_run_that_raised(tmp_path: Path) -> None:
    import torch

    import sightline as sl

    with pytest.raises(RuntimeError), sl.trace() as trace:
        torch.ones(2, 3) @ torch.ones(4)
    loaded = Trace(load(saved(trace, tmp_path)))
    assert_same(trace.data, loaded.data)
    assert str(loaded) == str(trace)


def test_nothing_is_decoded_before_it_is_asked_for(tmp_path: Path) -> None:
    loaded = load(saved(make_trace(), tmp_path))
    assert len(loaded.ops) == len(make_trace().data.ops)
    assert "name" not in vars(loaded.ops)
    assert "forms" not in vars(loaded)
    loaded.ops.name  # noqa: B018
    assert "name" in vars(loaded.ops)
    assert "parent" not in vars(loaded.ops)
    with pytest.raises(AttributeError, match="nothing"):
        loaded.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="nothing"):
        loaded.ops.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_loaded_trace_can_be_changed_like_any_other(tmp_path: Path) -> None:
    data = make_trace().data
    loaded = load(saved(make_trace(), tmp_path))
    changed = replace(loaded, ops=replace(loaded.ops, frame=loaded.ops.frame * 0), info={"name": "other"})
    assert len(changed.ops) == len(data.ops)
    assert changed.info == {"name": "other"}
    assert not changed.ops.frame.any()
    assert str(Trace(changed).call_order()) == str(make_trace().call_order())
    assert "other" in repr(Trace(changed))
    assert f"{len(data.ops)} ops" in repr(changed)
    assert "LoadedTrace" in repr(loaded)
    assert copy.copy(loaded).names == data.names


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    trace = make_trace(4)
    loaded = load(saved(trace, tmp_path))
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(assert_same, trace.data, loaded) for _ in range(8)]:
            done.result()


def test_many_chunks_are_one_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "CHUNK_ROWS", 7)
    trace = make_trace(4)
    assert_same(trace.data, load(saved(trace, tmp_path)))


def test_sources_and_environment_can_be_left_out(tmp_path: Path) -> None:
    trace = ZOO["measured"]()
    line = save(trace.data, tmp_path / "all.sight")
    assert "with the text of 1 source file and versions, host name and command line" in line
    line = save(trace.data, tmp_path / "bare.sight", source=False, environment=False)
    assert line.startswith(f"{tmp_path / 'bare.sight'}: {len(trace.ops)} ops, ")
    assert "without sources and environment" in line
    whole, bare = load(tmp_path / "all.sight"), load(tmp_path / "bare.sight")
    assert whole.environment["torch"] == "2.13"
    assert "class Block" in whole.sources["measured.py"]
    assert not bare.environment
    assert not bare.sources
    assert not {"torch", "pid", "python"} & set(bare.info)
    assert bare.info["name"] == "test"
    raw = (tmp_path / "bare.sight" / "rank0.db").read_bytes()
    assert os.uname().nodename.encode() not in raw


def test_what_is_no_bundle_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no recording"):
        load(tmp_path / "nothing.sight")
    with pytest.raises(UsageError, match=r"no sightline recording: it is an empty folder"):
        load(tmp_path)


def test_the_database_itself_can_be_given(tmp_path: Path) -> None:
    path = saved(make_trace(), tmp_path)
    assert_same(load(path), load(str(path / "rank0.db")))


def test_a_read_only_folder_is_read_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    path = saved(captured(), tmp_path)
    before = sorted(file.name for file in path.rglob("*"))
    for file in [*path.rglob("*"), path]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    try:
        assert_same(captured().data, load(path))
        assert sorted(file.name for file in path.rglob("*")) == before
    finally:
        for file in [path, *path.rglob("*")]:
            file.chmod(0o755 if file.is_dir() else 0o644)


@pytest.mark.parametrize("name", ["a b", "a?b=c&d", "a%20b#c", "ü", "x';--"])
def test_any_folder_name_will_do(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save(make_trace().data, path)
    assert_same(make_trace().data, load(path))


def test_captured_tensors_are_read_from_the_bundle(tmp_path: Path) -> None:
    trace = captured()
    loaded = load(saved(trace, tmp_path))
    assert loaded.store is not None
    tensors = Tensors(loaded.captures, loaded.store)
    assert list(tensors) == list(trace.tensors)
    for key in tensors:
        assert tensors[key].raw.tobytes() == trace.tensors[key].raw.tobytes()
    assert {file.parent.name for file in (tmp_path / "run.sight").rglob("*.safetensors")} == {"tensors"}


def test_without_torch(tmp_path: Path) -> None:
    trace = captured()
    path = saved(trace, tmp_path)
    script = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "functorch", "safetensors"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
from sightline.api import Trace
from sightline.store import load, save
t = Trace(load(sys.argv[1]))
print(t.code(), t.source(), t.summary(), t.tensors["blocks.0.fc"][0].numpy().sum(), sep="\\n")
save(t.data, sys.argv[1])
assert "torch" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60,
                         env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{trace.code()}\n{trace.source()}\n{trace.summary()}\n")


def test_forms_of_every_kind_keep_their_types(tmp_path: Path) -> None:
    trace = ZOO["measured"]()
    loaded: Any = load(saved(trace, tmp_path))
    args = loaded.forms[-3].args
    assert [type(arg).__name__ for arg in args] == [
        "Slot", "bool", "int", "float", "float", "float", "int", "complex", "NoneType", "tuple", "list",
        "dict", "tuple", "Elided",
    ]  # fmt: skip
    assert loaded.forms[-2].kwargs == {}
    assert loaded.forms[-1].kwargs is None
    assert isinstance(loaded, d.TraceData)
