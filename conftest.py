"""The examples in the docstrings under src/ are held to the same promise as the tests."""

from tests.conftest import nothing_left, one_torch_thread

__all__ = ["nothing_left", "one_torch_thread"]
