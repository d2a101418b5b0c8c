"""The examples in the docstrings under src/ are held to the same promise as the tests."""

from importlib.util import find_spec

from tests.conftest import nothing_left, one_torch_thread

__all__ = ["nothing_left", "one_torch_thread"]

#: The kernels cannot be imported where there is no Triton.
collect_ignore = [] if find_spec("triton") else ["src/sightline/recording/cuda_kernels.py"]
