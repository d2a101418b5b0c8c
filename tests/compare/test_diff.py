"""`sl.diff`: the verdict, the first true divergence, and the notes on recordings that lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import sightline as sl
from sightline.cli import main
from tests.compare.models import WIDTH, Net, inputs, net, recorded


def _place(diff: sl.Diff) -> tuple[str, str]:
    assert diff.divergence is not None
    place = diff.divergence.reason.a or diff.divergence.reason.b
    assert place is not None
    return place.name, place.module


# -- verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_the_same_run_twice_is_the_same(engine: str) -> None:
    diff = sl.diff(recorded(net(), engine=engine), recorded(net(), engine=engine))
    assert diff.verdict == "same"
    assert diff.divergence is None
    assert not len(diff.added)
    assert not len(diff.removed)
    assert diff.parameters.same


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_factor_is_named_with_its_line_and_module(engine: str) -> None:
    diff = sl.diff(recorded(net(), engine=engine), recorded(net(1.0, 2.0, 1.0), engine=engine))
    assert diff.verdict == "different"
    assert _place(diff) == ("*", "blocks.1.attn")
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "constant"
    assert "factor 0.25 against 0.5" in diff.divergence.text
    assert "models.py:" in diff.divergence.text
    assert diff.divergence.text.endswith("inputs are the same")
    assert len(diff.divergences) == 1


def test_one_engine_against_the_other_is_the_same() -> None:
    assert sl.diff(recorded(net(), engine="auto"), recorded(net(), engine="python")).verdict == "same"


def test_another_precision_is_no_divergence_and_hides_none() -> None:
    half = recorded(net().bfloat16(), inputs().bfloat16())
    assert sl.diff(recorded(net()), half).verdict == "close"
    wrong = recorded(net(1.0, 1.0, 2.0).bfloat16(), inputs().bfloat16())
    diff = sl.diff(recorded(net()), wrong)
    assert _place(diff) == ("*", "blocks.2.attn")


def test_a_layer_that_is_missing_is_named_though_all_names_after_it_have_moved() -> None:
    model = net()
    del model.blocks[1]
    diff = sl.diff(recorded(net()), recorded(model))
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "module"
    assert "blocks.1 (Block) ran only on the first side" in diff.divergence.text


def test_a_weight_that_differs_is_named_at_its_first_use() -> None:
    model: Any = net()
    with torch.no_grad():
        model.blocks[1].attn.out.weight[0, 0] += 2
    diff = sl.diff(recorded(net()), recorded(model))
    assert _place(diff)[1] == "blocks.1.attn.out"
    assert diff.divergence is not None
    assert diff.divergence.reason.text == "blocks.1.attn.out.weight differs"
    assert [str(pair) for pair in diff.parameters.of("different")] == ["blocks.1.attn.out.weight"]


def test_other_inputs_are_named_as_the_reason() -> None:
    diff = sl.diff(recorded(net()), recorded(net(), inputs() * 2))
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "input"
    assert "came from outside" in diff.divergence.text


class Split(nn.Module):
    """The attention of `models.Attention` with three projections."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for at, name in enumerate("qkv"):
            layer = nn.Linear(WIDTH, WIDTH)
            layer.weight.data = fused.qkv.weight.data.chunk(3)[at].clone()
            layer.bias.data = fused.qkv.bias.data.chunk(3)[at].clone()
            self.add_module(name, layer)
        self.out = fused.out

    def forward(self, x: Tensor) -> Any:
        q, k, v = (layer(x) for layer in list(self.children())[:3])
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


def test_three_projections_and_a_fused_attention_are_the_same_computation() -> None:
    model = net()
    for block in model.blocks:
        block.attn = Split(block.attn)
    diff = sl.diff(recorded(net()), recorded(model))
    assert diff.verdict == "close", str(diff)
    split = [str(pair) for pair in diff.parameters.of("split")]
    assert (
        "blocks.0.attn.qkv.weight | blocks.0.attn.q.weight + blocks.0.attn.k.weight + blocks.0.attn.v.weight"
        in split
    )
    assert diff.parameters.same


class Renamed(nn.Module):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.layers, self.readout = nn.ModuleList(model.blocks), model.head

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


@pytest.mark.parametrize("rename", [None, {"layers": "blocks", "readout": "head"}])
def test_modules_of_other_names_find_each_other(rename: dict[str, str] | None) -> None:
    diff = sl.diff(recorded(net()), recorded(Renamed(net(1.0, 2.0, 1.0))), rename=rename)
    assert diff.divergence is not None
    assert diff.divergence.reason.b is not None
    assert diff.divergence.reason.b.module == "layers.1.attn"


def test_tolerances_can_be_given() -> None:
    first, second = recorded(net()), recorded(net(), inputs() * 1.001)
    assert sl.diff(first, second).verdict == "different"
    assert sl.diff(first, second, rtol=0.1).verdict == "close"


def test_kept_tensors_are_compared_element_by_element() -> None:
    options: dict[str, Any] = {"stats": None, "capture": sl.Capture(inputs=True)}
    diff = sl.diff(recorded(net(), **options), recorded(net(1.0, 2.0, 1.0), **options))
    assert diff.verdict == "different"
    assert {pair.verdict.by for pair in diff.pairs} >= {"tensor"}
    assert sl.diff(recorded(net(), **options), recorded(net(), **options)).verdict == "same"


def test_backward_and_optimizer_are_compared_too() -> None:
    def trained(rate: float) -> sl.Trace:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with sl.trace(model, stats=True) as trace:
            model(inputs()).square().mean().backward()
            optimizer.step()
        return trace

    assert sl.diff(trained(0.1), trained(0.1)).verdict == "same"
    diff = sl.diff(trained(0.1), trained(0.2))
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "constant"
    assert "0.1" in diff.divergence.text


# -- two models, steps, ranks ------------------------------------------------------------------------------


def test_two_models_are_run_with_the_same_inputs_and_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    x, state = inputs(), torch.get_rng_state()
    assert sl.diff(model, model, x).verdict == "same"
    assert sl.diff(model, model, (x,)).verdict == "same"
    assert sl.diff(model, model, {"input": x}).verdict == "same"
    assert torch.equal(state, torch.get_rng_state())


def test_a_step_is_compared_with_another() -> None:
    model = net()
    with sl.trace(model, stats=True) as trace, torch.no_grad():
        for number in range(3):
            with sl.step(f"step{number}"):
                model(inputs() * (2 if number == 2 else 1))
    assert sl.diff(trace, trace, step=("step0", "step1")).verdict == "same"
    assert sl.diff(trace, trace, step=("step0", 2)).verdict == "different"
    assert sl.diff(trace, trace, step=(0, "last")).verdict == "different"
    with pytest.raises(sl.NothingMatched, match=r"step=9 is not there; this recording has the steps 0 to 2"):
        sl.diff(trace, trace, step=9)


def test_the_weights_of_a_step_are_those_it_used() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.trace(model, stats=True) as trace:
        for _ in range(3):
            model(inputs()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    diff = sl.diff(trace, trace, step=(1, 2))
    assert diff.divergence is not None
    assert diff.divergence.reason.kind == "parameter"
    assert diff.divergence.reason.text == "blocks.0.norm.weight differs"
    assert len(diff.parameters.of("different")) == len(list(model.parameters()))


_RANKS = """
import os, torch, sightline as sl
rank = int(os.environ["RANK"])
with sl.trace(path="run.sight", stats=True):
    x = torch.ones(4, 4) * (rank + 1)
    y = x @ x
    if rank == 0:
        y = y.relu()
    else:
        y = y.tanh()
    y.sum()
"""


def test_two_ranks_part_at_the_first_op_that_differs(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_RANKS, "utf-8")
    for rank in (0, 1):
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        _python("job.py", tmp_path, world)
    diff = sl.diff(tmp_path / "run.sight" / "rank0.sight", tmp_path / "run.sight" / "rank1.sight")
    assert diff.parting is not None
    assert "relu" in diff.parting.text
    assert "job.py:8" in diff.parting.text
    assert "tanh" in diff.parting.text
    assert "job.py:10" in diff.parting.text
    assert "ops part   " in str(diff)
    t = sl.load(tmp_path / "run.sight")
    assert str(sl.diff(t, t, rank=(0, 1))) == str(diff)
    assert sl.diff(t, t, rank=1).verdict == "same"
    with pytest.raises(
        sl.UsageError, match=r"There is no recording of rank 5; there is one of ranks 0 and 1"
    ):
        sl.diff(t, t, rank=(0, 5))
    with pytest.raises(sl.UsageError, match=r"rank=\(0, 1, 2\) must be the number of a rank, or a pair"):
        sl.diff(t, t, rank=(0, 1, 2))  # type: ignore[arg-type]
    run = str(tmp_path / "run.sight")
    shown = CliRunner().invoke(main, ["diff", run, "--rank", "0", "--rank", "1"])
    assert (
        shown.output.strip() == str(diff).replace("sl.trace(…, stats=True)", "sightline run --stats").strip()
    )
    assert "the same, to the last bit" in CliRunner().invoke(main, ["diff", run, run, "--rank", "1"]).output
    for wrong, sentence in (
        ([], "Missing argument B; two ranks or steps of A: --rank 0 --rank 1, or --step-b."),
        (["--rank", "1"], "Missing argument B; two ranks or steps of A: --rank 0 --rank 1, or --step-b."),
        (["--rank", "0"] * 3, "--rank is given once for both recordings, or twice: one rank for each."),
    ):
        assert sentence in CliRunner().invoke(main, ["diff", run, *wrong]).output


def _python(script: str, folder: Path, more: dict[str, str] | None = None) -> str:
    import os

    ran = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, **(more or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# -- input that is not enough ------------------------------------------------------------------------------


def test_without_statistics_ops_and_constants_are_still_compared() -> None:
    diff = sl.diff(recorded(net(), stats=None), recorded(net(), stats=None))
    assert diff.verdict == "unknown"
    assert diff.notes == [
        (
            "neither recording has statistics: ops, constants and shapes are compared, values are not; "
            "record both with stats=True"
        )
    ]
    one = sl.diff(recorded(net()), recorded(net(), stats=None))
    assert one.notes[0].startswith("b has no statistics or kept tensors")


def test_a_constant_that_differs_is_found_without_statistics() -> None:
    diff = sl.diff(recorded(net(), stats=None), recorded(net(1.0, 2.0, 1.0), stats=None))
    assert diff.divergence is not None
    assert "factor 0.25 against 0.5" in diff.divergence.text


def test_different_models_are_named_as_such() -> None:
    other = nn.Sequential(nn.Conv1d(5, 3, 3), nn.Tanh(), nn.MaxPool1d(2))
    diff = sl.diff(recorded(net()), recorded(other))
    assert any(note.startswith("these look like different models") for note in diff.notes)
    assert "verdict    these look like different models" in str(diff)


def test_levels_that_differ_are_compared_at_the_one_that_both_have() -> None:
    diff = sl.diff(recorded(net(), ops="api"), recorded(net(1.0, 2.0, 1.0), ops="both"))
    assert diff.notes == ["ops are compared as API calls: not both recordings have aten ops"]
    assert diff.divergence is not None
    none = sl.diff(recorded(net(), ops="none", stats=None), recorded(net()))
    assert none.notes[0].startswith("only module calls are compared: a has no ops")


def test_a_recording_that_ended_early_says_so() -> None:
    model = net()
    with pytest.raises(RuntimeError), sl.trace(model, stats=True) as trace:
        model(torch.ones(2, 3))
    diff = sl.diff(recorded(net()), trace)
    assert "b ended with an exception: the ops before it are compared" in diff.notes
    ring = recorded(net(), last=10)
    assert any("last 10 ops" in note for note in sl.diff(recorded(net()), ring).notes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"values": "bits"}, "values='bits' is not a choice"),
        ({"rtol": -1}, "rtol=-1 must be a number from 0 up, or None"),
        ({"rename": "a=b"}, "rename='a=b' must be a dict of names"),
    ],
)
def test_wrong_options_are_answered_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    trace = recorded(net())
    with pytest.raises(sl.UsageError, match=sentence):
        sl.diff(trace, trace, **options)


def test_arguments_that_cannot_be_compared_are_refused_in_one_sentence() -> None:
    trace = recorded(net())
    with pytest.raises(sl.UsageError, match="compares two recordings, two paths of them, or two models"):
        sl.diff(trace, 3)
    with pytest.raises(sl.UsageError, match="takes no inputs: they were run already"):
        sl.diff(trace, trace, inputs())


# -- without torch, on disk, as text -----------------------------------------------------------------------


def test_two_bundles_are_compared_without_torch(tmp_path: Path) -> None:
    recorded(net(), path=tmp_path / "a.sight")
    recorded(net(1.0, 2.0, 1.0)).save(tmp_path / "b.sight")
    (tmp_path / "look.py").write_text(
        "import sys\nsys.modules['torch'] = None\nimport sightline as sl\n"
        "d = sl.diff('a.sight', 'b.sight')\nprint(d)\nprint(d.summary())\nprint(d.source())\n",
        "utf-8",
    )
    text = _python("look.py", tmp_path)
    assert "factor 0.25 against 0.5" in text
    assert max(map(len, text.splitlines())) <= 100


def test_everything_is_plain_data() -> None:
    diff = sl.diff(recorded(net()), recorded(net(1.0, 2.0, 1.0)))
    found = json.loads(json.dumps(diff.to_dict(), allow_nan=False))
    assert found["verdict"] == "different"
    assert found["divergence"]["reason"]["kind"] == "constant"
    assert len(found["pairs"]) == len(diff.pairs)
    assert {row["a"] for row in found["modules"]} >= {"blocks.0.attn", "head"}


def test_every_view_fits_a_hundred_columns() -> None:
    diff = sl.diff(recorded(net()), recorded(Renamed(net(1.0, 2.0, 1.0)).bfloat16(), inputs().bfloat16()))
    for view in (str(diff), str(diff.summary()), str(diff.source()), str(diff.source(all=True))):
        assert max(map(len, view.splitlines())) <= 100
    assert len(str(diff).splitlines()) <= 40
    assert "<script" not in diff._repr_html_()


def test_equal_steps_have_nothing_besides() -> None:
    def steps() -> sl.Trace:
        model = net()
        with sl.trace(model, stats=True) as trace:
            optimizer = torch.optim.AdamW(model.parameters())  # makes its counters of Python numbers
            for _ in range(2):
                model(inputs()).square().mean().backward()
                optimizer.step()
        return trace

    diff = sl.diff(steps(), steps())
    assert (diff.verdict, diff.comparison.harmless) == ("same", [])
