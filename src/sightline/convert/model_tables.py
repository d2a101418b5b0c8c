"""The tables of what the run ran on: modules, parameters, source positions, steps, memory, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.lifetimes import USES
from sightline.convert.facts import Facts, json_text
from sightline.convert.tables import (
    Column,
    Reader,
    Rows,
    Table,
    choice,
    looked_up,
    number,
    plain,
    real,
    reference,
    row_id,
)
from sightline.trace import data as d

Array = NDArray[Any]
_INT: Final = "integer"
_REAL: Final = "real"
_TEXT: Final = "text"
_BOOL: Final = "boolean"


def _frame(name: str) -> Callable[[Facts], Array]:
    return lambda facts: getattr(facts.raw.frames, name)


def _each_frame(facts: Facts) -> Array:
    return np.arange(len(facts.raw.frames))


def _stat(name: str) -> Callable[[Facts], Array]:
    return lambda facts: getattr(facts.raw.stats, name)


def _module(read: Callable[[d.ModuleInfo], Any]) -> Reader:
    return plain(lambda facts: facts.raw.modules, read)


def _numel(module: d.ModuleInfo, *, buffer: bool = False) -> int:
    return sum(info.numel for info in module.parameters if info.buffer == buffer)


MODULES: Final = Table(
    "modules",
    "the modules that were called, and the ones that hold them",
    (
        Column("id", _INT, "", row_id),
        Column("path", _TEXT, "blocks.0.attn; empty for the model itself", _module(lambda m: m.path)),
        Column("module", _TEXT, "the path, or the class of the model", _module(lambda m: m.path or m.type)),
        Column("type", _TEXT, "Linear", _module(lambda m: m.type)),
        Column("type_module", _TEXT, "torch.nn.modules.linear", _module(lambda m: m.type_module)),
        Column("parent", _INT, "→ modules.id", _module(lambda m: m.parent if m.parent >= 0 else None)),
        Column("extra", _TEXT, "in_features=6, out_features=6, bias=True", _module(lambda m: m.extra)),
        Column("training", _BOOL, "", _module(lambda m: m.training)),
        Column("parameters", _INT, "elements of its own parameters", _module(_numel)),
        Column("buffers", _INT, "elements of its own buffers", _module(lambda m: _numel(m, buffer=True))),
        Column("calls", _INT, "how often it was called",
               lambda facts, rows: [len(facts.index.calls_of_module.get(row, ())) for row in rows.tolist()]),
    ),
    lambda facts: len(facts.raw.modules),
)  # fmt: skip


def _owned(facts: Facts) -> list[tuple[str, d.ParameterInfo]]:
    return facts.parameters


def _parameter(read: Callable[[d.ParameterInfo], Any]) -> Reader:
    return plain(_owned, lambda pair: read(pair[1]))


PARAMETERS: Final = Table(
    "parameters",
    "parameters and buffers, by the module that owns them",
    (
        Column("path", _TEXT, "fc1.weight", _parameter(lambda p: p.path)),
        Column("module", _TEXT, "path of the module", plain(_owned, lambda pair: pair[0])),
        Column("name", _TEXT, "weight", _parameter(lambda p: p.name)),
        Column("shape", _TEXT, "[2, 8], as JSON", _parameter(lambda p: str(list(p.shape)))),
        Column("dtype", _TEXT, "float32", _parameter(lambda p: p.dtype.removeprefix("torch."))),
        Column("numel", _INT, "", _parameter(lambda p: p.numel)),
        Column("bytes", _INT, "", _parameter(lambda p: p.nbytes)),
        Column("trainable", _BOOL, "", _parameter(lambda p: p.trainable)),
        Column("buffer", _BOOL, "it is a buffer", _parameter(lambda p: p.buffer)),
        Column("tensor", _INT, "equal for one tensor under several names", _parameter(lambda p: p.key)),
    ),
    lambda facts: len(facts.parameters),
)  # fmt: skip

FRAMES: Final = Table(
    "frames",
    "source positions; a row and its parents are a stack",
    (
        Column("id", _INT, "", row_id),
        Column("parent", _INT, "→ frames.id, the caller", reference(_frame("parent"))),
        Column("file", _TEXT, "", looked_up(lambda f: f.files, _each_frame)),
        Column("line", _INT, "", number(_frame("line"))),
        Column("end_line", _INT, "", number(_frame("end_line"))),
        Column("first_column", _INT, "0-based, in bytes", reference(_frame("column"))),
        Column("end_column", _INT, "", reference(_frame("end_column"))),
        Column("function", _TEXT, "Net.forward",
               looked_up(lambda f: f.functions, _each_frame)),
        Column("code", _TEXT, "the source line", looked_up(lambda f: f.code, _each_frame)),
    ),
    lambda facts: len(facts.raw.frames),
)  # fmt: skip


def _step(read: Callable[[d.StepInfo], Any]) -> Reader:
    return plain(lambda facts: facts.index.step_infos, read)


STEPS: Final = Table(
    "steps",
    "training steps, and the stretches that were named by sl.step",
    (
        Column("id", _INT, "", row_id),
        Column("name", _TEXT, "", _step(lambda s: s.name)),
        Column("first_op", _INT, "ops from this one …", _step(lambda s: s.first_op)),
        Column("end_op", _INT, "… to before this one ran in it", _step(lambda s: s.end_op)),
        Column("first_call", _INT, "module calls likewise", _step(lambda s: s.first_call)),
        Column("end_call", _INT, "", _step(lambda s: s.end_call)),
        Column("start_ns", _INT, "since the recording began", _step(lambda s: s.start)),
        Column("duration_ns", _INT, "the recorder's own time included", _step(lambda s: s.duration)),
    ),
    lambda facts: len(facts.index.step_infos),
)


def _fingerprints(facts: Facts, rows: Rows) -> list[Any]:
    return [f"{bits:016x}" if bits else None for bits in facts.raw.stats.fingerprint[rows].tolist()]


STATS: Final = Table(
    "stats",
    "what the numbers in a tensor were like, where they were measured",
    (
        Column("value", _INT, "→ values.id", number(_stat("value"))),
        *(Column(name, _REAL, "of the finite elements", real(_stat(name)))
          for name in ("min", "max", "mean", "std", "l2")),
        *(Column(name, _INT, "how many", number(_stat(name))) for name in ("zeros", "nans", "infs")),
        Column("fingerprint", _TEXT, "64 bits in hexadecimal; null where none was taken", _fingerprints),
    ),
    lambda facts: len(facts.raw.stats),
)  # fmt: skip


STORAGES: Final = Table(
    "storages",
    "memory behind the tensors; values that share memory share one",
    (
        Column("id", _INT, "", row_id),
        Column("bytes", _INT, "", number(lambda facts: facts.raw.storages)),
        Column("device", _TEXT, "cpu, cuda:0",
               looked_up(lambda f: f.of_metas(lambda m: m.device), lambda f: f.lifetimes.meta)),
        Column("use", _TEXT, "parameters, state, activations, gradients, other",
               choice(USES, lambda facts: facts.lifetimes.use)),
        Column("first_used_ns", _INT, "since the recording began",
               reference(lambda facts: facts.lifetimes.first)),
        Column("last_used_ns", _INT, "parameters and state to the end",
               reference(lambda facts: facts.lifetimes.last)),
    ),
    lambda facts: len(facts.raw.storages),
)  # fmt: skip


def _capture(read: Callable[[d.CaptureInfo], Any]) -> Reader:
    return plain(lambda facts: facts.raw.captures, read)


TENSORS: Final = Table(
    "tensors",
    "the tensors that were kept, without their elements",
    (
        Column("key", _TEXT, "step0/blocks.0.attn/output/0/0", _capture(lambda c: c.key)),
        Column("step", _TEXT, "", _capture(lambda c: c.step)),
        Column("module", _TEXT, "path", _capture(lambda c: c.module)),
        Column(
            "name", _TEXT, "input, output, the op, or the name it was spied under", _capture(lambda c: c.name)
        ),
        Column("call", _INT, "which time, from 0", _capture(lambda c: c.call)),
        Column("slot", _INT, "which tensor of it", _capture(lambda c: c.slot)),
        Column("role", _TEXT, "input, output, op, spy, gradient", _capture(lambda c: c.role)),
        Column("value", _INT, "→ values.id", _capture(lambda c: c.value if c.value >= 0 else None)),
        Column("shape", _TEXT, "as kept, as JSON", _capture(lambda c: str(list(c.shape)))),
        Column("dtype", _TEXT, "as kept", _capture(lambda c: c.dtype.removeprefix("torch."))),
        Column("whole", _BOOL, "false if only a sample was kept", _capture(lambda c: c.whole)),
    ),
    lambda facts: len(facts.raw.captures),
)

INFO: Final = Table(
    "info",
    "facts about the recording as a whole",
    (
        Column("key", _TEXT, "name, ops, torch, exception …", plain(lambda f: list(f.raw.info), str)),
        Column("value", _TEXT, "as JSON", plain(lambda f: list(f.raw.info.values()), json_text)),
    ),
    lambda facts: len(facts.raw.info),
)
