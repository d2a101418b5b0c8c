"""The timeline follows the format, has every op and call once, and agrees with the recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline as sl
from sightline.api import Trace
from sightline.convert.perfetto import EventWriter, microseconds
from sightline.convert.timeline import cut_to_nest, steps
from sightline.data.trace_data import StepInfo
from sightline.errors import CaptureError, UsageError
from tests.builders import TraceBuilder, make_trace
from tests.convert.trace_events import WEEK, ns, read, slices
from tests.store.bundles import ZOO


def written(trace: Trace, folder: Path, name: str = "run.json") -> list[dict[str, Any]]:
    trace.to_perfetto().save(folder / name)
    return read(folder / name)


@pytest.mark.parametrize("name", ZOO)
def test_every_trace_is_a_valid_timeline_with_each_op_and_call_once(name: str, tmp_path: Path) -> None:
    trace = ZOO[name]()
    events = written(trace, tmp_path)
    ops = slices(events, "api") + slices(events, "aten")
    assert sorted(event["args"]["op"] for event in ops) == list(range(len(trace.ops)))
    calls = [event["args"]["module_call"] for event in slices(events, "module")]
    assert calls == list(range(len(trace.module_calls)))
    assert len(slices(events, "step")) == len(trace.steps)


def train_gpt2() -> Trace:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        tokens = torch.randint(0, 32, (2, 8))
        optimizer = torch.optim.Adam(model.parameters())
        with sl.trace(model) as trace:
            for number in range(2):
                with sl.step(f"step{number}"):
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return trace


@pytest.fixture(scope="module")
def trained() -> Trace:
    return train_gpt2()


def test_a_training_run_of_a_real_model(trained: Trace, tmp_path: Path) -> None:
    events = written(trained, tmp_path)
    phases = [event["name"] for event in slices(events, "phase")]
    assert phases == ["forward", "backward", "optimizer"] * 2
    assert [event["name"] for event in slices(events, "step")] == ["step0", "step1"]
    by_op = {event["args"]["op"]: event for event in slices(events, "api") + slices(events, "aten")}
    by_call = {event["args"]["module_call"]: event for event in slices(events, "module")}
    for op in trained.ops:
        event = by_op[op.id]
        assert event["name"] == op.name
        assert event["cat"] == f"{op.level},{op.phase}"
        assert event["args"]["call"] == str(op)
        assert ns(event["ts"]) == op.start
        assert event["args"].get("module") == (op.module.label if op.module else None)
        assert ns(event["args"].get("host_us", event["dur"])) == op.duration
        assert event["args"].get("forward") == (op.forward.id if op.forward else None)
        if op.parent:
            assert holds(by_op[op.parent.id], event)
        elif op.call and op.phase == "forward":
            assert holds(by_call[op.call.id], event)
    for call in trained.module_calls:
        assert by_call[call.id]["name"] == call.module.label
        if call.parent:
            assert holds(by_call[call.parent.id], by_call[call.id])


def holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    begin, end = ns(outer["ts"]), ns(outer["ts"]) + ns(outer["dur"])
    inside = begin <= ns(inner["ts"]) and ns(inner["ts"]) + ns(inner["dur"]) <= end
    return bool(inside and outer["tid"] == inner["tid"])


def test_source_positions_are_those_of_the_code_outside_torch(trained: Trace, tmp_path: Path) -> None:
    events = written(trained, tmp_path)
    linear = next(
        event for event in slices(events, "api") if event["args"].get("module") == "transformer.h.0.mlp.c_fc"
    )
    assert "/transformers/" in linear["args"]["source"]
    assert linear["args"]["function"] == "Conv1D.forward"
    assert "torch.addmm" in linear["args"]["code"]
    for event in slices(events, "aten", "backward"):
        if "forward" in event["args"]:
            assert "/torch/" not in event["args"]["source"]


def test_memory_starts_with_the_parameters_and_gains_state_and_gradients(
    trained: Trace, tmp_path: Path
) -> None:
    counters = [event for event in written(trained, tmp_path) if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory cpu"}
    owned = {info.key: info for module in trained.modules for info in module.parameters}
    assert counters[0]["args"]["parameters"] == sum(info.nbytes for info in owned.values())
    held = sum(info.nbytes for info in owned.values() if not info.buffer)
    assert counters[-1]["args"]["state"] >= 2 * held
    assert max(event["args"]["gradients"] for event in counters) >= held
    assert counters[-1]["args"]["gradients"] == counters[-1]["args"]["activations"] == 0


def test_a_loaded_recording_gives_the_same_file_and_gz_the_same_events(
    trained: Trace, tmp_path: Path
) -> None:
    trained.save(tmp_path / "run.sight")
    loaded = sl.load(tmp_path / "run.sight")
    events = written(trained, tmp_path)
    assert written(loaded, tmp_path, "loaded.json") == events
    assert written(loaded, tmp_path, "run.json.gz") == events
    assert (tmp_path / "run.json.gz").stat().st_size < (tmp_path / "run.json").stat().st_size / 5


def test_recomputed_modules_lie_inside_the_backward_pass(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with sl.trace(model) as trace:
        checkpoint(model, torch.ones(2, 4), use_reentrant=False).sum().backward()
    events = written(trace, tmp_path)
    (backward,) = slices(events, "api", "backward")
    again = slices(events, "module", "recompute")
    assert [event["name"] for event in again] == ["Sequential", "0", "1"]
    assert all(holds(backward, event) for event in again)
    assert [event["name"] for event in slices(events, "phase")] == [
        "forward",
        "backward",
        "recompute",
        "backward",
    ]


def test_each_thread_has_its_tracks(tmp_path: Path) -> None:
    trace = make_trace(1)
    ops = trace.data.ops
    thread = np.where(ops.phase == 1, 2, 0).astype(np.int8)
    events = written(Trace(replace(trace.data, ops=replace(ops, thread=thread))), tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["main thread", "phases", "phases of thread 2", "thread 2"]
    assert {names[event["tid"]] for event in slices(events, "aten", "backward")} == {"thread 2"}
    assert {names[event["tid"]] for event in slices(events, "module")} == {"main thread"}
    order = [event["tid"] for event in events if event["name"] == "thread_sort_index"]
    assert [names[track] for track in order] == ["phases", "phases of thread 2", "main thread", "thread 2"]


def test_an_exception_and_the_op_that_raised_it_are_marked(tmp_path: Path) -> None:
    events = written(ZOO["crashed"](), tmp_path)
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert mark["args"]["exception"].startswith("RuntimeError: mat1 and mat2")
    raised = {event["name"] for event in events if event["args"].get("raised")}
    assert raised == {"Net", "torch.mm", "fc2", "addmm"}


def test_steps_that_overlap_have_lanes_of_their_own() -> None:
    named = [("a", 0, 10), ("inner", 2, 3), ("b", 5, 10), ("c", 15, 1)]
    infos = [StepInfo(name, 0, 0, 0, 0, start, long) for name, start, long in named]
    assert [(step.name, step.lane) for step in steps(infos)] == [("a", 0), ("inner", 0), ("b", 1), ("c", 0)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=40))
def test_cutting_makes_any_slices_nest(given: list[tuple[int, int, bool]]) -> None:
    given.sort(key=lambda one: one[0])
    start = np.array([begin for begin, _, _ in given], dtype=np.int64)
    end = start + np.array([long for _, long, _ in given], dtype=np.int64)
    before = end.copy()
    cut_to_nest(start, end, np.array([leaf for _, _, leaf in given], dtype=bool))
    assert (start <= end).all()
    assert (end <= before).all()
    for at, (_, _, leaf) in enumerate(given):
        for later in range(at + 1, len(given)):
            inside = start[later] < end[at]
            assert not (inside and leaf)
            assert not inside or end[later] <= end[at]


@settings(deadline=None)
@given(st.lists(st.integers(0, WEEK) | st.integers(0, 1 << 52)))
def test_a_time_is_the_same_whether_it_is_rounded_or_cut(times: list[int]) -> None:
    for text, time in zip(microseconds(np.array(times, dtype=np.int64)), times, strict=True):
        assert round(float(text) * 1000) == time
        assert int(float(text) * 1000) == time or time > WEEK
        assert "e" not in text


names = st.text(st.characters(), max_size=12)  # lone surrogates and control characters too
times = st.integers(0, 10**12) | st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=40, deadline=None)
@given(names, names, names, st.lists(st.tuples(times, times), min_size=5, max_size=5))
def test_hostile_names_and_wild_times_stay_valid(
    tmp_path_factory: pytest.TempPathFactory, op: str, module: str, file: str, wild: list[tuple[int, int]]
) -> None:
    b = TraceBuilder(name=op, exception=module)
    b.module("", module or "Net", extra=op)
    x = b.value(2, 3, dtype=op or "float32")
    with b.at(f"{file}.py", 3, op), b.call("", x), b.api(op, x, module):
        b.op(module, x, out=(2, 3))
        b.op(file, x, {op: module}, out=(2, 3))
    b.op(op, x, out=(2, 3))
    data = b.build().data
    start, duration = (np.array([pair[at] for pair in wild], dtype=np.int64) for at in (0, 1))
    ops = replace(data.ops, start=start[: len(data.ops)], duration=duration[: len(data.ops)])
    steps = [StepInfo(op, 0, 2, 0, 1, *pair) for pair in wild]
    trace = Trace(replace(data, ops=ops, steps=steps))
    events = written(trace, tmp_path_factory.mktemp("wild"))
    assert len(slices(events, "api")) + len(slices(events, "aten")) == len(data.ops)


def test_a_fault_half_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("old")

    def fails(self: EventWriter) -> Any:
        raise RuntimeError("no memory counter today")

    monkeypatch.setattr(EventWriter, "_memory", fails)
    with pytest.raises(RuntimeError):
        make_trace(1).to_perfetto().save(tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "old"


def test_an_old_file_is_replaced_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "run.json").symlink_to("real.json")
    make_trace(1).to_perfetto().save(tmp_path / "run.json")
    assert (tmp_path / "run.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["traceEvents"]


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"gone/run\.json cannot be written: No such file or directory\.$"):
        make_trace(1).to_perfetto().save(tmp_path / "gone" / "run.json")
    with pytest.raises(UsageError, match="is a folder: give the name of a file in it"):
        make_trace(1).to_perfetto().save(tmp_path)
