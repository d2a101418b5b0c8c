"""Which modules are equal: of one class, with the same settings, weights and work, to the last submodule."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from sightline.analysis.cost import Costs
from sightline.analysis.scopes import OUTSIDE, OwnOps
from sightline.trace.data import TraceData


def equal_scopes(data: TraceData, costs: Costs, own_ops: Mapping[int, OwnOps]) -> list[int]:
    """A number for each scope; scopes with equal numbers differ only in their names, times and values."""
    scopes = costs.scopes
    numbers: dict[Hashable, int] = {}
    of_scope = [0] * len(scopes.rows)
    for scope in range(len(of_scope) - 1, -1, -1):  # children have higher numbers than their parent
        children = tuple(
            (_name(data, scopes.rows[child].module), of_scope[child]) for child in scopes.children(scope)
        )
        key = (_own_key(data, costs, own_ops.get(scope), scope), children)
        of_scope[scope] = numbers.setdefault(key, len(numbers))
    return of_scope


def _name(data: TraceData, module: int) -> str:
    return "" if module == OUTSIDE else data.modules[module].path.rpartition(".")[2]


def _own_key(data: TraceData, costs: Costs, own: OwnOps | None, scope: int) -> Hashable:
    """Everything that is shown of one scope except its name and its times."""
    row = costs.scopes.rows[scope]
    if row.module == OUTSIDE:
        return scope  # there is only one
    info, counts = data.modules[row.module], costs.parameters[scope]
    calls, metas = data.calls, data.values.meta
    signatures = tuple(
        (
            metas[calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]]].tobytes(),
            metas[calls.outputs[calls.output_offsets[call] : calls.output_offsets[call + 1]]].tobytes(),
            int(calls.input_form[call]),
            int(calls.output_form[call]),
        )
        for call in row.calls
    )
    flops = int(costs.own.flops[scope])  # not backward: the first layer needs no gradient of its input
    ops = None if own is None else tuple(own.counts.items())
    names = len(info.aliases)
    parameters = (counts.own, counts.own_new, counts.own_trainable)
    return info.type, info.extra, names, signatures, flops, ops, parameters
