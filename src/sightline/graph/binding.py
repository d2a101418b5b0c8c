"""The arguments of an op or a module call by name, tensors as `Ref`.

Aten ops have the names and defaults of their schema, API calls those of `sightline.graph.signatures` or of
their own signature; methods and operators say ``self`` and ``other``. ``Arguments`` also tells under which
name each tensor went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sightline.graph.graph import Ref
from sightline.graph.naming import word
from sightline.graph.signatures import REQUIRED, read_arguments, signature
from sightline.trace.forms import SLOT, Form, Record

_SELF = ("method", "operator", "property")


@dataclass(frozen=True)
class Arguments:
    """One form with its argument names worked out, to be filled for every call that has it."""

    form: Form
    names: tuple[str, ...]  #: of the positional arguments
    rest: str = ""  #: the name of one that takes all that is left: ``shape`` in ``view(2, 3)``
    defaults: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The argument each tensor goes into, in order: ``self``, ``tensors[0]``."""
        found: list[str] = []
        _fill(self._bound, found.append)
        return tuple(found)

    @cached_property
    def _bound(self) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        args = self.form.args
        for position, item in enumerate(args):
            if position >= len(self.names) and self.rest:
                left = args[position:]
                whole = len(left) == 1 and isinstance(left[0], list | tuple)
                bound[self.rest] = left[0] if whole else tuple(left)
                break
            bound[self.names[position] if position < len(self.names) else f"arg{position}"] = item
        bound |= self.form.kwargs or {}
        for key, default in self.defaults:
            bound.setdefault(key, default)
        return bound

    @cached_property
    def _plain(self) -> bool:
        """Whether tensors stand only at the top, which is cheap to fill."""
        return sum(item is SLOT for item in self._bound.values()) == len(self.paths)

    def fill(self, refs: Sequence[Ref]) -> dict[str, Any]:
        """The arguments, with ``refs`` where tensors stood; a form out of a file may promise more of them."""
        supply = iter(refs)
        if self._plain:
            return {key: next(supply, None) if item is SLOT else item for key, item in self._bound.items()}
        filled: dict[str, Any] = _fill(self._bound, lambda _path: next(supply, None))
        return filled


def op_arguments(name: str, level: str, flavour: str, form: Form, schema: Sequence[str]) -> Arguments:
    """The arguments of an op: by its schema (aten), or by what is known of the function (API)."""
    known = read_arguments(schema)
    if level == "api":
        known = signature(word(name if flavour == "operator" else name.rpartition(".")[2], level)) or known
    names = [key for key, _ in known if not key.startswith("*")]
    rest = next((key[1:] for key, _ in known if key.startswith("*")), "")
    if flavour in _SELF:
        names = ["self", *(names[1:] or (["other"] if flavour == "operator" else []))]
    given = {*names[: len(form.args)], *(form.kwargs or {})}
    # A default is worth saying only where the function itself was called as it is documented.
    exact = len(form.args) <= len(names) or bool(rest)
    defaults = tuple((key, value) for key, value in known if value is not REQUIRED and key not in given)
    told = exact and flavour not in ("operator", "property")
    return Arguments(form, tuple(names), rest, defaults if told else ())


def call_arguments(form: Form) -> Arguments:
    """The arguments of a module call; positional ones have no known names."""
    count = len(form.args)
    return Arguments(form, ("input",) if count == 1 else tuple(f"input{at}" for at in range(count)))


def _fill(item: Any, put: Callable[[str], Any], path: str = "") -> Any:
    if item is SLOT:
        return put(path)
    parts = _parts(item)
    if parts is None:
        return item
    if isinstance(item, dict | Record):
        return {key: _fill(part, put, f"{path}.{key}" if path else str(key)) for key, part in parts}
    return type(item)(_fill(part, put, f"{path}[{key}]") for key, part in parts)


def _parts(item: Any) -> Iterator[tuple[Any, Any]] | None:
    if isinstance(item, list | tuple):
        return iter(enumerate(item))
    if isinstance(item, dict):
        return iter(item.items())
    if isinstance(item, Record):
        return iter(item.fields.items())
    return None
