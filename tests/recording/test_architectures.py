"""Real architectures run under a trace exactly as without it, and what was recorded is complete."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

import sightline as sl
from sightline.recording.flop_formulas import FORMULAS, REPLACED
from tests.recording.architecture_runs import (
    SEED,
    Run,
    execute,
    grad_mode,
    leaves,
    prepare,
    pristine,
)
from tests.recording.architectures import ZOO, Architecture
from tests.recording.empty_modes import EmptyDispatchMode
from tests.recording.engines import NATIVE

#: How each architecture is run: training or not, and the grad mode around the forward.
MODES = ("train", "eval", "no_grad")
#: Enough kinds of code for what is cheaper than everything: attention, experts, states, images, two stacks.
FEW = ("gpt2", "llama", "mixtral", "mamba", "bert", "albert", "t5", "vit", "resnet", "whisper", "wav2vec2")


def same(one: Any, other: Any) -> bool:
    """Equal to the bit: the same numbers, layout and dtype, and NaN where there was NaN."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.dtype, one.shape, one.stride(), one.requires_grad) != (
        other.dtype,
        other.shape,
        other.stride(),
        other.requires_grad,
    ):
        return False
    one, other = one.detach(), other.detach()
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    nan = torch.isnan(one)
    return torch.equal(nan, torch.isnan(other)) and torch.equal(one[~nan], other[~nan])


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        key
        for key in one.keys() | other.keys()
        if not (key in one and key in other and same(one[key], other[key]))
    ]


@functools.cache
def plain(architecture: Architecture, mode: str) -> Run:
    """The run without a trace, once per architecture and mode."""
    return execute(prepare(architecture, mode), mode)


@functools.cache
def under_a_mode(architecture: Architecture, mode: str) -> Run:
    """The run without a trace, under a dispatch mode that only passes on."""
    with EmptyDispatchMode():
        return execute(prepare(architecture, mode), mode)


@functools.cache
def counted(architecture: Architecture, mode: str, attention: bool = False) -> tuple[int, int]:
    """FLOPs of the forward, and of both, as torch counts them while they run.

    Before 2.15 torch has no formula for the fused attention of CPUs; ``attention`` lends it the one for other
    devices, else that op counts nothing. Of a grouped convolution its formula counts too much in the backward
    pass.
    """
    formulas: dict[Any, Any] = {torch.ops.aten.convolution_backward: _convolution_gradients}
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    formulas[fused] = _attention_flops if attention else _no_flops
    formulas[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward] = _no_flops
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # it hooks gradients, and fails where there are none
    with counter:
        return execute(prepare(architecture, mode), mode, counter).flops


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _no_flops(*_: Any, **__: Any) -> int:
    return 0


def _convolution_gradients(grad: Any, x: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    """Each of both takes as many products as the forward."""
    transposed, mask = rest[-4], rest[-1]
    return int(sum(mask[:2]) * conv_flop_count(x, weight, grad, transposed=transposed))


class _NoModules:
    """In place of the counter's module tracker: everything is counted together."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def check_unchanged(expected: Run, run: Run) -> None:
    """Outputs, gradients, random numbers, module state and inputs: all as without the trace."""
    assert [path for path, _ in run.outputs] == [path for path, _ in expected.outputs]
    assert not differences(dict(expected.outputs), dict(run.outputs)), "outputs differ"
    assert not differences(expected.gradients, run.gradients), "gradients differ"
    assert torch.equal(expected.random, run.random), "the random numbers drawn differ"
    assert not differences(expected.state(), run.state()), "the model was left in another state"
    assert not differences(expected.inputs, run.inputs), "inputs differ"
    assert run.calls == expected.calls, "modules were called another number of times"


@contextmanager
def same_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Check that parameters and buffers are the same objects afterwards."""
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    yield
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [name for name in before if after.get(name) is not before[name]] == []


SCRIPTED = {"deberta", "deberta_v2"}


def check_recording(t: Any, *, explained: bool = True) -> None:
    """It proves its own invariants, explains every value, and nothing went wrong in the recorder."""
    assert t.info["fault_count"] == 0, t.info["faults"]
    report = t.validate()
    unexplained = [
        f"{value} {[str(op) for op in value.consumers][:2]}" for value in t.values if value.kind == "external"
    ]
    assert report.external == t.info["external"] == len(unexplained)
    assert not (explained and unexplained), unexplained[:5]
    # A checkpoint stops its second forward by an exception as soon as it has what it needs.
    assert not [call for call in t.module_calls if call.raised and call.phase != "recompute"]
    assert not [call for call in t.module_calls if call.unfinished]
    assert not [op for op in t.ops if op.raised and op.phase != "recompute"]
    written = {op.name for op in t.ops if op.level == "api"}
    # transformers has ops of its own for versions of torch that lack theirs, and its models call these.
    ops = [name for name in written if name.startswith("torch.ops.")]
    assert not [name for name in ops if not name.startswith("torch.ops.transformers.")]


def recorded_calls(t: Any) -> Counter[str]:
    """Calls of the model's own modules; a loss made on the way is a root of its own."""
    return Counter(call.module.path for call in t.module_calls if call.module.root.path == "")


def unlinked(t: Any) -> list[str]:
    """Backward ops that do not say which forward op they belong to."""
    lost = (op for op in t.ops if op.level == "aten" and op.phase == "backward" and op.forward is None)
    return [f"{op} at {op.frame.position if op.frame else '?'}" for op in lost]


#: What torch's counter passes over, such as fused attention on CPUs; tests/recording/test_flops.py has these.
UNCOUNTED = {name.removeprefix("aten::") for name in FORMULAS if name not in REPLACED}


def flops(t: Any) -> tuple[int, int]:
    """Of the forward, and of both, in the ops that torch's counter has a formula for."""
    ops = [op for op in t.ops if op.level == "aten" and op.name.partition(".")[0] not in UNCOUNTED]
    ops = [op for op in ops if op.flops is not None]
    return sum(op.flops for op in ops if op.phase == "forward"), sum(op.flops for op in ops)


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Their advice on missing kernels and odd token ids is not ours to follow."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    pristine(ZOO[0])  # the first model built adds a method to nn.Module, for good
    yield
    transformers.logging.set_verbosity(before)
    pristine.cache_clear()
    plain.cache_clear()
    counted.cache_clear()


def test_the_zoo_is_large() -> None:
    names = [one.name for one in ZOO]
    assert len(set(names)) == len(names)
    assert {"gpt2", "llama", "bert", "vit", "t5", "mixtral", "mamba", "whisper"} <= set(names)
    assert len(ZOO) >= 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ZOO, ids=str)
def test_the_run_is_unchanged_and_the_recording_complete(architecture: Architecture, mode: str) -> None:
    if mode == "eval" and architecture.trains_only:
        pytest.skip("its backward refuses to run in eval mode")
    expected = plain(architecture, mode)
    run = prepare(architecture, mode)
    with same_tensors(run.model), sl.trace(run.model) as t:
        execute(run, mode)
    check_unchanged(expected, run)
    check_recording(t)
    assert recorded_calls(t)[""] == 1
    if mode == "train":
        assert recorded_calls(t) == run.calls, "module calls were missed or counted twice"
    assert not unlinked(t), unlinked(t)[:5]
    assert flops(t) == counted(architecture, mode)
    missed = "not counted: _fft_c2c" in str(t.summary(depth=1))
    assert missed == (architecture.name == "fnet")  # Fourier transforms have no formula


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", ["aten", "api", "none"])
@pytest.mark.parametrize("architecture", ZOO, ids=str)
def test_every_level_leaves_the_run_unchanged(architecture: Architecture, ops: Any) -> None:
    run = prepare(architecture, "train")
    with sl.trace(run.model, ops=ops) as t:
        execute(run, "train")
    check_unchanged(plain(architecture, "train"), run)
    # A scripted function passes no function mode: at this level its results come from nowhere.
    check_recording(t, explained=ops != "api" or architecture.name not in SCRIPTED)
    assert recorded_calls(t) == run.calls
    if ops == "aten":
        assert not unlinked(t), unlinked(t)[:5]
        assert flops(t) == counted(architecture, "train")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [one for one in ZOO if one.name in FEW], ids=str)
def test_inference_mode(architecture: Architecture) -> None:
    run = prepare(architecture, "inference")
    with same_tensors(run.model), sl.trace(run.model) as t:
        execute(run, "inference")
    # The plain engine is a dispatch mode, under which composite ops take other paths (docs/limits.md): the
    # results are those of a mode that does nothing, and no others.
    check_unchanged((plain if NATIVE else under_a_mode)(architecture, "inference"), run)
    check_recording(t)
    # Under a mode the attention arrives whole, and is taken apart; the observer sees its kernel.
    assert flops(t) == counted(architecture, "inference", attention=not NATIVE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "whisper"])
def test_a_forward_costs_the_same_in_every_grad_mode(name: str) -> None:
    """Attention arrives whole in inference mode and as its kernel otherwise: the work is the same."""
    architecture = next(one for one in ZOO if one.name == name)
    totals = {}
    for mode in ("eval", "no_grad", "inference"):
        run = prepare(architecture, mode)
        with grad_mode(mode), sl.trace(run.model) as t:
            run.model(**run.inputs)
        totals[mode] = sum(op.flops or 0 for op in t.ops if op.level == "aten")
    assert len(set(totals.values())) == 1, totals


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [one for one in ZOO if one.name in FEW], ids=str)
def test_without_a_model_given(architecture: Architecture) -> None:
    """The first module called is the root, and its parameters are known as such."""
    run = prepare(architecture, "train")
    with sl.trace() as t:
        execute(run, "train")
    check_unchanged(plain(architecture, "train"), run)
    check_recording(t)
    assert not unlinked(t), unlinked(t)[:5]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [one for one in ZOO if one.name in FEW], ids=str)
def test_training_steps(architecture: Architecture) -> None:
    """Three steps of AdamW with clipping: gradients accumulate, state is made, weights change in place."""
    plain_run, run = prepare(architecture, "train"), prepare(architecture, "train")
    torch.manual_seed(SEED)
    train(plain_run)
    torch.manual_seed(SEED)
    with sl.trace(run.model) as t:
        train(run)
    check_unchanged(plain_run, run)
    check_recording(t)
    assert not unlinked(t), unlinked(t)[:5]
    assert {op.phase for op in t.ops} == {"forward", "backward", "optimizer"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "mamba", "bert", "t5", "vit", "whisper"])
def test_checkpointing(name: str, reentrant: bool) -> None:
    """Layers that run again in the backward do so once each, and their ops are a phase of their own."""
    architecture = next(one for one in ZOO if one.name == name)
    plain_run, run = prepare(architecture, "train"), prepare(architecture, "train")
    for one in (plain_run, run):
        model: Any = one.model
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    torch.manual_seed(SEED)
    execute(plain_run, "train")
    torch.manual_seed(SEED)
    with sl.trace(run.model) as t:
        execute(run, "train")
    check_unchanged(plain_run, run)
    check_recording(t)
    assert recorded_calls(t) == run.calls
    assert not unlinked(t), unlinked(t)[:5]
    assert any(op.phase == "recompute" for op in t.ops)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", [one for one in ZOO if one.name in FEW], ids=str)
def test_autocast(architecture: Architecture) -> None:
    """Casts are made, and cached, as without the trace."""
    plain_run, run = prepare(architecture, "train"), prepare(architecture, "train")
    torch.manual_seed(SEED)
    with torch.autocast("cpu", torch.bfloat16):
        execute(plain_run, "train")
    torch.manual_seed(SEED)
    with sl.trace(run.model) as t, torch.autocast("cpu", torch.bfloat16):
        execute(run, "train")
    check_unchanged(plain_run, run)
    check_recording(t)
    assert not unlinked(t), unlinked(t)[:5]


def train(run: Run, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        execute(run, "train")
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        optimizer.step()
    run.gradients = {name: parameter.grad for name, parameter in run.model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ops", ["both", "aten", "api", "none"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mamba"])
def test_generate(name: str, ops: Any) -> None:
    """A greedy loop with its cache gives the same tokens and scores, and a valid recording."""
    architecture = next(one for one in ZOO if one.name == name)
    expected = generate(prepare(architecture, "eval"))
    run = prepare(architecture, "eval")
    with same_tensors(run.model), sl.trace(run.model, ops=ops) as t:
        generate(run)
    check_unchanged(expected, run)
    check_recording(t)
    assert t.info["ops"] == ops


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generate_by_sampling(name: str) -> None:
    """Sampling draws the same random numbers."""
    architecture = next(one for one in ZOO if one.name == name)
    options = {"do_sample": True, "top_k": 20, "temperature": 0.9}
    expected = generate(prepare(architecture, "eval"), **options)
    run = prepare(architecture, "eval")
    with same_tensors(run.model), sl.trace(run.model) as t:
        generate(run, **options)
    check_unchanged(expected, run)
    check_recording(t)


def generate(run: Run, **options: Any) -> Run:
    ids = run.inputs["input_ids"]
    settings = {"do_sample": False, "use_cache": True, **options}
    output = run.model.generate(  # type: ignore[operator]  # a method of transformers' models
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, output_scores=True,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip
    run.outputs = list(leaves(output))
    run.random = torch.get_rng_state()
    return run
