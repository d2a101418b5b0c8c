"""Views show the model: what builds it and what a trainer does around it is left out, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import sightline as sl
from tests.cli.recorded import cli, invoke
from tests.recording import training_loops as loops

BUILDS = "ops that build the model"
AROUND = "ops that installed packages run around it"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> sl.Trace:
    """Four steps of a trainer, with the model built inside the recording."""
    folder = tmp_path_factory.mktemp("trained")
    with sl.trace() as t:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16))
        rows = [{"input_ids": (ids := torch.randint(0, 50, (8,))), "labels": ids} for _ in range(8)]
        args = TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", logging_steps=1,
        )  # fmt: skip
        Trainer(model, args, train_dataset=rows).train()
    path = folder / "run.sight"
    t.save(path)
    return sl.load(path)


@pytest.mark.parametrize("view", ["code", "log"])
def test_code_and_log_begin_with_the_model(trained: sl.Trace, view: str) -> None:
    shown = str(getattr(trained, view)()).splitlines()
    assert shown[0].startswith("# left out: ")
    assert BUILDS in shown[0]
    assert AROUND in shown[0]
    assert shown[0].endswith("; all=True shows them")
    first = next(at for at, line in enumerate(shown) if "wte" in line)
    assert first < 40  # the first screen is the first forward pass
    everything = str(getattr(trained, view)(all=True, **({"fold": False} if view == "log" else {})))
    assert "left out" not in everything
    assert len(everything.splitlines()) > len(shown)


def test_the_graph_has_the_model_alone_and_says_so(trained: sl.Trace) -> None:
    shown, every = trained.graph(), trained.graph(all=True)
    shown.lint()
    assert BUILDS in shown.info["left_out"]
    assert "left_out" not in every.info
    assert len(shown.nodes) < len(every.nodes)
    assert not {node.op for node in shown if node.op.endswith("normal_")}
    assert {node.op for node in every if node.op.endswith("normal_")}
    assert any("wte" in node.name for node in shown.nodes_of(kind="parameter"))


def test_a_lineage_ends_at_the_model(trained: sl.Trace) -> None:
    value = next(call for call in trained.module_calls if call.module.path == "transformer.wte").outputs[0]
    shown, every = str(trained.lineage(value)), str(trained.lineage(value, all=True))
    assert shown.splitlines()[-1].startswith("# left out: the origin of ")
    assert shown.splitlines()[-1].endswith("outside the model; all=True shows it")
    assert "left out" not in every
    assert len(every.splitlines()) > len(shown.splitlines())


def test_what_was_asked_for_itself_is_told(trained: sl.Trace) -> None:
    made = next(op for op in trained.ops if op.name == "normal_")
    assert "normal_" in str(trained.lineage(made))


def test_the_command_line_says_it_in_its_own_words(trained: sl.Trace) -> None:
    path = Path(trained.data.path).parent  # type: ignore[attr-defined]  # it was loaded
    for view in ("code", "log"):
        assert cli("show", path, "--view", view).splitlines()[0].endswith("; --all shows them")
        assert "left out" not in cli("show", path, "--view", view, "--all")
    result = invoke("graph", path, "--to", "list")
    assert result.stderr.startswith("left out: ")
    assert result.stderr.endswith("; --all shows them\n")
    assert invoke("graph", path, "--to", "list", "--all").stderr == ""
    assert "--all shows it" in cli("lineage", path, "transformer.wte")
    assert "left out" not in cli("lineage", path, "transformer.wte", "--all")


def test_nothing_is_left_out_of_a_block_around_a_model() -> None:
    model = loops.net()
    with sl.trace(model) as t:
        loops.plain(model, 2)
    for view in (t.code(), t.log(), t.lineage("loss")):
        assert "left out" not in str(view)
    assert "left_out" not in t.graph().info


def test_a_script_without_modules_is_shown_whole() -> None:
    with sl.trace() as t:
        weight = torch.empty(3, 3)
        nn.init.normal_(weight)
        (weight @ weight).relu()
    assert "left out" not in str(t.log())
    assert "normal_" in str(t.lineage(t.values[-1]))
