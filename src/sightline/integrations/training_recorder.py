"""Which training steps are recorded, and what is done with the recording: the same for every trainer.

A callback says when a step begins and ends; everything else is here. Nothing runs but `sightline.trace`, and
that only between the first and the last step that is meant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sightline.analysis.nonfinite import first_nonfinite
from sightline.api import Trace
from sightline.argument_checks import argument_text
from sightline.errors import UsageError
from sightline.markers import step
from sightline.options import Check, step_range
from sightline.trace.bundle.paths import free_path, remove_recording
from sightline.tracing import trace

#: What a callback decides itself.
_DECIDED: Final = frozenset({"path", "name", "live"})
_PROBLEM_LINES: Final = 12


class TrainingRecorder:
    """Records some steps of a training, or each until the first NaN, and says what it found.

    Whatever goes wrong with the recording is said through ``say`` and ends it; the training goes on.
    """

    def __init__(
        self, steps: str | int | None, check: str | Check | None, name: str, options: dict[str, Any]
    ) -> None:
        wanted = Check.of(check)
        refused = _DECIDED & options.keys()
        if refused:
            raise UsageError(
                f"{min(refused)}= is the callback's own: it writes to the trainer's folder, under name=."
            )
        if steps is None and wanted is None:
            raise UsageError('Say what to record: steps="10:12", or check="nonfinite" for the first NaN.')
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, str | int)):
            raise UsageError(
                f"steps={argument_text(steps)} must be a step or a range of them: 3, '0:5' or '10:'."
            )
        self._span = range(sys.maxsize) if steps is None else step_range(str(steps), "steps=")
        # A training is not ended by being looked at: what is found is said at the end of the step.
        self._check = None if wanted is None else replace(wanted, on="report")
        self._name = name
        self._options = options
        trace(None, check=self._check, name=name, **options)  # what is wrong with the options is said now
        self._traced: trace | None = None
        self._step: AbstractContextManager[None] | None = None
        self._over = False
        self._place = Path()
        self.trace: Trace | None = None  #: the recording that was kept
        self.path: Path | None = None  #: where it is

    @property
    def recording(self) -> bool:
        return self._traced is not None

    def begin(self, number: int, model: Any, folder: str, say: Callable[[str], None]) -> None:
        """A step begins."""
        if self._over or number not in self._span:
            return
        try:
            if self._traced is None:
                self._place = free_path(Path(folder), self._name)
                traced = trace(model, path=self._place, name=self._name, check=self._check, **self._options)
                traced.start()
                self._traced = traced
            self._step = step(f"step{number}")
            self._step.__enter__()
        except Exception as error:  # noqa: BLE001 — a training does not end for its recording
            self._fail(error, say)

    def end(self, number: int, say: Callable[[str], None]) -> None:
        """A step has ended: the recording, too, if it was the last one or has what was looked for."""
        if self._traced is None:
            return
        self._end_step()
        if self._check is not None:
            if self._is_finite(say):
                if number + 1 in self._span:
                    self._drop()
                    return
            else:
                self._over = True
        if self._over or number + 1 not in self._span:
            self.stop(say)

    def _is_finite(self, say: Callable[[str], None]) -> bool:
        """Whether the step made no NaN and no infinity; the recording is stopped to see it."""
        assert self._traced is not None
        assert self._check is not None
        try:
            found = first_nonfinite(self._traced.stop().index, allow=self._check.allow or ())
        except Exception as error:  # noqa: BLE001 — the same
            self._fail(error, say)
            return False
        return found is None

    def _drop(self) -> None:
        """Forget a step in which nothing happened."""
        self._traced = None
        remove_recording(self._place)

    def stop(self, say: Callable[[str], None], error: BaseException | None = None) -> None:
        """The training has ended, or the steps that were meant: finish, and say what was found.

        An exception that ends the training gains its note here, as it does when it leaves a block.
        """
        traced, self._traced = self._traced, None
        if traced is None:
            return
        ended_inside = self._step is not None
        self._end_step()
        try:
            traced.__exit__(None if error is None else type(error), error, None)
            kept = traced.stop()
            if self._check is not None and not (self._over or ended_inside):
                remove_recording(self._place)  # every step was finite
                return
            self.trace, self.path = kept, self._place
            say(found_text(kept, self._place))
        except Exception as own:  # noqa: BLE001 — the same
            self._fail(own, say)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _fail(self, error: Exception, say: Callable[[str], None]) -> None:
        self._over = True
        say(f"sightline: no recording was made: {str(error) or type(error).__name__}")
        traced, self._traced = self._traced, None
        if traced is not None:
            self._end_step()
            traced.stop()


def found_text(trace: Trace, path: Path) -> str:
    """One short block: how much was recorded, what looks wrong, how to see more."""
    names = [step.name for step in trace.steps]
    steps = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else "no step"
    lines = str(trace.problems()).splitlines()
    if len(lines) > _PROBLEM_LINES:
        lines[_PROBLEM_LINES - 1 :] = ["…"]
    head = f"sightline: {steps}, {len(trace.ops):,} ops in {path}"
    return "\n".join([head, *(f"  {line}".rstrip() for line in lines), f"  sightline show {path}"])


class RecordsSteps:
    """What the callbacks of all trainers have in common: their options, and the recording."""

    def __init__(
        self, steps: str | int | None = None, *, check: str | Check | None = None, name: str = "sightline",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._recorder = TrainingRecorder(steps, check, name, options)

    def __repr__(self) -> str:
        return f"<SightlineCallback, {'recording' if self._recorder.recording else 'not recording'}>"

    @property
    def trace(self) -> Any:
        return self._recorder.trace

    @property
    def path(self) -> Any:
        return self._recorder.path
