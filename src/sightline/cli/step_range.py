"""Record some training steps of a script: a step ends when an optimizer has stepped.

`integrations.training_recorder` is told of steps by a trainer. Here nobody tells: hooks of optimizers do.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack
from types import FrameType, TracebackType

from sightline.api import Trace
from sightline.errors import NonFiniteError
from sightline.hints import for_command_line
from sightline.markers import step
from sightline.options import step_range
from sightline.tracing import trace


def parse_steps(text: str | None) -> range | None:
    """The steps of ``--steps``: ``3``, ``0:5``, ``10:``, ``:``; None without the option.

    >>> parse_steps("3"), parse_steps("2:5")
    (range(3, 4), range(2, 5))
    """
    if text is None:
        return None
    return step_range(text, "--steps ")


class StepRecorder:
    """A block in which everything is recorded, or some training steps are, each named.

    ``begin`` may raise. Once the block runs, an error of the recorder is stored in ``trouble`` and the script
    goes on. A forked child does nothing: the recording is its parent's.
    """

    def __init__(self, traced: trace, span: range | None) -> None:
        self._traced = traced
        self._span = span
        self._number = 0
        self._step: AbstractContextManager[None] | None = None
        self._exit_stack = ExitStack()
        self._above: FrameType | None = None  # the frame that runs the script
        self._pid = os.getpid()
        self.trace: Trace | None = None
        self.trouble = ""  #: the error of the recorder, as a sentence

    @property
    def _in_own_process(self) -> bool:
        return os.getpid() == self._pid

    def begin(self) -> None:
        """Begin to record, or to count steps; the caller runs the script next."""
        self._above = sys._getframe(1)
        if self._span is None:
            self._begin(sys._getframe())
            return
        from sightline.recording.step_marks import hold_optimizer_hooks
        from sightline.recording.torchapi import optimizer_hooks

        self._exit_stack.enter_context(hold_optimizer_hooks())  # steps begin and end inside a hook
        self._exit_stack.callback(optimizer_hooks.register_optimizer_step_post_hook(self._stepped).remove)
        self._next(sys._getframe())

    def __enter__(self) -> None:
        """The block runs the script."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._in_own_process:
            return
        try:
            self._end_step()
            if self.trace is None:
                return
            if isinstance(error, SystemExit) and not error.code:  # `sys.exit(main())` is not a failure
                kind = error = traceback = None
            self._traced.__exit__(kind, error, traceback)
        except NonFiniteError:  # --check stops the script on purpose
            raise
        except KeyboardInterrupt:  # the script has ended, in its own way
            self.trouble = "the recording was interrupted before it was finished."
        except Exception as own:  # noqa: BLE001 — an error of the recorder must not end the script
            self._fail(own)
        finally:
            self._exit_stack.close()
            self._above = None

    def _fail(self, error: Exception) -> None:
        self.trouble = self.trouble or str(error) or type(error).__name__

    def _stepped(self, *_: object) -> None:
        """An optimizer has stepped."""
        if not self._in_own_process:
            return
        try:
            self._end_step()
            self._number += 1
            self._next(sys._getframe())
        except NonFiniteError:
            raise
        except Exception as error:  # noqa: BLE001 — as above
            self._fail(error)

    def _next(self, frame: FrameType) -> None:
        assert self._span is not None
        if self._number == self._span.start:
            self._begin(frame)
        if self._number in self._span:
            self._step = step(f"step{self._number}")
            self._step.__enter__()
        elif self._number == self._span.stop and self.trace is not None:
            self._traced.stop()

    def _begin(self, frame: FrameType) -> None:
        """Begin to record, from the script's own first frame on."""
        while frame.f_back is not None and frame.f_back is not self._above:
            frame = frame.f_back
        with for_command_line():
            self.trace = self._traced._start(frame, outer_frames=False, is_block=True)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
