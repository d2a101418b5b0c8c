"""Repeated blocks of the log as one: equal layers, steps of a loop.

Blocks nest, so trees are compared: a container with everything inside it. Several equal blocks become one
`FoldedBlock` with all their runs; its text shows the differences between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sightline.analysis.fold import Node, Repeat, Varying, first_of, fold_alike, length_of

OPEN, CLOSE, LEAF, OP, REPEAT, REPEATED = range(6)

#: One of the constants above, the id of the call or op, and the depth.
Step = tuple[int, int, int]
#: Takes frames in the order they ran, and returns the position of the first frame of a loop over them.
LoopStart = Callable[[Sequence[int]], int]
_NO_NUMBERS: Final[Varying] = ((), ())


class BlockKey(NamedTuple):
    """The key of a call or an op: its text depends on nothing else."""

    key: Hashable  #: without its numbers
    numbers: Varying
    identity: Hashable  #: the same for two runs of one call or op in a loop
    frame: int  #: of the source line that called it


@dataclass(frozen=True, slots=True)
class FoldedBlock:
    """A block with all the calls or ops it stands for, or an end of a bracket around repeated blocks."""

    kind: int
    runs: tuple[int, ...]
    depth: int
    times: int = 1  #: how often it ran, where that is shown


@dataclass(slots=True)
class _Tree:
    """A block with those inside it."""

    kind: int
    id: int
    depth: int
    children: list[_Tree] = field(default_factory=list)
    key: int = -1  #: equal for trees that differ only in numbers
    numbers: Varying = _NO_NUMBERS
    identity: Hashable = None
    frame: int = -1


def fold_blocks(
    steps: Sequence[Step], key_of: Callable[[Step], BlockKey], loop_start: LoopStart, fold: bool
) -> Iterator[FoldedBlock]:
    """The blocks of some steps in order; with ``fold`` repeated ones only once.

    Without recursion: a model may be deeper than Python's stack.
    """
    if not fold:
        yield from (FoldedBlock(kind, (id,), depth) for kind, id, depth in steps)
        return
    stack: list[tuple[list[_Tree], int, int] | FoldedBlock] = []
    stack += reversed(_fold_siblings([[tree] for tree in _trees(steps, key_of)], 0, loop_start))
    while stack:
        item = stack.pop()
        if isinstance(item, FoldedBlock):
            yield item
            continue
        trees, times, deeper = item
        first, ids = trees[0], tuple(tree.id for tree in trees)
        depth = first.depth + deeper
        yield FoldedBlock(first.kind, ids, depth, times)
        if first.kind == OPEN:
            stack.append(FoldedBlock(CLOSE, ids, depth))
            children = [list(group) for group in zip(*(tree.children for tree in trees), strict=True)]
            stack += reversed(_fold_siblings(children, deeper, loop_start))


def _trees(steps: Iterable[Step], key_of: Callable[[Step], BlockKey]) -> list[_Tree]:
    """The trees of blocks, each with its key."""
    top: list[_Tree] = []
    open_: list[_Tree] = []
    keys: dict[Hashable, int] = {}
    for kind, id, depth in steps:
        if kind == CLOSE:
            tree = open_.pop()
        else:
            tree = _Tree(kind, id, depth)
            (open_[-1].children if open_ else top).append(tree)
            if kind == OPEN:
                open_.append(tree)
                continue
        own, numbers, tree.identity, tree.frame = key_of((tree.kind, tree.id, tree.depth))
        children = tree.children
        tree.key = keys.setdefault((tree.kind, own, tuple(child.key for child in children)), len(keys))
        whole = [*numbers[0], *(number for child in children for number in child.numbers[0])]
        other = [*numbers[1], *(number for child in children for number in child.numbers[1])]
        tree.numbers = tuple(whole), tuple(other)
    return top


def _fold_siblings(
    siblings: list[list[_Tree]], deeper: int, loop_start: LoopStart
) -> list[tuple[list[_Tree], int, int] | FoldedBlock]:
    """Siblings, each a list of all runs of one block, as blocks and as groups of trees still to be opened."""

    def is_loop(positions: Sequence[int]) -> bool:
        half = len(positions) // 2
        pairs = zip(positions[:half], positions[half:], strict=True)
        return all(siblings[a][0].identity == siblings[b][0].identity for a, b in pairs)

    def start(first: int, period: int) -> int:
        return loop_start([siblings[at][0].frame for at in range(first, first + period)])

    blocks: list[tuple[list[_Tree], int, int] | FoldedBlock] = []

    def put(node: Node, shifts: list[int], times: int, deeper: int) -> None:
        if not isinstance(node, Repeat):
            blocks.append(([tree for shift in shifts for tree in siblings[node + shift]], times, deeper))
            return
        period = sum(map(length_of, node.body))
        all_shifts = [shift + run * period for shift in shifts for run in range(node.count)]
        if len(node.body) == 1 and not isinstance(node.body[0], Repeat):
            put(node.body[0], all_shifts, node.count, deeper)
            return
        depth = siblings[first_of(node)][0].depth + deeper
        blocks.append(FoldedBlock(REPEAT, (), depth, node.count))
        for part in node.body:
            put(part, all_shifts, 1, deeper + 1)
        blocks.append(FoldedBlock(REPEATED, (), depth))

    for node in fold_alike([(group[0].key, group[0].numbers) for group in siblings], is_loop, start):
        put(node, [0], 1, deeper)
    return blocks
