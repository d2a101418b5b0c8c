"""`Form`: the arguments or the result of a call as nested plain data, with a slot for each tensor.

A form is stored once for all calls with the same arguments; the tensors of one call are the value ids that
fill its slots, in order. A form holds only plain data: numbers, strings, ``None``, lists, tuples, dicts, and
three small types for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from sightline.notation import MANY_ALIKE, constant_text, times_text


class Slot:
    """The place of a tensor in a form; there is one instance, ``SLOT``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "SLOT"

    def __reduce__(self) -> str:
        return "SLOT"


SLOT: Final = Slot()


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is not plain data, stored as the text it prints: ``torch.float32``."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Elided:
    """The items left out of a sequence that is too long to store."""

    count: int

    def __repr__(self) -> str:
        return f"… {self.count} more"


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass, a named tuple or a model output: a type name and its fields."""

    type: str
    fields: dict[str, Any]


#: The operators that read and write a part of a tensor, and how many arguments they have.
SUBSCRIPTS: Final = {"[]": 2, "[]=": 3}


@dataclass(frozen=True, slots=True)
class Form:
    """The arguments of one kind of call, tensors replaced by slots.

    >>> Form((SLOT, 1, [2, 3]), {"alpha": 2}).fill(["f32[4]"])
    'f32[4], 1, [2, 3], alpha=2'
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def fill(self, tensors: Sequence[str]) -> str:
        """The arguments as text, with ``tensors`` in the slots."""
        supply = iter(tensors)
        parts = [_text(item, supply) for item in self.args]
        parts += [f"{key}={_text(item, supply)}" for key, item in (self.kwargs or {}).items()]
        return ", ".join(parts)

    def written(self, name: str, tensors: Sequence[str]) -> tuple[str, str]:
        """A call of ``name`` in two parts, the name and the arguments; a subscript as it stands in a program.

        >>> Form((SLOT, 3)).written("mul.Tensor", ["f32[2]"])
        ('mul.Tensor', '(f32[2], 3)')
        >>> Form((SLOT, (2, SLOT), 0)).written("[]=", ["f32[4, 5]", "i64[3]"])
        ('f32[4, 5]', '[2, i64[3]] = 0')
        """
        if self.kwargs or len(self.args) != SUBSCRIPTS.get(name):
            return name, f"({self.fill(tensors)})"
        supply = iter(tensors)
        whole, item, *new = self.args
        head = _text(whole, supply)
        inner = _items_text(item, supply) if isinstance(item, tuple) and item else _text(item, supply)
        return head, f"[{inner}]" + "".join(f" = {_text(each, supply)}" for each in new)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Everything that holds nothing else, with its path: ``[0]``, ``mask``, ``[1][0]``, ``past.key``."""
        yield from leaves(self.args)
        for key, item in (self.kwargs or {}).items():
            yield from leaves(item, key)

    def slots(self) -> list[str]:
        """The path of every slot, in order."""
        return [path for path, leaf in self.leaves() if leaf is SLOT]

    @property
    def constants(self) -> bool:
        """Whether anything but tensors was passed."""
        return bool(self.kwargs) or any(item is not SLOT for item in self.args)


#: The result of most ops: one tensor.
ONE_TENSOR: Final = Form((SLOT,))


def leaves(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a nested item that holds nothing else, in order, with its path.

    >>> list(leaves([SLOT, {"a": (1, 2)}]))
    [('[0]', SLOT), ("[1]['a'][0]", 1), ("[1]['a'][1]", 2)]
    """
    if isinstance(item, list | tuple):
        for index, part in enumerate(item):
            yield from leaves(part, f"{path}[{index}]")
    elif isinstance(item, dict):
        for key, part in item.items():
            yield from leaves(part, f"{path}[{key!r}]")
    elif isinstance(item, Record):
        for key, part in item.fields.items():
            yield from leaves(part, f"{path}.{key}")
    else:
        yield path, item


def map_leaves(
    item: Any, change: Callable[[Any], Any], record: Callable[[str, dict[str, Any]], Any] = Record
) -> Any:
    """A copy of a nested item with ``change`` applied to everything that holds nothing else.

    ``record`` makes the copy of a `Record` from its type and its fields.

    >>> map_leaves({"a": (1, [2])}, lambda leaf: leaf * 10)
    {'a': (10, [20])}
    """
    if isinstance(item, list):
        return [map_leaves(part, change, record) for part in item]
    if isinstance(item, tuple):
        return tuple([map_leaves(part, change, record) for part in item])
    if isinstance(item, dict):
        return {key: map_leaves(part, change, record) for key, part in item.items()}
    if isinstance(item, Record):
        return record(item.type, map_leaves(item.fields, change, record))
    return change(item)


def _items_text(items: Sequence[Any], tensors: Iterator[str]) -> str:
    """The items of a list; equal tensors in a row are shown once: ``f32[] ×64``."""
    texts = [_text(item, tensors) for item in items]
    if len(texts) < MANY_ALIKE:
        return ", ".join(texts)
    with_tensors = [any(leaf is SLOT for _, leaf in leaves(item)) for item in items]
    parts: list[str] = []
    for (text, alike), group in groupby(zip(texts, with_tensors, strict=True)):
        count = len(list(group))
        parts += [times_text(text, count)] if alike and count >= MANY_ALIKE else [text] * count
    return ", ".join(parts)


def _text(item: Any, tensors: Iterator[str]) -> str:
    if item is SLOT:
        return next(tensors, "?")
    if isinstance(item, list):
        return f"[{_items_text(item, tensors)}]"
    if isinstance(item, tuple):
        inner = _items_text(item, tensors)
        return f"({inner},)" if len(item) == 1 else f"({inner})"
    if isinstance(item, dict):
        return f"{{{', '.join(f'{key}: {_text(part, tensors)}' for key, part in item.items())}}}"
    if isinstance(item, Record):
        inner = ", ".join(f"{key}={_text(part, tensors)}" for key, part in item.fields.items())
        return f"{item.type}({inner})"
    return constant_text(item)
