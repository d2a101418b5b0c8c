"""What C++ asks of Python, once for each thing it meets, and what it tells observers.

An operator, a code object, a form of arguments, a type, a module, a tensor from outside: C++ knows each by a
number afterwards, and asks no more.
"""

from __future__ import annotations

from types import CodeType, ModuleType
from typing import Any, Final

import torch

from sightline.recording.arguments import form_of, has_parts
from sightline.recording.compiled_code import COMPILED_BACKWARD
from sightline.recording.native.api_names import ApiNames, is_torch_function
from sightline.recording.native.buffers import (
    DEVICE,
    MAPPING,
    NAMED,
    PYTHON,
    SEQUENCE,
    SINGLETON,
    TENSOR,
    NativeStacks,
    NativeValues,
)
from sightline.recording.native.call_sites import may_follow
from sightline.recording.native.compiled_regions import opaque_info
from sightline.recording.native.schema_forms import (
    api_result_form,
    dtype_name,
    form_of_schema,
    result_form,
    split_arguments,
    traits_of,
)
from sightline.recording.observers import ObservedCall, ObservedOp
from sightline.recording.operations import OpInfo, without_end
from sightline.recording.session_base import SessionBase
from sightline.recording.stacks import is_hidden
from sightline.recording.torchapi import Tensor, below_autograd, no_dispatch, quiet
from sightline.recording.values import ACTIVATION, EXTERNAL, INPUT, KIND
from sightline.trace.data import TensorMeta
from sightline.trace.forms import Form

_CONSTANT: Final = KIND["constant"]


#: What was described in earlier recordings: most of it comes again.
_forms: Final[dict[tuple[int, int], Form]] = {}  # by operator: `aten_facts` keeps them alive
_api_forms: Final[dict[tuple[str, str, int], Form]] = {}  # by how it was read, and function
_types: Final[set[type]] = set()  # whose addresses are part of keys
_metadata: Final[dict[tuple[Any, ...], TensorMeta]] = {}
_MOST_REMEMBERED: Final = 20_000


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a description for the next recording."""
    if len(table) >= _MOST_REMEMBERED:
        table.clear()
    table[key] = value


class Host(SessionBase):
    """Answers C++."""

    native: ModuleType
    recording: Any  #: the C++ side
    api_names: ApiNames
    stacks: NativeStacks
    values: NativeValues

    def new_op(self, name: str, overload: str) -> tuple[Any, ...]:
        """An operator: its number, whether it is recorded, takes Python data, is a view; what it changes.

        The rest is for those who measure its results: see C++'s ``Measured``.
        """
        facts, mutates = traits_of(name, overload)
        info = OpInfo(facts, len(self.infos))
        self.infos.append(info)
        chosen = self.measurer is None or self.measurer.chooses_op(info)
        measured = facts.uninitialized, facts.relabels, facts.keeps_order, facts.maybe, facts.preserves
        return info.number, not facts.noise, facts.constant, facts.aliases, mutates, chosen, *measured

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
        self, maker: str, number: int, key: int, given: tuple[Any, ...], names: Any, keywords: Any
    ) -> tuple[int, list[int]]:
        """The form of an API call; those of one function with equal keys are equal.

        Without a key C++ could not read what it was given, and is told the values of its tensors.
        """
        ids: list[int] = []
        known = maker, self.infos[number].name, key
        found = _api_forms.get(known) if key else None
        if found is None:
            args, kwargs = self._given(maker, number, given, names, keywords)
            with quiet():
                if not key:
                    return self.arguments.read(self.arguments.known, args, kwargs, ids), ids
                found = form_of(args, kwargs)
            _remember(_api_forms, known, found)
        return self.arguments.forms.add(found), ids

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

    def new_form(self, op: int, key: int, values: list[Any]) -> int:
        """The form of an operator's arguments; those of one operator with equal keys are equal."""
        function = self.infos[op].function
        found = _forms.get((id(function), key)) if key else None
        if found is None:
            if self.infos[op].slices:
                values = list(without_end(tuple(values)))
            found = form_of_schema(function, values, self.native.scalar_type_name)
            if key:
                _remember(_forms, (id(function), key), found)
        return self.arguments.forms.add(found)

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
        _types.add(kind)
        if issubclass(kind, Tensor):
            return TENSOR
        if kind in (list, tuple, torch.Size):
            return SEQUENCE
        if kind is dict:
            return MAPPING
        if kind in (torch.dtype, torch.layout, torch.memory_format, type(Ellipsis)):
            return SINGLETON
        if kind is torch.device:
            return DEVICE
        return PYTHON if has_parts(kind) else NAMED

    def plain_metadata(self, shape: Any, stride: Any, dtype: str, device: str) -> int:
        """The number of the metadata of a strided tensor."""
        key = shape, stride, dtype, device
        meta = _metadata.get(key)
        if meta is None:
            name = dtype_name(dtype)
            meta = TensorMeta(shape, stride, name, device, "strided", getattr(torch, name).itemsize)
            _remember(_metadata, key, meta)
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
        number = self.modules.of(module, self.where).number
        if self.measurer is not None and self.measurer.some_modules and self.measurer.chooses_module(number):
            self.recording.choose_module(number)
        return number

    # -- observers -------------------------------------------------------------------------------------

    def where(self) -> tuple[list[int], int]:
        """The modules whose calls are open on this thread, outermost first, and the phase."""
        found: tuple[list[int], int] = self.recording.where()
        return found

    def op_ended(
        self, info: int, number: int, stack: int, node: int, phase: int, api: int, worker: int,
        ids: list[int], values: list[Any], results: list[Any], form: int, result_form: int, raised: int,
        odd: int,
    ) -> None:  # fmt: skip
        """An op has ended, and observers are to be told."""
        known = self.infos[info]
        args, kwargs = split_arguments(known.function, values)
        result = results[0] if len(results) == 1 else tuple(results) if results else None
        self.observer.op(
            ObservedOp(
                known, number, stack, phase, None if node == -1 else node,
                None if api < 0 else self.infos[api], self.where()[0], bool(worker), ids, args, kwargs,
                result, bool(raised), *self._forms(form, result_form), odd=bool(odd),
            )
        )  # fmt: skip

    def measure_on_device(self, value: int, tensor: Any) -> None:
        """The result of an op on a device, nothing for the kernels that C++ launches."""
        with quiet(), no_dispatch(), below_autograd():
            self.readings.deferred.add(value, tensor)

    def prepare_device(self, device: int, stream: int, scalar_type: int, many: int, size: int) -> None:
        """What C++ needs to measure tensors of a dtype on a device."""
        with quiet(), no_dispatch(), below_autograd():
            self.readings.deferred.prepare(device, stream, scalar_type, bool(many), size)

    def api_call_ended(
        self, info: int, number: int, stack: int, phase: int, worker: int, ids: list[int],
        given: tuple[str, int, Any, Any, Any], results: list[Any], form: int, result_form: int, raised: int,
    ) -> None:  # fmt: skip
        """An API call has ended, and observers are to be told."""
        args, kwargs = self._given(*given)
        result = results[0] if len(results) == 1 else results or None
        self.observer.op(
            ObservedOp(
                self.infos[info], number, stack, phase, None, None, self.where()[0], bool(worker), ids, args,
                kwargs, result, bool(raised), *self._forms(form, result_form),
            )
        )  # fmt: skip

    def _forms(self, given: int, result: int) -> tuple[Form, Form]:
        """Forms by their numbers; of one tensor where there is none."""
        forms, one = self.arguments.forms.all, self.arguments.one_tensor
        return forms[one if given < 0 else given], forms[one if result < 0 else result]

    def module_entered(
        self, module: int, number: int, phase: int, depth: int, form: int, args: Any, kwargs: Any
    ) -> None:
        """A module call has begun, and observers are to be told."""
        self.observer.enter(ObservedCall(module, number, phase, depth, args, kwargs, form))

    def module_left(
        self, module: int, number: int, phase: int, depth: int, form: int, args: Any, kwargs: Any,
        result: Any, raised: int,
    ) -> None:  # fmt: skip
        """A module call has ended, and observers are to be told."""
        self.observer.leave(
            ObservedCall(module, number, phase, depth, args, kwargs, form, result, bool(raised))
        )
