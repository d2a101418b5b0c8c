"""Telling a watcher what happens, as it happens: for ``live=``. Off, it costs one test per op.

Here alone the recorder reads source lines and builds texts while the model runs: that is what was asked.
"""

from __future__ import annotations

import linecache
from typing import Any

from sightline.recording.arguments import form_of
from sightline.recording.observing import CallEvent, Observer, OpEvent
from sightline.recording.places import operator_names
from sightline.recording.session_base import SessionBase
from sightline.recording.torchapi import quiet, sequence_number
from sightline.trace.data import FLAVOURS, PHASES, TensorMeta
from sightline.trace.events import CallHappened, OpHappened, Place, Watcher
from sightline.trace.forms import Form
from sightline.trace.notebook_cells import cell_name
from sightline.trace.origins import inside_engine
from sightline.trace.source_lines import indent_of


class Listener(Observer):
    """Turns what passes through the recorder into plain events."""

    silent = False

    def __init__(self, session: SessionBase, watcher: Watcher) -> None:
        self._session = session
        self._watcher = watcher
        self._nodes: dict[int, int] = {}  # autograd node -> stack of the op that made it
        self._newest = sequence_number()
        self._places: dict[int, Place] = {}
        self._operator = operator_names(session.stacks)

    def op(self, event: OpEvent) -> None:
        """An op has ended."""
        info, stack, phase = event.info, event.stack, PHASES[event.phase]
        if stack >= len(self._session.stacks.parents):
            self._session.refresh()
        if info.backward or (event.api is not None and event.api.backward):
            phase = "backward"
        if event.node is None:
            now = sequence_number()
            if now > self._newest:  # else it has made no node
                self._nodes[now - 1] = stack
                self._newest = now
        elif not self._of_the_user(event):
            stack = self._nodes.get(event.node, stack)
        level = "aten" if FLAVOURS[info.flavour] == "op" else "api"
        symbol = self._operator(stack, info.name) if level == "api" else None
        with quiet():
            inputs = self._metas((event.args, event.kwargs or {}))
            outputs = self._metas(event.result)
            form, made = event.form, event.result_form
            if form is None or made is None:
                form = form_of(event.args, event.kwargs)
                made = form_of((event.result,), None) if event.result is not None else Form(())
        self._watcher.op(
            OpHappened(
                symbol or info.name, level, "operator" if symbol else FLAVOURS[info.flavour], phase, form,
                inputs, made, outputs, self._chain(stack), len(event.modules), event.raised,
            )
        )  # fmt: skip

    def enter(self, call: CallEvent) -> None:
        """A module call begins."""
        self._watcher.enter(self._call(call))

    def leave(self, call: CallEvent) -> None:
        """It has ended."""
        self._watcher.leave(self._call(call))

    def _call(self, call: CallEvent) -> CallHappened:
        known = self._session.modules.all[call.module]
        module = known.ref()
        with quiet():
            inputs = self._metas((call.args, call.kwargs or {}))
            outputs = self._metas(call.result)
            made = form_of((call.result,), None) if call.result is not None else Form(())
        kind = type(module).__name__
        return CallHappened(
            known.path or kind, kind, self._session.modules.says(module), call.depth,
            module is not None and not any(True for _ in module.children()), not known.path,
            self._session.arguments.forms.all[call.form], inputs, made, outputs, call.raised,
        )  # fmt: skip

    def _metas(self, item: Any) -> list[TensorMeta]:
        values = self._session.values
        return [values.metas[values.describe(tensor)] for tensor in self._session.arguments.tensors(item, [])]

    def _of_the_user(self, event: OpEvent) -> bool:
        """Whether the user's own code ran an op of the backward pass: it is shown where it is written."""
        places = [(place.file, place.function) for place in reversed(self._chain(event.stack))]
        return inside_engine(places, worker=event.worker) >= 0

    def _chain(self, stack: int) -> list[Place]:
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
            cell_name(code.co_filename), line, at[1] or line, code.co_qualname, text.strip(), columns,
            indent=indent_of(text),
        )  # fmt: skip
