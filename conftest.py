"""The examples in the docstrings under src/ are held to the same promise as the tests."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import nothing_left, one_torch_thread

__all__ = ["nothing_left", "one_torch_thread"]

#: The kernels cannot be imported where there is no Triton.
collect_ignore = [] if find_spec("triton") else ["src/sightline/recording/statistics/cuda_kernels.py"]
_VIEWER = Path(__file__).parent / "src/sightline/page/viewer.js"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Node there is no viewer, and a page cannot be written."""
    if not _VIEWER.exists():
        for item in items:
            if item.name == "sightline.api.Trace.html":
                item.add_marker(pytest.mark.skip(reason="the viewer is not built: that needs Node 20"))
