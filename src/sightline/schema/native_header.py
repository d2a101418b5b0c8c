"""The C++ header of the row layout, as text: structs, constants and the order of the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sightline.schema import streams, tables
from sightline.schema.streams import Field, RowLayout

_HEAD = """\
// Written by `make schema` from src/sightline/schema/; a test checks that it is current.
// The rows of a recording: the engine keeps one for each op, module call and value until Python reads it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sightline {
"""


def native_header() -> str:
    """The text of ``recording/native/row_layout.h``."""
    constants = {
        "flag_shift": streams.FLAG_SHIFT,
        "thread_shift": streams.THREAD_SHIFT,
        "moved": streams.MOVED,
        "inherited": streams.INHERITED,
    }
    lines = [
        *_constants(constants),
        f"inline constexpr int64_t kNoEnd = int64_t{{1}} << {streams.NO_END.bit_length() - 1};",
        "",
        *_constants(tables.CALL_FLAGS | tables.OP_FLAGS),
        *_constants(tables.VALUE_FLAGS),
        "",
        f"enum Phase : int {{ {_enumerators(tables.PHASES)} }};",
        f"enum Kind : int {{ {_enumerators(tables.KINDS, 'Kind')} }};",
    ]
    for layout in (streams.OP, streams.CALL, streams.VALUE):
        lines += ["", *_struct(layout)]
    return "\n".join((_HEAD, *lines, "", "}  // namespace sightline", ""))


def _constants(numbers: Mapping[str, int]) -> Iterator[str]:
    return (f"inline constexpr int k{_camel_case(name)} = {number};" for name, number in numbers.items())


def _camel_case(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def _enumerators(names: tuple[str, ...], prefix: str = "") -> str:
    return ", ".join(f"k{prefix}{_camel_case(name)}" for name in names)


def _struct(layout: RowLayout) -> Iterator[str]:
    """A struct with the id and the fields, wide ones first, and how it is written as 64-bit numbers."""
    yield f"struct {_camel_case(layout.name)}Row {{"
    fields = [*layout.fields, Field("id", "")]
    for field in sorted(fields, key=lambda field: (-field.bits, field.name != "id")):
        yield f"  int{field.bits}_t {field.name} = -1;" + (f"  // {field.about}" if field.about else "")
    yield ""
    yield "  // The fixed numbers of a row: its length, the id, the fields" + (
        ", how many inputs it has." if layout.lists else "."
    )
    yield f"  static constexpr size_t kWidth = {layout.width};"
    arguments = "int64_t* to, size_t inputs, size_t outputs" if layout.lists else "int64_t* to"
    yield f"  void write({arguments}) const {{"
    length = (
        "static_cast<int64_t>(kWidth + inputs + outputs)" if layout.lists else "static_cast<int64_t>(kWidth)"
    )
    numbers = [length, "id", *(field.name for field in layout.fields)]
    numbers += ["static_cast<int64_t>(inputs)"] if layout.lists else []
    yield from (f"    to[{at}] = {number};" for at, number in enumerate(numbers))
    yield "  }"
    yield "};"
