"""Arguments of the wrong type: every public call answers in one sentence, never with a traceback of ours."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sightline as sl
from sightline.argument_checks import argument_text, check_arguments
from sightline.data.tensors import Captures, Tensors
from sightline.graph.exported import ExportedGraph
from sightline.graph.graph import Graph

ODD: dict[str, Any] = {
    "None": None, "3": 3, "-1": -1, "2.5": 2.5, "text": "a", "empty": "", "bytes": b"a", "object": object(),
    "tensor": torch.arange(40.0), "list": [], "numbers": [3], "dict": {}, "True": True, "class": int,
}  # fmt: skip
#: What else a call needs before a wrong argument can be looked at.
NEEDED = {"value": "$1", "path": "out.json", "start": "output", "end": "output"}
#: Python's own contracts: ``Sequence.index`` raises ValueError, and a position that is not there IndexError.
PYTHONS = {"index", "count", "items", "values", "get"}
HELD: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def held() -> Iterator[None]:
    """One of everything people hold."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    with sl.trace(net, capture=True, stats=True) as t:
        net(x).sum().backward()
    exported = sl.export(net, (x,))
    HELD.update(
        Trace=t, Graph=t.graph(), ExportedGraph=exported, Tensors=t.tensors, Captures=t.tensors.where(),
        View=t.code(), LineageView=t.lineage("$1"), Run=exported.run(x), Table=t.ops,
    )  # fmt: skip
    yield
    HELD.clear()


def calls() -> Iterator[tuple[str, str, str]]:
    """Every parameter of every public method of what people hold."""
    from sightline.data.table import Table
    from sightline.views.lineage import LineageView
    from sightline.views.rendering import View

    for kind in (sl.Trace, Graph, ExportedGraph, Tensors, Captures, View, LineageView, Table):
        for name, method in inspect.getmembers(kind, callable):
            if (
                (name.startswith("_") and name != "__getitem__")
                or name in PYTHONS
                or isinstance(method, type)
            ):
                continue
            for parameter in list(inspect.signature(method).parameters.values()):
                if parameter.name not in ("self", "cls", "asked", "kwargs"):
                    yield kind.__name__, name, parameter.name


def one_sentence(call: Callable[[], object]) -> None:
    """It works, or it says in one sentence what is wrong."""
    try:
        with redirect_stdout(io.StringIO()):
            str(call())
    except sl.SightlineError as error:
        text = str(error)
        assert "\n" not in text, text
        assert "tensor(" not in text, text
        assert len(text) < 300, text
        assert text.endswith((".", "?")), text
    except IndexError:  # of a position, as everywhere in Python
        pass


@pytest.mark.parametrize(("kind", "method", "parameter"), list(calls()), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_one_sentence(
    kind: str, method: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be "a"
    function = getattr(HELD[kind], method)
    known = inspect.signature(function).parameters
    needed = [NEEDED[name] for name, one in known.items() if _is_needed(one) and name != parameter]
    for value in ODD.values():
        if parameter == "tensor" and value is int:  # a function that people give may raise what it likes
            continue
        if known[parameter].default is inspect.Parameter.empty:
            one_sentence(partial(function, value, *needed))
        else:
            one_sentence(partial(function, *needed, **{parameter: value}))


def _is_needed(parameter: inspect.Parameter) -> bool:
    named = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return named and parameter.default is inspect.Parameter.empty


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_option_is_one_sentence(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in (sl.Capture, sl.Stats, sl.Check):
        for name in inspect.signature(kind).parameters:
            one_sentence(partial(kind, **{name: value}))
    for name in ("ops", "live", "capture", "stats", "check", "compiled"):
        one_sentence(partial(sl.trace, **{name: value}))
    one_sentence(lambda: sl.load(value))
    one_sentence(lambda: sl.load_graph(value))
    one_sentence(lambda: sl.step(value).__enter__() if not isinstance(value, str) or not value else None)
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    one_sentence(lambda: sl.export(value, (x,)))
    one_sentence(lambda: sl.export(net, value))
    one_sentence(lambda: sl.export(net, (x,), value))
    one_sentence(lambda: sl.export(net, (x,), strict=value) if not isinstance(value, bool) else None)
    if isinstance(value, str):
        one_sentence(lambda: sl.export(net, (x,), dynamic=value))  # type: ignore[arg-type]  # on purpose


X = torch.ones(2, 4)
SENTENCES: dict[str, Callable[[Any], object]] = {
    "width='a' must be a whole number from 1 up, or None for no limit.": lambda t: t.summary(width="a"),
    "allow=3 must be a string or a list of strings.": lambda t: t.nonfinite(allow=3),
    "fold='yes' must be True or False.": lambda t: t.code(fold="yes"),
    "path=3 must be a path.": lambda t: t.save(3),
    "a Tensor is no value of a trace; give a row of t.values or t.ops, an id like '$12' or a name.": (
        lambda t: t.lineage(X)
    ),
    "[…] takes a position or a slice here, not 'relu'; `.where(name=…)` finds by name.": (
        lambda t: t.ops["relu"]
    ),
    "where('relu') takes a function of a row, or names: where(name=…).": lambda t: t.ops.where("relu"),
    "t.tensors[…] takes a key or a name, not 3.": lambda t: t.tensors[3],
    "tensor=3 must be a function of a tensor, such as str.": lambda t: t.log(tensor=3),
    "file='a' must be a file that is open for writing.": lambda t: t.code().print(file="a"),
    "keep=5 is not a choice; it is True, False, a glob, a list of globs or a function of a name.": (
        lambda t: HELD["ExportedGraph"].run(X, keep=5)
    ),
    "given=3 must be a run of this graph: given=g.run(x).": lambda t: HELD["ExportedGraph"].run(given=3),
    "Linear.forward cannot be called with the example inputs: missing a required argument: 'input'; give "
    "them as export(model, (x, y), {name: z}).": lambda t: sl.export(nn.Linear(4, 4)),
    "dynamic='atuo' is not a choice; it is \"auto\", None for fixed sizes, or what torch calls "
    "dynamic_shapes.": lambda t: sl.export(nn.Linear(4, 4), X, dynamic="atuo"),  # type: ignore[arg-type]
    "inputs='yes' is not a choice; inputs is one of True, False.": (
        lambda t: sl.Capture(inputs="yes")  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentence_says_the_fix(sentence: str) -> None:
    with pytest.raises(sl.UsageError) as caught:
        SENTENCES[sentence](HELD["Trace"])
    assert str(caught.value) == sentence


def test_a_checked_function_is_the_function() -> None:
    @check_arguments
    def shout(text: str, loud: bool = True, *, times: int | None = None) -> str:
        """Say it."""
        return text.upper() if loud else text * (times or 1)

    assert (shout("a"), shout("a", loud=False, times=2), shout.__doc__) == ("A", "aa", "Say it.")
    assert list(inspect.signature(shout).parameters) == ["text", "loud", "times"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'text'"):
        shout()  # type: ignore[call-arg]
    with pytest.raises(sl.UsageError, match=r"^loud=None must be True or False\.$"):
        shout("a", loud=None)  # type: ignore[arg-type]


def test_what_is_long_is_named_by_its_class() -> None:
    assert argument_text(torch.ones(2)) == "a Tensor"
    assert argument_text("x" * 99) == "a str"
    assert argument_text([1, 2]) == "[1, 2]"
