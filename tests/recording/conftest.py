"""Every trace recorded by a test here is validated when the test ends, and must be free of faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sightline.data.validate import validate
from sightline.recording.recorder import Recorder


@pytest.fixture(autouse=True)
def every_trace_is_valid(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[list[Recorder]]:
    """Collects what is recorded; a test that provokes faults says so with ``@pytest.mark.faults``."""
    made: list[Recorder] = []
    stop = Recorder.stop

    def collecting(self: Recorder, error: BaseException | None = None) -> None:
        stop(self, error)
        made.append(self)

    monkeypatch.setattr(Recorder, "stop", collecting)
    yield made
    for recorder in made:
        data = recorder.index().raw
        validate(data)
        if request.node.get_closest_marker("faults") is None:
            assert not data.info["fault_count"], data.info["faults"]
