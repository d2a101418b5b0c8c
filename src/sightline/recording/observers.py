"""Observers of a running recording: called for every op and module call with the tensors at hand.

`LiveObserver` is the observer behind ``live=``.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sightline.data.file_owners import cell_name
from sightline.data.forms import Form
from sightline.data.live_events import LiveCallEvent, LiveOpEvent, SourceFrame, Watcher
from sightline.data.not_recorded import compiled_note, other_threads_note
from sightline.data.source_files import indent_of
from sightline.data.trace_data import FLAVOURS, PHASES, TensorMeta
from sightline.data.user_frames import engine_callback_index
from sightline.recording.arguments import form_of
from sightline.recording.session import Session
from sightline.recording.source_positions import operator_names
from sightline.recording.torchapi import no_torch_function, sequence_number, unobserved
from sightline.schema.tables import BACKWARD

if TYPE_CHECKING:
    from sightline.data.forms import Form
    from sightline.recording.operations import OpInfo
    from sightline.recording.session import Session


@dataclass(slots=True)
class ObservedOp:
    """An op, or an API call, that has ended."""

    info: OpInfo
    number: int  #: its id
    stack: int
    phase: int  #: a position in ``PHASES``
    node: int | None  #: the number of the autograd node that runs it; None outside a backward pass
    api: OpInfo | None  #: the API call an op is part of
    modules: list[int]  #: whose calls are open, outermost first
    worker: bool  #: one of autograd's own threads runs it
    ids: list[int]  #: the values of its inputs
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    result: Any
    raised: bool = False
    form: Form | None = None  #: of the arguments, and below of the result, where the engine has them
    result_form: Form | None = None
    result_metas: list[TensorMeta] | None = None  #: of the tensors in the result, which may be gone already
    nonfinite: bool = False  #: the native engine has found a NaN or an infinity in the result


@dataclass(slots=True)
class ObservedCall:
    """A module call that has begun, or ended; on an exception without a result."""

    module: int
    number: int
    phase: int
    depth: int  #: how many calls are open around it
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    form: int  #: the number of the form of its arguments
    result: Any = None
    raised: bool = False


@dataclass(slots=True)
class SpiedTensor:
    """A value that ``sl.spy`` was called with."""

    name: str
    value: Any
    module: Any  #: the module it belongs to, or None for the running one
    modules: list[int]  #: whose calls are open, outermost first
    phase: int


class Observer:
    """Ignores every event; methods of a `silent` one run where no mode and no autograd sees their ops."""

    silent: ClassVar = True
    ops: bool = True  #: whether it observes ops
    api: bool = True  #: whether it observes API calls
    calls: bool = True  #: whether it observes every module call

    def wants(self, event: ObservedOp) -> bool:
        """Whether it would use an op; checked first, since switching modes off costs microseconds."""
        return True

    def op(self, event: ObservedOp) -> None:
        """An op has ended."""

    def region(self, event: ObservedOp) -> None:
        """Compiled code begins, as one opaque op."""

    def enter(self, call: ObservedCall) -> None:
        """A module call begins."""

    def leave(self, call: ObservedCall) -> None:
        """A module call has ended."""

    def spied(self, spied: SpiedTensor) -> None:
        """A value was named by ``sl.spy``."""

    def step(self) -> None:
        """A step has begun or ended."""

    def finish(self) -> None:
        """The recording has stopped; the model is still there."""

    def requested(self) -> dict[str, Any]:
        """The options it was made with, as plain data: views report globs that matched nothing."""
        return {}


def _notify(observers: list[Observer], method: str, event: object) -> None:
    for one in observers:
        getattr(one, method)(event)


class Observers(Observer):
    """Several observers as one; each event ends before the recording is finished, on any thread."""

    def __init__(self, session: Session, observers: list[Observer]) -> None:
        self._session = session
        self._gate = session.events
        self._loud = [one for one in observers if not one.silent]
        self._silent = [one for one in observers if one.silent]
        self.all = observers
        self.ops = any(one.ops for one in observers)
        self.api = any(one.api for one in observers)
        self.calls = any(one.calls for one in observers)

    def op(self, event: ObservedOp) -> None:
        if not self._gate.enter():
            return
        try:
            for one in self._loud:
                one.op(event)
            interested = [] if event.raised else [one for one in self._silent if one.wants(event)]
            if interested:
                unobserved(partial(_notify, interested, "op", event))
        finally:
            self._gate.leave()

    def region(self, event: ObservedOp) -> None:
        if not self._gate.enter():
            return
        try:
            for one in self._loud:
                one.region(event)
        finally:
            self._gate.leave()

    def enter(self, call: ObservedCall) -> None:
        if not self._gate.enter():
            return
        try:
            for one in self._loud:
                one.enter(call)
            if self._silent:
                unobserved(partial(_notify, self._silent, "enter", call))
        finally:
            self._gate.leave()

    def leave(self, call: ObservedCall) -> None:
        if not self._gate.enter():
            return
        try:
            for one in self._loud:
                one.leave(call)
            if self._silent:
                unobserved(partial(_notify, self._silent, "leave", call))
        finally:
            self._gate.leave()

    def spied(self, spied: SpiedTensor) -> None:
        if not self._gate.enter():
            return
        try:
            unobserved(partial(_notify, self.all, "spied", spied))
        finally:
            self._gate.leave()

    def step(self) -> None:
        for one in self.all:
            one.step()

    def finish(self) -> None:
        """Notify each, also after one has failed."""
        for one in self.all:
            try:
                one.finish()
            except Exception as error:
                self._session.fault(error)

    def requested(self) -> dict[str, Any]:
        """The options of all."""
        return {name: options for one in self.all for name, options in one.requested().items()}


def notify_region(
    session: Session, info: OpInfo, number: int, stack: int, ids: Sequence[int] = (),
    args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, form: int | None = None,
    node: int | None = None,
) -> None:  # fmt: skip
    """Notify the observers of the opaque op of compiled code, whose results are not known.

    ``node`` is the autograd node of a backward pass, of which the arguments are not known either.
    """
    if session.observer is None:
        return
    modules, phase = session.context()
    arguments = session.arguments.forms.all[session.arguments.nothing if form is None else form]
    session.observer.region(
        ObservedOp(
            info, number, stack, phase if node is None else BACKWARD, node, None, modules, False, list(ids),
            args, kwargs, None, form=arguments, result_form=Form(()),
        )
    )  # fmt: skip


class LiveObserver(Observer):
    """Turns the events of the recorder into plain ones for a watcher."""

    silent = False

    def __init__(self, session: Session, watcher: Watcher) -> None:
        self._session = session
        self._watcher = watcher
        self._nodes: dict[int, int] = {}  # autograd node -> stack of the op that made it
        self._newest = sequence_number()
        self._frames: dict[int, SourceFrame] = {}
        self._operator = operator_names(session.stacks)
        self._regions: list[str] = []  # the names of the opaque ops so far

    def region(self, event: ObservedOp) -> None:
        self._regions.append(event.info.name)
        self.op(event)

    def finish(self) -> None:
        """The last lines: compiled code and other threads, which are not shown."""
        session = self._session
        texts = (
            compiled_note(self._regions),
            other_threads_note(session.unrecorded_calls, session.unrecorded_module),
        )
        self._watcher.finish([text for text in texts if text])

    def op(self, event: ObservedOp) -> None:
        info, stack, phase = event.info, event.stack, PHASES[event.phase]
        if stack >= len(self._session.stacks.parents):
            self._session.refresh()
        if info.backward or (event.api is not None and event.api.backward):
            phase = "backward"
        if event.node is None:
            now = sequence_number()
            if now > self._newest:  # else the op has made no node
                self._nodes[now - 1] = stack
                self._newest = now
        else:  # in a backward pass the user's code is shown at its own line, other ops at their forward op's
            frames = [(frame.file, frame.function) for frame in reversed(self._chain(stack))]
            if engine_callback_index(frames, worker=event.worker) < 0:
                stack = self._nodes.get(event.node, stack)
        level = "aten" if FLAVOURS[info.flavour] == "op" else "api"
        symbol = self._operator(stack, info.name) if level == "api" else None
        with no_torch_function():
            inputs = self._metas((event.args, event.kwargs or {}))
            outputs = self._metas(event.result) if event.result_metas is None else event.result_metas
            form, result = event.form, event.result_form
            if form is None or result is None:
                form = form_of(event.args, event.kwargs)
                result = form_of((event.result,), None) if event.result is not None else Form(())
        self._watcher.op(
            LiveOpEvent(
                name=symbol or info.name, level=level,
                flavour="operator" if symbol else FLAVOURS[info.flavour], phase=phase, form=form,
                inputs=inputs, result=result, outputs=outputs, chain=self._chain(stack),
                depth=len(event.modules), raised=event.raised,
            )
        )  # fmt: skip

    def enter(self, call: ObservedCall) -> None:
        self._watcher.enter(self._call(call))

    def leave(self, call: ObservedCall) -> None:
        self._watcher.leave(self._call(call))

    def _call(self, call: ObservedCall) -> LiveCallEvent:
        record = self._session.modules.all[call.module]
        module = record.ref()
        with no_torch_function():
            inputs = self._metas((call.args, call.kwargs or {}))
            outputs = self._metas(call.result)
            result = form_of((call.result,), None) if call.result is not None else Form(())
        kind = type(module).__name__
        return LiveCallEvent(
            path=record.path or kind, type=kind, extra=self._session.modules.extra_repr(module),
            depth=call.depth, leaf=module is not None and not any(True for _ in module.children()),
            root=not record.path, form=self._session.arguments.forms.all[call.form], inputs=inputs,
            result=result, outputs=outputs, raised=call.raised,
            library=type(module).__module__.partition(".")[0] == "torch",
        )  # fmt: skip

    def _metas(self, item: Any) -> list[TensorMeta]:
        values = self._session.values
        return [values.metas[values.describe(tensor)] for tensor in self._session.arguments.tensors(item, [])]

    def _chain(self, stack: int) -> list[SourceFrame]:
        frames = []
        while stack >= 0:
            frame = self._frames.get(stack)
            if frame is None:
                stacks = self._session.stacks
                code = stacks.codes[stacks.code_ids[stack]]
                at = list(code.co_positions())[stacks.instructions[stack] // 2]
                line = at[0] or code.co_firstlineno
                columns = (at[2], at[3]) if at[2] is not None and at[3] is not None else None
                text = linecache.getline(code.co_filename, line)
                frame = self._frames[stack] = SourceFrame(
                    cell_name(code.co_filename), line, at[1] or line, code.co_qualname, text.strip(), columns,
                    indent=indent_of(text),
                )  # fmt: skip
            frames.append(frame)
            stack = self._session.stacks.parents[stack]
        return frames[::-1]
