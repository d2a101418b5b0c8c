"""The collectives of one rank: ops of ``c10d`` with kind, group, peers, bytes, dtype and order number.

They are ops like others, which both engines record; kind, group and peers are read from their names and
arguments here, on first use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.forms import SLOT, Form, Symbol, leaves
from sightline.data.trace_data import I64, TraceData

_NAMESPACES: Final = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
#: The beginning of an op's name, after its namespace and a leading underscore, and its kind.
_KINDS: Final = (
    ("all_reduce", "all_reduce"), ("allreduce", "all_reduce"),
    ("all_gather", "all_gather"), ("allgather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"), ("reduce", "reduce"), ("broadcast", "broadcast"),
    ("all_to_all", "all_to_all"), ("alltoall", "all_to_all"), ("gather", "gather"),
    ("scatter", "scatter"), ("barrier", "barrier"), ("monitored_barrier", "barrier"),
    ("send", "send"), ("recv", "recv"),
)  # fmt: skip
#: Kinds of which every rank must pass as many elements of the same dtype.
SAME_SIZE: Final = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})
POINT_TO_POINT: Final = frozenset({"send", "recv"})
#: The arguments that a rank contributes, by the names in the schemas of torch, the first that is there.
_PAYLOAD: Final = ("input_tensors", "input_tensor", "input", "inputs", "tensors", "tensor", "self")
REPLICATED: Final = "DistributedDataParallel"  #: the class of a module whose weights are equal on all ranks
#: Backends that match messages by their order alone.
_WITHOUT_TAGS: Final = frozenset(("nccl", "xccl", "hccl"))
_ROOTS: Final = ("root_rank", "dst", "src")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, or one send or receive, of a rank."""

    op: int  #: its row in ``t.ops``
    kind: str  #: ``all_reduce``
    group: str  #: the name of its process group
    peers: tuple[int, ...]  #: the ranks of the group; of a send or receive, the other one
    number: int  #: its order in the group, from 0; sends and receives are counted for each peer
    bytes: int  #: that this rank contributes
    elements: int
    dtype: str
    reduction: str  #: ``sum``; "" where nothing is reduced
    root: int  #: the rank it starts from or goes to; -1 where there is none
    counter: tuple[str, ...]  #: the name of the count that its order number is of
    start: int  #: ns since the recording began
    duration: int  #: of the call on the host; an asynchronous one is waited for later
    tag: int = 0  #: of a send or receive, which belongs to one with the same tag

    @property
    def signature(self) -> tuple[Any, ...]:
        """The facts that have to be the same on every rank of the group."""
        if self.kind in SAME_SIZE:
            return self.kind, self.elements, self.dtype, self.reduction, self.root
        return self.kind, self.root if self.kind not in POINT_TO_POINT else -1

    def __str__(self) -> str:
        name = f"{self.kind} #{self.number}" if self.kind not in POINT_TO_POINT else self.kind
        size = f" of {self.elements:,} {self.dtype}" if self.kind in SAME_SIZE else ""
        other = f" {'to' if self.kind == 'send' else 'from'} rank {self.root}" if self.root >= 0 else ""
        if self.kind == "reduce":
            other = f" to rank {self.root}"
        return f"{name}{size}{tag_text(self.tag)}{other}"


def tag_text(tag: int) -> str:
    """The tag of a message, as the end of its description; messages without one have the tag 0."""
    return f" with tag {tag}" if tag else ""


@dataclass(frozen=True, slots=True)
class _Traits:
    """The facts that all calls with one name and form have in common."""

    kind: str
    group: str
    reduction: str
    root: int  #: its number within the group
    payload: slice  #: of the tensors the op takes
    tag: int

    @property
    def counter(self) -> tuple[str, ...]:
        """The count that its order number is of: collectives of a group, or messages of a peer and a tag."""
        if self.kind not in POINT_TO_POINT:
            return (self.group,)
        return self.group, self.kind, str(self.root), *((str(self.tag),) if self.tag else ())


def kind_of(name: str) -> str:
    """The kind of collective that an op is; "" for any other op.

    >>> kind_of("c10d::_allgather_base_"), kind_of("_c10d_functional::wait_tensor"), kind_of("add.Tensor")
    ('all_gather', '', '')
    """
    base = next((name[len(space) :] for space in _NAMESPACES if name.startswith(space)), "").lstrip("_")
    return next((kind for start, kind in _KINDS if base.startswith(start)), "")


_MESSAGES: Final = re.compile(r"(.*):(send|recv):(-?\d{1,9})(?::(-?\d{1,12}))?", re.DOTALL)


def messages_of(counter: str) -> tuple[str, str, int, int] | None:
    """Group, kind, peer within the group and tag of a counter of messages; None for one of collectives.

    >>> messages_of("0:send:1"), messages_of("0:recv:1:7"), messages_of("0")
    (('0', 'send', 1, 0), ('0', 'recv', 1, 7), None)
    """
    match = _MESSAGES.fullmatch(counter)
    return None if match is None else (match[1], match[2], int(match[3]), int(match[4] or 0))


class Collectives(Sequence[Collective]):
    """The collectives of a trace, in the order they were issued."""

    def __init__(self, data: TraceData) -> None:
        self._data = data
        wanted = np.array([bool(kind_of(name)) for name in data.names] or [False])
        ops = data.ops
        aten = ops.level == 1
        self.ops: I64 = np.flatnonzero(aten & wanted[ops.name]) if len(ops) else np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __iter__(self) -> Iterator[Collective]:
        return iter(self._rows)

    @cached_property
    def _rows(self) -> list[Collective]:
        data, ops = self._data, self._data.ops
        groups: dict[str, Any] = data.info.get("groups") or {}
        traits: dict[tuple[int, int], _Traits] = {}
        counts = self.dropped()
        rows = []
        columns = (ops.name, ops.form, ops.start, ops.duration)
        taken = zip(self.ops.tolist(), *(column[self.ops].tolist() for column in columns), strict=True)
        for op, name, form, start, duration in taken:
            trait = traits.get((name, form))
            if trait is None:
                trait = traits[name, form] = self._traits(data.names[name], data.forms[form])
            metas = [data.metas[data.values.meta[value]] for value in ops.inputs_of(op)[trait.payload]]
            ranks = (groups.get(trait.group) or {}).get("ranks") or ()
            peers = tuple(each for each in ranks if type(each) is int)
            root = peers[trait.root] if 0 <= trait.root < len(peers) else trait.root
            if trait.kind in POINT_TO_POINT:
                peers = (root,) if root >= 0 else ()
            number = counts[trait.counter]
            counts[trait.counter] += 1
            rows.append(
                Collective(
                    op, trait.kind, trait.group, peers, number, sum(meta.nbytes for meta in metas),
                    sum(meta.numel for meta in metas), metas[0].dtype if metas else "", trait.reduction,
                    root, trait.counter, start, duration, trait.tag,
                )
            )  # fmt: skip
        return rows

    def dropped(self) -> Counter[tuple[str, ...]]:
        """How many collectives of each counter came before the first that ``last=`` has kept."""
        counts: Counter[tuple[str, ...]] = Counter()
        for name, form, count in self._data.info.get("dropped_collectives") or ():
            if kind_of(name) and 0 <= form < len(self._data.forms):
                counts[self._traits(name, self._data.forms[form]).counter] += count
        return counts

    def _traits(self, name: str, form: Form) -> _Traits:
        schema = [argument.partition("=")[0] for argument in self._data.schemas.get(name, ())]
        arguments = {schema[at] if at < len(schema) else str(at): item for at, item in enumerate(form.args)}
        arguments |= form.kwargs or {}
        group = arguments.get("process_group", arguments.get("group_name", ""))
        group = str(group).removeprefix("group ") if isinstance(group, Symbol | str) else ""
        reduction = arguments.get("reduce_op", "")
        reduction = str(reduction) if isinstance(reduction, Symbol | str) else ""
        if reduction.startswith("<"):  # an object that the plain engine cannot look into
            reduction = ""
        root = next((arguments[each] for each in _ROOTS if isinstance(arguments.get(each), int)), -1)
        start, payload = 0, slice(0, 0)
        wanted = next((each for each in _PAYLOAD if each in arguments), None)
        for argument, item in arguments.items():
            count = sum(leaf is SLOT for _, leaf in leaves(item))
            if argument == wanted:
                payload = slice(start, start + count)
            start += count
        tag = arguments.get("tag", 0)
        described = (self._data.info.get("groups") or {}).get(group) or {}
        if type(tag) is not int or _WITHOUT_TAGS.intersection(
            re.split("[:,]", str(described.get("backend")))
        ):
            tag = 0
        return _Traits(kind_of(name), group, reduction.lower(), root, payload, tag)

    def module_of(self, collective: Collective) -> str:
        """The module whose weights a collective gathers, or whose gradients it reduces.

        It is the one module with as many parameters; where there are several or none, the module it ran in,
        or the one that DDP wraps. Empty where none is known.
        """
        whole = collective.elements * (len(collective.peers) if collective.kind == "all_gather" else 1)
        named = self._by_size.get(whole, [])
        if len(named) == 1 and collective.kind in ("all_gather", "reduce_scatter", "all_reduce"):
            return named[0]
        call = int(self._data.ops.call[collective.op])
        if call >= 0:
            return self._data.modules[int(self._data.calls.module[call])].label
        wrapped = [module.label for module in self._data.modules if module.type == REPLICATED]
        return wrapped[0] if len(wrapped) == 1 and collective.kind == "all_reduce" else ""

    @cached_property
    def _by_size(self) -> dict[int, list[str]]:
        """The modules with each number of parameters, those of the modules inside included."""
        modules = self._data.modules
        held: list[dict[int, int]] = [
            {one.key: one.numel for one in module.parameters if not one.buffer} for module in modules
        ]
        for number in reversed(range(len(modules))):
            parent = modules[number].parent
            if 0 <= parent < number:
                held[parent] |= held[number]
        sizes: dict[int, list[str]] = {}
        for module, parameters in zip(modules, held, strict=True):
            if module.parameters or len(parameters) > 1:
                sizes.setdefault(sum(parameters.values()), []).append(module.label)
        return sizes


def released(data: TraceData, at: I64) -> NDArray[np.int64]:
    """When the host went on after some ops: the start of the next op of the same thread that is no child.

    For the last op of a thread this is the end of the recording: it may have waited until then.
    """
    ops = data.ops
    end = int(data.info.get("duration_ns") or 0)
    result: NDArray[np.int64] = np.maximum(ops.start[at] + ops.duration[at], end)
    for thread in np.unique(ops.thread[at]):
        rows = np.flatnonzero((ops.thread == thread) & (ops.level == 1))
        where = np.flatnonzero(ops.thread[at] == thread)
        following = np.searchsorted(rows, at[where], side="right")
        has = following < len(rows)
        nexts = ops.start[rows[following[has]]]
        ends = ops.start[at[where[has]]] + ops.duration[at[where[has]]]
        result[where[has]] = np.maximum(ends, nexts)
    return result
