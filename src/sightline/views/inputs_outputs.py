"""The inputs and outputs of module calls in one short text: ``f32[2, 8] → f32[2, 4]``.

Several calls are written as one: a size that differs becomes ``5…9``. Tensors inside dicts, keyword
arguments and model outputs carry their name: ``mask=b8[2, 8]``. The table of a wide model has little
room, so an exchange can be written at four levels of brevity, and `key` explains the short forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sightline.data.index import Index
from sightline.data.trace_data import RAISED, TensorMeta, TraceData
from sightline.notation import dtype_name, size_text
from sightline.views.rendering import cut, width

ARROW: Final = " → "
#: In full; without the parts that the output repeats; only its changes; only the output.
FULL, SHORT, SHORTEST, RESULT = range(4)
#: The pattern of each short form, and its meaning.
_KEY: Final = (
    (re.compile(r"\+\d+(?! other|\d)"), "+N: N more"),
    (re.compile(r"\+\d+ other"), "+N other: N more kinds of calls, with other tensors"),
    (re.compile(r"×\d"), "×N: N times"),
    (re.compile(r"\d…\d"), "N…M: from call to call"),
    (re.compile(r"→ same"), "same: as the input"),
    (re.compile(r"\[…, "), "[…, N]: leading sizes as in the input"),
    (re.compile(r"^→ "), "→ alone: the output"),
)
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Item:
    """Consecutive tensors of a call that are written the same."""

    label: str
    dtype: str
    sizes: tuple[str, ...]
    suffix: str  #: layout and device, if they are unusual
    count: int = 1

    def text(self, *, dtype: bool = True, label: bool = True, skip: int = 0) -> str:
        """``mask=b8[2, 8] ×2``; ``skip`` leading sizes are written as one ``…``."""
        sizes = ("…", *self.sizes[skip:]) if skip else self.sizes
        name = f"{self.label}=" if label and self.label else ""
        times = f" ×{self.count}" if self.count > 1 else ""
        return f"{name}{self.dtype if dtype else ''}[{', '.join(sizes)}]{self.suffix}{times}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """The inputs and outputs of equal calls, and how many calls were different."""

    inputs: tuple[Item, ...]
    outputs: tuple[Item, ...]
    others: int = 0
    raised: bool = False  #: the call raised an exception

    def text(self, brevity: int = FULL) -> str:
        """The exchange in one line.

        >>> linear = Exchange((Item("", "f32", ("2", "8"), ""),), (Item("", "f32", ("2", "4"), ""),))
        >>> [linear.text(brevity) for brevity in (FULL, SHORT, SHORTEST, RESULT)]
        ['f32[2, 8] → f32[2, 4]', 'f32[2, 8] → [2, 4]', 'f32[2, 8] → […, 4]', '→ f32[2, 4]']
        """
        if not self.inputs and not self.outputs:
            return ""
        more = f" +{self.others} other" if self.others else ""
        if self.raised:
            return f"{', '.join(item.text() for item in self.inputs) or '()'}{ARROW}raised{more}"
        if brevity == RESULT:
            return f"{ARROW.lstrip()}{_first_text(self.outputs)}{more}"
        if brevity == SHORTEST:
            return _first_text(self.inputs) + ARROW + self._shortest() + more
        inputs = ", ".join(item.text() for item in self.inputs) or "()"
        if brevity == SHORT and self.outputs and self._same:
            return f"{inputs}{ARROW}same{more}"
        outputs = ", ".join(item.text(dtype=brevity == FULL or not self._same_dtype) for item in self.outputs)
        return f"{inputs}{ARROW}{outputs or '()'}{more}"

    def fit(self, room: int, brevity: int = FULL) -> str:
        """The longest text of this brevity or shorter that fits ``room`` columns; else the output, cut."""
        texts = [self.text(each) for each in range(brevity, RESULT + 1)]
        return next((text for text in texts if width(text) <= room), cut(texts[-1], room))

    @property
    def _same(self) -> bool:
        both = len(self.outputs) == 1 and bool(self.inputs)
        return both and _bare(self.inputs[0]) == _bare(self.outputs[0])

    @property
    def _same_dtype(self) -> bool:
        return bool(self.inputs) and {item.dtype for item in self.outputs} == {self.inputs[0].dtype}

    def _shortest(self) -> str:
        if not self.outputs or not self.inputs:
            return _first_text(self.outputs)
        if self._same:
            return "same"
        output, source = self.outputs[0], self.inputs[0]
        skip = 0
        most = min(len(output.sizes) - 1, len(source.sizes))  # at least the last size is written
        while skip < most and output.sizes[skip] == source.sizes[skip]:
            skip += 1
        if len(output.sizes) != len(source.sizes) and skip < len(source.sizes):
            skip = 0  # a reader could not tell how many sizes were left out
        text = output.text(dtype=output.dtype != source.dtype, label=False, skip=skip)
        return text + _rest(self.outputs)


def key(texts: Iterable[str]) -> list[str]:
    """The meanings of the short forms that appear in some texts.

    >>> key(["f32[2, 8] +1 → same"])
    ['+N: N more', 'same: as the input']
    """
    seen = list(texts)
    return [meaning for sign, meaning in _KEY if any(sign.search(text) for text in seen)]


def _bare(item: Item) -> Item:
    return replace(item, label="", count=1)


def _first_text(items: Sequence[Item]) -> str:
    return items[0].text(label=False) + _rest(items) if items else "()"


def _rest(items: Sequence[Item]) -> str:
    rest = sum(item.count for item in items[1:])
    return f" +{rest}" if rest else ""


def alike(one: Exchange, other: Exchange) -> bool:
    """Whether the tensors of two exchanges have the same sizes; sizes that vary have to overlap.

    >>> every = [Exchange((Item("", "f32", (size, "8"), ""),), ()) for size in ("5…9", "8", "4")]
    >>> alike(every[0], every[1]), alike(every[1], every[2])
    (True, False)
    """
    sides = ((one.inputs, other.inputs), (one.outputs, other.outputs))
    if one.raised != other.raised or any(len(mine) != len(yours) for mine, yours in sides):
        return False
    pairs = [pair for mine, yours in sides for pair in zip(mine, yours, strict=True)]
    return all(
        replace(mine, sizes=()) == replace(yours, sizes=())
        and len(mine.sizes) == len(yours.sizes)
        and all(map(_overlap, mine.sizes, yours.sizes))
        for mine, yours in pairs
    )


def _overlap(one: str, other: str) -> bool:
    (low, _, high), (least, _, most) = one.partition("…"), other.partition("…")
    if not (low + least).isdecimal():  # "*", or a symbol of a nested tensor
        return one == other
    return int(low) <= int(most or least) and int(least) <= int(high or low)


class Exchanges:
    """Exchanges of the module calls of one trace; the labels of each form are computed once."""

    def __init__(self, index: Index) -> None:
        self._data: TraceData = index.raw
        self._one_device = len({meta.device for meta in self._data.metas}) <= 1
        self._labels: dict[int, list[str]] = {}

    def of(self, calls: Sequence[int]) -> Exchange:
        """The exchange of several calls, written as one where they differ only in sizes."""
        columns = self._data.calls
        kinds: dict[tuple[tuple[Item, ...], tuple[Item, ...]], None] = {}
        seen: set[tuple[object, ...]] = set()
        metas = self._data.values.meta
        for call in calls:
            inputs = metas[columns.inputs[columns.input_offsets[call] : columns.input_offsets[call + 1]]]
            outputs = metas[columns.outputs[columns.output_offsets[call] : columns.output_offsets[call + 1]]]
            forms = (int(columns.input_form[call]), int(columns.output_form[call]))
            key = (*forms, inputs.tobytes(), outputs.tobytes())
            if key not in seen:
                seen.add(key)
                kinds[self._items(forms[0], inputs.tolist()), self._items(forms[1], outputs.tolist())] = None
        if not kinds:
            return Exchange((), ())
        merged = _merge(list(kinds))
        raised = bool(columns.flags[calls[0]] & RAISED) and not merged.outputs
        return replace(merged, raised=raised)

    def kind_of_output(self, call: int, position: int) -> tuple[str, str, int]:
        """The name, dtype and rank of an output: of another kind it means something else."""
        labels = self._labels_of(int(self._data.calls.output_form[call]))
        meta = self._data.metas[self._data.values.meta[self._data.calls.outputs_of(call)[position]]]
        return labels[position] if position < len(labels) else "", meta.dtype, len(meta.sizes)

    def _labels_of(self, form: int) -> list[str]:
        """The keyword, field or key that leads to each tensor of a form."""
        if form not in self._labels:
            paths = self._data.forms[form].slots() if form >= 0 else []
            matches = [_NAME.search(path) for path in paths]
            self._labels[form] = [match[0] if match else "" for match in matches]
        return self._labels[form]

    def _items(self, form: int, metas: Sequence[int]) -> tuple[Item, ...]:
        labels = self._labels_of(form)
        items: list[Item] = []
        for position, meta in enumerate(metas):
            tensor: TensorMeta = self._data.metas[meta]
            layout = tensor.layout.removeprefix("torch.")
            suffix = "" if layout == "strided" else f" {layout}"
            suffix += "" if self._one_device or tensor.device == "cpu" else f"@{tensor.device}"
            label = labels[position] if position < len(labels) else ""
            item = Item(label, dtype_name(tensor.dtype), tuple(map(size_text, tensor.sizes)), suffix)
            if items and replace(items[-1], count=1) == item:
                items[-1] = replace(items[-1], count=items[-1].count + 1)
            else:
                items.append(item)
        return tuple(items)


def _merge(kinds: list[tuple[tuple[Item, ...], tuple[Item, ...]]]) -> Exchange:
    shapes = {tuple((i.label, i.dtype, len(i.sizes), i.suffix, i.count) for i in (*a, *b)) for a, b in kinds}
    inputs, outputs = kinds[0]
    if len(kinds) == 1 or len(shapes) > 1 or len({len(a) for a, _ in kinds}) > 1:
        return Exchange(inputs, outputs, len(kinds) - 1)
    return Exchange(
        tuple(_size_ranges([kind[0][i] for kind in kinds]) for i in range(len(inputs))),
        tuple(_size_ranges([kind[1][i] for kind in kinds]) for i in range(len(outputs))),
    )


def _size_ranges(items: list[Item]) -> Item:
    """One item for several of the same rank: sizes that differ become a range, and ``*`` where not all of
    them are numbers.
    """
    sizes = []
    for column in zip(*(item.sizes for item in items), strict=True):
        if len(set(column)) == 1:
            sizes.append(column[0])
        else:
            numbers = sorted(int(size) for size in column if size.isdecimal())
            known = len(numbers) == len(column)  # a nested tensor has "*", or a symbol: "j1"
            sizes.append(f"{numbers[0]}…{numbers[-1]}" if known else "*")
    return replace(items[0], sizes=tuple(sizes))
