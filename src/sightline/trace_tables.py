"""`TraceTables`: the tables of a recording, its captured tensors, and its steps and ranks as recordings.

`sightline.api.Trace` adds a method for every view.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sightline.errors import TorchMissing, UsageError
from sightline.hints import Hint

if TYPE_CHECKING:
    from sightline.data.index import Frame, Index, Module, ModuleCall, Op, Step, Table, Value
    from sightline.data.tensors import CapturedTensor, Tensors
    from sightline.data.trace_data import TraceData
    from sightline.data.validate import Report
    from sightline.ranks.collectives import Collectives
    from sightline.ranks.folder import RankFolder, Ranks
    from sightline.ranks.merge import Run

#: A choice of steps: 3, "3:5", slice(3, 5), "last", or a name.
StepRange = int | str | slice


class TraceTables:
    """The tables of a recording, read from its columns on demand."""

    def __init__(self, source: TraceData | Callable[[], Index], folder: RankFolder | None = None) -> None:
        self._folder = folder  # of a distributed job: this trace stands for all its ranks
        self._of_job = folder is not None
        self._merged: Run | None = None
        if callable(source):
            self._source = source
        else:
            from sightline.data.index import Index

            index = Index(source)
            self._source = lambda: index
            if hasattr(source, "close_with"):  # the file of a loaded one
                source.close_with(self._source)

    @property
    def index(self) -> Index:
        """The data with derived lookups; views start here."""
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
        """Every tensor, one row per version."""
        return self.index.values

    @property
    def modules(self) -> Table[Module]:
        """The modules that were called, and those that contain them."""
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
    def steps(self) -> Table[Step]:
        """Training steps, each of which ends with ``optimizer.step()``, and steps named by `sl.step`."""
        return self.index.steps

    def step(self, step: StepRange) -> Self:
        """A step as a recording of its own; values made before it that it reads are inputs.

        ``step`` is a number, counted from 0, a range ``"3:5"`` or ``slice(3, 5)``, ``"last"``, or the name of
        a step. ``t.code(step=3)`` is ``t.step(3).code()``; the same holds for every view, and in a
        distributed job for ``t.code(rank=3)`` and ``t.ranks[3].code()``.

        >>> import torch, sightline as sl
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with sl.trace(model) as t:
        ...     for _ in range(4):
        ...         model(torch.ones(2, 3)).sum().backward()
        ...         optimizer.step()
        >>> len(t.steps), len(t.module_calls), len(t.step(3).module_calls), len(t.step("1:3").module_calls)
        (4, 4, 1, 2)
        """
        from sightline.analysis.step_excerpt import excerpt
        from sightline.analysis.step_summaries import step_span

        index = self.index  # once: during the run each access is a new snapshot
        made = type(self)(excerpt(index, step_span(index, step)))
        made._of_job = self._of_job
        return made

    @property
    def ranks(self) -> Ranks[Self]:
        """The recordings of all ranks of a distributed job, by rank; each is a trace like any other.

        They are read on use. Of a recording of one process it is that one. Every view takes ``rank=``.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> list(t.ranks), len(t.ranks[0].ops.where(level="aten"))
        ([0], 2)
        """
        from sightline.ranks.folder import Ranks, siblings
        from sightline.store import load

        path = vars(self.data).get("path")
        folder = self._folder
        if folder is None and path is not None:
            folder = siblings(Path(path).absolute().parent)
        if folder is None:
            return Ranks({int(self.info.get("rank") or 0): Path()}, lambda _: self)
        return Ranks(folder.paths, lambda path: type(self)(load(path)))

    @property
    def collectives(self) -> Collectives:
        """The collectives of this rank: kind, group, peers, bytes, dtype and order number of each.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> len(t.collectives)
        0
        """
        from sightline.ranks.collectives import Collectives

        return Collectives(self.data)

    def _run(self) -> Run | None:
        """All ranks merged, if this trace stands for them."""
        if self._merged is None and self._folder is not None:
            from sightline.ranks.merge import merge

            self._merged = merge(self._folder)
        return self._merged

    def _several_ranks(self) -> Run | None:
        """All ranks merged, if this trace stands for more than one."""
        run = self._run()
        return run if run is not None and len(run.records) > 1 else None

    def _at(self, step: StepRange | None = None, rank: int | None = None) -> Self:
        """What a view with these arguments shows: every view passes here."""
        trace = self if rank is None else self._of_rank(rank)
        return trace if step is None else trace.step(step)

    def _of_rank(self, rank: int) -> Self:
        if type(rank) is not int:
            raise UsageError(f"{Hint.option('rank', rank)} must be the number of a rank.")
        ranks = self.ranks
        if len(ranks) == 1 and self.info.get("rank") is None:
            raise UsageError(
                f"rank={rank} is for a distributed job, and this is the recording of one process."
            )
        return ranks[rank]

    @property
    def tensors(self) -> Tensors:
        """The captured tensors, by key and by name.

        >>> import torch, sightline as sl
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> with sl.trace(model, capture=True) as t:
        ...     y = model(torch.ones(1, 3))
        >>> list(t.tensors), t.tensors["1"][0].shape
        (['0/output/0/0', '1/output/0/0', 'Sequential/output/0/0'], (1, 2))
        """
        from sightline.analysis.unmatched_globs import capture_text
        from sightline.analysis.value_names import value_names
        from sightline.data.tensors import Tensors
        from sightline.store.shards.stores import MemoryStore

        index = self.index
        store = index.raw.store or MemoryStore({})
        return Tensors(index.raw.captures, store, lambda: value_names(index), _to_torch,
                       lambda: capture_text(index.raw))  # fmt: skip

    @property
    def info(self) -> dict[str, Any]:
        """Name, level, versions, faults and exception of the recording."""
        return self.data.info

    def validate(self) -> Report:
        """Check the recording's invariants; raises `InvalidTrace` with what contradicts them.

        Where the trace stands for all ranks of a job, all are checked, and their sizes are added.
        """
        from sightline.data.validate import validate

        if self._folder is not None:
            from sightline.ranks.folder import validate_ranks

            return validate_ranks(self._folder)
        return validate(self.data)


def _to_torch(captured: CapturedTensor) -> Any:
    try:
        from sightline.recording.captures import to_torch
    except TorchMissing as error:
        fix = "`.numpy()` has the numbers and `.raw` the bits"
        raise TorchMissing(f"A torch tensor needs torch, which is not installed here; {fix}.") from error
    return to_torch(captured._data, captured.dtype, captured.shape)
