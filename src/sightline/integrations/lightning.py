"""A callback for Lightning's ``Trainer``: `SightlineCallback`."""

from __future__ import annotations

from typing import Any

from sightline.integrations.training_recorder import StepRecordingCallback

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.rank_zero import rank_zero_info
except ImportError:
    try:
        from pytorch_lightning import Callback
        from pytorch_lightning.utilities.rank_zero import rank_zero_info
    except ImportError as error:
        raise ImportError(
            "sightline.integrations.lightning needs Lightning: pip install lightning."
        ) from error


class SightlineCallback(StepRecordingCallback, Callback):  # type: ignore[misc]  # either of two packages
    """Records some batches of a ``fit``, or the first that makes a NaN, into ``trainer.default_root_dir``.

    >>> from sightline.integrations.lightning import SightlineCallback
    >>> SightlineCallback(check="nonfinite")
    <SightlineCallback, not recording>

    ``steps`` are training batches, counted from 0 over all epochs: ``3``, ``"0:5"``, ``"10:"``; each is a
    step of the recording. With ``check="nonfinite"`` every batch is checked, and the first one in which an op
    makes a NaN or an infinity is kept; with both, only these are checked. The training goes on either way.
    ``name`` is the recording's, ``default_root_dir/<name>.sight``; the other options are those of `trace`.
    After the training ``trace`` is the recording and ``path`` its folder, or None. If the training raises,
    the recording ends there, and the exception gains its note.
    """

    _batches = 0

    def on_train_start(self, *_: Any) -> None:
        """A training begins."""
        self._batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """A batch begins."""
        self._recorder.begin(self._batches, pl_module, trainer.default_root_dir, rank_zero_info)

    def on_train_batch_end(self, *_: Any) -> None:
        """A batch has ended."""
        self._recorder.end(self._batches, rank_zero_info)
        self._batches += 1

    def on_train_end(self, *_: Any) -> None:
        """The training has ended."""
        self._recorder.stop(rank_zero_info)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """The training has raised."""
        self._recorder.stop(rank_zero_info, exception)
