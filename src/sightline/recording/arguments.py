"""Arguments and results: tensors become value ids, everything else a form that is stored once.

`Arguments.read` builds a key from the types and plain arguments of a call; a `Form` is made only for a key
that is new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
import torch.utils._pytree as pytree

from sightline.argument_checks import argument_text, is_written, key_text
from sightline.data.forms import SLOT, Elided, Form, Record, Symbol
from sightline.recording.atomic import append_numbered
from sightline.recording.distributed import object_symbol
from sightline.recording.tensor_registry import PLAIN_TENSORS, TensorRegistry
from sightline.recording.torchapi import Tensor

#: How an argument of a type is treated.
_TENSOR, _PLAIN, _SEQUENCE, _OTHER = range(1, 5)
_NUMBERS: Final = frozenset({int, float, bool, complex})
_MAX_ITEMS: Final = 64
_MAX_TEXT: Final = 200
_MAX_DEPTH: Final = 8


class Forms:
    """The forms of a recording by number; equal forms of different ops have different numbers."""

    def __init__(self) -> None:
        self.all: list[Form] = []

    def add(self, form: Form) -> int:
        return append_numbered(self.all, form)


class Arguments:
    """Reads arguments and results into value ids and form numbers."""

    def __init__(self, values: TensorRegistry, forms: Forms) -> None:
        self.values = values
        self.forms = forms
        self.form_numbers: dict[Any, int] = {}  #: forms of module inputs and of results, by key
        self._kinds: dict[type, int] = {
            **dict.fromkeys((int, float, bool, str, type(None), complex), _PLAIN),
            **dict.fromkeys((torch.dtype, torch.device, torch.layout, torch.memory_format), _PLAIN),
        }
        self.one_tensor = self.forms.add(Form((SLOT,)))
        self.nothing = self.forms.add(Form(()))
        self.form_numbers[(SLOT,)] = self.one_tensor

    def read(
        self, numbers: dict[Any, int], args: tuple[Any, ...], kwargs: dict[str, Any] | None, ids: list[int],
        value: Callable[[Any], int] | None = None,
    ) -> int:  # fmt: skip
        """Append the value ids of all tensors to ``ids``; return the number of the form.

        ``numbers`` holds the forms so far by key. ``value`` returns the value of a tensor; by default, a
        tensor never seen before is explained and added.
        """
        key: list[Any] = []
        value = value or self.values.value
        for item in args:
            self._extend(item, key, ids, value)
        for name, item in (kwargs or {}).items():
            key.append(name)
            self._extend(item, key, ids, value)
        return self.form(numbers, tuple(key), args, kwargs)

    def form(
        self, numbers: dict[Any, int], key: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> int:
        """The number of the form with this key; made from the arguments if it is new."""
        try:
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = self.forms.add(form_of(args, kwargs))
            return number
        except TypeError:  # an argument that cannot be hashed: its form gets a number of its own
            return self.forms.add(form_of(args, kwargs))

    def _extend(
        self, item: Any, key: list[Any], ids: list[int], value: Callable[[Any], int], depth: int = 0
    ) -> None:
        """Extend key and ids by one argument of any type.

        1, 1.0 and True are equal as keys, and so are 0.0 and -0.0: the type and, for a false value, the text
        distinguish them.
        """
        kind = self._kinds.get(type(item)) or self._classify(type(item))
        if kind == _TENSOR:
            ids.append(value(item))
            key.append(SLOT)
        elif kind == _PLAIN:
            key += (type(item), item or repr(item))
        elif kind == _SEQUENCE and depth < _MAX_DEPTH:
            key += (type(item), len(item))
            for part in _shown_parts(item):
                self._extend(part, key, ids, value, depth + 1)
        elif depth < _MAX_DEPTH and (fields := _fields(item)) is not None:
            key += (type(item), len(fields))
            for name, part in fields.items():
                key.append(_field_name(name))
                self._extend(part, key, ids, value, depth + 1)
        else:
            key.append(_symbol(item).text)

    def _classify(self, kind: type) -> int:
        if issubclass(kind, Tensor):
            treatment = _TENSOR
        elif issubclass(kind, list | tuple) and not hasattr(kind, "_fields"):
            treatment = _SEQUENCE
        else:
            treatment = _OTHER
        self._kinds[kind] = treatment
        return treatment

    def results(self, result: Any, value: Callable[[Any], int] | None = None) -> tuple[list[int], int]:
        """Value ids and form of any result; with ``value``, as in `read`, None counts as no result."""
        ids: list[int] = []
        if result is None and value is not None:
            return ids, self.nothing
        form = self.read(self.form_numbers, (result,), None, ids, value)
        return ids, form

    def tensors(self, result: Any, tensors: list[Any], depth: int = 0) -> list[Any]:
        """The tensors inside a result, in slot order."""
        kind = self._kinds.get(type(result)) or self._classify(type(result))
        if kind == _TENSOR:
            tensors.append(result)
        elif kind == _SEQUENCE and depth < _MAX_DEPTH:
            for part in _shown_parts(result):
                self.tensors(part, tensors, depth + 1)
        elif kind == _OTHER and depth < _MAX_DEPTH and (fields := _fields(result)) is not None:
            for part in fields.values():
                self.tensors(part, tensors, depth + 1)
        return tensors

    def at(
        self, positions: Iterable[int | str], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> list[Any]:
        """The tensors among some of the arguments, by position or name."""
        tensors: list[Any] = []
        for position in positions:
            if isinstance(position, str):
                item = (kwargs or {}).get(position)
            else:
                item = args[position] if position < len(args) else None
            self.tensors(item, tensors)
        return tensors


def _shown_parts(items: Any) -> Any:
    """The parts of a list that its form has: of a long one without tensors the first ones."""
    return items if len(items) <= _MAX_ITEMS or _holds_tensors(items) else items[:_MAX_ITEMS]


def _holds_tensors(items: Any) -> bool:
    return any(issubclass(kind, Tensor | list | tuple | dict) for kind in set(map(type, items)))


def _fields(item: Any) -> dict[Any, Any] | None:
    """The named parts of a dict, dataclass, named tuple or model output; None for anything else."""
    if isinstance(item, Mapping):  # transformers' ModelOutput is one
        return dict(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item, strict=False))
    if isinstance(item, tuple) and hasattr(type(item), "n_sequence_fields"):  # torch.return_types.max
        names: tuple[str, ...] = type(item).__match_args__  # type: ignore[attr-defined]  # struct sequences have it
        return dict(zip(names, item, strict=False))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
    node = pytree.SUPPORTED_NODES.get(type(item))
    if node is not None and node.flatten_with_keys_fn is not None:
        parts, _ = node.flatten_with_keys_fn(item)
        return {path_text((key,)).strip("[]'."): part for key, part in parts}
    return None


def path_text(path: Iterable[Any], numbers: dict[int, int] | None = None) -> str:
    """The place of a tensor in a tree, ``['a'][0]``, as `pytree.keystr` writes it where keys are plain.

    ``numbers`` has a number for each other key of the tree so far: equal ones have one name.
    """
    return "".join(_entry_text(entry, {} if numbers is None else numbers) for entry in path)


def _entry_text(entry: Any, numbers: dict[int, int]) -> str:
    if isinstance(entry, pytree.SequenceKey | pytree.GetAttrKey):
        return str(entry)
    key = entry.key if isinstance(entry, pytree.MappingKey) else entry
    number = None if is_written(key) else numbers.setdefault(id(key), len(numbers))
    return f"[{key_text(key, number)}]"


def has_parts(kind: type) -> bool:
    """Whether objects of a type may hold tensors, or have a form that is more than the type's name."""
    return (
        issubclass(kind, Mapping | tuple | list | type)
        or dataclasses.is_dataclass(kind)
        or kind in pytree.SUPPORTED_NODES
        or issubclass(kind, Callable)  # type: ignore[arg-type]  # callables are shown by name
        or issubclass(kind, int | float | complex | str | slice)
        or issubclass(kind, torch.SymInt | torch.SymFloat | torch.SymBool)
    )


def _field_name(name: Any) -> Any:
    return name if isinstance(name, str | int) else _symbol(name).text


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Form:
    """The form of a call with these arguments."""
    return Form(
        tuple(plain_argument(item) for item in args),
        {name: plain_argument(item) for name, item in kwargs.items()} if kwargs else None,
    )


def plain_argument(item: Any, depth: int = 0) -> Any:
    """An argument as plain data, its tensors in the order in which `Arguments.read` reads them."""
    if isinstance(item, Tensor):
        return SLOT
    if item is None or type(item) in _NUMBERS:
        return item
    if isinstance(item, str):
        return item if len(item) <= _MAX_TEXT else item[: _MAX_TEXT - 1] + "…"
    if isinstance(item, list | tuple) and not hasattr(item, "_fields") and depth < _MAX_DEPTH:
        if not hasattr(type(item), "n_sequence_fields"):
            parts = _plain_parts(item, depth)
            return parts if isinstance(item, list) else tuple(parts)
    if depth < _MAX_DEPTH and (fields := _fields(item)) is not None:
        plain = {str(_field_name(name)): plain_argument(part, depth + 1) for name, part in fields.items()}
        return plain if type(item) is dict else Record(type(item).__name__, plain)
    return _symbol(item)


def _plain_parts(items: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
    """The parts of a list. Optimizers pass hundreds of tensors, and numbers that are new in each step."""
    kinds = set(map(type, items))
    if kinds and kinds <= PLAIN_TENSORS:
        return [SLOT] * len(items)
    long = len(items) > _MAX_ITEMS and (kinds <= _NUMBERS or not _holds_tensors(items))
    shown = items[:_MAX_ITEMS] if long else items
    parts = list(shown) if kinds <= _NUMBERS else [plain_argument(part, depth + 1) for part in shown]
    if long:
        parts.append(Elided(len(items) - len(shown)))
    return parts


def _symbol(item: Any) -> Symbol:
    """Anything else as a short text, made without running the user's code."""
    if isinstance(item, torch.dtype | torch.layout | torch.memory_format | torch.device):
        return Symbol(str(item))
    if isinstance(item, type) or callable(item):
        return Symbol(getattr(item, "__qualname__", type(item).__name__)[:_MAX_TEXT])
    if isinstance(item, slice):
        return Symbol(f"{_end(item.start)}:{_end(item.stop)}" + (f":{_end(item.step)}" if item.step else ""))
    if item is Ellipsis:
        return Symbol("...")
    if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
        hint = getattr(item.node, "hint", None)
        return Symbol("?" if hint is None else str(hint))
    return object_symbol(item) or Symbol(f"<{type(item).__name__}>")


def _end(value: Any) -> str:
    if value is None:
        return ""
    if type(value) in _NUMBERS or isinstance(value, torch.SymInt):
        return str(value)[:_MAX_TEXT]
    return "<tensor>" if isinstance(value, Tensor) else argument_text(value)
