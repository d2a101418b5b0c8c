"""`Trace`: what users hold of a recording — its tables (`TraceTables`), and a method for every view of it.

While the block runs, a trace is a snapshot of the run so far; afterwards it is final. A view is imported on
first use.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.argument_checks import argument_text, check_arguments, renamed_arguments
from sightline.errors import SightlineError, UsageError
from sightline.text_encoding import printable
from sightline.trace_tables import StepRange, TraceTables

if TYPE_CHECKING:
    from sightline.convert.perfetto import Timeline
    from sightline.data.trace_data import TensorMeta
    from sightline.graph.graph import Graph
    from sightline.store.reader import LoadedTrace
    from sightline.views.lineage import LineageView
    from sightline.views.rendering import View


@printable
class Trace(TraceTables):
    """A recording, and every view of it.

    >>> import torch, sightline as sl
    >>> with sl.trace() as t:
    ...     y = torch.ones(2, 3).relu()
    >>> [op.name for op in t.ops.where(level="aten")]
    ['ones', 'relu']
    """

    @renamed_arguments(ops="level", everything="all")
    @check_arguments
    def code(
        self, *, level: str | None = None, module: str | None = None, op: str | None = None,
        phase: str | None = None, depth: int | None = None, tail: int | None = None,
        fold: bool = True, torch_frames: bool = False, names: bool = False, stats: bool | None = None,
        all: bool = False, step: StepRange | None = None, rank: int | None = None,
    ) -> View:  # fmt: skip
        """Ops and shapes under the chain of source lines that ran them.

        ``level`` is "aten" (where recorded, the default) or "api". ``module``, ``op``, ``phase``, ``depth``
        and ``tail`` choose ops (see `sightline.analysis.select`). The repeats of a loop body are shown once,
        with ×N, unless ``fold=False``. ``torch_frames=True`` shows torch's own source lines too;
        ``names=True`` puts the names of parameters and variables before their shapes. Where statistics were
        recorded, an op ends with those of its result, over all its runs where it is folded; ``stats=False``
        hides them. Ops that build the model, and those that installed packages run before it or, in training,
        around it, are left out unless ``all=True`` or ``op`` selects them; the first line counts them.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> print(t.code(op="relu"))  # doctest: +ELLIPSIS
        y = torch.ones(2, 3).relu()  # ...
        │ # relu(f32[2, 3]) -> f32[2, 3];
        """
        from sightline.views.code import code

        view = code(self._at(step, rank).index, level=level, module=module, op=op, phase=phase, depth=depth,
                    tail=tail, fold=fold, torch_frames=torch_frames, names=names, stats=stats,
                    all=all)  # fmt: skip
        return self._with_rank(view, rank)

    @renamed_arguments(ops="level")
    @check_arguments
    def source(
        self, *, file: str | None = None, level: str | None = None, module: str | None = None,
        op: str | None = None, phase: str | None = None, depth: int | None = None,
        tail: int | None = None, width: int = 100, stats: bool | None = None,
        step: StepRange | None = None, rank: int | None = None,
    ) -> View:  # fmt: skip
        """Your own files with, per line, the ops that ran there, their shapes, runs and time.

        Loops and calls are merged, and only functions that ran are shown. ``file`` chooses other files by a
        part of their path or a glob; the other filters choose ops. ``width`` is in columns. The range of a
        line's results follows their shapes where statistics were recorded; ``stats=False`` hides it.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> "relu -> f32[2, 3]" in str(t.source(op="relu"))
        True
        """
        from sightline.views.source import source

        view = source(self._at(step, rank).index, file=file, level=level, module=module, op=op, phase=phase,
                      depth=depth, tail=tail, width=width, stats=stats)  # fmt: skip
        return self._with_rank(view, rank)

    @renamed_arguments(everything="all")
    @check_arguments
    def log(
        self, *, module: str | None = None, op: str | None = None, phase: str | None = None,
        depth: int | None = None, tail: int | None = None, inside: bool = False,
        tensor: Callable[[TensorMeta], str] | None = None, stats: bool | None = None,
        fold: bool = True, all: bool = False, step: StepRange | None = None, rank: int | None = None,
    ) -> View:  # fmt: skip
        """Module calls and operations as blocks, with their inputs and outputs.

        A module without module calls inside is one block; ``inside=True`` also shows the ops that ran in it.
        Without ``phase`` it is the forward pass. ``tensor=str`` prints tensors as ``f32[2, 3]``. Where
        statistics were recorded they follow each tensor; ``stats=False`` hides them. Equal layers and runs of
        a loop are one block with ×N and the ranges of what differs, unless ``fold=False``. Ops outside the
        model are left out as in `code`, unless ``all=True`` or ``op`` selects them.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.cat([torch.ones(2, 3), torch.ones(2, 1)], dim=1)
        >>> print(t.log(op="torch.cat"))
        ● torch.cat(dim=1) @ [<module>]
        ├─ Input 0: Tensor [2, 3] @ cpu
        ├─ Input 1: Tensor [2, 1] @ cpu
        └─ Output: Tensor [2, 4] @ cpu
        """
        from sightline.views.log import log
        from sightline.views.log_blocks import tensor_block_text

        if tensor is not None and not callable(tensor):
            raise UsageError(f"tensor={argument_text(tensor)} must be a function of a tensor, such as str.")
        view = log(self._at(step, rank).index, module=module, op=op, phase=phase, depth=depth, tail=tail,
                   inside=inside, tensor=tensor or tensor_block_text, stats=stats, fold=fold,
                   all=all)  # fmt: skip
        return self._with_rank(view, rank)

    @check_arguments
    def call_order(
        self, *, module: str | None = None, phase: str | None = None, depth: int | None = None,
        tail: int | None = None, fold: bool = True, order: str = "entry",
        step: StepRange | None = None, rank: int | None = None,
    ) -> View:  # fmt: skip
        """Module calls in the order of "entry" or "completion", indented by depth.

        ``#2`` is the third call of its module. Consecutive calls of one module that did the same
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

        view = call_order(self._at(step, rank).index, order=order, module=module, phase=phase, depth=depth,
                          tail=tail, fold=fold)  # fmt: skip
        return self._with_rank(view, rank)

    @check_arguments
    def summary(
        self, *, module: str | None = None, phase: str | None = None, depth: int | None = None,
        width: int | None = 100, stats: bool | None = None, fold: bool = True,
        step: StepRange | None = None, rank: int | None = None,
    ) -> View:  # fmt: skip
        """Per module: calls, shapes, parameters, FLOPs, time and activation memory, as a table.

        Ops that run between modules have their own rows, so that the rows of a module add up to its numbers.
        Empty columns are left out. ``width`` is in columns, None for no limit; columns that do not fit are
        named below the table. Where statistics were recorded there are columns for mean ± std of each output
        and for NaN and Inf; ``stats=False`` hides them. Equal layers share their rows, with the sums of all
        of them, unless ``fold=False``.

        >>> import torch, sightline as sl
        >>> model = torch.nn.Linear(3, 4)
        >>> with sl.trace(model) as t:
        ...     y = model(torch.ones(2, 3))
        >>> print(t.summary())  # doctest: +ELLIPSIS
        module  input → output         params  FLOPs ...
        Linear  f32[2, 3] → f32[2, 4]      16     48 ...
        """
        from sightline.views.summary import summary

        view = summary(self._at(step, rank), module=module, phase=phase, depth=depth, width=width,
                       stats=stats, fold=fold)  # fmt: skip
        return self._with_rank(view, rank)

    @check_arguments
    def memory(
        self, *, module: str | None = None, phase: str | None = None, depth: int | None = None,
        step: StepRange | None = None, rank: int | None = None,
    ) -> View:  # fmt: skip
        """The peak of memory, what holds it then, and the curve over time.

        It shows held memory by kind, by module and by line, and the largest tensors with what made and what
        keeps them. A storage counts until torch frees it. ``module`` counts only what these modules made or
        own, ``phase`` finds the peak of one phase, ``depth`` limits the depth of the listed modules.

        >>> import torch, sightline as sl
        >>> model = torch.nn.Linear(256, 256, bias=False)
        >>> x = torch.ones(64, 256)
        >>> with sl.trace(model) as t:
        ...     y = model(x)
        >>> print(str(t.memory()).splitlines()[0])  # doctest: +ELLIPSIS
        memory     peak 384 KiB  at ... · in forward, linear, ...
        """
        from sightline.views.memory import memory

        view = memory(self._at(step, rank).index, module=module, phase=phase, depth=depth)
        return self._with_rank(view, rank)

    @check_arguments
    def problems(
        self,
        *,
        module: str | None = None,
        kind: str | None = None,
        step: StepRange | None = None,
        rank: int | None = None,
    ) -> View:
        """What looks wrong in this run, the most serious first, each with its line and why it matters.

        ``module`` chooses modules by a glob, ``kind`` one kind of problem. Where the trace stands for all
        ranks of a job, what is wrong between them comes first, and each other problem says which ranks have
        it; they are read one after the other.

        >>> import torch, sightline as sl
        >>> layer, target = torch.nn.Linear(3, 1), torch.ones(5)
        >>> with sl.trace(layer) as t:
        ...     loss = ((layer(torch.ones(5, 3)) - target) ** 2).mean()
        >>> "broadcast" in str(t.problems())
        True
        """
        from sightline.views.problems import problem_list, problems

        run = self._run() if rank is None else None
        if run is None:
            return problems(self._at(step, rank), module=module, kind=kind)
        from sightline.ranks.overview import RANK_KINDS, in_order, rank_problems
        from sightline.ranks.process_problems import process_problems

        between = rank_problems(run) if step is None and module is None else []
        found, _ = (
            process_problems(run, module, lambda data: Trace(data)._at(step).index)
            if kind not in RANK_KINDS  # which needs each rank to be read once more
            else ([], [])
        )
        ops = sum(record.ops for record in run.records.values())
        count = len(run.records)
        where = f"{f'{ops:,} ops of ' if step is None else ''}{count:,} rank{'s' * (count != 1)}"
        is_cut = any(record.unfinished for record in run.records.values())
        scope = " of a recording that was not finished" if is_cut else ""
        return problem_list(self, in_order(between, found), module, kind, RANK_KINDS, where, scope)

    @check_arguments
    def rank_times(self, *, top: int = 12) -> View:
        """Where the time of the ranks of a distributed job differs: by module, by line, by collective.

        Each has the time of the fastest rank, of the one in the middle and of the slowest. Collectives are
        listed with how long ranks waited in them for the one that came last. ``top`` is how many rows each
        table has, those that differ most.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> t.rank_times()  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        sightline.errors.UsageError: This is the recording of one process: there are no ranks to compare.
        """
        from sightline.ranks.times import rank_times

        if type(top) is not int or top < 1:
            raise UsageError(f"top={argument_text(top)} is how many rows to show: a whole number from 1 up.")
        run = self._run()
        if run is None:
            fix = "" if self.info.get("rank") is None else "; open the folder of the whole job"
            raise UsageError(f"This is the recording of one process: there are no ranks to compare{fix}.")
        return rank_times(run, top)

    @check_arguments
    def nonfinite(
        self, *, allow: str | Sequence[str] = (), step: StepRange | None = None, rank: int | None = None
    ) -> View:
        """The op that made the first NaN or infinity, its inputs, and how far it spread.

        It needs ``stats=True`` or ``check="nonfinite"``. ``allow`` are globs on ops and modules that
        may make them.

        >>> import torch, sightline as sl
        >>> with sl.trace(stats=True) as t:
        ...     y = torch.tensor([-1.0, 1.0]).log()
        >>> print(str(t.nonfinite()).splitlines()[0])  # doctest: +ELLIPSIS
        log made 1 NaN of 2 in f32[2], ...
        """
        from sightline.views.nonfinite import nonfinite

        view = nonfinite(self._at(step, rank), allow=allow)
        return self._with_rank(view, rank)

    @renamed_arguments(ops="level", everything="all")
    @check_arguments
    def lineage(
        self, value: Any, *, depth: int | None = None, level: str | None = None,
        all: bool = False, step: StepRange | None = None, rank: int | None = None,
    ) -> LineageView:  # fmt: skip
        """The origin of a value: the chain of ops, lines and modules, the most recent first.

        ``value`` is a row, ``"$12"``, the name of a parameter, a module (its last output), a variable in one
        (``"blocks.0.attn.q"``), or the key of a captured tensor. ``depth`` is how many ops to go back;
        ``level="aten"`` shows dispatcher ops instead of API calls.

        >>> import torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu() * 2
        >>> t.lineage(t.values[-1]).to_networkx().number_of_nodes() > 0
        True
        """
        from sightline.views.lineage import lineage

        return lineage(self._at(step, rank).index, value, depth=depth, level=level, everything=all)

    @renamed_arguments(everything="all")
    @check_arguments
    def graph(
        self, *, level: str | None = None, depth: int | None = None, fold: bool = True,
        prune: str | Sequence[str] = (), phase: str = "forward", module: str | None = None,
        all: bool = False, step: StepRange | None = None, rank: int | None = None,
    ) -> Graph:  # fmt: skip
        """The data flow as a graph of API calls, aten ops or modules.

        ``level`` is "api" (where recorded, the default), "aten" or "module". ``depth`` collapses modules
        below it. Equal layers are shown once with ×N, and a recurrence as a loop, unless ``fold=False``;
        ``prune`` hides "views", "parameters", "constants" or "leaves". ``phase`` is "forward", "backward" or
        "both".

        >>> import torch, sightline as sl
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> x = torch.ones(1, 3)
        >>> with sl.trace(model) as t:
        ...     y = model(x)
        >>> [node.op for node in t.graph(level="module").nodes_of(kind="call")]
        ['Linear', 'ReLU']
        """
        from sightline.graph.recorded_graph import graph

        return graph(self._at(step, rank).index, level=level, depth=depth, fold=fold,
                     prune=(prune,) if isinstance(prune, str) else tuple(prune), phase=phase,
                     module=module, everything=all)  # fmt: skip

    @check_arguments
    def save(
        self, path: str | os.PathLike[str], *, source: bool = True, environment: bool = True,
        overwrite: bool = False,
    ) -> str:  # fmt: skip
        """Write the recording to a folder ``run.sight``; returns a line that says what it holds.

        It holds everything the views need, with the text of the source files (``source=False`` leaves them
        out) and versions, host name and command line, secrets masked (``environment=False`` leaves them out).
        An existing recording is replaced only with ``overwrite=True``, and then atomically. In a distributed
        job each process saves its own into that folder, ``run.sight/rank0.sight``; where the trace stands for
        all ranks, all of them are saved.

        >>> import tempfile, torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     line = t.save(f"{folder}/run.sight")
        ...     [op.name for op in sl.load(f"{folder}/run.sight").ops.where(level="aten")]
        ['ones', 'relu']
        """
        from sightline.process_rank import path_of_rank
        from sightline.store import save
        from sightline.store.paths import make_job_folder, refuse_recording

        if self._folder is not None:
            from sightline.ranks.folder import save_ranks

            return save_ranks(
                self._folder, Path(path), source=source, environment=environment, overwrite=overwrite
            )
        folder = path_of_rank(Path(path))
        if not overwrite:
            refuse_recording(folder, "save under another name, or give overwrite=True to replace it")
        make_job_folder(folder)
        return save(self.data, folder, source=source, environment=environment)

    @check_arguments
    def to_perfetto(
        self, path: str | os.PathLike[str] | None = None, *,
        step: StepRange | None = None, rank: int | None = None,
    ) -> Timeline:  # fmt: skip
        """The run as a timeline, whose ``save(path)`` writes what Perfetto (ui.perfetto.dev) opens.

        Module calls contain API calls, which contain aten ops; phases, steps and memory have tracks of their
        own, and each slice has its tensors and its source line. The ranks of a distributed job are a process
        each, with an arrow through each collective. A path that ends in ``.gz`` is compressed. An existing
        file is replaced atomically. As text it is the JSON of trace events.

        >>> import json, torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> events = json.loads(str(t.to_perfetto()))["traceEvents"]
        >>> [event["name"] for event in events if event.get("cat") == "aten,forward"]
        ['ones', 'relu']
        """
        from sightline.convert.perfetto import Timeline

        run = self._run() if step is None and rank is None else None
        timeline = Timeline(self._at(step, rank).index if run is None else run)
        if path is not None:
            text = "t.to_perfetto(path) is t.to_perfetto().save(path) now; the old form ends soon."
            warnings.warn(text, DeprecationWarning, stacklevel=3)  # through the check of arguments
            timeline.save(path)
        return timeline

    @check_arguments
    def html(
        self, path: str | os.PathLike[str], *, step: StepRange | None = None, rank: int | None = None
    ) -> None:
        """Write the run as a page to walk through: one HTML file, which opens offline anywhere.

        It shows the tree of modules, the source with what ran on each line, the graph, the timeline, what
        costs most, what looks wrong, and every value with its shape, its maker and its readers. It holds the
        text of your source files. A file that is there is replaced, at once or not at all. In a notebook, a
        cell that ends with the trace shows the same page. The page of a distributed job begins with what is
        said of all ranks, and holds one of each kind of rank.

        >>> import pathlib, tempfile, torch, sightline as sl
        >>> with sl.trace() as t:
        ...     y = torch.ones(2, 3).relu()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     t.html(f"{folder}/run.html")
        ...     pathlib.Path(folder, "run.html").read_text()[:15]
        '<!doctype html>'
        """
        self._save_page(path, step, rank)

    def _with_rank(self, view: View, rank: int | None) -> View:
        """A view of one rank of a job, with a line that says so where the program named none."""
        if rank is not None or not self._of_job:
            return view
        from sightline.ranks.overview import view_of_rank

        return view_of_rank(view, self.info)

    def _save_page(
        self, path: str | os.PathLike[str], step: StepRange | None = None, rank: int | None = None
    ) -> int:
        """Write the page; returns how many bytes it has."""
        from sightline.page.document import save_page, save_ranks_page

        run = self._several_ranks() if step is None and rank is None else None
        return save_page(self._at(step, rank).index, path) if run is None else save_ranks_page(run, path)

    @check_arguments
    def print(self, color: bool | None = None) -> None:
        """Write the one-screen overview to the terminal, with colour on a TTY."""
        self._overview().print(color)

    def _overview(self) -> View:
        run = self._run()
        if run is not None:
            from sightline.ranks.overview import ranks_overview

            return ranks_overview(run)
        from sightline.views.overview import overview

        return overview(self)

    def __reduce__(self) -> tuple[Callable[[str], Trace], tuple[str]]:
        """A loaded recording is pickled as its path; any other must be saved first."""
        path = vars(self.data).get("path")
        if path is None:
            fix = 't.save("run.sight") here, sl.load("run.sight") there'
            raise UsageError(f"A recording is passed on as a file: {fix}.")
        return load, (os.path.abspath(path if self._folder is None else self._folder.path),)

    def __deepcopy__(self, memo: object = None) -> Trace:
        return Trace(self._source, self._folder)

    __copy__ = __deepcopy__

    def __repr__(self) -> str:
        return f"<Trace {self.info['name']}: {len(self.ops)} ops, {len(self.module_calls)} module calls>"

    def __str__(self) -> str:
        return str(self._overview())

    def _repr_html_(self) -> str:
        """The page, in a notebook; the overview where the page is too large or its viewer is not built."""
        from sightline.page.document import inline_page

        return inline_page(self.index, self._several_ranks()) or self._overview()._repr_html_()


@check_arguments
def load(path: str | os.PathLike[str]) -> Trace:
    """Open a saved recording, whose parts are read on use; it needs no torch and runs no code of the file.

    The folder of a distributed job opens as its lowest rank, with all of them in ``t.ranks``.

    >>> import tempfile, torch, sightline as sl
    >>> with sl.trace() as t:
    ...     y = torch.ones(2, 3).relu()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     line = t.save(f"{folder}/run.sight")
    ...     str(sl.load(f"{folder}/run.sight").code()) == str(t.code())
    True
    """
    from sightline.ranks.folder import rank_folder

    folder = rank_folder(Path(path))
    if folder is None or not folder.paths:
        return Trace(_load(path))
    for last, rank in enumerate(folder.paths, 1):
        try:
            return Trace(_load(folder.paths[rank]), folder)
        except SightlineError:  # the overview says so; another rank can stand for all
            if last == len(folder.paths):
                raise
    raise AssertionError


def _load(path: str | os.PathLike[str]) -> LoadedTrace:
    from sightline.store import load

    return load(path)
