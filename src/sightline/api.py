"""`Trace`: the recording people hold — the tables, and a method for every view of them.

While the block runs, a trace is a snapshot of the run so far; afterwards it is final. Each view is
imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sightline.errors import UsageError

if TYPE_CHECKING:
    from sightline.trace.data import TensorMeta, TraceData
    from sightline.trace.tables import Frame, Index, Module, ModuleCall, Op, Table, Value
    from sightline.trace.validate import Report
    from sightline.views.outline import View


class Trace:
    """What a recording saw, and every view of it.

    >>> import torch, sightline as sl
    >>> with sl.trace() as t:
    ...     y = torch.ones(2, 3).relu()
    >>> [op.name for op in t.ops.where(level="aten")]
    ['ones', 'relu']
    """

    def __init__(self, source: TraceData | Callable[[], Index]) -> None:
        if callable(source):
            self._source = source
        else:
            from sightline.trace.tables import Index

            index = Index(source)
            self._source = lambda: index

    @property
    def index(self) -> Index:
        """The data with its derived look-ups; views start here."""
        return self._source()

    @property
    def data(self) -> TraceData:
        """The columns themselves."""
        return self.index.raw

    @property
    def ops(self) -> Table[Op]:
        """Every API call and aten op, in the order they began."""
        return self.index.ops

    @property
    def values(self) -> Table[Value]:
        """Every tensor seen, one row per version."""
        return self.index.values

    @property
    def modules(self) -> Table[Module]:
        """The modules that were called, and the ones that hold them."""
        return self.index.modules

    @property
    def module_calls(self) -> Table[ModuleCall]:
        """Every call of a module, in the order of entry."""
        return self.index.module_calls

    @property
    def frames(self) -> Table[Frame]:
        """Every source position on the way to an op."""
        return self.index.frames

    @property
    def info(self) -> dict[str, Any]:
        """Name, level, versions, faults and exception of the recording."""
        return self.data.info

    def validate(self) -> Report:
        """Prove the recording's invariants, or raise `InvalidTrace` with what contradicts them."""
        from sightline.trace.validate import validate

        return validate(self.data)

    def code(
        self,
        *,
        ops: str | None = None,
        module: str | None = None,
        op: str | None = None,
        phase: str | None = None,
        depth: int | None = None,
        tail: int | None = None,
        fold: bool = False,
        torch_frames: bool = False,
        names: bool = False,
    ) -> View:
        """Ops and shapes under the chain of source lines that ran them.

        ``ops`` is "aten" (where recorded, the default) or "api". ``module``, ``op``, ``phase``, ``depth``
        and ``tail`` choose ops (see `sightline.analysis.select`). ``fold=True`` writes the repeats of a loop
        body once, with ×N. ``torch_frames=True`` shows torch's own source lines too; ``names=True`` puts the
        names of parameters and variables before their shapes.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> print(t.code(op="relu"))  # doctest: +ELLIPSIS
        y = torch.ones(2, 3).relu()  # ...
        │ # relu(f32[2, 3]) -> f32[2, 3];
        """
        from sightline.views.code import code

        return code(self, ops=ops, module=module, op=op, phase=phase, depth=depth, tail=tail, fold=fold,
                    torch_frames=torch_frames, names=names)  # fmt: skip

    def source(
        self,
        *,
        file: str | None = None,
        ops: str | None = None,
        module: str | None = None,
        op: str | None = None,
        phase: str | None = None,
        depth: int | None = None,
        tail: int | None = None,
        width: int = 100,
    ) -> View:
        """Your own files with, per line, the ops that ran there, their shapes, runs and time.

        Loops and calls are taken together, and only functions that ran are shown. ``file`` chooses other
        files by a part of their path or a glob; the other filters choose ops. ``width`` is in columns.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> "relu -> f32[2, 3]" in str(t.source(op="relu"))
        True
        """
        from sightline.views.source import source

        return source(self, file=file, ops=ops, module=module, op=op, phase=phase, depth=depth, tail=tail,
                      width=width)  # fmt: skip

    def log(
        self,
        *,
        module: str | None = None,
        op: str | None = None,
        phase: str | None = None,
        depth: int | None = None,
        tail: int | None = None,
        inside: bool = False,
        tensor: Callable[[TensorMeta], str] | None = None,
    ) -> View:
        """Module calls and operations as blocks, with what went in and what came out.

        A module without module calls inside is one block; ``inside=True`` also shows the ops that ran in it.
        Without ``phase`` it is the forward pass. ``tensor=str`` writes tensors as ``f32[2, 3]``.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.cat([torch.ones(2, 3), torch.ones(2, 1)], dim=1)
        >>> print(t.log(op="torch.cat"))
        ● torch.cat(dim=1) @ [<module>]
        ├─ Input 0: Tensor [2, 3] @ cpu
        ├─ Input 1: Tensor [2, 1] @ cpu
        └─ Output: Tensor [2, 4] @ cpu
        """
        from sightline.views.blocks import tensor_block_text
        from sightline.views.log import log

        return log(self, module=module, op=op, phase=phase, depth=depth, tail=tail, inside=inside,
                   tensor=tensor or tensor_block_text)  # fmt: skip

    def call_order(
        self,
        *,
        order: str = "entry",
        module: str | None = None,
        phase: str | None = None,
        depth: int | None = None,
        tail: int | None = None,
        fold: bool = True,
    ) -> View:
        """Module calls in the order of "entry" or "completion", indented by depth.

        ``#2`` is the third call of its module. Calls of one module that follow each other and did the same
        inside are one line with ×N; ``fold=False`` gives every call its own.

        >>> import torch, sightline as sl
        >>> relu = torch.nn.ReLU()
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), relu, relu)
        >>> with sl.trace(model) as t:
        ...     y = model(torch.ones(2, 3))
        >>> print(t.call_order())
        Sequential #0
          0 (Linear) #0
          1 (ReLU) #0…#1 ×2
        """
        from sightline.views.call_order import call_order

        return call_order(self, order=order, module=module, phase=phase, depth=depth, tail=tail, fold=fold)

    def summary(
        self,
        *,
        module: str | None = None,
        phase: str | None = None,
        depth: int | None = None,
        width: int | None = 100,
    ) -> View:
        """Per module: calls, shapes, parameters, FLOPs, time and activation memory, as a table.

        Ops that run between modules have their own rows, so that the rows of a module add up to its numbers.
        Columns that would be empty are left out. ``width`` is in columns, None for no limit.

        >>> import torch, sightline as sl
        >>> model = torch.nn.Linear(3, 4)
        >>> with sl.trace(model) as t:
        ...     y = model(torch.ones(2, 3))
        >>> print(t.summary())  # doctest: +ELLIPSIS
        module  input → output         params  FLOPs ...
        Linear  f32[2, 3] → f32[2, 4]      16     48 ...
        """
        from sightline.views.summary import summary

        return summary(self, module=module, phase=phase, depth=depth, width=width)

    def print(self, color: bool | None = None) -> None:
        """Write the one-screen overview to the terminal, with colour on a TTY."""
        self._overview().print(color)

    def _overview(self) -> View:
        from sightline.views.overview import overview

        return overview(self)

    def __repr__(self) -> str:
        return f"<Trace {self.info['name']}: {len(self.ops)} ops, {len(self.module_calls)} module calls>"

    def __str__(self) -> str:
        return str(self._overview())

    def _repr_html_(self) -> str:
        return self._overview()._repr_html_()


__all__ = ["Trace", "UsageError"]
