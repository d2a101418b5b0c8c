"""The engine of tests that choose none: the environment's, or the native one where it can be built."""

from __future__ import annotations

import pytest

from sightline.recording.native.build import chosen

NATIVE = chosen("auto") == "native"
needs_native = pytest.mark.skipif(
    chosen("auto") != "native",
    reason="the native engine cannot be built here, or the plain one was asked for",
)
