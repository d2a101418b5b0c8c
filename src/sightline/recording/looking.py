"""What only torch and the code objects know of the ops of a batch: FLOPs, and which calls were operators.

A journal tells it along with the ops, each thing once, so that a recording whose process was killed has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.recording.costs import has_plain_formula
from sightline.recording.operations import OP
from sightline.trace.assembly import layout as row
from sightline.trace.assembly.numbers import NONE, Numbers, Rows, dense, offsets_of
from sightline.trace.assembly.raw import Batch, Tables

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


class Looks:
    """Remembers what was told, and what the living values look like."""

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._operators: dict[tuple[int, int], str | None] = {}
        self._flops: dict[tuple[Any, ...], int] = {}
        self._counted: list[bool] = []
        self._api: list[bool] = []
        self._ids, self._metas = NONE, NONE

    def told(self) -> tuple[list[tuple[int, int, str]], list[tuple[Any, ...]]]:
        """Everything that was told."""
        operators = [(*key, symbol) for key, symbol in self._operators.items() if symbol is not None]
        return operators, [(*key, count) for key, count in self._flops.items()]

    def news(
        self, ops: Rows, batch: Batch, tables: Tables
    ) -> tuple[list[tuple[int, int, str]], list[tuple[Any, ...]]]:
        """New in a batch: (stack, operation, operator) and (operation, form, inputs, outputs, FLOPs)."""
        for info in self._session.infos[len(self._counted) :]:
            self._counted.append(has_plain_formula(info))
            self._api.append(info.flavour != OP)
        self._see(batch)
        found = self._new_operators(ops, tables), self._new_flops(ops, tables)
        if batch.alive is not None:
            held = (dense(batch.alive, self._ids) >= 0) | (self._ids >= _first(batch))
            self._ids, self._metas = self._ids[held], self._metas[held]
        return found

    def _see(self, batch: Batch) -> None:
        values = Rows(batch.rows.values, row.V_WIDTH)
        fresh = batch.rows.fresh.reshape(-1, row.FRESH_WIDTH)
        ids = np.concatenate([self._ids, values.ids, fresh[:, 0]])
        metas = np.concatenate([self._metas, values.column(row.V_META), fresh[:, 1]])
        order = np.argsort(ids, kind="stable")
        self._ids, self._metas = ids[order], metas[order]

    def _new_operators(self, ops: Rows, tables: Tables) -> list[tuple[int, int, str]]:
        info, stack = ops.column(row.O_INFO), ops.column(row.O_STACK)
        calls = np.array(self._api or [False])[info] & (stack >= 0)
        new = []
        for key in np.unique((stack[calls] << 32) + info[calls]).tolist():
            pair = key >> 32, key & 0xFFFFFFFF
            if pair not in self._operators:
                symbol = self._operators[pair] = tables.operator(*pair)
                if symbol is not None:
                    new.append((*pair, symbol))
        return new

    def _new_flops(self, ops: Rows, tables: Tables) -> list[tuple[Any, ...]]:
        info = ops.column(row.O_INFO)
        wanted = np.flatnonzero(np.array(self._counted or [False])[info])
        if not len(wanted):
            return []
        form, result = ops.column(row.O_FORM), ops.column(row.O_RESULT)
        given = ops.column(row.O_INPUTS)
        looks = self._look(ops.lists(row.O_WIDTH, ops.column(0) - row.O_WIDTH))
        starts = offsets_of(ops.column(0) - row.O_WIDTH)
        new: list[tuple[Any, ...]] = []
        seen: set[tuple[int, int, int, bytes]] = set()
        for op in wanted.tolist():
            part = looks[starts[op] : starts[op + 1]]
            short = (int(info[op]), int(form[op]), int(given[op]), part.tobytes())
            if short in seen:
                continue
            seen.add(short)
            metas = tuple(part.tolist())
            key = (*short[:2], metas[: short[2]], metas[short[2] :])
            if key in self._flops or -1 in metas:
                continue
            made = int(result[op]) if result[op] >= 0 else tables.one_tensor
            self._flops[key] = tables.flops(key[0], key[1], made, key[2], key[3])
            new.append((*key, self._flops[key]))
        return new

    def _look(self, ids: Numbers) -> Numbers:
        at = dense(self._ids, ids)
        return np.where(at >= 0, self._metas[at], -1) if len(self._ids) else np.full(len(ids), -1)


def _first(batch: Batch) -> int:
    """The first value of a batch: all of those may be used again."""
    values = Rows(batch.rows.values, row.V_WIDTH).ids
    fresh = batch.rows.fresh.reshape(-1, row.FRESH_WIDTH)[:, 0]
    firsts = [int(ids.min()) for ids in (values, fresh) if len(ids)]
    return min(firsts, default=1 << 62)
