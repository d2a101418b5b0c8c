"""Float32 products in TF32 differ from a divergence by the precision that was recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sightline as sl
from tests.compare.models import inputs, net, recorded

TF32 = {"float32_matmul": "high", "cudnn_tf32": True}
FULL = {"float32_matmul": "highest"}  # whatever earlier tests have switched on


def _with(trace: sl.Trace, device: str = "", **info: Any) -> sl.Trace:
    """The recording as if it were made on another device and with other settings."""
    data = trace.data
    metas = [replace(meta, device=device) for meta in data.metas] if device else data.metas
    return sl.Trace(replace(data, info={**data.info, **info}, metas=metas))


def _rounded() -> sl.Trace:
    """A run whose products are off by about as much as those of TF32."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return recorded(model, inputs())


def test_the_precision_of_products_is_recorded() -> None:
    precision = recorded(net()).info["precision"]
    assert precision["float32_matmul"] == torch.get_float32_matmul_precision()


@pytest.mark.parametrize("device", ["", "cuda:0"])
def test_the_tolerance_is_that_of_the_coarser_products(device: str) -> None:
    exact, coarse = _with(recorded(net()), precision=FULL), _with(_rounded(), precision=FULL)
    assert sl.diff(exact, coarse).verdict == "different"
    diff = sl.diff(exact, _with(coarse, device, precision=TF32), values="statistics")
    results = [pair.verdict.state.name for pair in diff.pairs if diff.a.ops[pair.a].name == "addmm"]
    assert results
    assert set(results) <= {"SAME", "CLOSE"}
    assert len(diff.notes) == 1
    assert diff.notes[0].startswith("float32 products: full precision in a, TF32 in matmuls")


def test_recordings_without_the_setting_are_compared_as_before() -> None:
    trace = _with(recorded(net()), precision={})
    assert sl.diff(trace, recorded(net())).verdict == "same"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_gpu_and_a_processor_agree(precision: str) -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=61, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(3, 61, (4, 32))
    before = torch.get_float32_matmul_precision()

    def run(device: str) -> sl.Trace:
        with sl.trace(model.to(device), stats=True) as trace, torch.no_grad():
            model(input_ids=ids.to(device), use_cache=False)
        return trace

    try:
        on_cpu = run("cpu")
        torch.set_float32_matmul_precision(precision)
        diff = sl.diff(on_cpu, run("cuda"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert diff.divergence is None, str(diff)
    assert diff.verdict == "close"
    assert any("device cpu | cuda" in text for text in diff.comparison.harmless)
    model.transformer.h[2].ln_2.eps = 0.1
    with sl.trace(model, stats=True) as wrong, torch.no_grad():
        model(input_ids=ids.to("cuda"), use_cache=False)
    found = sl.diff(on_cpu, wrong).divergence
    assert found is not None
    assert "(transformer.h.2.ln_2): eps 1e-05 against 0.1" in found.text
