"""Checks of the arguments of public functions: one of the wrong type is refused in one sentence.

`check_arguments` reads the annotations of a function, so that types are not written down twice. It reads
their text: to evaluate them would import torch and numpy, which they name. Anything beyond the type (a number
from 1 up, one of some choices) is checked by the function itself.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Final, ParamSpec, TypeVar

from sightline.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST: Final = 60


#: Types whose objects Python writes without running code of the program, or reading what may be gone.
_WRITTEN: Final = (str, bytes, int, float, complex, bool, type, range, FunctionType, BuiltinFunctionType)
_WRITTEN_OF_TORCH: Final = ("dtype", "device", "layout", "memory_format", "Size")
_DEEPEST: Final = 3


def argument_text(value: object) -> str:
    """An argument in a message: as Python writes it, or by its class where that is long or not known.

    >>> argument_text("relu"), argument_text([0] * 99), argument_text(3)
    ("'relu'", 'a list', '3')

    Tensors are never written out, wherever they are: the memory of one may have been freed, or be on a
    device that would have to be waited for.
    """
    text = repr(value) if is_written(value) else ""
    kind = type(value).__name__
    plain = 0 < len(text) <= _LONGEST and "\n" not in text
    return text if plain else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def key_text(key: object, number: int | None = None) -> str:
    """A key of a dict in a name: as Python writes it, or by its class, and a number where there is one.

    >>> key_text("a"), key_text(("a", 1)), key_text(object(), 0)
    ("'a'", "('a', 1)", 'object 0')

    Like `argument_text` it runs no code of the program, and reads no tensor.
    """
    if is_written(key):
        return repr(key)
    kind = type(key).__name__
    return kind if number is None else f"{kind} {number}"


def is_written(value: object, depth: int = 0) -> bool:
    """Whether Python writes an object without running code of the program, or reading a tensor."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict) and depth < _DEEPEST:
        assert isinstance(value, list | tuple | set | frozenset | dict)
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return len(value) <= _LONGEST and all(is_written(part, depth + 1) for part in parts)
    if kind.__module__ == "torch":
        return kind.__name__ in _WRITTEN_OF_TORCH
    return value is None or value is ... or isinstance(value, PurePath) or kind in _WRITTEN or kind is type


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


#: By annotation: the test of a value, and how the sentence about a wrong one goes on.
_KINDS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "str": (_is_text, "must be a string"),
    "bool": (_is_bool, "must be True or False"),
    "bool | None": (_is_bool, "must be True, False or None"),
    "str | Sequence[str]": (_are_texts, "must be a string or a list of strings"),
    "Globs": (_are_texts, "must be a string or a list of strings"),
    "str | os.PathLike[str]": (_is_path, "must be a path"),
}


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function to refuse arguments that do not fit their annotations.

    >>> @check_arguments
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
        rule = _KINDS.get(text) or _KINDS.get(kind)
        if rule is not None:
            tests[name] = (*rule, optional)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own message names the missing argument
        for name, (test, rule, optional) in tests.items():
            if name in bound and not (optional and bound[name] is None) and not test(bound[name]):
                raise UsageError(f"{name}={argument_text(bound[name])} {rule}.")
        return function(*args, **kwargs)

    return wrapper


def renamed_arguments(**renamed: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Wrap a function to accept arguments under the names they had before, with a `DeprecationWarning`.

    >>> @renamed_arguments(everything="all")
    ... def shown(*, all: bool = False) -> bool:
    ...     return all
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     shown(everything=True)
    True
    >>> str(caught[0].message)
    'everything= is called all= now; the old name ends with the next version.'
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in renamed.keys() & kwargs.keys():
                new = renamed[old]
                if new in kwargs:
                    raise UsageError(f"{old}= is the old name of {new}=; give only {new}=.")
                text = f"{old}= is called {new}= now; the old name ends with the next version."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
