"""`Tensors`: the captured tensors of a trace, by key and by the names people know them under.

A full key means one tensor: ``step0/blocks.0.attn/output/0/0``. A short name means all calls in order: the
name inside its module (``blocks.0.attn.q``), the module itself for what it returned (``blocks.0.attn``), or
the name alone (``q``). Nothing is read before it is asked for.
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
from sightline.errors import DamagedFile, NotCaptured, UsageError
from sightline.notation import bytes_text, numbers_text, tensor_text
from sightline.options import one_of
from sightline.patterns import PathPattern, choices_text, close_names, segments_of
from sightline.trace.data import ROLES, CaptureInfo
from sightline.trace.dtypes import bits, nbytes_of, numbers
from sightline.trace.tensor_stores import Store

Array = NDArray[Any]
ToTorch = Callable[["CapturedTensor"], Any]

#: The numbers of tensors up to this many elements are shown with them.
_CHEAP: Final = 1_000_000


class CapturedTensor:
    """One tensor that was kept, and where it belongs.

    >>> from sightline.trace.tensor_stores import MemoryStore
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
        """As kept: of a sample, how many elements."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """As kept, by torch's name: ``"bfloat16"``."""
        return self.info.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        known = nbytes_of(self.dtype, self.shape)
        return self._data.nbytes if known is None else known

    @property
    def _data(self) -> NDArray[np.uint8]:
        data = self._store.read(self.key)
        known = nbytes_of(self.dtype, self.shape)
        if known not in (None, data.nbytes):
            text = tensor_text(self.shape, self.dtype)
            raise DamagedFile(f"{self.key} has {data.nbytes} bytes, not the {known} of {text}.")
        return data

    @property
    def raw(self) -> Array:
        """Its bits as unsigned integers; complex128 as pairs of them."""
        return bits(self._data, self.dtype, self.shape)

    def numpy(self) -> Array:
        """Its numbers, not to be written to; bfloat16, float8 and complex32 are widened, exactly."""
        return numbers(self._data, self.dtype, self.shape)

    def torch(self) -> Any:
        """A torch tensor of its own, with the dtype it was kept in."""
        if self._to_torch is None:
            raise UsageError("torch is not at hand here; `.numpy()` has the numbers and `.raw` the bits.")
        return self._to_torch(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        text = f"{self.key}: {tensor_text(self.shape, self.dtype)}"
        if not self.info.whole:
            text += " (a sample)"
        return f"<{text}{_numbers_text(self)}>"


class Captures(Sequence[CapturedTensor]):
    """Captured tensors, in the order of capture; a slice is one again.

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
        """The one there is; an error if there are none or several."""
        if len(self) != 1:
            raise UsageError(
                f"There are {len(self)} captured tensors here, not one; choose one by its place."
            )
        return self._tensors[0]

    def __repr__(self) -> str:
        lines = [f"  {tensor.key}: {tensor_text(tensor.shape, tensor.dtype)}" for tensor in self[:8]]
        if len(self) > 8:
            lines.append(f"  … {len(self) - 8} more")
        return "\n".join([f"<{_count_text([tensor.info for tensor in self])}>", *lines])


class Tensors(Mapping[str, Any]):
    """The captured tensors of a trace.

    >>> from sightline.trace.tensor_stores import MemoryStore
    >>> info = CaptureInfo("", "fc", "output", 0, 0, "output", "", -1, (2,), "float32")
    >>> tensors = Tensors([info], MemoryStore({info.key: np.zeros(8, dtype=np.uint8)}))
    >>> tensors["fc"][0].numpy()
    array([0., 0.], dtype=float32)

    ``tensors[key]`` is a `CapturedTensor`, ``tensors[name]`` the `Captures` of that name. ``names()`` gives
    the variable that each value was assigned to: it is asked once, when no captured name fits. ``to_torch``
    makes a torch tensor of a captured one. ``note()`` says what was asked for and is not here.
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
        """One tensor by its full key, or all of a short name."""
        if not isinstance(name, str):
            raise NotCaptured(f"t.tensors[…] takes a key or a name, not {argument_text(name)}.")
        info = self._infos.get(name)
        if info is not None:
            return self._tensor(info)
        found = self._short(name)
        if not found:
            raise NotCaptured(f"No tensor was captured as {name!r}{self._nearest(name)}")
        return Captures([self._tensor(info) for info in found])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._infos or bool(self._short(name)))

    @check_arguments
    def keys(self, glob: str | None = None) -> KeysView[str]:
        """The full keys in the order of capture; those a glob means.

        A glob is matched part by part between slashes, and within a part segment by segment between dots:
        ``*`` never crosses either, ``**`` is any number of parts or segments. The step may be left out, and
        so may parts at the end: ``blocks.*.attn/output``, ``step0/**.mlp``.
        """
        if glob is None:
            return self._infos.keys()
        meant = KeyPattern(glob)
        return {key: 0 for key, info in self._infos.items() if meant(info)}.keys()

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
        """The tensors that fit every filter given.

        ``module`` is a glob over path segments, and what is inside matches, too; ``name`` and ``step`` are
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
        shown = list(dict.fromkeys(_inside(info.module, info.name) for info in self._infos.values()))
        names = f": {', '.join(shown[:4])}{', …' if len(shown) > 4 else ''}" if shown else ""
        note = self._note() if self._note is not None else ""
        return f"<{_count_text(list(self._infos.values()))}{names}{note and f' ({note})'}>"

    def _tensor(self, info: CaptureInfo) -> CapturedTensor:
        return CapturedTensor(info, self._store, self._to_torch)

    def _short(self, name: str) -> list[CaptureInfo]:
        """What a short name means: the first reading that fits anything."""
        found = self._by_name.get(name) or self._by_variable.get(name)
        return found[min(found)] if found else []

    @cached_property
    def _by_name(self) -> dict[str, dict[int, list[CaptureInfo]]]:
        """By the names they were captured under; the smaller the number, the better the reading."""
        found: dict[str, dict[int, list[CaptureInfo]]] = {}
        for info in self._infos.values():
            readings = [(_inside(info.module, info.name), 0 if info.role == "spy" else 2), (info.name, 4)]
            if info.role == "output":
                readings.append((info.module, 1))
            if info.name == "output.grad":
                readings.append((_inside(info.module, "grad"), 3))
            for name, rank in readings:
                found.setdefault(name, {}).setdefault(rank, []).append(info)
        return found

    @cached_property
    def _by_variable(self) -> dict[str, dict[int, list[CaptureInfo]]]:
        """By the variables they were assigned to, in the module that did it or alone."""
        found: dict[str, dict[int, list[CaptureInfo]]] = {}
        for info, variable in self._set:
            for name in dict.fromkeys([*(_inside(module, variable) for module in _setters(info)), variable]):
                rank = 1 if name == variable else 0
                found.setdefault(name, {}).setdefault(rank, []).append(info)
        return found

    @cached_property
    def _set(self) -> list[tuple[CaptureInfo, str]]:
        """The tensors that were assigned to a variable, each with that."""
        variables = self._names() if self._names is not None else {}
        infos = (info for info in self._infos.values() if info.role in ("op", "output", "spy"))
        return [(info, variables[info.value]) for info in infos if info.value in variables]

    def _nearest(self, wanted: str) -> str:
        """The end of the sentence about a name that is not there."""
        # of those that may have set a variable the last is a module for sure, the first may be a mere list
        set_by = [_inside(_setters(info)[-1], variable) for info, variable in self._set]
        variables = [variable for _, variable in self._set]
        known = [name for name in dict.fromkeys([*self._by_name, *set_by, *variables]) if name]
        note = self._note() if self._note is not None else ""
        if not known and note:
            return f"; no tensors were captured: {note}."
        if not known:
            return "; no tensors were captured: ask for them with sl.trace(…, capture=True)."
        near = close_names(wanted, known)
        if near:
            return f"; did you mean {choices_text(near)}?"
        return f"; there are {', '.join(map(repr, known[:5]))}{', …' if len(known) > 5 else ''}."


class KeyPattern:
    """A glob over keys, part by part between slashes and segment by segment between dots.

    >>> info = CaptureInfo("step0", "layers.10", "output", 0, 0, "output", "", -1, (), "float32")
    >>> [KeyPattern(glob)(info) for glob in ("layers.1", "layers.*/output", "step*/**/0", "*/input")]
    [False, True, True, False]
    """

    def __init__(self, glob: str) -> None:
        parts = glob.strip("/").split("/")
        self._steps = [None if part == "**" else PathPattern(part).exactly for part in parts]

    def __call__(self, info: CaptureInfo) -> bool:
        """Whether its key is meant, with its step or without; parts at the end may be left out."""
        key = info.key
        if self._begins(key):
            return True
        return bool(info.step) and self._begins(key.removeprefix(f"{info.step}/"))

    def _begins(self, key: str) -> bool:
        """Walk over the parts at every place in the glob at once: many ``**`` cost no backtracking."""
        end = len(self._steps)
        places = self._skipped({0})
        for part in key.split("/"):
            if end in places:
                return True
            moved = set()
            for place in places:
                step = self._steps[place]
                if step is None:
                    moved.add(place)
                elif step(part.split(".")):
                    moved.add(place + 1)
            places = self._skipped(moved)
        return end in places

    def _skipped(self, places: set[int]) -> set[int]:
        reached = set(places)
        for place in places:
            while place < len(self._steps) and self._steps[place] is None:
                place += 1
                reached.add(place)
        return reached


def _inside(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _setters(info: CaptureInfo) -> list[str]:
    """The modules whose code may have set a variable to a tensor.

    What a module gave out was set by what holds it; one in a list was called by what holds the list.
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
    """What the numbers in an array are like: of the finite ones, the range, mean and deviation."""

    def __init__(self, given: Array) -> None:
        wide = given.astype(np.float64).reshape(-1)
        self.nans = int(np.isnan(wide).sum())
        self.infs = int(np.isinf(wide).sum())
        finite = wide[np.isfinite(wide)]
        nothing = math.nan
        self.min = float(finite.min()) if finite.size else nothing
        self.max = float(finite.max()) if finite.size else nothing
        unit = max(abs(self.min), abs(self.max)) or 1.0  # the square of a double may be none
        shares = finite / unit
        self.mean = float(shares.mean()) * unit if finite.size else nothing
        self.std = float(shares.std(ddof=1)) * unit if finite.size > 1 else 0.0 if finite.size else nothing


def _numbers_text(tensor: CapturedTensor) -> str:
    """The range of a tensor's numbers where that is cheap; a tensor that cannot be read is shown without."""
    if not 0 < math.prod(tensor.shape) <= _CHEAP:
        return ""
    try:
        given = tensor.numpy()
    except (DamagedFile, UsageError, OSError):
        return ""
    if given.dtype.kind == "c":
        return ""
    with np.errstate(all="ignore"):
        return f", {numbers_text(_Numbers(given))}"
