"""`Tensors`: the captured tensors of a trace, by key and by short names.

A full key stands for one tensor: ``step0/blocks.0.attn/output/0/0``. A short name stands for all calls in
order: the name inside its module (``blocks.0.attn.q``), the module itself for its output (``blocks.0.attn``),
or the name alone (``q``). A tensor is read on use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from sightline.argument_checks import argument_text, check_arguments
from sightline.data.dtypes import element_bits, element_numbers, nbytes_of
from sightline.data.trace_data import ROLES, CaptureInfo, Store
from sightline.errors import DamagedFile, NotCaptured, UsageError
from sightline.hints import Hint
from sightline.notation import bytes_text, numbers_text, tensor_text
from sightline.options import one_of
from sightline.patterns import PathPattern, StarPattern, choices_text, close_names, segments_of
from sightline.text_encoding import for_output

Array = NDArray[Any]
ToTorch = Callable[["CapturedTensor"], Any]

#: A repr includes the range of the numbers for tensors up to this many elements.
_CHEAP: Final = 1_000_000


class CapturedTensor:
    """One captured tensor, and where it belongs.

    >>> from sightline.store.shards.stores import MemoryStore
    >>> info = CaptureInfo("", "fc", "output", 0, 0, "output", "", -1, (2,), "float32")
    >>> CapturedTensor(info, MemoryStore({info.key: np.array([1, -1], dtype="f4").view(np.uint8)}))
    <fc/output/0/0: f32[2], -1 … 1, mean 0, std 1.41>
    """

    __slots__ = ("_store", "_to_torch", "info")

    def __init__(self, info: CaptureInfo, store: Store, to_torch: ToTorch | None = None) -> None:
        self.info = info
        self._store = store
        self._to_torch = to_torch

    @property
    def key(self) -> str:
        """Its full key: ``step0/blocks.0.attn/output/0/0``."""
        return self.info.key

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored: for a sample, how many elements."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """As stored, by torch's name: ``"bfloat16"``."""
        return self.info.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        expected = nbytes_of(self.dtype, self.shape)
        return self._data.nbytes if expected is None else expected

    @property
    def _data(self) -> NDArray[np.uint8]:
        data = self._store.read(self.key)
        expected = nbytes_of(self.dtype, self.shape)
        if expected not in (None, data.nbytes):
            text = tensor_text(self.shape, self.dtype)
            raise DamagedFile(f"{self.key} has {data.nbytes} bytes, not the {expected} of {text}.")
        return data

    @property
    def raw(self) -> Array:
        """Its bits as unsigned integers; complex128 as pairs of them."""
        return element_bits(self._data, self.dtype, self.shape)

    def numpy(self) -> Array:
        """Its numbers, read-only; bfloat16, float8 and complex32 are widened without loss."""
        return element_numbers(self._data, self.dtype, self.shape)

    def torch(self) -> Any:
        """A new torch tensor with the stored dtype."""
        if self._to_torch is None:
            raise UsageError("torch is not at hand here; `.numpy()` has the numbers and `.raw` the bits.")
        return self._to_torch(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        text = f"{self.key}: {tensor_text(self.shape, self.dtype)}"
        if not self.info.whole:
            text += " (a sample)"
        return for_output(f"<{text}{_numbers_text(self)}>")


class Captures(Sequence[CapturedTensor]):
    """Captured tensors, in the order of capture; a slice is a `Captures` again.

    >>> Captures([])
    <0 captured tensors>
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[CapturedTensor]) -> None:
        self._tensors = tuple(tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[CapturedTensor]:
        return iter(self._tensors)

    @overload
    def __getitem__(self, index: int) -> CapturedTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Captures: ...
    def __getitem__(self, index: int | slice) -> CapturedTensor | Captures:
        if isinstance(index, slice):
            return Captures(self._tensors[index])
        if not isinstance(index, int):
            raise UsageError(f"[…] takes a position or a slice here, not {argument_text(index)}.")
        try:
            return self._tensors[index]
        except IndexError:
            raise IndexError(f"there are {len(self)} captured tensors, none at {index}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Captures):
            return NotImplemented
        return [tensor.info for tensor in self] == [tensor.info for tensor in other]

    def __hash__(self) -> int:
        return hash(tuple(self.keys()))

    def keys(self) -> list[str]:
        """Their full keys."""
        return [tensor.key for tensor in self]

    @property
    def only(self) -> CapturedTensor:
        """The single tensor; an error if there are none or several."""
        if len(self) != 1:
            raise UsageError(
                f"There are {len(self)} captured tensors here, not one; choose one by its place."
            )
        return self._tensors[0]

    def __repr__(self) -> str:
        lines = [f"  {tensor.key}: {tensor_text(tensor.shape, tensor.dtype)}" for tensor in self[:8]]
        if len(self) > 8:
            lines.append(f"  … {len(self) - 8} more")
        return for_output("\n".join([f"<{_count_text([tensor.info for tensor in self])}>", *lines]))


class Tensors(Mapping[str, Any]):
    """The captured tensors of a trace.

    >>> from sightline.store.shards.stores import MemoryStore
    >>> info = CaptureInfo("", "fc", "output", 0, 0, "output", "", -1, (2,), "float32")
    >>> tensors = Tensors([info], MemoryStore({info.key: np.zeros(8, dtype=np.uint8)}))
    >>> tensors["fc"][0].numpy()
    array([0., 0.], dtype=float32)

    ``tensors[key]`` is a `CapturedTensor`, ``tensors[name]`` the `Captures` of that name. ``names()`` returns
    the variable that each value was assigned to; it is called once, when no captured name fits. ``to_torch``
    converts a captured tensor to torch. ``note()`` says which requested tensors are missing.
    """

    def __init__(
        self,
        captures: Sequence[CaptureInfo],
        store: Store,
        names: Callable[[], Mapping[int, str]] | None = None,
        to_torch: ToTorch | None = None,
        note: Callable[[], str] | None = None,
    ) -> None:
        self._infos = {info.key: info for info in captures}
        self._store = store
        self._names = names
        self._to_torch = to_torch
        self._note = note

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __getitem__(self, name: str) -> Any:
        """One tensor by its full key, or all tensors of a short name."""
        if not isinstance(name, str):
            raise NotCaptured(f"t.tensors[…] takes a key or a name, not {argument_text(name)}.")
        info = self._infos.get(name)
        if info is not None:
            return self._tensor(info)
        infos = self._by_short_name(name)
        if not infos:
            raise NotCaptured(f"No tensor was captured as {name!r}{self._nearest(name)}")
        return Captures([self._tensor(info) for info in infos])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._infos or bool(self._by_short_name(name)))

    @check_arguments
    def keys(self, glob: str | None = None) -> KeysView[str]:
        """The full keys that match a glob, or all, in the order of capture.

        A glob is matched part by part between slashes, and within a part segment by segment between dots:
        ``*`` never crosses either, ``**`` is any number of parts or segments. The step may be left out, and
        so may parts at the end: ``blocks.*.attn/output``, ``step0/**.mlp``.
        """
        if glob is None:
            return self._infos.keys()
        matches = KeyPattern(glob)
        return {key: 0 for key, info in self._infos.items() if matches(info)}.keys()

    @check_arguments
    def where(
        self,
        *,
        module: str | None = None,
        name: str | None = None,
        step: str | None = None,
        role: str | None = None,
        call: int | None = None,
    ) -> Captures:
        """The tensors that fit every filter.

        ``module`` is a glob over path segments that also matches submodules; ``name`` and ``step`` are
        globs; ``role`` is one of "input", "output", "op", "spy" and "gradient"; ``call`` is a number from 0.
        """
        if role is not None:
            one_of("role", role, ROLES)
        if call is not None and (type(call) is not int or call < 0):
            raise UsageError(f"call={argument_text(call)} must be a whole number from 0 up.")
        inside = PathPattern(module or "")
        return Captures(
            [
                self._tensor(info)
                for info in self._infos.values()
                if (module is None or inside(segments_of(info.module)))
                and (name is None or fnmatchcase(info.name, name))
                and (step is None or fnmatchcase(info.step, step))
                and role in (None, info.role)
                and call in (None, info.call)
            ]
        )

    def __repr__(self) -> str:
        shown = list(dict.fromkeys(_path_in_module(info.module, info.name) for info in self._infos.values()))
        names = f": {', '.join(shown[:4])}{', …' if len(shown) > 4 else ''}" if shown else ""
        note = self._note() if self._note is not None else ""
        return for_output(f"<{_count_text(list(self._infos.values()))}{names}{note and f' ({note})'}>")

    def _tensor(self, info: CaptureInfo) -> CapturedTensor:
        return CapturedTensor(info, self._store, self._to_torch)

    def _by_short_name(self, name: str) -> list[CaptureInfo]:
        """The captures of the best reading of a short name."""
        readings = self._by_name.get(name) or self._by_variable.get(name)
        return readings[min(readings)] if readings else []

    @cached_property
    def _by_name(self) -> dict[str, dict[int, list[CaptureInfo]]]:
        """Captures by their short names and by rank; a smaller rank is a better reading."""
        by_name: dict[str, dict[int, list[CaptureInfo]]] = {}
        for info in self._infos.values():
            readings = [
                (_path_in_module(info.module, info.name), 0 if info.role == "spy" else 2),
                (info.name, 4),
            ]
            if info.role == "output":
                readings.append((info.module, 1))
            if info.name == "output.grad":
                readings.append((_path_in_module(info.module, "grad"), 3))
            for name, rank in readings:
                by_name.setdefault(name, {}).setdefault(rank, []).append(info)
        return by_name

    @cached_property
    def _by_variable(self) -> dict[str, dict[int, list[CaptureInfo]]]:
        """Captures by the variables they were assigned to, with the module that did so or alone."""
        by_name: dict[str, dict[int, list[CaptureInfo]]] = {}
        for info, variable in self._assigned:
            for name in dict.fromkeys(
                [*(_path_in_module(module, variable) for module in _setters(info)), variable]
            ):
                rank = 1 if name == variable else 0
                by_name.setdefault(name, {}).setdefault(rank, []).append(info)
        return by_name

    @cached_property
    def _assigned(self) -> list[tuple[CaptureInfo, str]]:
        """The captures that were assigned to a variable, and the variable."""
        variables = self._names() if self._names is not None else {}
        infos = (info for info in self._infos.values() if info.role in ("op", "output", "spy"))
        return [(info, variables[info.value]) for info in infos if info.value in variables]

    def _nearest(self, name: str) -> str:
        """The end of the sentence about a name that was not captured."""
        # The last candidate is certainly a module, the first may be a list.
        set_by = [_path_in_module(_setters(info)[-1], variable) for info, variable in self._assigned]
        variables = [variable for _, variable in self._assigned]
        names = [each for each in dict.fromkeys([*self._by_name, *set_by, *variables]) if each]
        note = self._note() if self._note is not None else ""
        if not names and note:
            return f"; no tensors were captured: {note}."
        if not names:
            capture = Hint("capture=True", "sightline run --capture '**'")
            return f"; no tensors were captured: record with {capture}."
        near = close_names(name, names)
        if near:
            return f"; did you mean {choices_text(near)}?"
        return f"; there are {', '.join(map(repr, names[:5]))}{', …' if len(names) > 5 else ''}."


class KeyPattern:
    """A glob over keys, part by part between slashes and segment by segment between dots.

    >>> info = CaptureInfo("step0", "layers.10", "output", 0, 0, "output", "", -1, (), "float32")
    >>> [KeyPattern(glob)(info) for glob in ("layers.1", "layers.*/output", "step*/**/0", "*/input")]
    [False, True, True, False]
    """

    def __init__(self, glob: str) -> None:
        self._parts = StarPattern(
            [None if part == "**" else _part_test(part) for part in glob.strip("/").split("/")]
        )

    def __call__(self, info: CaptureInfo) -> bool:
        """Whether a key matches, with or without its step; parts at the end may be left out."""
        key = info.key
        if self._parts(key.split("/")):
            return True
        return bool(info.step) and self._parts(key.removeprefix(f"{info.step}/").split("/"))


def _part_test(glob: str) -> Callable[[str], bool]:
    pattern = PathPattern(glob)
    return lambda part: pattern.exactly(part.split("."))


def _path_in_module(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _setters(info: CaptureInfo) -> list[str]:
    """The modules whose code may have assigned a tensor to a variable.

    A module's output was assigned by its parent; the parent of a module in a list is the list's parent.
    """
    if info.role != "output":
        return [info.module]
    holder, _, last = info.module.rpartition(".")
    return [holder, holder.rpartition(".")[0]] if last.isdecimal() else [holder]


def _count_text(infos: Sequence[CaptureInfo]) -> str:
    count = f"{len(infos)} captured tensor{'' if len(infos) == 1 else 's'}"
    total = sum(nbytes_of(info.dtype, info.shape) or 0 for info in infos)
    return f"{count}, {bytes_text(total)}" if infos else count


class _Numbers:
    """Range, mean and standard deviation of the finite numbers of an array, and the count of others."""

    def __init__(self, numbers: Array) -> None:
        wide = numbers.astype(np.float64).reshape(-1)
        self.nans = int(np.isnan(wide).sum())
        self.infs = int(np.isinf(wide).sum())
        finite = wide[np.isfinite(wide)]
        nothing = math.nan
        self.min = float(finite.min()) if finite.size else nothing
        self.max = float(finite.max()) if finite.size else nothing
        unit = max(abs(self.min), abs(self.max)) or 1.0  # squares may overflow
        shares = finite / unit
        self.mean = float(shares.mean()) * unit if finite.size else nothing
        self.std = float(shares.std(ddof=1)) * unit if finite.size > 1 else 0.0 if finite.size else nothing


def _numbers_text(tensor: CapturedTensor) -> str:
    """The range of a small tensor's numbers; empty for a large one or one that cannot be read."""
    if not 0 < math.prod(tensor.shape) <= _CHEAP:
        return ""
    try:
        numbers = tensor.numpy()
    except (DamagedFile, UsageError, OSError):
        return ""
    if numbers.dtype.kind == "c":
        return ""
    with np.errstate(all="ignore"):
        return f", {numbers_text(_Numbers(numbers))}"
