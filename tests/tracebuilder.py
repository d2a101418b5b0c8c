"""Hand-built traces for tests of logic and views: torch-free, valid, a few lines each.

    b = TraceBuilder()
    b.source("net.py", "def forward(self, x):\\n    return self.fc(x).relu()\\n")
    x, w = b.value(2, 8), b.value(8, 4, kind="parameter", name="fc.weight")
    with b.call("", x):                                     # the model itself
        with b.at("net.py", 2, "Net.forward", "self.fc(x)"), b.call("fc", x):
            with b.api("F.linear", x, w):
                h = b.op("mm", x, w, out=(2, 4))            # an aten op, child of F.linear
        with b.at("net.py", 2, "Net.forward", "self.fc(x).relu()"):
            y = b.op("relu", h, out=(2, 4))
    with b.phase("backward"):
        b.op("threshold_backward", y, h, 0, out=(2, 4), forward=y)
    t = b.build()

What an op is given is turned into its form: refs become slots, everything else stays a constant.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sightline.api import Trace
from sightline.data import trace_data as d
from sightline.data.forms import ONE_TENSOR, SLOT, Form, Record

ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}
TORCH = "/usr/lib/python3/site-packages/torch/nn/modules/linear.py"  # a frame the views must hide


class Ref(int):
    """A value id that remembers its shape, and the op that made it."""

    shape: tuple[int, ...]
    dtype: str
    op: int


class TraceBuilder:
    """Collects rows in the order they are asked for; ``build`` makes the `Trace`."""

    def __init__(self, **info: Any) -> None:
        self._info: dict[str, Any] = {"name": "test", "ops": "both", **info}
        self._ops: list[dict[str, Any]] = []
        self._values: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._modules: list[d.ModuleInfo] = []
        self._frames: dict[tuple[int, ...], int] = {}
        self._tables: dict[str, list[Any]] = {"codes": [], "metas": [], "forms": [], "names": []}
        self._interned: dict[tuple[str, str], int] = {}
        self._files: dict[str, d.FileInfo] = {}
        self._storages: list[int] = []
        self._clock = 0
        self._order = 0
        self._phase = 0
        self._thread = 0
        self._call_stack: list[int] = [-1]
        self._frame_stack: list[int] = [-1]
        self._api_stack: list[int] = [-1]

    # -- sources -------------------------------------------------------------------------------

    def source(self, file: str, text: str) -> None:
        """Invent a source file: its lines are found like those of a real one."""
        lines = text.splitlines(keepends=True)
        linecache.cache[file] = (len(text), None, lines, file)

    def file(self, file: str, *, changed: bool = False) -> None:
        """Remember a real file as it looks now, or as if it had looked different."""
        seen = os.stat(file)
        self._files[file] = d.FileInfo(seen.st_mtime_ns - changed, seen.st_size)

    def frame(
        self,
        file: str,
        line: int,
        function: str = "forward",
        expr: str | tuple[int, int] | None = None,
        *,
        parent: int = -1,
        end_line: int | None = None,
    ) -> int:
        """A source position; ``expr`` is the text of the expression on that line, or its byte columns."""
        columns = (-1, -1)
        if isinstance(expr, tuple):
            columns = expr
        elif expr:
            whole = linecache.getline(file, line)
            start = len(whole[: whole.index(expr)].encode())
            columns = (start, start + len(expr.encode()))
        code = self._intern("codes", d.CodeInfo(file, function, 1))
        return self._frames.setdefault(
            (parent, code, line, line if end_line is None else end_line, *columns), len(self._frames)
        )

    @contextmanager
    def at(
        self,
        file: str,
        line: int,
        function: str = "forward",
        expr: str | tuple[int, int] | None = None,
        *,
        end_line: int | None = None,
    ) -> Iterator[int]:
        """What happens inside is called from this source position."""
        parent = self._frame_stack[-1]
        frame = self.frame(file, line, function, expr, parent=parent, end_line=end_line)
        self._frame_stack.append(frame)
        try:
            yield frame
        finally:
            self._frame_stack.pop()

    @contextmanager
    def no_source(self) -> Iterator[None]:
        """What happens inside has no Python frame."""
        self._frame_stack.append(-1)
        try:
            yield
        finally:
            self._frame_stack.pop()

    # -- modules -------------------------------------------------------------------------------

    def module(
        self,
        path: str,
        type: str = "",
        *,
        type_module: str = "net",
        extra: str = "",
        root: int = 0,
        parameters: tuple[d.ParameterInfo, ...] = (),
        aliases: tuple[str, ...] = (),
    ) -> int:
        """The module at a path, made with its parents when it is new."""
        for id, known in enumerate(self._modules):
            if path in known.aliases and known.root == root:
                return id
        parent = -1
        if path:
            parent = self.module(path.rpartition(".")[0], root=root)
        id = len(self._modules)
        name = type or (path.rpartition(".")[2].title() if path else "Net")
        self._modules.append(
            d.ModuleInfo(
                path,
                (path, *aliases),
                name,
                type_module,
                parent,
                extra,
                True,
                root if path else id,
                parameters,
            )
        )
        return id

    @contextmanager
    def call(self, module: str | int, *args: Any, raised: bool = False, **kwargs: Any) -> Iterator[list[Any]]:
        """A call of a module; append to the yielded list what it returns (else its last op's outputs)."""
        id = self.module(module) if isinstance(module, str) else module
        form, inputs = _form(args, kwargs)
        row: dict[str, Any] = {
            "module": id,
            "index": sum(c["module"] == id for c in self._calls),
            "parent": self._call_stack[-1],
            "frame": self._frame_stack[-1],
            "phase": self._phase,
            "start": self._clock,
            "first_op": len(self._ops),
            "flags": d.RAISED if raised else 0,
            "input_form": self._intern("forms", form),
            "inputs": inputs,
        }
        self._calls.append(row)
        self._call_stack.append(len(self._calls) - 1)
        returned: list[Any] = []
        try:
            yield returned
        finally:
            self._call_stack.pop()
            if not returned and len(self._ops) > row["first_op"] and not raised:
                returned = [Ref(id) for id in self._ops[-1]["outputs"]]
            out_form, outputs = _form(tuple(returned), {})
            row |= {
                "output_form": self._intern("forms", out_form),
                "outputs": outputs,
                "end_op": len(self._ops),
                "duration": self._clock - row["start"],
                "order": self._order,
            }
            self._order += 1

    # -- values and ops ------------------------------------------------------------------------

    def value(
        self,
        *shape: int,
        dtype: str = "float32",
        device: str = "cpu",
        kind: str = "input",
        name: str = "",
        producer: int = -1,
        slot: int = 0,
        previous: int = -1,
        base: int = -1,
        requires_grad: bool = False,
    ) -> Ref:
        """A tensor: an input unless ``kind`` says otherwise."""
        stride = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        meta = d.TensorMeta(tuple(shape), stride, dtype, device, itemsize=ITEMSIZES.get(dtype, 4))
        shared = previous if previous >= 0 else base
        if shared < 0:
            self._storages.append(meta.nbytes)
        storage = self._values[shared]["storage"] if shared >= 0 else len(self._storages) - 1
        self._values.append(
            {
                "meta": self._intern("metas", meta),
                "storage": storage,
                "offset": 0,
                "kind": d.KINDS.index(kind),
                "name": self._intern("names", name) if name else -1,
                "producer": producer,
                "slot": slot,
                "previous": previous,
                "base": base,
                "flags": d.REQUIRES_GRAD if requires_grad else 0,
            }
        )
        ref = Ref(len(self._values) - 1)
        ref.shape, ref.dtype, ref.op = tuple(shape), dtype, producer
        return ref

    def op(
        self,
        name: str,
        *args: Any,
        out: Any = None,
        level: str = "aten",
        flavour: str = "op",
        forward: Ref | int = -1,
        inplace: Ref | None = None,
        raised: bool = False,
        duration: int = 1000,
        flops: int = -1,
        dtype: str | None = None,
        frame: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """An op; ``out`` is a shape, a list of shapes, or refs it hands through. Returns its output ref(s).

        ``inplace=x`` makes a new version of ``x``. ``forward`` is the forward op (or a value it made) that
        a backward op belongs to.
        """
        form, inputs = _form(args, kwargs)
        id = len(self._ops)
        origin = forward.op if isinstance(forward, Ref) else forward
        call = self._ops[origin]["call"] if origin >= 0 else self._call_stack[-1]
        row: dict[str, Any] = {
            "name": self._intern("names", name),
            "level": d.LEVELS.index(level),
            "flavour": d.FLAVOURS.index(flavour),
            "phase": self._phase,
            "call": call,
            "frame": self._frame_stack[-1] if frame is None else frame,
            "parent": self._api_stack[-1] if level == "aten" else -1,
            "forward": origin,
            "form": self._intern("forms", form),
            "result": -1,
            "start": self._clock,
            "duration": duration,
            "flops": flops,
            "thread": self._thread,
            "inputs": inputs,
            "outputs": [],
            "flags": d.RAISED * raised | d.MUTATES * (inplace is not None),
        }
        self._ops.append(row)
        self._clock += duration if level == "aten" else 0
        first = next((arg for arg in args if isinstance(arg, Ref)), None)
        kind = "gradient" if self._phase == 1 else "activation"
        made_dtype = dtype or (first.dtype if first is not None else "float32")
        made: Any = None
        if inplace is not None:
            made = self.value(*inplace.shape, dtype=inplace.dtype, kind=kind, producer=id, previous=inplace)
        elif out is not None and not raised:
            made = self._outputs(out, id, made_dtype, kind)
        returned = made if isinstance(made, list | tuple) else [made] if made is not None else []
        self._returns(row, returned)
        return made

    def _outputs(self, out: Any, producer: int, dtype: str, kind: str) -> Any:
        if isinstance(out, Ref):
            return out
        if isinstance(out, tuple) and all(type(size) is int for size in out):
            return self.value(*out, dtype=dtype, kind=kind, producer=producer)
        return [
            item
            if isinstance(item, Ref)
            else self.value(*item, dtype=dtype, kind=kind, producer=producer, slot=slot)
            for slot, item in enumerate(out)
        ]

    def _returns(self, row: dict[str, Any], refs: Any) -> None:
        form = ONE_TENSOR if len(refs) == 1 else _form((tuple(refs),) if refs else (), {})[0]
        row["result"] = self._intern("forms", form)
        row["outputs"] = [int(ref) for ref in refs]

    @contextmanager
    def api(self, name: str, *args: Any, flavour: str = "function", **options: Any) -> Iterator[list[Any]]:
        """An API call; ops inside are its aten ops. Append to the yielded list what it returns
        (else its last op's outputs)."""
        id = len(self._ops)
        self.op(name, *args, level="api", flavour=flavour, **options)
        self._api_stack.append(id)
        returned: list[Any] = []
        try:
            yield returned
        finally:
            self._api_stack.pop()
            row = self._ops[id]
            row["duration"] = self._clock - row["start"]
            if len(self._ops) > id + 1 and not row["outputs"]:
                self._returns(row, returned or [Ref(out) for out in self._ops[-1]["outputs"]])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this phase."""
        outer, self._phase = self._phase, d.PHASES.index(name)
        try:
            yield
        finally:
            self._phase = outer

    # -- the trace -----------------------------------------------------------------------------

    def build(self) -> Trace:
        """The trace of everything asked for so far."""
        frames = np.array(list(self._frames) or np.zeros((0, 6)), dtype=np.int32).reshape(-1, 6)
        tables = self._tables
        return Trace(
            d.TraceData(
                ops=d.OpColumns(**_columns(d.OpColumns, self._ops)),
                values=d.ValueColumns(**_columns(d.ValueColumns, self._values)),
                calls=d.CallColumns(**_columns(d.CallColumns, self._calls)),
                frames=d.FrameColumns(*(frames[:, i].copy() for i in range(6))),
                modules=list(self._modules),
                codes=list(tables["codes"]),
                files=dict(self._files),
                metas=list(tables["metas"]),
                forms=list(tables["forms"]),
                names=list(tables["names"]),
                storages=np.array(self._storages, dtype=np.int64),
                info=dict(self._info),
            )
        )

    def _intern(self, table: str, item: Any) -> int:
        items = self._tables[table]
        id = self._interned.setdefault((table, repr(item)), len(items))
        if id == len(items):
            items.append(item)
        return id


def _columns(kind: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in kind.__dataclass_fields__:
        if field.endswith("_offsets"):
            lists = [row[field.removesuffix("_offsets") + "s"] for row in rows]
            columns[field] = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        elif field in ("inputs", "outputs"):
            columns[field] = np.array([id for row in rows for id in row[field]], dtype=np.int32)
        else:
            columns[field] = np.array([row.get(field, -1) for row in rows], dtype=kind.declared[field].dtype)
    return columns


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Form, list[int]]:
    ids: list[int] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Ref):
            ids.append(int(item))
            return SLOT
        if isinstance(item, list | tuple):
            return type(item)(plain(part) for part in item)
        if isinstance(item, dict):
            return {key: plain(part) for key, part in item.items()}
        if isinstance(item, Record):
            return Record(item.type, {key: plain(part) for key, part in item.fields.items()})
        return item

    form = Form(tuple(plain(item) for item in args), {k: plain(v) for k, v in kwargs.items()} or None)
    return form, ids
