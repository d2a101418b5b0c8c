"""The tables of `docs/migrating.md`: every row is run, and a row that names something absent fails.

A row whose first cell is code is executed in a scope of its tool; one in words has a check of its own in
`migrating_checks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.compat import dl_backtrace, torchspy
from sightline.compat.dl_backtrace import DLBacktrace, diagnose_model_compatibility
from sightline.compat.torch_code_tracing import TracingMode
from sightline.compat.torchspy import CallTracer, TensorSaver, trace_graph
from sightline.compat.tracy_nn import Color, Tracer, trace_model
from sightline.errors import UsageError
from tests.compat.migrating_checks import CHECKS, Block, X

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating.md"
TOOLS = ("torch-code-tracing", "tracy_nn", "torchspy", "DLBacktrace, model tracing")
Row = tuple[str, str, str, str]  # tool, first cell, verdict, reason


@cache
def rows() -> list[Row]:
    text = DOCUMENT.read_text("utf-8")
    found: list[Row] = []
    for tool in TOOLS:
        section = text.split(f"\n## {tool}\n")[1].split("\n## ")[0]
        for line in re.findall(r"^\|(?! there |-)(.*)\|$", section, re.MULTILINE):
            name, verdict, reason = (cell.strip() for cell in line.split("|"))
            found.append((tool, name, verdict, reason))
    return found


def code_of(cell: str) -> str | None:
    """The code of a cell that is nothing else."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    return match[1] if match else None


# -- rows of code --------------------------------------------------------------------------------------------


def scope_of(tool: str, folder: Path) -> dict[str, Any]:
    """The names that the rows of a tool use, made as its user would."""
    model = Block().eval()
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "model": model, "x": X, "folder": folder}
    if tool == "torch-code-tracing":
        with torch.no_grad(), TracingMode(quiet=True) as mode:
            model(X)
        return scope | {"TracingMode": TracingMode, "mode": mode, "TorchDispatchMode": TorchDispatchMode}
    if tool == "tracy_nn":
        return scope | {"Tracer": Tracer, "trace_model": trace_model, "Color": Color, "tracer": Tracer("T")}
    if tool == "torchspy":
        tree = trace_graph.build_tree(["layers.0.fc", "layers.1.fc", "head"])
        file = folder / "trace.txt"
        file.write_text("layers.0.fc\nroot")
        saver, tracer = TensorSaver(folder / "tensors"), CallTracer(folder / "traces")
        saver.register_modules(model)
        scope |= {name: getattr(torchspy, name) for name in torchspy.__all__}
        return scope | {"saver": saver, "tracer": tracer, "trace_graph": trace_graph, "tree": tree,
                        "dot": trace_graph.construct_graph(tree), "file": file}  # fmt: skip
    dlb = DLBacktrace(model, X)
    return scope | {"DLBacktrace": DLBacktrace, "diagnose_model_compatibility": diagnose_model_compatibility,
                    "dl_backtrace": dl_backtrace, "dlb": dlb, "node_io": dlb.predict(X)}  # fmt: skip


def run(code: str, scope: dict[str, Any]) -> Any:
    """The value of an expression, or None after a statement."""
    try:
        compiled = compile(code, "migrating.md", "eval")
    except SyntaxError:
        exec(compile(code, "migrating.md", "exec"), scope)
        return None
    return eval(compiled, scope)


#: Results of rows of code whose subject is the result.
VALUES: dict[str, Callable[[Any], bool]] = {
    "mode.traces": lambda traces: len(traces) == 6,
    "mode.traces[0].op_str": lambda text: text == "t(f32[8, 4]) -> f32[4, 8]",
    "mode.traces[0].stack[0].filename": lambda name: name == __file__,
    "mode.traces[0].stack[0].frame": lambda frame: frame is None,
    "isinstance(mode, TorchDispatchMode)": lambda answer: answer is False,
    "mode.format(color=False, succinct=True)": lambda text: "hidden = self.up(x).relu()  # " in text,
    "Tracer()": lambda tracer: tracer.name == "Neural Network",
    "trace_model(model)": lambda tracer: tracer.name == "Quick Trace",
    "Color.disable()": lambda _: not Color.enabled,
    "saver.get_module_path(model)": lambda path: path == "root",
    'saver.save("q", x, call_idx=3)': lambda path: path.name == "q.call3.pt",
    'DebugContext(saver, module_path_override="here").debugger': lambda saver: isinstance(saver, TensorSaver),
    "get_debug_context()": lambda context: context is None,
    "trace_graph.parse_trace(file)": lambda paths: paths == ["layers.0.fc", "root"],
    'trace_graph.build_tree(["layers.0.fc", "layers.1.fc"]).children["layers"].indices': lambda found: (
        found == {"0", "1"}
    ),
    'trace_graph.build_tree(["layers.0.fc"]).children["layers"].count': lambda count: count == 1,
    'trace_graph.Node("fc", {}, 1, 0, [], set())': lambda node: node != trace_graph.Node("fc"),
    "dot.source": lambda text: 'label="layers x 2"' in text,
    "dlb.predict(torch.ones(7, 4))": lambda node_io: node_io["output"]["output_values"].shape == (7, 8),
    'dlb.graph.nodes["p_up_weight"]["layer_type"]': lambda kind: kind == "Weight",
    'dlb.graph.nodes["linear"]["layer_name"]': lambda name: name == "linear",
    'node_io["linear"]["input_values"]': lambda value: value is X,
    'node_io["cat"]["input_sources"]': lambda names: names == ["x", "linear_1"],
    'node_io["output"]["output_values"]': lambda value: value.shape == (2, 8),
    "diagnose_model_compatibility(model, x)": lambda found: found["issues"] == [],
    "dlb.debug_execution_differences(x)": lambda found: found["max_difference"] == 0.0,
}


@pytest.fixture
def colours() -> Iterator[None]:
    yield
    Color.enable()


@pytest.mark.usefixtures("colours")
@pytest.mark.parametrize("row", [row for row in rows() if code_of(row[1])], ids=lambda row: row[1][:60])
def test_every_row_of_code_runs(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, cell, verdict, _ = row
    code = code_of(cell)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    scope = scope_of(tool, tmp_path)
    try:
        if verdict == "not offered":
            with pytest.raises(UsageError, match=r"relevance|model\.generate") as caught:
                run(code, scope)
            assert str(caught.value).endswith(".")
            return
        value = run(code, scope)
    finally:
        for one in (scope.get("tracer"),):
            if isinstance(one, Tracer):
                one.stop()
            elif isinstance(one, CallTracer):
                one.remove_hooks()
    if code in VALUES:
        assert VALUES[code](value), value


def test_every_value_is_of_a_row() -> None:
    assert VALUES.keys() <= {code_of(cell) for _, cell, _, _ in rows()}


# -- rows in words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [r[:2] for r in rows() if not code_of(r[1])], ids=lambda key: key[1])
def test_every_row_in_words_holds(key: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert key in CHECKS, f"{key} has no check"
    CHECKS[key](capsys)


def test_every_check_is_of_a_row() -> None:
    assert CHECKS.keys() == {r[:2] for r in rows() if not code_of(r[1])}


# -- the tables as such --------------------------------------------------------------------------------------

#: Every name and option in the documents of the tools.
NAMES = {
    "torch-code-tracing": "TracingMode succinct color quiet traces op_str stack print format",
    "tracy_nn": "Tracer start stop trace trace_model",
    "torchspy": "BaseDebugger TensorSaver DebugContext CallTracer spy_save get_debug_context "
    "register_modules target_classes target_names exclude_names save call_idx norm_only prefix "
    "module_path_override register_hooks call_trace hooks get_trace reset_trace remove_hooks "
    "save_trace reset_counts get_module_path module_paths enabled parse_trace build_tree "
    "render_graph construct_graph prune_leaves squash_numeric_indices apply_graph_render_options "
    "save_tree_json show_repetition prune_leaves_flag squash_name dpi figwidth figheight",
    "DLBacktrace, model tracing": "DLBacktrace model input_for_graph dynamic_shapes device verbose predict "
    "graph layer_stack node_type layer_hyperparams layer_name input_values output_values evaluation "
    "run_task sample_auto visualize diagnose_model_compatibility Dim clear_intermediates close",
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_every_name_of_a_tool_has_a_row(tool: str) -> None:
    cells = " ".join(cell for row_tool, cell, _, _ in rows() if row_tool == tool)
    words = set(re.findall(r"\w+", cells))
    assert [name for name in NAMES[tool].split() if name not in words] == []


def test_every_row_has_a_verdict_and_every_difference_a_reason() -> None:
    assert {verdict for _, _, verdict, _ in rows()} == {"same", "better", "different", "not offered"}
    assert [row for row in rows() if row[2] != "same" and not row[3]] == []
    assert len(rows()) == len({row[:2] for row in rows()})


@pytest.mark.parametrize("code", ["mode.trace", "TracingMode(loud=True)", "tracer.begin(model)"])
def test_a_row_that_names_something_absent_fails(code: str, tmp_path: Path) -> None:
    tool = "tracy_nn" if code.startswith("tracer") else "torch-code-tracing"
    with pytest.raises((AttributeError, TypeError)):
        run(code, scope_of(tool, tmp_path))
