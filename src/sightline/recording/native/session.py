"""A recording of the native engine: C++ records, this side describes what it meets for the first time.

`NativeSession` offers what `Session` offers to everybody who reads a recording in progress. As *host* of the
C++ recording it is asked, once for each, what an operator, a code object, a form of arguments, a type, a
module or a tensor from outside is.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType, FrameType, ModuleType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch

from sightline.errors import UsageError
from sightline.recording.arguments import Arguments, Forms, form_of, has_parts
from sightline.recording.calibration import Passage
from sightline.recording.compiled import COMPILED_BACKWARD
from sightline.recording.explain import traceback_of
from sightline.recording.modules import Modules
from sightline.recording.native.api_names import ApiNames, is_torch_function
from sightline.recording.native.call_sites import may_follow
from sightline.recording.native.compiled_regions import opaque_info
from sightline.recording.native.schemas import (
    api_result_form,
    dtype_name,
    form_of_schema,
    result_form,
    split_arguments,
    traits_of,
)
from sightline.recording.observing import CallEvent, OpEvent
from sightline.recording.operations import OpInfo
from sightline.recording.session_base import STOPS_THE_RUN, SessionBase, clock
from sightline.recording.stacks import is_hidden
from sightline.recording.torchapi import (
    MODULE_CALL_CODES,
    Module,
    Parameter,
    Tensor,
    current_node,
    quiet,
)
from sightline.recording.values import ACTIVATION, EXTERNAL, INPUT, KIND, KnownTensors, metadata_of
from sightline.trace.assembly.numbers import NONE, Numbers
from sightline.trace.data import TensorMeta
from sightline.trace.forms import Form

_CONSTANT: Final = KIND["constant"]
#: How objects of a type are read by C++: positions in its ``TypeKind``.
_TENSOR, _SEQUENCE, _MAPPING, _SINGLETON, _NAMED, _PYTHON, _DEVICE = range(7)


class NoSlot(UsageError):
    """All of the native engine's recordings are running."""


class OpenModule(NamedTuple):
    """A module whose call is open."""

    module: int


class NativeStream:
    """Rows that C++ has written."""

    def __init__(self, recording: Any, name: str) -> None:
        self._recording, self._name = recording, name

        self._frozen: Numbers | None = None

    def numbers(self) -> Numbers:
        """Everything so far."""
        return self._read(take=False) if self._frozen is None else self._frozen

    def take(self) -> Numbers:
        """Everything here, which is then no longer here."""
        if self._frozen is None:
            return self._read(take=True)
        found, self._frozen = self._frozen, NONE
        return found

    @property
    def held(self) -> int:
        """How many numbers are here."""
        return len(self.numbers())

    def freeze(self) -> None:
        """Hold what there is: C++ is about to forget it."""
        self._frozen = self._read(take=True)

    def _read(self, take: bool) -> Numbers:
        return np.frombuffer(self._recording.rows(self._name, take), dtype=np.int64)


class NativeStacks:
    """The trie of frames, as far as it was read back."""

    def __init__(self) -> None:
        self.codes: list[CodeType] = []  # kept alive: C++ knows them by address
        self.parents: list[int] = []
        self.code_ids: list[int] = []
        self.instructions: list[int] = []

    def refresh(self, recording: Any) -> None:
        """Read back what is new."""
        nodes = np.frombuffer(recording.rows("stacks", False), dtype=np.int64).reshape(-1, 3)
        parents, codes, instructions = nodes[len(self.parents) :].T.tolist()
        self.parents += parents
        self.code_ids += codes
        self.instructions += instructions


class NativeValues(KnownTensors):
    """Every tensor seen in one recording: identity is kept by C++, names and metadata here."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.stream: NativeStream
        self.fresh: NativeStream
        self.refs: dict[int, Any] = {}  # none: `Arguments` then asks for every tensor
        self.metas: list[TensorMeta] = []
        self._meta_ids: dict[TensorMeta, int] = {}
        self.storage_bytes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.kinds: dict[int, int] = {}
        self._types: set[type] = set()

    def _tell_type(self, tensor: Any) -> None:
        kind = type(tensor)
        if kind not in self._types:
            self._types.add(kind)
            self.recording.type_kind(kind, _TENSOR)

    def known(self, tensor: Any) -> int | None:
        """The current value of a tensor, if it has been seen."""
        self._tell_type(tensor)
        found: int = self.recording.known(tensor)
        return None if found < 0 else found

    def value(self, tensor: Any) -> int:
        """The current value of a tensor; one never seen before is explained and added."""
        self._tell_type(tensor)
        found: int = self.recording.value(tensor)
        return found

    def first_sight(self, tensor: Any, kind: int | None = None, name: str = "") -> int:
        """A tensor that no recorded op made: say what it is."""
        if kind is None:
            return self.value(tensor)
        self._tell_type(tensor)
        with quiet():
            number: int = self.recording.add(tensor, kind, -1, -1, int(bool(tensor.requires_grad)))
            self.note(tensor, number, name)
        return number

    def note(self, tensor: Any, number: int, name: str) -> None:
        """What is kept of a tensor that was not made in the block."""
        if name:
            self.names[number] = name
        with suppress(Exception):  # no storage: sparse, functorch, some subclasses
            self.storage_bytes[number] = tensor.untyped_storage().nbytes()

    def describe(self, tensor: Any) -> int:
        """The number of the metadata of any tensor."""
        with quiet():
            return self.describe_as(metadata_of(tensor)[1])

    def describe_as(self, meta: TensorMeta) -> int:
        """The number of metadata."""
        found = self._meta_ids.get(meta)
        if found is None:
            found = self._meta_ids[meta] = len(self.metas)
            self.metas.append(meta)
        return found

    def living(self) -> list[tuple[int, Any]]:
        """Values and their tensors, of those that are still there."""
        found: list[tuple[int, Any]] = self.recording.living()
        return found

    def alive(self) -> Numbers:
        """The values of living tensors."""
        return np.frombuffer(self.recording.rows("alive", False), dtype=np.int64)

    def sharing(self, tensor: Any) -> int:
        """The newest value whose memory a tensor shows; -1 if there is none."""
        self._tell_type(tensor)
        found: int = self.recording.sharing(tensor)
        return found


class NativeSession(SessionBase):
    """The Python side of one native recording."""

    engine: ClassVar = "native"
    values: NativeValues

    def __init__(
        self,
        observer: ModuleType,
        model: Any,
        name: str,
        level: str,
        caller: FrameType | None,
        above: bool = True,
    ) -> None:
        super().__init__(name, level)
        self.native = observer
        self._ident = threading.get_ident()
        self.api_names = ApiNames(self.infos)
        self.stacks: NativeStacks = NativeStacks()
        values = self.values = NativeValues()
        self.arguments = Arguments(values, Forms())  # type: ignore[arg-type]  # it asks no more of it
        self.recording = values.recording = observer.Recording(
            self,
            level,
            self.begin,
            self.arguments.nothing,
            self.arguments.one_tensor,
            tensor_offset(observer),
            kwargs_slot(),
        )
        if self.recording is None:
            raise NoSlot(
                "The native engine makes at most 8 recordings at once: stop one, or leave engine= out, "
                "and the plain recorder makes it."
            )
        self.ops, self.calls = NativeStream(self.recording, "ops"), NativeStream(self.recording, "calls")
        values.stream, values.fresh = (NativeStream(self.recording, n) for n in ("values", "plain_values"))
        for kind in (Tensor, Parameter):
            self.recording.type_kind(kind, _TENSOR)
        self.modules = Modules(model, values)  # type: ignore[arg-type]
        self._counters: tuple[int, ...] = ()
        self._raised = -1  # the stack of the last op that raised
        self._stopping: BaseException | None = None  # an observer's, that the program has not been given
        self._caller = caller
        self._above = self.recording.stack(caller) if caller is not None and above else -1

    # -- from start to stop ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record on this thread."""
        if self.observer is not None:
            self.recording.observe(self.observer.ops, self.observer.api, True)
        self.recording.start(self._caller, self._above)
        self._caller = None

    def abandon(self) -> None:
        """It will never begin: give the slot back."""
        self.running = False
        self.recording.release()

    def halt(self) -> None:
        """Record nothing more."""
        self.running = False
        self.ended = clock()
        self.recording.halt()

    def finish(self) -> None:
        """After the stop: close what is still open, and read what must be read while the model lives."""
        self.recording.finish()
        self.label_gradients(new=False)
        self.module_infos = self.modules.infos()
        self.refresh()
        self._counters, self._raised = self.recording.counters(), self.recording.raised()
        if self._counters[4]:
            self.fault_count += self._counters[4]
            self.faults.append(f"{self._counters[4]} events of the native engine failed in C++.")

    def release(self) -> None:
        """Take over what C++ holds: it has room for few recordings, and this one may stay unread for long."""
        for stream in (self.ops, self.calls, self.values.stream, self.values.fresh):
            stream.freeze()
        self.recording.release()
        error, self._stopping = self._stopping, None
        if error is not None:
            cancel_in_thread(self._ident)
            raise error

    def refresh(self) -> None:
        """Read back the small tables that C++ keeps."""
        if not self._counters:
            self.stacks.refresh(self.recording)

    def progress(self) -> int:
        """A number that changes when anything has been written, or the recording has ended."""
        return 2 * sum(self.counters()[:3]) + (not self.running)

    def counters(self) -> tuple[int, ...]:
        """Numbers written for ops and for calls, what is open, threads, faults of C++'s own."""
        found: tuple[int, ...] = self._counters or self.recording.counters()
        return found

    @property
    def passage(self) -> Passage:
        """What torch adds to an op that is observed: a fraction of a microsecond, left in."""
        return Passage(0, 0)

    @property
    def ident(self) -> int:
        """The thread it was started on."""
        return self._ident

    def note_error(self, error: BaseException) -> None:
        """An exception is leaving the block: if it came out of an open API call, that one has raised."""
        codes = set()
        at = traceback_of(error)
        while at is not None:
            codes.add(at.tb_frame.f_code)
            at = at.tb_next
        self.recording.fail(codes)

    def raised_by(self, error: BaseException) -> bool:
        """Whether an exception came out of the last op that failed: its traceback has the op's line."""
        stack = self._raised
        if stack < 0:
            return False
        where = self.stacks.codes[self.stacks.code_ids[stack]], self.stacks.instructions[stack]
        at = traceback_of(error)
        while at is not None:
            if (at.tb_frame.f_code, at.tb_lasti) == where:
                return True
            at = at.tb_next
        return False

    @property
    def threads(self) -> int:
        """How many threads have worked for it."""
        return self.counters()[3]

    def open_rows(self, read: bool = True) -> tuple[Numbers, Numbers]:
        """Rows of the ops and calls that have begun and not ended."""
        ops, calls = self.recording.open_rows()
        return np.frombuffer(ops, dtype=np.int64), np.frombuffer(calls, dtype=np.int64)

    def next_id(self) -> int:
        """A number in the order of ops and calls."""
        found: int = self.recording.next_id()
        return found

    # -- what C++ asks ---------------------------------------------------------------------------------

    def handle_fault(self, error: BaseException) -> None:
        """Count a fault of our own; the program gets what a signal handler or an observer has for it."""
        if issubclass(type(error), STOPS_THE_RUN):
            self._stop_the_run(error)
        elif comes_from_a_signal(error):
            self.native.raise_soon(lambda: error)
        else:
            self.note_fault(error)

    def _stop_the_run(self, error: BaseException) -> None:
        """Have the thread that is recorded raise an error at the next chance; observers hear no more."""
        if self._stopping is not None:
            return
        self._stopping = error
        self.recording.observe(False, False, False)
        if not self.running:
            return
        if self._ident == threading.main_thread().ident:
            self.native.raise_soon(self._take_stopping)
        else:
            raise_in_thread(self._ident, error)

    def _take_stopping(self) -> BaseException | None:
        """The error, unless code of ours would be hit by it: then it waits for the end of the recording."""
        ours = str(sys._getframe(1).f_globals.get("__name__", "")).startswith("sightline.")
        if ours or not self.running:
            return None
        error, self._stopping = self._stopping, None
        return error

    def new_op(self, name: str, overload: str) -> tuple[int, bool, bool, int, int]:
        """An operator: its number, whether it is recorded, takes Python data, is a view; what it changes."""
        facts, mutates = traits_of(name, overload)
        info = OpInfo(facts, len(self.infos))
        self.infos.append(info)
        return info.number, not facts.noise, facts.constant, facts.aliases, mutates

    def new_code(self, code: CodeType) -> tuple[int, bool, bool]:
        """A code object: its number, whether its frames are hidden, whether it is a torch function."""
        self.stacks.codes.append(code)
        return len(self.stacks.codes) - 1, is_hidden(code), is_torch_function(code)

    def new_site(self, code: CodeType, offset: int) -> tuple[Any, ...]:
        """A place that calls torch: see C++'s ``Site``."""
        site, method, mirrored = self.api_names.site(code, offset)
        where = site.kind, site.depth, site.arguments
        spread = site.keywords, site.is_tuple, site.args_slot, site.kwargs_slot
        return *where, method, mirrored, site.names, *spread

    def new_callable(self, called: Any) -> tuple[int, bool, bool, bool]:
        """Something that was called: see C++'s ``CallableTraits``."""
        return self.api_names.callable(called)

    def new_call_by_op(self, op: int, called: Any) -> tuple[int, bool]:
        """A call that no function of torch's stands behind."""
        return self.api_names.by_op(self.infos[op], called), False

    def new_function(self, function: Any) -> tuple[int, bool, list[tuple[int, str | None, Any]]]:
        """A torch function written in Python."""
        return self.api_names.function(function)

    def may_follow(self, code: CodeType, before: int, after: int) -> bool:
        """Whether an op at one instruction can come after one at another in the same call."""
        return may_follow(code, before, after)

    def new_api_form(
        self, maker: str, number: int, given: tuple[Any, ...], names: Any, keywords: Any, read: bool
    ) -> tuple[int, list[int]]:
        """The form of an API call; with ``read`` also the values of its tensors."""
        args, kwargs = self._given(maker, number, given, names, keywords)
        ids: list[int] = []
        with quiet():
            if read:
                return self.arguments.read(self.arguments.known, args, kwargs, ids), ids
            return self.arguments.forms.add(form_of(args, kwargs)), ids

    def _given(
        self, maker: str, number: int, given: Any, names: Any, keywords: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an API call, from what C++ has found."""
        if maker == "function":  # the parameters of a torch function written in Python
            return self.api_names.bound(number, given)
        if maker == "slice":  # ``x[start:stop]``
            return (given[0], slice(*given[1:])), {}
        if maker == "op":  # unreadable: what its op was given
            return split_arguments(self.infos[number].function, given)
        kwargs = dict(keywords or {})
        if names:
            kwargs |= dict(zip(names, given[-len(names) :], strict=True))
            given = given[: -len(names)]
        return given, kwargs

    def new_api_result_form(self, op: int, values: list[Any]) -> int:
        """The form of what a function written in C returns, given what its op did."""
        return self.arguments.forms.add(api_result_form(self.infos[op].function, values))

    def new_form(self, op: int, values: list[Any]) -> int:
        """The form of an operator's arguments."""
        function = self.infos[op].function
        return self.arguments.forms.add(form_of_schema(function, values, self.native.scalar_type_name))

    def new_result_form(self, op: int, values: list[Any]) -> int:
        """The form of what an operator returned."""
        return self.arguments.forms.add(result_form(values))

    def new_call_form(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        """The form of what a Python function was given, or returned."""
        return self.arguments.forms.add(form_of(args, kwargs))

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[int, list[int]]:
        """Form and values of what C++ cannot read."""
        ids: list[int] = []
        with quiet():
            return self.arguments.read(self.arguments.known, args, kwargs, ids), ids

    def new_type(self, kind: type) -> int:
        """How C++ reads objects of a type."""
        if issubclass(kind, Tensor):
            return _TENSOR
        if kind in (list, tuple, torch.Size):
            return _SEQUENCE
        if kind is dict:
            return _MAPPING
        if kind in (torch.dtype, torch.layout, torch.memory_format, type(Ellipsis)):
            return _SINGLETON
        if kind is torch.device:
            return _DEVICE
        return _PYTHON if has_parts(kind) else _NAMED

    def plain_metadata(self, shape: Any, stride: Any, dtype: str, device: str) -> int:
        """The number of the metadata of a strided tensor."""
        name = dtype_name(dtype)
        meta = TensorMeta(shape, stride, name, device, "strided", getattr(torch, name).itemsize)
        return self.values.describe_as(meta)

    def metadata(self, tensor: Any) -> int:
        """The number of the metadata of any other tensor."""
        return self.values.describe(tensor)

    def first_sight(self, tensor: Any, number: int) -> tuple[int, int, int, int]:
        """A tensor that no recorded op made: kind, producer, base, flags."""
        with quiet():
            kind, name, producer = self.explain(tensor)
            base = -1
            if kind in (EXTERNAL, INPUT):
                base = self.values.inside(tensor)
                kind = kind if base < 0 else ACTIVATION
            self.values.note(tensor, number, name)
            return kind, producer, base, int(bool(tensor.requires_grad))

    def compiled_backward(self) -> int:
        """The operation that stands for a compiled backward pass."""
        return opaque_info(self, COMPILED_BACKWARD)

    def made_region(self, op: int) -> None:
        """An opaque op was written whose outputs are not known."""
        self.regions.append(op)

    def module(self, module: Any) -> int:
        """The number of a module that is called."""
        known = self.modules.by_id.get(id(module))
        if known is None or known.ref() is not module:
            known = self.modules.place(module, self._open_modules())  # type: ignore[arg-type]
        return known.number

    def _open_modules(self) -> list[OpenModule]:
        return [OpenModule(number) for number in self.where()[0]]

    # -- observers -------------------------------------------------------------------------------------

    def where(self) -> tuple[list[int], int]:
        """The modules whose calls are open on this thread, outermost first, and the phase."""
        found: tuple[list[int], int] = self.recording.where()
        return found

    def op_ended(
        self, info: int, number: int, stack: int, node: int, phase: int, api: int, worker: int,
        ids: list[int], values: list[Any], results: list[Any], form: int, result_form: int, raised: int,
    ) -> None:  # fmt: skip
        """An op has ended, and observers are to be told."""
        known = self.infos[info]
        args, kwargs = split_arguments(known.function, values)
        result = results[0] if len(results) == 1 else tuple(results) if results else None
        self.observer.op(
            OpEvent(
                known, number, stack, phase, None if node == -1 else node,
                None if api < 0 else self.infos[api], self.where()[0], bool(worker), ids, args, kwargs,
                result, bool(raised), *self._forms(form, result_form),
            )
        )  # fmt: skip

    def api_call_ended(
        self, info: int, number: int, stack: int, phase: int, worker: int, ids: list[int],
        given: tuple[str, int, Any, Any, Any], results: list[Any], form: int, result_form: int, raised: int,
    ) -> None:  # fmt: skip
        """An API call has ended, and observers are to be told."""
        args, kwargs = self._given(*given)
        result = results[0] if len(results) == 1 else results or None
        self.observer.op(
            OpEvent(
                self.infos[info], number, stack, phase, None, None, self.where()[0], bool(worker), ids, args,
                kwargs, result, bool(raised), *self._forms(form, result_form),
            )
        )  # fmt: skip

    def _forms(self, *numbers: int) -> list[Form]:
        """Forms by their numbers; of one tensor where there is none."""
        return [self.arguments.forms.all[self.arguments.one_tensor if n < 0 else n] for n in numbers]

    def module_entered(
        self, module: int, number: int, phase: int, depth: int, form: int, args: Any, kwargs: Any
    ) -> None:
        """A module call has begun, and observers are to be told."""
        self.observer.enter(CallEvent(module, number, phase, depth, args, kwargs, form))

    def module_left(
        self, module: int, number: int, phase: int, depth: int, form: int, args: Any, kwargs: Any,
        result: Any, raised: int,
    ) -> None:  # fmt: skip
        """A module call has ended, and observers are to be told."""
        self.observer.leave(CallEvent(module, number, phase, depth, args, kwargs, form, result, bool(raised)))

    # -- what a tensor is that no recorded op made -----------------------------------------------------

    def explain(self, tensor: Any) -> tuple[int, str, int]:
        """Kind, name and producer of a tensor seen for the first time."""
        named = self.modules.tensor_name(tensor)
        if named is not None:
            return KIND[named[0]], named[1], -1
        calls = self._open_modules()
        if self.level == "none":  # the ops between modules were not watched
            return (ACTIVATION if calls else INPUT), "", -1
        if self.regions:
            return ACTIVATION, "", self.regions[-1]
        if not calls:
            return INPUT, "", -1
        name = self.modules.attribute_name(tensor, calls) or _variable_name(tensor)  # type: ignore[arg-type]
        if name:
            return _CONSTANT, name, -1
        if self.level == "api":  # what runs in a backward pass shows only as the modules it calls
            return (EXTERNAL if current_node() is None else ACTIVATION), "", -1
        # Every op is seen, so a scalar that none has made is one of torch's own (of a scripted function).
        return (_CONSTANT if tensor.dim() == 0 and not tensor.requires_grad else EXTERNAL), "", -1


def _variable_name(tensor: Any) -> str:
    """The global or enclosing variable under which the running functions know a tensor, or nothing."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at.f_code not in MODULE_CALL_CODES:
        if not is_hidden(at.f_code):
            held: Mapping[str, Any] = at.f_locals
            free = {name: held[name] for name in at.f_code.co_freevars if name in held}
            for name, value in (*free.items(), *at.f_globals.items()):
                if value is tensor:
                    return str(name)
        at = at.f_back
    return ""


def tensor_offset(observer: ModuleType) -> int:
    """How many bytes into a Python tensor its C++ one is."""
    probe = torch.empty(0)
    for offset in (observer.OBJECT_HEAD, observer.OBJECT_HEAD + 8):
        if observer.address_at(probe, offset) == probe._cdata:
            return int(offset)
    raise RuntimeError("a Python tensor does not hold its C++ one where it is expected")


def kwargs_slot() -> int:
    """Where the frame that calls a module's hooks keeps the keyword arguments of the call."""
    inner = next(code for code in Module._call_impl.__code__.co_consts if isinstance(code, CodeType))
    return len(inner.co_varnames) + len(inner.co_cellvars) + inner.co_freevars.index("kwargs")


def comes_from_a_signal(error: BaseException) -> bool:
    """Whether a signal handler has raised it, which ran while Python was asked something."""
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()} - {None}
    at = traceback_of(error) if handlers else None
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def raise_in_thread(ident: int, error: BaseException) -> None:
    """Have a thread that is not the main one raise an exception as soon as it runs Python."""

    def again(self: BaseException) -> None:
        self.args = error.args

    # Python takes only a class, and makes the exception itself.
    members = {"__init__": again, "__module__": type(error).__module__}
    kind = type(type(error).__name__, (type(error),), members)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def cancel_in_thread(ident: int) -> None:
    """Take back what a thread is to raise and has not."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)
