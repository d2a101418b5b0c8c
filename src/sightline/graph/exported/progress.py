"""Lines on the standard error while an export takes long: how long so far, and where the time goes."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import TracebackType
from typing import Final

from sightline.graph.exported.source_lines import running_line

_PERIOD: Final = 10.0  #: seconds between lines, and before the first
_SAMPLES: Final = 50  #: of the exporting thread in that time


class Progress:
    """Prints every ten seconds that an export goes on, and which line has taken most of the time.

    With ``dynamic`` sizes the line adds that fixed ones are faster.
    """

    def __init__(self, model: str, dynamic: bool, period: float = _PERIOD) -> None:
        self._model = model
        self._dynamic = dynamic
        self._period = period
        self._exporting = threading.get_ident()
        self._done = threading.Event()
        self._lines: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._sample, name="sightline-export", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        samples = 0
        while not self._done.wait(self._period / _SAMPLES):
            samples += 1
            line = running_line(sys._current_frames().get(self._exporting))
            if line:
                self._lines[line] += 1
            if samples % _SAMPLES == 0:
                self._print(self._period * samples / _SAMPLES)

    def _print(self, seconds: float) -> None:
        longest = [f", {count * self._period / _SAMPLES:.0f} s of it at {line}"
                   for line, count in self._lines.most_common(1)]  # fmt: skip
        hint = "; fixed sizes are faster: dynamic=None" if self._dynamic else ""
        if sys.stderr is None:  # a program without a console
            return
        sys.stderr.write(f"exporting {self._model}: {seconds:.0f} s{''.join(longest)}{hint}\n")
        sys.stderr.flush()
