"""The module that scripts import `DLBacktrace` from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.compat.dl_backtrace import DLBacktrace, diagnose_model_compatibility, missing_name

__all__ = ["DLBacktrace", "diagnose_model_compatibility"]

if not TYPE_CHECKING:  # a type checker that saw it would accept any name
    __getattr__ = missing_name
