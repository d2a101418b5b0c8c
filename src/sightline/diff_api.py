"""`sl.diff` and the `Diff` it returns: the comparison of two runs, with a method for each view of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sightline.api import Trace, load
from sightline.argument_checks import argument_text, check_arguments, renamed_arguments
from sightline.errors import DamagedFile, UsageError
from sightline.options import one_of
from sightline.text_encoding import printable

if TYPE_CHECKING:
    from sightline.compare.comparison import Comparison, ModuleRow, OpPair, Parting, Steps
    from sightline.compare.divergence import Divergence
    from sightline.compare.parameters import ParameterDiff
    from sightline.data.index import Op, Table
    from sightline.views.rendering import View


@printable
class Diff:
    """Two recordings compared: what is the same, what differs, and the first true divergence.

    >>> import torch, sightline as sl
    >>> first, second = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4, eps=0.1)
    >>> d = sl.diff(first, second, torch.arange(8.0).view(2, 4))
    >>> d.verdict, d.divergence.reason.text
    ('different', 'eps 1e-05 against 0.1')

    ``verdict`` is "same", "close" (equal up to rounding), "different" or "unknown": the outputs of the model,
    the losses, the results of code outside of modules, the gradients or the updated weights could not all be
    compared, and ``uncompared`` says which. ``divergence`` is the first op whose results differ although its
    inputs agree, or None: also of models that have next to nothing in common, which are "different".
    ``pairs``, ``added``, ``removed`` and ``differing`` are ops, ``modules`` the pairs of module calls,
    ``parameters`` the weights, ``notes`` what could not be compared.
    """

    def __init__(self, a: Trace, b: Trace, comparison: Comparison) -> None:
        self.a, self.b = a, b
        self.comparison = comparison

    @property
    def verdict(self) -> str:
        """One of "same", "close", "different" and "unknown"."""
        return self.comparison.verdict

    @property
    def divergence(self) -> Divergence | None:
        """The first true divergence, or None."""
        return self.comparison.divergence

    @property
    def divergences(self) -> list[Divergence]:
        """Every divergence that does not follow from an earlier one, the first one first."""
        return self.comparison.divergences

    @property
    def parting(self) -> Parting | None:
        """The first difference in the ops of the two runs, whatever the values, or None."""
        return self.comparison.parting

    @property
    def pairs(self) -> list[OpPair]:
        """Pairs of ops, with the verdict on their results."""
        return self.comparison.pairs

    @property
    def differing(self) -> list[OpPair]:
        """The pairs of ops with different results."""
        return self.comparison.differing

    @property
    def removed(self) -> Table[Op]:
        """The ops that only the first recording has."""
        return self.a.ops._of(self.comparison.removed)

    @property
    def added(self) -> Table[Op]:
        """The ops that only the second recording has."""
        return self.b.ops._of(self.comparison.added)

    @property
    def modules(self) -> list[ModuleRow]:
        """Pairs of module calls in the order in which they ended, with the error of their results."""
        return self.comparison.modules

    @property
    def parameters(self) -> ParameterDiff:
        """Which parameters and buffers are the same, differ, or have another layout."""
        return self.comparison.parameters

    @property
    def uncompared(self) -> list[str]:
        """Sentences about what leaves the runs, such as outputs and losses, and could not be compared."""
        return self.comparison.uncompared

    @property
    def notes(self) -> list[str]:
        """What could not be compared, and why."""
        return self.comparison.notes

    def summary(self) -> View:
        """The table of module calls, with the error along the depth."""
        from sightline.views.diff import modules_view

        return modules_view(self)

    @renamed_arguments(everything="all")
    @check_arguments
    def source(self, *, all: bool = False) -> View:
        """Both sources side by side: around the divergence, or all of them with ``all=True``."""
        from sightline.views.diff import source_view

        return source_view(self, everything=all)

    @check_arguments
    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison as a page to walk through: one HTML file with both runs side by side.

        It shows the verdict, the error of each module along the depth, and the ops, sources and values of
        both runs beside each other. It holds the text of both runs' source files.

        >>> import pathlib, tempfile, torch, sightline as sl
        >>> d = sl.diff(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4, eps=0.1), torch.ones(2, 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     d.html(f"{folder}/diff.html")
        ...     pathlib.Path(folder, "diff.html").read_text()[:15]
        '<!doctype html>'
        """
        from sightline.page.document import save_diff_page

        save_diff_page(self.comparison, path)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON."""
        names = {"a": str(self.a.info["name"]), "b": str(self.b.info["name"])}
        return {**names, **self.comparison.to_dict()}

    @check_arguments
    def print(self, color: bool | None = None) -> None:
        """Write the verdict to the terminal, with colour on a TTY."""
        self._verdict().print(color)

    def _verdict(self) -> View:
        from sightline.views.diff import verdict_view

        return verdict_view(self)

    def __str__(self) -> str:
        return str(self._verdict())

    def __repr__(self) -> str:
        return f"<Diff of {self.a.info['name']} and {self.b.info['name']}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return self._verdict()._repr_html_()


def diff(
    a: Any,
    b: Any,
    *args: Any,
    rename: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    values: str = "auto",
    step: Steps = None,
    rank: int | tuple[int | None, int | None] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Diff:
    """Where two runs diverge: the first value that differs although everything it was computed from agrees.

    >>> import torch, sightline as sl
    >>> x, model = torch.ones(2, 3), torch.nn.Linear(3, 3)
    >>> with sl.trace(model, stats=True) as t1:
    ...     y = model(x)
    >>> with sl.trace(model, stats=True) as t2:
    ...     y = model(x)
    >>> sl.diff(t1, t2).verdict
    'same'

    ``a`` and ``b`` are recordings, or paths of them; looking needs no torch. Two models are run first, each
    with ``args`` (one tuple or dict of them will do) and ``kwargs``, with the same random numbers and without
    gradients. ``rename={"mixer": "attn"}``
    names a module of one as in the other. Without ``rtol`` and ``atol`` the tolerance is what rounding
    explains, by dtype and by the number of ops behind a value. ``values`` is "auto" (the best
    that both have), "tensors", "statistics", "fingerprints" or "none". ``step`` (a
    number, a name, ``"3:5"``, ``"last"``) compares one step of both, or with a pair a step of one with a step
    of the other; so does ``rank`` for the ranks of distributed jobs: ``sl.diff(t, t, rank=(0, 3))``.
    """
    from sightline.compare.comparison import VALUES, compare

    one_of("values", values, VALUES)
    _check_numbers({"rtol": rtol, "atol": atol})
    _check_names(rename)
    ranks = rank if isinstance(rank, tuple) else (rank, rank)
    if len(ranks) != 2:
        raise UsageError(f"rank={argument_text(rank)} must be the number of a rank, or a pair of them.")
    first, second = _recordings(a, b, args, dict(kwargs or {}))
    first, second = first._at(rank=ranks[0]), second._at(rank=ranks[1])
    comparison = compare(
        first.index, second.index, rename=rename, rtol=rtol, atol=atol, values=values, step=step
    )
    return Diff(first, second, comparison)


def _check_numbers(tolerances: Mapping[str, Any]) -> None:
    for name, number in tolerances.items():
        if number is not None and (type(number) not in (int, float) or number < 0):
            raise UsageError(f"{name}={argument_text(number)} must be a number from 0 up, or None.")


def _check_names(rename: Any) -> None:
    if rename is None:
        return
    if not isinstance(rename, Mapping) or not all(
        isinstance(part, str) for pair in rename.items() for part in pair
    ):
        raise UsageError(f'rename={argument_text(rename)} must be a dict of names: {{"mixer": "attn"}}.')


def _recordings(a: Any, b: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Trace]:
    if all(_is_recording(each) for each in (a, b)):
        if args or kwargs:
            raise UsageError("sl.diff(a, b) of two recordings takes no inputs: they were run already.")
        return opened(a, "a"), opened(b, "b")
    for each in (a, b):
        if _is_recording(each) or not callable(each):
            raise UsageError(
                f"sl.diff compares two recordings, two paths of them, or two models with their inputs; "
                f"{argument_text(each)} does not go with that."
            )
    from sightline.tracing import recorded

    only = args[0] if len(args) == 1 else None
    if isinstance(only, tuple | list):
        args = tuple(only)
    elif isinstance(only, dict):
        args, kwargs = (), {**only, **kwargs}
    return recorded(a, args, kwargs, "a"), recorded(b, args, kwargs, "b")


def _is_recording(value: Any) -> bool:
    return isinstance(value, Trace | str | os.PathLike)


def opened(recording: Any, name: str, open: Callable[[Any], Trace] = load) -> Trace:
    """A recording, opened if it is a path; where it cannot be, the error says that nothing is compared."""
    if isinstance(recording, Trace):
        return recording
    try:
        return open(recording)
    except DamagedFile as error:
        why = str(error).removesuffix(".")
        raise DamagedFile(f"{why}; nothing of {name} can be compared.") from error
