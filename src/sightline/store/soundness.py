"""`sound_part`: the part that can be saved and opened of a recording that contradicts itself.

The recorder should never write such a recording. Where it does, the rest is worth keeping: references that
the checks of a bundle would refuse become unknown, and ``info["contradictions"]`` names the faults.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.trace_data import TensorMeta, TraceData
from sightline.data.validate import contradictions
from sightline.schema.columns import Column, all_columns
from sightline.store import bundle_schema as schema
from sightline.store import checks
from sightline.store.damage import Damage
from sightline.store.journal import UNKNOWN_ROWS

Array = NDArray[Any]

_MOST_TEXTS: Final = 20  #: sentences that are kept
#: The row of each table that stands in for a lost or invalid one.
_UNKNOWN: Final[dict[str, Any]] = {**UNKNOWN_ROWS, "names": "?"}


def sound_part(data: TraceData) -> TraceData:
    """The recording itself, or where it contradicts itself a marked copy that a bundle can hold."""
    known = data.info.get("contradictions") or []
    texts = list(dict.fromkeys([*known, *contradictions(data)]))
    try:
        check_all(data)
    except Damage as why:
        data, texts = _repaired(data), texts or [str(why)]
    if texts == known:
        return data
    marked = replace(data, info={**data.info, "contradictions": texts[:_MOST_TEXTS]})
    if "environment" in vars(data):  # a loaded recording has it besides its fields
        vars(marked)["environment"] = vars(data)["environment"]
    return marked


def warn_if_unsound(data: TraceData, path: str) -> None:
    """Warn the program that saves a recording which contradicts itself."""
    texts = data.info.get("contradictions")
    if texts:
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        warnings.warn(
            f"The recording saved to {path} contradicts itself: {texts[0]}{more}; references that lead "
            "nowhere are left out.",
            stacklevel=5,  # the line that calls `Trace.save`
        )


def _counts(data: TraceData) -> dict[str, int]:
    """The number of rows of each table, as a bundle states it."""
    tables = (*schema.KINDS, "storages", "names", "codes", "metas", "forms", "modules")
    counts = {name: len(getattr(data, name)) for name in tables}
    for kind, lists in (("ops", data.ops), ("calls", data.calls)):
        counts |= {f"{kind}.inputs": len(lists.inputs), f"{kind}.outputs": len(lists.outputs)}
    return counts


def check_all(data: TraceData) -> None:
    """Apply every check of a bundle; raises `Damage`."""
    counts = _counts(data)
    checks.check_info(data.info)
    checks.check_modules(data.modules)
    checks.check_metas(data.metas)
    for kind in schema.KINDS:
        for name in schema.columns_of(kind):
            checks.check_column(kind, name, getattr(getattr(data, kind), name), counts)
    checks.check_spans(data.calls.first_op, data.calls.end_op, counts)
    checks.check_steps(data.steps, counts)
    checks.check_captures(data.captures, counts)


def _repaired(data: TraceData) -> TraceData:
    """A copy without the parts that the checks refuse."""
    for kind in ("ops", "calls"):
        data = replace(data, **{kind: _with_valid_lists(getattr(data, kind), len(data.values))})
    stats = data.stats
    if not ((stats.value < len(data.values)) & (np.diff(stats.value, prepend=-1) > 0)).all():
        # No statistics are better than those of another value.
        data = replace(data, stats=type(stats)(*(getattr(stats, one.name)[:0] for one in fields(stats))))
    for column in all_columns():
        if column.is_reference:
            data = _with_valid_references(data, column)
    unknown: TensorMeta = _UNKNOWN["metas"]
    metas = [meta if _passes(checks.check_metas, [meta]) else unknown for meta in data.metas]
    count = len(data.modules)
    modules = [
        one if -1 <= one.parent < count and 0 <= one.root < count else replace(one, parent=-1, root=at)
        for at, one in enumerate(data.modules)
    ]
    if not _passes(checks.check_modules, modules):  # they are no tree
        modules = [replace(one, parent=-1, root=at) for at, one in enumerate(modules)]
    data = replace(data, metas=metas, modules=modules)
    calls, count = data.calls, len(data.ops)
    first = np.clip(calls.first_op, 0, count).astype(calls.first_op.dtype)
    end = np.clip(calls.end_op, first, count).astype(calls.end_op.dtype)
    data = replace(data, calls=replace(calls, first_op=first, end_op=end))
    if not data.forms:
        data = replace(data, forms=[_UNKNOWN["forms"]])
    counts = _counts(data)
    return replace(
        data,
        info={key: value for key, value in data.info.items() if _passes(checks.check_info, {key: value})},
        steps=[step for step in data.steps if _passes(checks.check_steps, [step], counts)],
        captures=[info for info in data.captures if _passes(checks.check_captures, [info], counts)],
    )


def _passes(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except Damage:
        return False
    return True


def _with_valid_lists(columns: Any, values: int) -> Any:
    """Ops or calls whose inputs and outputs exist; lists that do not fit their offsets are empty."""
    changed: dict[str, Array] = {}
    for name in ("input", "output"):
        offsets, flat = getattr(columns, f"{name}_offsets"), getattr(columns, f"{name}s")
        rows = len(columns)
        fits = len(offsets) == rows + 1 and not offsets[0] and offsets[-1] == len(flat)
        if not fits or (np.diff(offsets) < 0).any():
            offsets, flat = np.zeros(rows + 1, dtype=offsets.dtype), flat[:0]
        valid = (flat >= 0) & (flat < values)
        if not valid.all():
            before = np.concatenate([[0], np.cumsum(valid)])
            offsets, flat = before[offsets].astype(offsets.dtype), flat[valid]
        changed |= {f"{name}_offsets": offsets, f"{name}s": flat}
    return replace(columns, **changed)


def _with_valid_references(data: TraceData, declared: Column) -> TraceData:
    """A copy in which the references of a column that point nowhere, or forward, are unknown."""
    kind, name, meaning = declared.table, declared.name, declared.meaning
    target = meaning.target
    columns = getattr(data, kind)
    column: Array = getattr(columns, name)
    size = len(meaning.choices) or len(getattr(data, target))
    wrong = (column < declared.lowest) | (column >= size)
    if meaning.earlier:
        wrong |= column >= np.arange(len(column))
    if wrong.any():
        unknown = -1 if meaning.optional else 0  # of a choice
        if target and not meaning.optional:
            longer: dict[str, Any] = {target: [*getattr(data, target), _UNKNOWN[target]]}
            data = replace(data, **longer)
            unknown = size
        column = np.where(wrong, unknown, column).astype(column.dtype)
    most = schema.MAX_NESTING
    while meaning.chain and not _passes(checks.check_chains, kind, name, column):
        lengths = checks.chain_lengths(column)
        column = np.where(lengths % most == 0, -1, column).astype(column.dtype)  # the chain in pieces
        most //= 4
    return replace(data, **{kind: replace(columns, **{name: column})})
