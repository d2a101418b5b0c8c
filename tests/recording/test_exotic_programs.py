"""Programs that use torch in unusual ways run as if nobody recorded them, and what is recorded can be read.

Each program is recorded by both engines in some of the configurations; the others are slow tests.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

import pytest

from tests.recording.engines import needs_native
from tests.recording.exotic import memory, tensors, transforms, watchers
from tests.recording.exotic.comparison import (
    CONFIGURATIONS,
    PROGRAMS,
    look_at,
    plain,
    recorded,
    under_a_mode,
)

assert [memory, tensors, transforms, watchers]  # importing them has filled the list

#: Torch itself does something else where a mode is active, as the plain engine's are: it takes a number for a
#: tensor in some ops, and dispatches each op a second time, which a profiler counts.
CHANGED_BY_A_MODE: Final = {
    "jit_traced_function",
    "zero_tensors",
    "profiled",
    "profiled_with_stacks",
    "observed_by_an_execution_trace",
}
#: Programs that are to fail, recorded or not.
FAILING: Final = {"swap_refused_as_ever", "exported_strictly_with_a_hook"}


def _cases() -> list[object]:
    names = list(CONFIGURATIONS)
    cases: list[object] = []
    for at, program in enumerate(PROGRAMS):
        chosen = {"native": {"path", names[at % len(names)]}, "python": {names[(at + 3) % len(names)]}}
        for engine, some in chosen.items():
            marks = [needs_native] if engine == "native" else []
            for name in names:
                slow = [] if name in some else [pytest.mark.slow]
                cases.append(pytest.param(program, engine, name, marks=[*marks, *slow]))
    return cases


@pytest.mark.parametrize(("program", "engine", "configuration"), _cases())
def test_a_recorded_program_is_the_plain_one(
    program: str, engine: str, configuration: str, tmp_path: Path
) -> None:
    by_mode = engine == "python" and configuration != "none" and program in CHANGED_BY_A_MODE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has much to say about its prototypes
        expected = under_a_mode(program) if by_mode else plain(program)
        if program not in FAILING and not by_mode:
            assert not isinstance(expected[0], type), expected[1]
        outcome, traces = recorded(program, {**CONFIGURATIONS[configuration], "engine": engine}, tmp_path)
    assert outcome == expected
    assert traces
    for trace in traces:
        look_at(trace, tmp_path)
