"""Which engines the benchmarks measure: those that can record here, of those that were asked for."""

from __future__ import annotations

import argparse
from typing import Final, Literal

from sightline.errors import NativeUnavailable
from sightline.recording.native.engine import load

Engine = Literal["native", "python"]

ENGINES: Final[tuple[Engine, ...]] = ("native", "python")


def add_option(parser: argparse.ArgumentParser, default: str = "all") -> None:
    """``--engine``, the same for every benchmark that measures both."""
    parser.add_argument("--engine", choices=(*ENGINES, "all"), default=default, help="which engine records")


def available(asked: str) -> tuple[Engine, ...]:
    """The engines to measure; where the native one cannot be built, a line says so, and the plain one is."""
    wanted = tuple(engine for engine in ENGINES if asked in (engine, "all"))
    if "native" in wanted:
        try:
            load()
        except NativeUnavailable as error:
            print(f"Only the plain engine is measured. {error}\n")
            return ("python",)
    return wanted
