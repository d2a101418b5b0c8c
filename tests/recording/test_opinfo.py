"""Does a trace change what torch computes? Asked of every operator in torch's own OpInfo database.

Each operator runs forward and, where it can, backward on torch's own sample inputs: untraced, inside an
*empty* dispatch mode, inside an *empty* function mode, and inside `sl.trace(ops="both")`, from one seed.
Results, gradients, inputs, exceptions and the random generator are compared bit for bit, with strides.

- What differs under a trace must differ in the same way under an empty mode: torch's own branch, not ours.
- The operators where torch branches are the ones kept in ``opinfo_differences.txt``, no more and no fewer,
  and ``docs/limits.md`` names the same ones with the same words.
- Every recording is free of faults, valid, without ``external`` values, and holds exactly the aten ops, with
  exactly the result shapes, that the empty mode saw go by.

Two samples per operator, and forty of each operator on the list, take about a minute in one process.
``SIGHTLINE_OPINFO=all`` runs all samples, methods and in-place forms, second derivatives, wrong
inputs and every level of recording; that is for a new torch version, and takes the better part of an hour.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import sightline as sl
from tests.recording.engines import NATIVE

torch = pytest.importorskip("torch")

from torch.utils import _pytree as pytree  # noqa: E402

from tests.recording.empty_modes import (  # noqa: E402  # after the check that torch is there
    EmptyDispatchMode,
    EmptyFunctionMode,
    EmptyModes,
    tensors,
)

KEPT: Final = Path(__file__).with_name("opinfo_differences.txt")
LIMITS: Final = Path(__file__).parents[2] / "docs" / "limits.md"
EVERYTHING: Final = os.environ.get("SIGHTLINE_OPINFO") == "all"
SHARDS: Final = 8
#: Untraced repeats of an operator that seems to differ, to see whether it differs from itself.
REPEATS: Final = 8

Function = Callable[..., Any]
Outcome = dict[str, list[Any]]


# -- the kept list ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """One operator of the list: what differs, in the words of the file, and why."""

    differs: frozenset[str]
    why: str

    @property
    def unsettled(self) -> bool:
        """Whether its results are no two times the same, traced or not."""
        return "unsettled" in self.differs


def read_kept() -> dict[str, Kept]:
    """The operators of ``opinfo_differences.txt``: ``name | what differs, … | why``."""
    found: dict[str, Kept] = {}
    for line in KEPT.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, differs, why = (part.strip() for part in line.split("|"))
            assert name not in found, f"{name} is listed twice"
            found[name] = Kept(frozenset(re.split(r",\s*", differs)), why)
    return found


LISTED: Final = read_kept()
NOT_LISTED: Final = Kept(frozenset(), "")


# -- one run -----------------------------------------------------------------------------------------------


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # the generator torch's samples draw from


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def dtype_of(op: Any) -> Any:
    """float32, or the nearest to it that the operator has on a CPU; None if it has none."""
    wanted = (torch.float32, torch.complex64, torch.int64, torch.bool)
    return next((dtype for dtype in wanted if dtype in op.dtypes), None)


@dataclass(frozen=True)
class Case:
    """One way to run an operator: on its n-th sample, as function, method or in place, to some derivative."""

    op: Any
    sample: Any
    number: int
    spelling: str = "function"
    derivatives: int = 1  #: of what order; with 2 the first are computed with create_graph=True
    wrong: bool = False  #: one of the inputs that must raise

    def __str__(self) -> str:
        parts = [name_of(self.op), f"{'wrong ' if self.wrong else ''}sample {self.number}"]
        parts += [self.spelling] if self.spelling != "function" else []
        parts += ["create_graph"] if self.derivatives == 2 else []
        return ", ".join(parts)

    def run(self, mode: AbstractContextManager[Any]) -> tuple[Outcome, Any]:
        """What came out of it, read after the mode has ended; and what the mode gave."""
        outcome: dict[str, Any] = {}
        sample = self.fresh()
        seed(self.number)
        with mode as given:
            try:
                self._compute(sample, outcome)
            except Exception as error:  # noqa: BLE001  # what is raised is part of the outcome
                outcome["error"] = [type(error).__name__, str(error)]
        outcome["random"] = [torch.get_rng_state().numpy().tobytes()]
        outcome["inputs"] = (sample.input, sample.args, sample.kwargs)
        return {part: facts(found) for part, found in outcome.items()}, given

    def fresh(self) -> Any:
        """A sample that no run has changed: a copy, or made anew where it cannot be copied."""
        try:
            return copy.deepcopy(self.sample)
        except (RuntimeError, TypeError):  # a tensor that is no leaf, an object that refuses
            return samples(self.op, self.wrong, self.number + 1)[self.number]

    def _compute(self, sample: Any, outcome: dict[str, Any]) -> None:
        function: Function = self.op
        given = sample.input
        if self.spelling == "method":
            function = self.op.method_variant
        elif self.spelling == "in place":
            function = self.op.inplace_variant
            given = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        result = function(given, *sample.args, **sample.kwargs)
        outcome["result"] = result
        if self.derivatives == 0:
            return
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        leaves = [one for one in tensors((sample.input, sample.args, sample.kwargs)) if one.requires_grad]
        second = self.derivatives == 2
        gradients = differentiate(result, leaves, create_graph=second)
        outcome["gradient"] = gradients
        if second:
            outcome["second gradient"] = differentiate(gradients, leaves)


def differentiate(outputs: Any, leaves: list[Any], create_graph: bool = False) -> Any:
    """Gradients for arbitrary weights, which come from a generator of their own."""
    outputs = [one for one in tensors(outputs) if one.requires_grad]
    if not outputs or not leaves:
        return ()
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in outputs]
    weights = [
        weight.to_sparse() if one.layout is torch.sparse_coo else weight
        for weight, one in zip(weights, outputs, strict=True)
    ]
    return torch.autograd.grad(outputs, leaves, weights, allow_unused=True, create_graph=create_graph)


def facts(tree: Any) -> list[Any]:
    """Everything that can be compared about what a run gave."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
    return [_tensor_facts(leaf) if isinstance(leaf, torch.Tensor) else _plain_facts(leaf) for leaf in leaves]


def _plain_facts(leaf: Any) -> Any:
    plain = isinstance(leaf, (int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device))
    return {"values": repr(leaf) if plain else type(leaf).__name__}


def _tensor_facts(tensor: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "values": (type(tensor), tensor.dtype, tensor.layout, tensor.requires_grad, _bits(tensor)),
        "node": tensor.grad_fn.name() if tensor.grad_fn is not None else "",
    }
    if tensor.layout is torch.strided and not tensor.is_nested:
        found["strides"] = (tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        found["values"] += (tuple(tensor.shape),)
    return found


def _bits(tensor: Any) -> Any:
    """The bits of the elements in logical order, so that nan equals nan, and 0.0 is not -0.0."""
    if tensor.is_nested:
        return [_bits(part) for part in tensor.unbind()]
    if tensor.layout is torch.sparse_coo:
        return [_bits(tensor._indices()), _bits(tensor._values())]
    if tensor.layout is not torch.strided:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (
            (tensor.crow_indices, tensor.col_indices) if rows else (tensor.ccol_indices, tensor.row_indices)
        )
        return [*(_bits(part()) for part in indices), _bits(tensor.values())]
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_meta:
        return "no elements"
    if tensor._is_zerotensor():  # torch's own mark for "zero, and never allocated"
        return "zeros"
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def differences(case: Case, one: Outcome, other: Outcome) -> set[str]:
    """In what two runs differ, in the words of the kept list."""
    found: set[str] = set()
    for part in one.keys() | other.keys():
        mine, theirs = one.get(part, []), other.get(part, [])
        if len(mine) != len(theirs):
            found.add("create_graph" if case.derivatives == 2 else part)
            continue
        for left, right in zip(mine, theirs, strict=True):
            found |= {
                _word(case, part, fact)
                for fact in left.keys() | right.keys()
                if left.get(fact) != right.get(fact)
            }
    found.discard("")
    return found


def _word(case: Case, part: str, fact: str) -> str:
    if case.derivatives == 2 and "gradient" in part:
        return "" if fact == "node" else "create_graph"
    if fact == "node":
        return "node"
    return f"{part} strides" if fact == "strides" else part


# -- one operator ------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What a test found: torch's own differences by operator, and what is wrong with the recorder."""

    torchs_own: dict[str, set[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    unsettled: dict[str, set[str]] = field(default_factory=dict)  #: where the list does not say so


def samples(op: Any, wrong: bool = False, count: int | None = None) -> list[Any]:
    """The first samples of an operator, or its inputs that must raise; the same ones every time.

    torch's own ``op.sample_inputs`` looks through the whole stack for a unittest, once per call.
    """
    seed(0)
    if wrong:
        made = (
            (one.sample_input for one in op.error_inputs_func(op, "cpu"))
            if op.error_inputs_func
            else iter(())
        )
    else:
        made = op.sample_inputs_func(op, "cpu", dtype_of(op), differentiable(op))
    return list(itertools.islice(made, count))


def differentiable(op: Any) -> bool:
    dtype = dtype_of(op)
    return bool(op.supports_autograd and (dtype.is_floating_point or dtype.is_complex))


def cases(op: Any, thorough: bool) -> Iterator[Case]:
    """The ways to run one operator."""
    order = 1 if differentiable(op) else 0
    many = EVERYTHING or thorough
    spellings = ["function"]
    if EVERYTHING:
        spellings += ["method"] * (op.method_variant is not None)
        spellings += ["in place"] * (op.inplace_variant is not None)
    right = samples(op, count=None if EVERYTHING else 40 if thorough else 2)
    for spelling, number in itertools.product(spellings, range(len(right))):
        yield Case(op, right[number], number, spelling, order)
        if many and order and op.supports_gradgrad and spelling == "function":
            yield Case(op, right[number], number, spelling, 2)
    if EVERYTHING:
        for number, sample in enumerate(samples(op, wrong=True)):
            yield Case(op, sample, number, derivatives=0, wrong=True)


def check(case: Case, found: Findings) -> None:
    """Run one case in every mode, and sort what differs into torch's own and ours."""
    name, run = name_of(case.op), case.run
    plain, _ = run(nullcontext())
    again, _ = run(nullcontext())
    dispatch, witness = run(EmptyDispatchMode())
    function, _ = run(EmptyFunctionMode())
    listed = LISTED.get(name, NOT_LISTED)
    known = {"result"} if listed.unsettled else set()
    unsettled = differences(case, plain, again) | known
    torchs_own = differences(case, plain, dispatch) | differences(case, plain, function)
    for level in ("both", "aten", "api", "none") if EVERYTHING else ("both",):
        traced, trace = run(sl.trace(ops=level, engine="python"))
        ours = differences(case, plain, traced) - unsettled
        if (ours | torchs_own) - unsettled - listed.differs:
            # What an untraced run does by itself, one time or another, no mode has done.
            for _ in range(REPEATS):
                unsettled |= differences(case, plain, run(nullcontext())[0])
            ours -= unsettled
        if ours and not _explained(case, traced, unsettled, (dispatch, function)):
            both, _ = run(EmptyModes())
            if not _explained(case, traced, unsettled, (both,)):
                found.wrong.append(f"{case}: only ops={level!r} changes {', '.join(sorted(ours))}")
        found.wrong += [f"{case}, ops={level!r}: {fault}" for fault in faults(trace)]
        if level == "both":
            found.wrong += [f"{case}: {fault}" for fault in missed(trace, witness.seen)]
        if NATIVE:
            found.wrong += natively(case, level, plain, unsettled)
    torchs_own -= unsettled
    if torchs_own:
        found.torchs_own.setdefault(name, set()).update(torchs_own)
    if unsettled - known:
        found.unsettled.setdefault(name, set()).update(unsettled - known)


def natively(case: Case, level: str, plain: Outcome, unsettled: set[str]) -> list[str]:
    """What is wrong under the native engine: anything that differs at all from the run without a trace."""
    traced, trace = case.run(sl.trace(ops=level, engine="native"))  # type: ignore[arg-type]  # one of the four
    ours = differences(case, plain, traced) - unsettled
    for _ in range(REPEATS if ours else 0):
        ours -= differences(case, plain, case.run(nullcontext())[0])
    found = [f"{case}, native, ops={level!r}: it changes {', '.join(sorted(ours))}"] if ours else []
    return found + [f"{case}, native, ops={level!r}: {fault}" for fault in faults(trace)]


def _explained(case: Case, traced: Outcome, unsettled: set[str], others: Iterable[Outcome]) -> bool:
    """Whether an empty mode gives exactly what the trace gave."""
    return any(not differences(case, traced, other) - unsettled for other in others)


def faults(trace: sl.Trace) -> list[str]:
    """What is wrong with a recording by itself."""
    found = [f"a fault of the recorder: {fault}" for fault in trace.info["faults"]]
    try:
        report = trace.validate()
    except sl.SightlineError as error:
        return [*found, str(error)]
    if report.external and trace.info["ops"] in ("aten", "both"):
        found.append(f"{report.external} external values")
    return found


def missed(trace: sl.Trace, seen: list[tuple[str, list[tuple[int, ...]]]]) -> list[str]:
    """Where the recorded aten ops, or their results, are not the ones that an empty mode saw go by."""
    ops = [op for op in trace.ops if op.level == "aten"]
    if [op.name for op in ops] != [name for name, _ in seen]:
        return [f"recorded {[op.name for op in ops]}, but what ran is {[name for name, _ in seen]}"]
    # New versions of what an op changed in place follow what it returned.
    results = [
        [value.shape for value in op.outputs][: len(shapes)]
        for op, (_, shapes) in zip(ops, seen, strict=True)
    ]
    return [
        f"{op.name} is said to have made {made}, but made {shapes}"
        for op, made, (_, shapes) in zip(ops, results, seen, strict=True)
        if made != shapes
    ]


# -- the tests ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def undisturbed_generators() -> Iterator[None]:
    """One torch thread, and after the test the generators as they were."""
    threads, numpy_state, state = torch.get_num_threads(), np.random.get_state(), random.getstate()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)
    np.random.set_state(numpy_state)
    random.setstate(state)


def operators() -> list[Any]:
    """torch's database. Importing it takes seconds, which collecting the tests need not."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


@pytest.mark.slow
@pytest.mark.timeout(3600 if EVERYTHING else 180)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_trace_changes_nothing_that_an_empty_mode_does_not_change(shard: int) -> None:
    found = Findings()
    kept = {name: one for name, one in LISTED.items() if not one.unsettled}
    operators_here = [op for op in operators()[shard::SHARDS] if dtype_of(op) is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has much to say about its samples
        for op in operators_here:
            for case in cases(op, thorough=name_of(op) in kept):
                check(case, found)
    for name, parts in found.unsettled.items():
        warnings.warn(f"{name} is not compared in full: untraced runs differ in {parts}", stacklevel=1)
    assert not found.wrong, "\n".join(found.wrong)
    here = {name_of(op) for op in operators_here}
    listed = {name: one.differs for name, one in kept.items() if name in here}
    assert found.torchs_own == listed, "torch branches elsewhere now: opinfo_differences.txt must follow"


def test_limits_names_the_operators_of_the_list() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", LIMITS.read_text("utf-8"), re.MULTILINE)
    shown = {name: frozenset(re.split(r",\s*", differs.replace("`", ""))) for name, differs in rows}
    assert shown == {name: kept.differs for name, kept in LISTED.items() if not kept.unsettled}
