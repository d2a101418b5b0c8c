"""The blocks of ``log()``: one per module call or operation, with its inputs and outputs.

    ● query_weights (Linear) (in_features: 6, out_features: 6)
    ├─ Input: Tensor [10, 20, 6] @ cpu
    └─ Output: Tensor [10, 20, 6] @ cpu
    │
    ● Tensor.view(10, 20, 3, 2) @ [MHA.split_heads]
    ├─ Input: Tensor [10, 20, 6] @ cpu
    └─ Output: Tensor [10, 20, 3, 2] @ cpu

A container is opened with its inputs, contains the blocks of the calls and ops inside it, and is closed with
its outputs. Recorded statistics follow each tensor. Blocks are built from plain events, so that a finished
trace (`views.log`) and a running model (`views.live`) print the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from sightline.data.forms import ONE_TENSOR, SLOT, Form
from sightline.data.op_groups import BINARY_OPERATORS, REFLECTED_OPERATORS
from sightline.data.trace_data import TensorMeta
from sightline.notation import MANY_ALIKE, constant_text, times_text
from sightline.views.rendering import Line, Span, printable, width

Tensors = Sequence[TensorMeta]
#: The statistics of each tensor as spans; empty where there are none.
StatisticsSpans = Sequence[tuple[Span, ...]]
TensorText = Callable[[TensorMeta], str]

OK: Final = ""
RAISED: Final = "raised"
UNFINISHED: Final = "unfinished"

_POSITION = re.compile(r"\[\d+\]")
_NUMBER = re.compile(r"(\d+)(?=\]?$)")  #: at the end of a label: its position in a list
_LOCALS: Final = "<locals>."


def tensor_block_text(meta: TensorMeta) -> str:
    """A tensor as this log writes it: ``Tensor [10, 20, 6] @ cpu``."""
    return f"{meta.type} [{', '.join(map(str, meta.sizes))}] @ {meta.device}"


@dataclass(frozen=True, slots=True)
class LogModule:
    """A module call; at its entry, result, outputs and state are not known yet."""

    path: str  #: ``blocks.0.attn``; the class name for a root
    type: str
    extra: str  #: ``in_features=6, out_features=6, bias=True``
    depth: int  #: how many blocks enclose it
    leaf: bool  #: printed as one block, with nothing inside
    form: Form
    inputs: Tensors
    result: Form = ONE_TENSOR
    outputs: Tensors = ()
    state: str = OK
    root: bool = False
    input_statistics: StatisticsSpans = ()
    output_statistics: StatisticsSpans = ()
    times: int = 1  #: how many equal calls the block stands for


@dataclass(frozen=True, slots=True)
class LogOp:
    """An operation outside leaf modules."""

    name: str  #: ``Tensor.view``, ``torch.cat``, ``@``, or an aten name where no API call was recorded
    flavour: str
    function: str  #: qualified name of the user's function it was called from: ``MHA.split_heads``
    depth: int
    form: Form
    inputs: Tensors
    result: Form = ONE_TENSOR
    outputs: Tensors = ()
    state: str = OK
    note: str = ""  #: a remark: ``backward of fc``
    input_statistics: StatisticsSpans = ()
    output_statistics: StatisticsSpans = ()
    times: int = 1
    labels: tuple[str, str, str] = (
        "Left",
        "Right",
        "Output",
    )  #: of both sides of an operator, and its result


@dataclass(frozen=True, slots=True)
class Part:
    """A branch of a block: ``Input: Tensor [2, 6] @ cpu``, and the statistics of that tensor."""

    label: str
    text: str
    style: str = ""
    statistics: tuple[Span, ...] = ()

    @property
    def width(self) -> int:
        return width(printable(self.label)) + 2 + width(printable(self.text))


@dataclass(frozen=True, slots=True)
class BlockStyle:
    """How blocks are written: the text of a tensor, and the prefix of every line."""

    tensor: TensorText = tensor_block_text
    margin: str = ""

    def banner(self, text: str) -> Line:
        """A line of its own between blocks: ``● TRACING MHA STARTED``."""
        return Line((Span("● "), Span(text, "title")), self.margin)

    def rail(self, depth: int) -> Line:
        """The line between two blocks."""
        return Line((), f"{self._inner(depth)}│")

    def repeat(self, depth: int, count: int) -> Line:
        """The line before a sequence of blocks that ran several times."""
        return Line((Span(f"×{count}", "number"),), f"{self._inner(depth)}┌ ")

    def repeated(self, depth: int) -> Line:
        """The line after such a sequence."""
        return Line((), f"{self._inner(depth)}└")

    def opened(self, event: LogModule) -> list[Line]:
        """The head of a container with its inputs; its children follow, one level deeper."""
        inputs = self._inputs(event, named=True)
        return [
            self._head(event.depth, _module_head(event)),
            *self._branches(event.depth, inputs, closed=False),
        ]

    def closed(self, event: LogModule) -> list[Line]:
        """The foot of a container: its outputs."""
        return self._branches(event.depth, self._results(event), closed=True)

    def leaf(self, event: LogModule) -> list[Line]:
        """A module call in one block."""
        parts = self._inputs(event, named=True) + self._results(event)
        return [
            self._head(event.depth, _module_head(event)),
            *self._branches(event.depth, parts, closed=True),
        ]

    def op(self, event: LogOp) -> list[Line]:
        """An operation in one block."""
        operator = REFLECTED_OPERATORS.get(event.name.rpartition(".")[2])
        reversed_sides = operator is not None and len(event.form.args) == 2
        if operator is not None and reversed_sides:
            event = replace(event, name=operator, flavour="operator")  # as in the source
        binary = event.name.removeprefix("Tensor.") in BINARY_OPERATORS and len(event.form.args) == 2
        parts = self._sides(event, reversed_sides) if binary else self._inputs(event, named=False)
        parts += self._results(event)
        return [
            self._head(event.depth, _op_head(event, binary)),
            *self._branches(event.depth, parts, closed=True),
        ]

    # -- the lines of a block --------------------------------------------------------------------

    def _inner(self, depth: int) -> str:
        return self.margin + "│  " * depth

    def _head(self, depth: int, spans: tuple[Span, ...]) -> Line:
        return Line((Span("● "), *spans), self._inner(depth))

    def _branches(self, depth: int, parts: Sequence[Part], *, closed: bool) -> list[Line]:
        lead = self._inner(depth)
        last = len(parts) - 1
        column = max((part.width for part in parts if part.statistics), default=0)
        return [
            Line(
                (
                    Span(f"{part.label}: ", "dim"),
                    Span(part.text, part.style),
                    *(
                        (Span(" " * (column - part.width) + "  "), *part.statistics)
                        if part.statistics
                        else ()
                    ),
                ),
                lead + ("└─ " if closed and i == last else "├─ "),
            )
            for i, part in enumerate(parts)
        ]

    def _inputs(self, event: LogModule | LogOp, *, named: bool) -> list[Part]:
        labels = slot_labels("Input", event.form, len(event.inputs))
        parts = self._tensors(labels, event.inputs, event.input_statistics)
        constants = constants_text(event.form) if named else ""  # an op has them in its head
        return [*parts, Part("With", constants)] if constants else parts

    def _tensors(self, labels: Sequence[str], metas: Tensors, statistics: StatisticsSpans) -> list[Part]:
        supply = iter(statistics)
        pairs = zip(labels, metas, strict=True)
        return _merge_parts(
            [Part(label, self.tensor(meta), "shape", next(supply, ())) for label, meta in pairs]
        )

    def _sides(self, event: LogOp, reversed_sides: bool) -> list[Part]:
        tensors = iter(self._tensors([""] * len(event.inputs), event.inputs, event.input_statistics))
        labels, parts = event.labels[1::-1] if reversed_sides else event.labels[:2], []
        for label, side in zip(labels, event.form.args, strict=True):
            tensor = next(tensors, None) if side is SLOT else None
            parts.append(replace(tensor, label=label) if tensor else Part(label, constant_text(side)))
        return parts[::-1] if reversed_sides else parts

    def _results(self, event: LogModule | LogOp) -> list[Part]:
        if event.state == RAISED:
            return [Part("Raised", "it ended in an exception", "error")]
        if event.state == UNFINISHED:
            return [Part("Unfinished", "the recording ended inside", "warn")]
        if not event.outputs and isinstance(event, LogOp) and event.flavour == "opaque":
            return [Part("Output", "not known: no recorded op has used it")]
        if not event.outputs:
            return [Part("Output", constants_text(event.result) or "None")]
        label = event.labels[2] if isinstance(event, LogOp) else "Output"
        labels = slot_labels(label, event.result, len(event.outputs))
        return self._tensors(labels, event.outputs, event.output_statistics)


def _merge_parts(parts: list[Part]) -> list[Part]:
    """The parts, with many equal ones as one: ``Input 0…63: Tensor [8] @ cpu ×64``."""
    if len(parts) < MANY_ALIKE:
        return parts
    merged: list[Part] = []
    for _, group in groupby(
        parts, key=lambda part: (part.text, part.statistics, _NUMBER.sub("", part.label))
    ):
        equal = list(group)
        first, last = (_NUMBER.search(equal[at].label) for at in (0, -1))
        if len(equal) < MANY_ALIKE or first is None or last is None:
            merged += equal
            continue
        label = _NUMBER.sub(f"{first[1]}…{last[1]}", equal[0].label)
        merged.append(replace(equal[0], label=label, text=times_text(equal[0].text, len(equal))))
    return merged


def slot_labels(title: str, form: Form, count: int) -> list[str]:
    """The labels of the tensors of a call: ``Input``, ``Input 0``, ``Input mask``, ``Output logits``.

    >>> slot_labels("Input", Form((SLOT,), {"mask": SLOT}), 2)
    ['Input', 'Input mask']
    >>> slot_labels("Output", Form(({"logits": SLOT, "hidden": [SLOT, SLOT]},)), 3)
    ['Output logits', 'Output hidden[0]', 'Output hidden[1]']
    """
    paths = form.slots()[:count]
    paths += [""] * (count - len(paths))
    with_tensors = [position for position, item in enumerate(form.args) if _holds_tensor(item)]
    if len(with_tensors) == 1:  # the only argument with tensors needs no number, only the path inside it
        paths = [path.removeprefix(f"[{with_tensors[0]}]") for path in paths]
    labels = []
    for path in paths:  # [1] is 1, ['logits'] is logits, .key is key
        label = path.removeprefix(".")
        if _POSITION.fullmatch(path):
            label = path[1:-1]
        elif path.startswith("['"):
            key, _, rest = path[2:].partition("']")
            label = key + rest
        labels.append(f"{title} {label}".rstrip())
    return labels


def constants_text(form: Form, skip: int = 0) -> str:
    """The arguments that are not tensors, as they were passed, without None.

    ``_stacklevel``, which torch's functions pass to each other, is left out too.

    >>> constants_text(Form((SLOT, 1, [SLOT, SLOT]), {"dim": -1, "out": None, "_stacklevel": 3}))
    '1, dim=-1'
    """
    parts = [constant_text(item) for item in form.args[skip:] if not _holds_tensor(item) and item is not None]
    named = [(key, item) for key, item in (form.kwargs or {}).items() if key != "_stacklevel"]
    parts += [
        f"{key}={constant_text(item)}" for key, item in named if not _holds_tensor(item) and item is not None
    ]
    return ", ".join(parts)


def _holds_tensor(item: object) -> bool:
    return bool(Form((item,)).slots())


def _module_head(event: LogModule) -> tuple[Span, ...]:
    settings = ", ".join(hyperparameters(event.extra))
    spans = [Span(event.path, "module")]
    if not event.root:
        spans.append(Span(f" ({event.type})"))
    return (*spans, *([Span(f" ({settings})", "dim")] if settings else []), *_times(event.times))


def _op_head(event: LogOp, binary: bool) -> tuple[Span, ...]:
    name = event.name
    if event.flavour == "operator" and not name.startswith("Tensor."):
        name = f"Tensor.{name}"
    arguments = "" if binary else constants_text(event.form)
    args = event.form.args
    if name == "Tensor.[]" and len(args) == 2:
        name, arguments = "Tensor", _subscript_text(args[1])
    elif name == "Tensor.[]=" and len(args) == 3:
        name, arguments = "Tensor", f"{_subscript_text(args[1])} = {_written(args[2])}"
    elif not binary and (arguments or event.flavour not in ("operator", "property")):
        arguments = f"({arguments})"
    place = f" @ [{short_function(event.function)}]" if event.function else ""
    note = f" ({event.note})" if event.note else ""
    return (Span(name, "op"), Span(arguments), Span(place, "dim"), Span(note, "dim"), *_times(event.times))


def _subscript_text(item: object) -> str:
    """A subscript as it is written: ``[:20, :20]``."""
    return f"[{', '.join(map(_written, item if isinstance(item, tuple) else (item,)))}]"


def _written(item: object) -> str:
    """An argument as it is written; a tensor by that word."""
    form = Form((item,))
    return form.fill(["Tensor"] * len(form.slots()))


def _times(count: int) -> tuple[Span, ...]:
    return (Span(f" ×{count}", "number"),) if count > 1 else ()


def short_function(qualname: str) -> str:
    """A qualified name without the functions it was defined in.

    >>> short_function("test_it.<locals>.Net.forward")
    'Net.forward'
    """
    return qualname.rpartition(_LOCALS)[2]


def hyperparameters(extra: str) -> list[str]:
    """``extra_repr`` as ``key: value`` texts.

    >>> hyperparameters("3, 16, kernel_size=(3, 3), bias=True")
    ['3', '16', 'kernel_size: (3, 3)', 'bias: True']
    """
    settings = []
    for part in _split(" ".join(extra.split())):
        key, equals, value = part.partition("=")
        named = equals and key.strip().isidentifier()
        settings.append(f"{key.strip()}: {value.strip()}" if named else part)
    return settings


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside brackets."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()
