"""Blocks that ran again and look alike, as one: equal layers, steps of a loop. For the log.

Blocks nest, so it is trees that are compared: a container with all it holds. What several are drawn as is a
`Drawn` with all of them; who draws it says what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sightline.analysis.fold import Node, Repeat, first_of, length_of
from sightline.views.variation import Varying, fold_alike

OPEN, CLOSE, LEAF, OP, REPEAT, REPEATED = range(6)

#: What happens, to which call or op, how deep.
Step = tuple[int, int, int]
#: Which of some frames, in the order they ran, a loop that runs them had better begin with.
Beginning = Callable[[Sequence[int]], int]
_NO_NUMBERS: Final[Varying] = ((), ())


class Look(NamedTuple):
    """What a call or an op looks like."""

    key: Hashable  #: without its numbers
    numbers: Varying
    same: Hashable  #: what it is, to know it again
    frame: int  #: where it was called from


@dataclass(frozen=True, slots=True)
class Drawn:
    """A block, or an end of a bracket around blocks that ran again: all the calls or ops that it shows."""

    what: int
    runs: tuple[int, ...]
    depth: int
    times: int = 1  #: how often, where it says so


@dataclass(slots=True)
class _Tree:
    """A block with those inside it."""

    what: int
    id: int
    depth: int
    children: list[_Tree] = field(default_factory=list)
    key: int = -1  #: equal for trees that look alike but for their numbers
    numbers: Varying = _NO_NUMBERS
    same: Hashable = None
    frame: int = -1


def drawn_blocks(
    steps: Sequence[Step], look: Callable[[Step], Look], begins: Beginning, fold: bool
) -> Iterator[Drawn]:
    """The blocks of some steps in order; with ``fold`` those that ran again once."""
    if not fold:
        return (Drawn(what, (id,), depth) for what, id, depth in steps)
    return _emitted(_grown(steps, look), begins)


def _grown(steps: Iterable[Step], look: Callable[[Step], Look]) -> list[_Tree]:
    """The trees of blocks, each with its key."""
    top: list[_Tree] = []
    open_: list[_Tree] = []
    keys: dict[Hashable, int] = {}
    for what, id, depth in steps:
        if what == CLOSE:
            tree = open_.pop()
        else:
            tree = _Tree(what, id, depth)
            (open_[-1].children if open_ else top).append(tree)
            if what == OPEN:
                open_.append(tree)
                continue
        own, numbers, tree.same, tree.frame = look((tree.what, tree.id, tree.depth))
        inside = tree.children
        tree.key = keys.setdefault((tree.what, own, tuple(child.key for child in inside)), len(keys))
        whole = [*numbers[0], *(number for child in inside for number in child.numbers[0])]
        other = [*numbers[1], *(number for child in inside for number in child.numbers[1])]
        tree.numbers = tuple(whole), tuple(other)
    return top


def _emitted(top: Sequence[_Tree], begins: Beginning) -> Iterator[Drawn]:
    """The trees as blocks, without recursion: a model may be deeper than Python's stack."""
    stack: list[tuple[list[_Tree], int, int] | Drawn] = []
    stack += reversed(_folded([[tree] for tree in top], 0, begins))
    while stack:
        item = stack.pop()
        if isinstance(item, Drawn):
            yield item
            continue
        trees, times, deeper = item
        first, ids = trees[0], tuple(tree.id for tree in trees)
        depth = first.depth + deeper
        yield Drawn(first.what, ids, depth, times)
        if first.what == OPEN:
            stack.append(Drawn(CLOSE, ids, depth))
            inside = [list(each) for each in zip(*(tree.children for tree in trees), strict=True)]
            stack += reversed(_folded(inside, deeper, begins))


def _folded(
    siblings: list[list[_Tree]], deeper: int, begins: Beginning
) -> list[tuple[list[_Tree], int, int] | Drawn]:
    """Blocks that stand beside each other, each already all runs of one; what is to be drawn of them."""

    def is_loop(places: Sequence[int]) -> bool:
        half = len(places) // 2
        first, second = places[:half], places[half:]
        return all(siblings[a][0].same == siblings[b][0].same for a, b in zip(first, second, strict=True))

    def start(first: int, period: int) -> int:
        return begins([siblings[at][0].frame for at in range(first, first + period)])

    made: list[tuple[list[_Tree], int, int] | Drawn] = []

    def put(node: Node, shifts: list[int], times: int, deeper: int) -> None:
        if not isinstance(node, Repeat):
            made.append(([tree for shift in shifts for tree in siblings[node + shift]], times, deeper))
            return
        period = sum(map(length_of, node.body))
        every = [shift + run * period for shift in shifts for run in range(node.count)]
        if len(node.body) == 1 and not isinstance(node.body[0], Repeat):
            put(node.body[0], every, node.count, deeper)
            return
        depth = siblings[first_of(node)][0].depth + deeper
        made.append(Drawn(REPEAT, (), depth, node.count))
        for part in node.body:
            put(part, every, 1, deeper + 1)
        made.append(Drawn(REPEATED, (), depth))

    for node in fold_alike([(group[0].key, group[0].numbers) for group in siblings], is_loop, start):
        put(node, [0], 1, deeper)
    return made
