"""Which engine tests run on where they do not choose one: the environment's, or the native one if it can be built."""

from __future__ import annotations

import pytest

from sightline.recording.native.build import chosen

NATIVE = chosen("auto") == "native"
needs_native = pytest.mark.skipif(
    chosen("auto") != "native", reason="the native engine cannot be built here, or the plain one was asked for"
)
