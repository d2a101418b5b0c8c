"""A short run of the exam that ``make fuzz`` makes long: every sentence about 40 programs is true."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

from tests.truth.audit import audit
from tests.truth.audit_diff import check_diff
from tests.truth.audit_overview import OverviewAuditor
from tests.truth.audit_summary import audit_summary
from tests.truth.audit_tables import audit_tables
from tests.truth.distributed import job
from tests.truth.findings import Auditor
from tests.truth.loops import LOOPS
from tests.truth.program import Program, generate
from tests.truth.running import Run, recorded, run

_SEEDS = range(500, 540)


def _program(seed: int) -> Program:
    """The program of a seed; each kind of loop has its turn."""
    return generate(seed, list(LOOPS)[seed % len(LOOPS)])


@pytest.mark.parametrize("seed", _SEEDS, ids=lambda seed: _program(seed).name)
def test_every_sentence_is_true(seed: int, tmp_path: Path) -> None:
    program = _program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = audit(run(program, tmp_path))
    again = f"python -m tests.truth --seed {seed} --count 1 --loop {program.loop} --show"
    found = "\n".join(map(str, result.findings))
    assert not found, f"{program.name} {program.options}\n{found}\n{again}"
    assert result.statements > 50


@pytest.mark.parametrize(("kind", "world"), [("replicated", 2), ("sharded", 1)])
def test_every_sentence_about_a_process_of_a_job_is_true(kind: str, world: int, tmp_path: Path) -> None:
    assert [str(finding) for finding in job(3, kind, world, tmp_path)] == []


def test_a_seed_is_always_the_same_program() -> None:
    assert [generate(seed).source for seed in range(20)] == [generate(seed).source for seed in range(20)]
    assert {generate(seed).loop for seed in range(400)} == set(LOOPS)


# -- the auditor itself: each of these lies must be found out ---------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of which nothing false is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(generate(5, "plain", "regression"), tmp_path_factory.mktemp("honest"))


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose critic steps twice before its generator steps once, in each of two rounds."""
    seeds = (seed for seed in range(1000) if _has_two_rounds(generate(seed, "unequal_turns", "regression")))
    return run(generate(next(seeds), "unequal_turns", "regression"), tmp_path_factory.mktemp("turns"))


def _has_two_rounds(program: Program) -> bool:
    lines = "for i in range(2):", "for _ in range(2):", "torch.optim.SGD(D.parameters(), lr=0.002)"
    return not program.options and all(line in program.source for line in lines)


@pytest.mark.parametrize(
    ("said", "lie"),
    [
        ("steps     ", "steps     1"),
        ("; backward; ", "; backward ×2; "),
        (" called, ", "0 called, "),
        ("(forward ", "(forward 1"),
        ("(modules ", "(modules 1"),
        ("(Linear)", "(Conv2d)"),
        ("f32[", "f16["),
        ("key  ", "kay  "),
        ("(lr ", "(lr 1"),
        ("one step  ", "one step  Other, "),
        ("of the host time", "of the device time"),
    ],
)
def test_the_auditor_finds_a_lie(honest: Run, said: str, lie: str) -> None:
    text = str(honest.trace)
    assert said in text
    before = OverviewAuditor(honest, text).audit().findings
    assert len(OverviewAuditor(honest, text.replace(said, lie, 1)).audit().findings) > len(before)


@pytest.mark.parametrize(
    ("said", "lie"),
    [
        ("of 4 steps: ", "of 5 steps: "),
        ("2 of 4 steps: G, ", "3 of 4 steps: G, "),
        ("G, D ×2; backward; ", "G, D ×3; backward; "),
        ("backward; SGD (lr 0.002)", "backward; SGD (lr 0.002), SGD (lr 0.001)"),
        (", with 6 optimizer steps", ", with 4 optimizer steps"),
        (", with 6 optimizer steps", ""),
        ("in 2 of the steps", "in 3 of the steps"),
    ],
)
def test_the_auditor_finds_a_lie_about_steps_that_differ(said: str, lie: str, turns: Run) -> None:
    text = str(turns.trace)
    assert said in text
    assert not OverviewAuditor(turns, text).audit().findings
    assert OverviewAuditor(turns, text.replace(said, lie, 1)).audit().findings


def test_the_auditor_finds_other_truths(honest: Run) -> None:
    first, *rest = honest.truth.calls
    changed = dataclasses.replace(honest.truth, calls=[dataclasses.replace(first, inputs=["f32[1]"]), *rest])
    other = dataclasses.replace(honest, truth=changed)
    assert audit_tables(other).findings
    assert audit_summary(other).findings


def test_programs_with_compiled_parts_are_looked_at_in_most_views(tmp_path: Path) -> None:
    """With one step too many in the truth, each view that counts steps or calls says something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = run(generate(0, "compiled"), tmp_path)
        assert "last" in made.program.options
        assert audit(made).findings == []
        facts = dataclasses.replace(made.program.facts, steps=made.program.facts.steps + 1)
        lied = dataclasses.replace(made, program=dataclasses.replace(made.program, facts=facts))
        views = {finding.kind.partition(":")[0] for finding in audit(lied).findings}
    assert {"overview", "tables", "SQL", "page", "last="} <= views


def test_a_diff_of_other_numbers_is_found_out(honest: Run, tmp_path: Path) -> None:
    path = tmp_path / honest.path.name
    source = honest.program.source
    assert source.count("torch.manual_seed(5)") == 1
    path.write_text(source.replace("torch.manual_seed(5)", "torch.manual_seed(6)"), "utf-8")
    traces = [recorded(each, {"stats": True})[0] for each in (honest.path, honest.path, path)]
    auditor = Auditor("diff")
    check_diff(auditor, *traces[:2])
    assert not auditor.findings
    check_diff(auditor, *traces[1:])
    kinds = {finding.kind for finding in auditor.findings}
    assert {"diff: verdict", "diff: a divergence of equal runs", "diff: where equal runs part"} <= kinds
