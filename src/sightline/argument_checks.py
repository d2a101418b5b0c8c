"""Arguments people give: shown in a message on one line, and refused in one sentence where the type is wrong.

`check_arguments` reads the annotations of a public function, so that nothing is written down twice. What must
hold beyond a type (a number from 1 up, one of some words) is checked where it is known.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from sightline.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST: Final = 60


def argument_text(value: object) -> str:
    """An argument in a message: as Python writes it, or by its class where that is long.

    >>> said("relu"), said([0] * 99), said(3)
    ("'relu'", 'a list', '3')
    """
    text = repr(value)
    kind = type(value).__name__
    plain = len(text) <= _LONGEST and "\n" not in text and not text.startswith("tensor(")
    return text if plain else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence) and all(isinstance(each, str) for each in value)
    )


#: What a parameter is, as its annotation says it: whether a value is one, and how the sentence goes on.
_KINDS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "str": (_is_text, "must be a string"),
    "bool": (_is_bool, "must be True or False"),
    "bool | None": (_is_bool, "must be True, False or None"),
    "str | Sequence[str]": (_are_texts, "must be a string or a list of strings"),
    "Globs": (_are_texts, "must be a string or a list of strings"),
    "str | os.PathLike[str]": (_is_path, "must be a path"),
}


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with a sentence for every argument that is not what its annotation says.

    >>> @checked
    ... def shout(text: str) -> str:
    ...     return text.upper()
    >>> shout(3)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    sightline.errors.UsageError: text=3 must be a string.
    """
    signature = inspect.signature(function)
    tests = {}
    for name, parameter in signature.parameters.items():
        text = str(parameter.annotation).strip("'")
        kind, optional = text.removesuffix(" | None"), text.endswith(" | None")
        found = _KINDS.get(text) or _KINDS.get(kind)
        if found is not None:
            tests[name] = (*found, optional)

    @functools.wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own sentence names the argument that is missing
        for name, (test, told, optional) in tests.items():
            if name in bound and not (optional and bound[name] is None) and not test(bound[name]):
                raise UsageError(f"{name}={argument_text(bound[name])} {told}.")
        return function(*args, **kwargs)

    return asked
