"""Records the chosen steps of a training, for the callbacks of all trainers.

A callback reports when a step begins and ends; everything else is here. `sightline.data` runs only between
the first and the last chosen step.
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
from sightline.store.paths import free_path, remove_recording
from sightline.tracing import trace

#: Options of `trace` that a callback sets itself.
_OWN_OPTIONS: Final = frozenset({"path", "name", "live"})
_PROBLEM_LINES: Final = 12


class TrainingRecorder:
    """Records some steps of a training, or each until the first NaN, and reports the result.

    An error of the recorder is reported through ``report`` and ends the recording; the training goes on.
    """

    def __init__(
        self, steps: str | int | None, check: str | Check | None, name: str, options: dict[str, Any]
    ) -> None:
        nonfinite_check = Check.of(check)
        refused = _OWN_OPTIONS & options.keys()
        if refused:
            raise UsageError(
                f"{min(refused)}= is the callback's own: it writes to the trainer's folder, under name=."
            )
        if steps is None and nonfinite_check is None:
            raise UsageError(
                'Choose the steps to record: steps="10:12", or check="nonfinite" for the first NaN.'
            )
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, str | int)):
            raise UsageError(
                f"steps={argument_text(steps)} must be a step or a range of them: 3, '0:5' or '10:'."
            )
        self._span = range(sys.maxsize) if steps is None else step_range(str(steps), "steps=")
        # The check must not end the training: a NaN is reported at the end of the step.
        self._check = None if nonfinite_check is None else replace(nonfinite_check, on="report")
        self._name = name
        self._options = options
        trace(None, check=self._check, name=name, **options)  # raises now if an option is wrong
        self._traced: trace | None = None
        self._step: AbstractContextManager[None] | None = None
        self._finished = False
        self._recording_path = Path()
        self.trace: Trace | None = None  #: the finished recording
        self.path: Path | None = None  #: its folder

    @property
    def recording(self) -> bool:
        return self._traced is not None

    def begin(self, number: int, model: Any, folder: str, report: Callable[[str], None]) -> None:
        """A step begins."""
        if self._finished or number not in self._span:
            return
        try:
            if self._traced is None:
                self._recording_path = free_path(Path(folder), self._name)
                traced = trace(
                    model, path=self._recording_path, name=self._name, check=self._check, **self._options
                )
                traced.start()
                self._traced = traced
            self._step = step(f"step{number}")
            self._step.__enter__()
        except Exception as error:  # noqa: BLE001 — a training does not end for its recording
            self._fail(error, report)

    def end(self, number: int, report: Callable[[str], None]) -> None:
        """A step ends, and the recording with it if it was the last step or has a NaN."""
        if self._traced is None:
            return
        self._end_step()
        is_last = number + 1 not in self._span
        if self._check is not None:
            if not self._is_finite(report):
                self._finished = True
            elif not is_last:  # the recording of a finite step
                self._traced = None
                remove_recording(self._recording_path)
                return
        if self._finished or is_last:
            self.stop(report)

    def _is_finite(self, report: Callable[[str], None]) -> bool:
        """Whether the step has no NaN and no infinity; the recording is stopped to find out."""
        assert self._traced is not None
        assert self._check is not None
        try:
            nonfinite = first_nonfinite(self._traced.stop().index, allow=self._check.allow or ())
        except Exception as error:  # noqa: BLE001 — a training does not end for its recording
            self._fail(error, report)
            return False
        return nonfinite is None

    def stop(self, report: Callable[[str], None], error: BaseException | None = None) -> None:
        """Finish the recording at the end of the training or of the chosen steps, and report it.

        An exception that ends the training gains its note here, as it does when it leaves a block.
        """
        traced, self._traced = self._traced, None
        if traced is None:
            return
        ended_inside = self._step is not None
        self._end_step()
        try:
            traced.__exit__(None if error is None else type(error), error, None)
            recording = traced.stop()
            if self._check is not None and not (self._finished or ended_inside):
                remove_recording(self._recording_path)  # every step was finite
                return
            self.trace, self.path = recording, self._recording_path
            report(report_text(recording, self._recording_path))
        except Exception as failure:  # noqa: BLE001 — a training does not end for its recording
            self._fail(failure, report)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _fail(self, error: Exception, report: Callable[[str], None]) -> None:
        self._finished = True
        report(f"sightline: no recording was made: {str(error) or type(error).__name__}")
        traced, self._traced = self._traced, None
        if traced is not None:
            self._end_step()
            traced.stop()


def report_text(trace: Trace, path: Path) -> str:
    """A short report: how much was recorded, its problems, and how to see more."""
    names = [step.name for step in trace.steps]
    steps = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else "no step"
    lines = str(trace.problems()).splitlines()
    if len(lines) > _PROBLEM_LINES:
        lines[_PROBLEM_LINES - 1 :] = ["…"]
    head = f"sightline: {steps}, {len(trace.ops):,} ops in {path}"
    return "\n".join([head, *(f"  {line}".rstrip() for line in lines), f"  sightline show {path}"])


class StepRecordingCallback:
    """The common base of the callbacks: their options, and the recording."""

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
