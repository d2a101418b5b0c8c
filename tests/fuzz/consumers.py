"""Everything that reads a recording: each must end, and end well or in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sightline.api import Trace
from sightline.convert import table_files as documents
from sightline.convert.tables import TABLES
from sightline.graph.graph import Graph


def _cli(*arguments: str) -> None:
    from click.testing import CliRunner

    from sightline.cli import main

    ended = CliRunner().invoke(main, arguments)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception


def _graphs(trace: Trace, **options: Any) -> None:
    graph: Graph = trace.graph(**options)
    str(graph), graph._repr_html_(), graph.to_dot(), graph.to_mermaid(), graph.to_model_explorer()
    Graph.from_json(graph.to_json())
    graph.to_networkx()


def _rows(trace: Trace) -> None:
    for table in (trace.ops, trace.values, trace.modules, trace.module_calls, trace.frames, trace.steps):
        repr(table), [str(row) for row in table]
    for op in trace.ops:
        _ = op.args, op.module, op.frame, op.inputs, op.outputs, op.parent, op.duration
    for value in trace.values:
        _ = value.shape, value.dtype, value.kind, value.producer, value.consumers, value.stats


def _tensors(trace: Trace) -> None:
    for key in trace.tensors:
        held = trace.tensors[key]
        repr(held), held.raw, held.nbytes


def _documents(trace: Trace, out: Path) -> None:
    documents.to_json(trace.index, list(TABLES.values()), out / "run.json")
    json.loads((out / "run.json").read_text())
    for name, table in TABLES.items():
        documents.to_csv(trace.index, table, out / f"{name}.csv")


def _perfetto(trace: Trace, out: Path) -> None:
    trace.to_perfetto().save(out / "timeline.json")
    json.loads((out / "timeline.json").read_text())


def consumers(trace: Trace, path: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """How each reads a recording; ``out`` is a folder for what is written."""
    return {
        "overview": lambda: str(trace),
        "html": trace._repr_html_,
        "code": lambda: str(trace.code()),
        "code names": lambda: str(trace.code(fold=True, names=True, torch_frames=True)),
        "source": lambda: str(trace.source()),
        "log": lambda: str(trace.log()),
        "log inside": lambda: str(trace.log(inside=True, tensor=str)),
        "call order": lambda: str(trace.call_order()),
        "summary": lambda: str(trace.summary()),
        "problems": lambda: str(trace.problems()),
        "nonfinite": lambda: str(trace.nonfinite()),
        "lineage": lambda: str(trace.lineage(trace.values[-1])) if len(trace.values) else "",
        "rows": lambda: _rows(trace),
        "tensors": lambda: _tensors(trace),
        "validate": trace.validate,
        "graph": lambda: _graphs(trace),
        "graph folded": lambda: _graphs(trace, fold=True, phase="both"),
        "graph of modules": lambda: _graphs(trace, level="module"),
        "graph collapsed": lambda: _graphs(trace, level="aten", depth=1),
        "documents": lambda: _documents(trace, out),
        "perfetto": lambda: _perfetto(trace, out),
        "save": lambda: trace.save(out / "again.sight"),
        "cli ops": lambda: _cli("ops", str(path), "--json"),
        "cli ops csv": lambda: _cli("ops", str(path), "--csv"),
        "cli ops table": lambda: _cli("ops", str(path), "--sort", "flops"),
        "cli show": lambda: _cli("show", str(path)),
        "cli tensors": lambda: _cli("tensors", str(path), "--stats"),
        "cli sql": lambda: _cli("sql", str(path), "SELECT * FROM ops JOIN module_calls JOIN values LIMIT 50"),
        "cli validate": lambda: _cli("validate", str(path)),
    }
