"""Telling a watcher what happens, as it happens: for ``live=``. Off, it costs one test per op.

Here alone the recorder reads source lines and builds texts while the model runs: that is what was asked.
"""

from __future__ import annotations

import linecache
from typing import Any

from sightline.recording.arguments import form_of
from sightline.recording.lanes import Lane, OpenCall
from sightline.recording.observing import Observer
from sightline.recording.operations import OpInfo
from sightline.recording.places import operator_names
from sightline.recording.session import Session
from sightline.recording.torchapi import quiet, sequence_number
from sightline.trace.data import FLAVOURS, PHASES, TensorMeta
from sightline.trace.events import CallHappened, OpHappened, Place, Watcher
from sightline.trace.forms import Form
from sightline.trace.origins import inside_engine
from sightline.trace.source_lines import indent_of


class Listener(Observer):
    """Turns what passes through the recorder into plain events."""

    silent = False

    def __init__(self, session: Session, watcher: Watcher) -> None:
        self._session = session
        self._watcher = watcher
        self._nodes: dict[int, int] = {}  # autograd node -> stack of the op that made it
        self._newest = sequence_number()
        self._places: dict[int, Place] = {}
        self._operator = operator_names(session.stacks)

    def op(
        self,
        lane: Lane,
        info: OpInfo,
        node: Any,
        stack: int,
        number: int,
        ids: list[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        raised: bool = False,
    ) -> None:
        """An op has ended."""
        open_op = lane.open_op
        starts_backward = info.backward or (open_op is not None and self._session.infos[open_op[1]].backward)
        phase = "backward" if starts_backward else PHASES[lane.phase]
        if node is None:
            now = sequence_number()
            if now > self._newest:  # else it has made no node
                self._nodes[now - 1] = stack
                self._newest = now
        else:
            phase = "backward"
            if not self._of_the_user(lane, stack):
                stack = self._nodes.get(node._sequence_nr(), stack)
        level = "aten" if FLAVOURS[info.flavour] == "op" else "api"
        symbol = self._operator(stack, info.name) if level == "api" else None
        with quiet():
            inputs = self._metas((args, kwargs or {}))
            outputs = self._metas(result)
            form, shape = form_of(args, kwargs), form_of((result,), None)
        self._watcher.op(
            OpHappened(
                symbol or info.name, level, "operator" if symbol else FLAVOURS[info.flavour], phase, form,
                inputs, shape if result is not None else Form(()), outputs, self._chain(lane, stack),
                len(lane.calls()), raised,
            )
        )  # fmt: skip

    def enter(self, session: Session, call: OpenCall, args: tuple[Any, ...]) -> None:
        """A module call begins."""
        self._watcher.enter(self._call(call, call.input_form, call.inputs))

    def leave(
        self, session: Session, call: OpenCall, args: tuple[Any, ...], result: Any, raised: bool
    ) -> None:
        """It has ended."""
        self._watcher.leave(self._call(call, call.input_form, call.inputs, result, raised))

    def _call(
        self, call: OpenCall, form: int, inputs: list[int], result: Any = None, raised: bool = False
    ) -> CallHappened:
        known = self._session.modules.all[call.module]
        module = known.ref()
        local = call.frame.f_locals if call.frame is not None else {}
        with quiet():
            looks = self._metas((local.get("args", ()), local.get("kwargs") or {}))
            outputs = self._metas(result)
            shape = form_of((result,), None) if result is not None else Form(())
        kind = type(module).__name__
        return CallHappened(
            known.path or kind, kind, self._session.modules.says(module), self._depth(call),
            module is not None and not any(True for _ in module.children()), not known.path,
            self._session.arguments.forms.all[form], looks, shape, outputs, raised,
        )  # fmt: skip

    def _depth(self, call: OpenCall) -> int:
        calls = self._session.lane_here().calls()
        return calls.index(call) if call in calls else len(calls)

    def _metas(self, item: Any) -> list[TensorMeta]:
        values = self._session.values
        return [values.metas[values.describe(tensor)] for tensor in self._session.arguments.tensors(item, [])]

    def _of_the_user(self, lane: Lane, stack: int) -> bool:
        """Whether the user's own code ran an op of the backward pass: it is shown where it is written."""
        places = [(place.file, place.function) for place in reversed(self._chain(lane, stack))]
        return inside_engine(places, worker=lane is not self._session.lane) >= 0

    def _chain(self, lane: Lane, stack: int) -> list[Place]:
        found = []
        while stack >= 0:
            place = self._places.get(stack)
            if place is None:
                place = self._places[stack] = self._place(stack)
            found.append(place)
            stack = self._session.stacks.parents[stack]
        return found[::-1]

    def _place(self, stack: int) -> Place:
        stacks = self._session.stacks
        code = stacks.codes[stacks.code_ids[stack]]
        at = list(code.co_positions())[stacks.instructions[stack] // 2]
        line = at[0] or code.co_firstlineno
        columns = (at[2], at[3]) if at[2] is not None and at[3] is not None else None
        text = linecache.getline(code.co_filename, line)
        return Place(
            code.co_filename, line, at[1] or line, code.co_qualname, text.strip(), columns,
            indent=indent_of(text),
        )  # fmt: skip
