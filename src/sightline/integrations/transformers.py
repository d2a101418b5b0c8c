"""A callback for ``transformers.Trainer``: `SightlineCallback`."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Self

from sightline.integrations.training_recorder import StepRecordingCallback

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "sightline.integrations.transformers needs transformers with its Trainer: "
        "pip install 'transformers[torch]'."
    ) from error


class SightlineCallback(StepRecordingCallback, TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Records some steps of a ``Trainer``, or the first step that makes a NaN, into ``args.output_dir``.

    >>> from sightline.integrations.transformers import SightlineCallback
    >>> SightlineCallback(steps="10:12")
    <SightlineCallback, not recording>

    ``steps`` are optimizer steps, counted from 0: ``3``, ``"0:5"``, ``"10:"``; each is a step of the
    recording. With ``check="nonfinite"`` every step is checked, and the first one in which an op makes a NaN
    or an infinity is kept; with both, only these steps are checked. The training goes on either way.
    ``name`` is the recording's, ``output_dir/<name>.sight``; the other options are those of `trace`.
    After the training ``trace`` is the recording and ``path`` its folder, or None.

    ``Trainer`` does not call its callbacks when training raises. In a ``with`` block such a recording
    ends with the block, and the exception gains its note; without one it ends with the next ``train()`` or
    with the process:

        with SightlineCallback(steps="10:12") as callback:
            Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.stop(_report, error)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """End the recording of an earlier training that raised."""
        self._recorder.stop(_report)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        """An optimizer step begins."""
        self._recorder.begin(state.global_step, model, args.output_dir, _report)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """An optimizer step has ended, and is counted already."""
        self._recorder.end(state.global_step - 1, _report)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The training has ended."""
        self._recorder.stop(_report)


def _report(text: str) -> None:
    """Log through transformers, whose warnings are shown unless they are switched off."""
    logging.getLogger("transformers.sightline").warning(text)
