"""Compares the weights of two recordings: which are the same, which differ, which have another layout."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sightline.compare.op_pairs import Alignment
from sightline.compare.side import Side
from sightline.text_encoding import printable

_NEAR: Final = 4e-3  #: the relative difference of norms of a parameter in two precisions
_MAX_PARTS: Final = 8


@printable
@dataclass(frozen=True, slots=True)
class ParameterPair:
    """A parameter or buffer on both sides; several where one side has it in parts."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    relation: str  #: "same", "close", "different", "transposed", "split" or "unknown"
    error: float

    def __str__(self) -> str:
        left, right = (" + ".join(names) for names in (self.a, self.b))
        return left if left == right else f"{left} | {right}"

    def to_dict(self) -> dict[str, Any]:
        error = self.error if math.isfinite(self.error) else None
        return {"a": list(self.a), "b": list(self.b), "relation": self.relation, "error": error}


@printable
@dataclass(frozen=True)
class ParameterDiff:
    """The parameters and buffers of two recordings."""

    pairs: tuple[ParameterPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    untied: tuple[str, ...]  #: names that share a tensor on one side only

    def of(self, *relations: str) -> list[ParameterPair]:
        """The pairs of these relations."""
        return [pair for pair in self.pairs if pair.relation in relations]

    @property
    def same(self) -> bool:
        """Whether everything was measured and agrees, in any layout, and nothing is missing."""
        return not (self.of("different", "unknown") or self.only_a or self.only_b or self.untied)

    @property
    def text(self) -> str:
        """One line."""
        if not self.pairs and not self.only_a and not self.only_b:
            return "none recorded"
        counts = {
            "the same": len(self.of("same")), "equal up to rounding": len(self.of("close")),
            "transposed": len(self.of("transposed")), "in other parts": len(self.of("split")),
            "different": len(self.of("different")), "not measured": len(self.of("unknown")),
            "only in a": len(self.only_a), "only in b": len(self.only_b), "no longer tied": len(self.untied),
        }  # fmt: skip
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"same weights ({listed})" if self.same else listed

    def to_dict(self) -> dict[str, Any]:
        return {"same": self.same, "pairs": [pair.to_dict() for pair in self.pairs],
                "only_a": list(self.only_a), "only_b": list(self.only_b),
                "untied": list(self.untied)}  # fmt: skip


def compare_parameters(alignment: Alignment) -> ParameterDiff:
    """Pair all parameters and buffers of two recordings."""
    a, b = alignment.a, alignment.b
    pairs: list[ParameterPair] = []
    named = {alignment.calls.name(path): path for path in b.parameters}
    paired: set[str] = set()
    left: list[str] = []
    for path, (info, value) in a.parameters.items():
        other = alignment.values_a[value] if value >= 0 else -1
        partner = named.get(alignment.calls.name(path))
        if other >= 0 and other in b.parameter_names:
            if partner is None or b.parameters[partner][1] != other:
                partner = b.parameter_names[other]
            shape = b.parameters[partner][0].shape
            verdict = alignment.compare(value, other)
            relation = verdict.state.name.lower()
            if verdict.agrees and info.shape != shape and sorted(info.shape) == sorted(shape):
                relation = "transposed"
            pairs.append(ParameterPair((path,), (partner,), relation, verdict.error))
            paired.add(partner)
        elif partner is not None and partner not in paired and (value < 0 or b.parameters[partner][1] < 0):
            pairs.append(ParameterPair((path,), (partner,), "unknown", math.nan))
            paired.add(partner)
        else:
            left.append(path)
    right = [path for path in b.parameters if path not in paired]
    shared = {value for path, (_, value) in b.parameters.items() if path in paired}
    right = [path for path in right if b.parameters[path][1] not in shared or b.parameters[path][1] < 0]
    parts, left, right = _pair_parts(alignment, left, right)
    return ParameterDiff(
        (*pairs, *parts), tuple(left), tuple(right), _untied(alignment, {p.a[0]: p.b[0] for p in pairs})
    )


def _pair_parts(
    alignment: Alignment, left: list[str], right: list[str]
) -> tuple[list[ParameterPair], list[str], list[str]]:
    """Pair parameters that are one on one side and several on the other, or only renamed."""
    pairs: list[ParameterPair] = []
    for whole_side, whole, parts_side, parts in (
        (alignment.a, left, alignment.b, right),
        (alignment.b, right, alignment.a, left),
    ):
        for path in list(whole):
            group = _parts_of(whole_side, path, parts_side, parts)
            if not group:
                continue
            shapes = whole_side.parameters[path][0].shape, parts_side.parameters[group[0]][0].shape
            relation = "split" if len(group) > 1 else "close" if shapes[0] == shapes[1] else "transposed"
            a, b = ([path], group) if whole is left else (group, [path])
            pairs.append(ParameterPair(tuple(a), tuple(b), relation, 0.0))
            whole.remove(path)
            for each in group:
                parts.remove(each)
    return pairs, left, right


def _parts_of(side: Side, path: str, other: Side, candidates: Sequence[str]) -> list[str]:
    """Consecutive candidates that together have the size, norm and range of a parameter."""
    info, value = side.parameters[path]
    whole = side.numbers(value) if value >= 0 else None
    if whole is None:
        return []
    for at in range(len(candidates)):
        group: list[str] = []
        count, squares, low, high = 0, 0.0, math.inf, -math.inf
        leaf = candidates[at].rpartition(".")[2]
        for each in [name for name in candidates[at:] if name.rpartition(".")[2] == leaf][:_MAX_PARTS]:
            part, part_value = other.parameters[each]
            numbers = other.numbers(part_value) if part_value >= 0 else None
            if numbers is None:
                break
            group.append(each)
            count, squares = count + part.numel, squares + numbers.l2**2
            low, high = min(low, numbers.min), max(high, numbers.max)
            if count >= info.numel:
                break
        near = all(
            abs(x - y) <= _NEAR * max(abs(x), abs(y), 1e-12)
            for x, y in ((math.sqrt(squares), whole.l2), (low, whole.min), (high, whole.max))
        )
        if count == info.numel and near:
            return group
    return []


def _untied(alignment: Alignment, partners: dict[str, str]) -> tuple[str, ...]:
    """Names that share a tensor on one side only."""
    untied = []
    reverse = {y: x for x, y in partners.items()}
    for side, other, mapping in ((alignment.a, alignment.b, partners), (alignment.b, alignment.a, reverse)):
        groups: dict[int, list[str]] = defaultdict(list)
        for path, (info, _) in side.parameters.items():
            groups[info.key].append(path)
        for paths in groups.values():
            names = [mapping.get(path, path) for path in paths]
            keys = {other.parameters[path][0].key for path in names if path in other.parameters}
            if len(paths) > 1 and len(keys) > 1:
                untied.append(" = ".join(paths))
    return tuple(dict.fromkeys(untied))
