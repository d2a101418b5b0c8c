"""The callbacks of C++ into Python: they describe things that are new to it, and notify observers.

C++ calls one once for each operator, code object, form of arguments, type, module and tensor from outside,
and refers to it by number from then on. Nothing that is active on the thread sees these callbacks work, as
in `torchapi.unobserved`.
"""

from __future__ import annotations

from types import CodeType, ModuleType
from typing import Any, Final

import torch

from sightline.data.forms import Form
from sightline.data.trace_data import TensorMeta
from sightline.recording.arguments import form_of, has_parts
from sightline.recording.atomic import append_numbered
from sightline.recording.compilations import COMPILED_BACKWARD
from sightline.recording.native.api_names import ApiNames, calls_engine, is_torch_function
from sightline.recording.native.buffers import (
    DEVICE,
    MAPPING,
    NAMED,
    PYTHON,
    SEQUENCE,
    SINGLETON,
    TENSOR,
    NativeStacks,
    NativeStream,
    NativeValues,
)
from sightline.recording.native.call_sites import may_follow
from sightline.recording.native.compiled_regions import opaque_info
from sightline.recording.native.measurements import NativeDeviceStatistics
from sightline.recording.native.schema_forms import (
    api_result_form,
    dtype_name,
    form_of_schema,
    result_form,
    split_arguments,
    traits_of,
)
from sightline.recording.observers import ObservedCall, ObservedOp, notify_region
from sightline.recording.operations import add_info, without_end
from sightline.recording.session import Session
from sightline.recording.stacks import is_hidden
from sightline.recording.tensor_registry import ACTIVATION, EXTERNAL, INPUT
from sightline.recording.torchapi import Tensor

#: Caches over all recordings: the next one meets most of it again.
_forms: Final[dict[tuple[int, int], Form]] = {}  # by operator, which `aten_traits` keeps alive, and key
_api_forms: Final[dict[tuple[str, str, int], Form]] = {}  # by reader, function and key
_types: Final[set[type]] = set()  # kept alive: their addresses are part of keys
_metadata: Final[dict[tuple[Any, ...], TensorMeta]] = {}
_CACHE_SIZE: Final = 20_000


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Cache a description for the next recording."""
    if len(table) >= _CACHE_SIZE:
        table.clear()
    table[key] = value


class CallbackSession(Session):
    """The session as C++ sees it: every method here but the last helpers is called from C++."""

    native: ModuleType
    recording: Any  #: the C++ side
    api_names: ApiNames
    stacks: NativeStacks
    values: NativeValues
    ops: NativeStream
    calls: NativeStream
    memory: NativeStream

    def new_op(self, name: str, overload: str) -> tuple[Any, ...]:
        """An operator: its number, whether it is recorded, takes Python data, is a view; changed arguments.

        The rest is for measuring its results: see C++'s ``Measured``.
        """
        traits, mutates = traits_of(name, overload)
        info = add_info(self.infos, traits)
        selected = self.statistics is None or self.statistics.selects_op(info)
        measured = traits.uninitialized, traits.relabels, traits.keeps_order, traits.maybe, traits.preserves
        return info.number, not traits.noise, traits.constant, traits.aliases, mutates, selected, *measured

    def new_code(self, code: CodeType) -> tuple[int, bool, bool, bool]:
        """A code object: see C++'s ``CodeTraits``."""
        number = append_numbered(self.stacks.codes, code)
        return number, is_hidden(code), is_torch_function(code), calls_engine(code)

    def new_site(self, code: CodeType, offset: int) -> tuple[Any, ...]:
        """An instruction that calls torch: see C++'s ``Site``."""
        site, method, mirrored = self.api_names.site(code, offset)
        where = site.kind, site.depth, site.arguments
        spread = site.keywords, site.is_tuple, site.args_slot, site.kwargs_slot
        return *where, method, mirrored, site.names, *spread, site.truth

    def new_callable(self, called: Any) -> tuple[int, bool, bool, bool, bool]:
        """A callable: see C++'s ``CallableTraits``."""
        return self.api_names.callable(called)

    def new_call_by_op(self, op: int, called: Any) -> tuple[int, bool]:
        """A call that is no function of torch, such as ``float(x)``; only the op identifies it."""
        return self.api_names.by_op(self.infos[op], called), False

    def new_function(self, function: Any) -> tuple[int, bool, list[tuple[int, str | None, Any]]]:
        """A torch function written in Python."""
        return self.api_names.function(function)

    def may_follow(self, code: CodeType, before: int, after: int) -> bool:
        """Whether an op at one instruction can come after one at another in the same call."""
        return may_follow(code, before, after)

    def new_api_form(
        self, maker: str, number: int, key: int, values: tuple[Any, ...], names: Any, keywords: Any
    ) -> tuple[int, list[int]]:
        """The form of an API call; those of one function with equal keys are equal.

        Without a key, C++ could not read the arguments: the values of their tensors are returned too.
        """
        ids: list[int] = []
        cache_key = maker, self.infos[number].name, key
        form = _api_forms.get(cache_key) if key else None
        if form is None:
            args, kwargs = self._call_arguments(maker, number, values, names, keywords)
            if not key:
                return self.arguments.read(self.arguments.form_numbers, args, kwargs, ids), ids
            form = form_of(args, kwargs)
            _remember(_api_forms, cache_key, form)
        return self.arguments.forms.add(form), ids

    def _call_arguments(
        self, maker: str, number: int, values: Any, names: Any, keywords: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an API call, from the operands that C++ has read."""
        if maker == "function":  # the parameters of a torch function written in Python
            return self.api_names.bind_arguments(number, values)
        if maker == "slice":  # ``x[start:stop]``, ``x[start:stop] = value``
            return (values[0], slice(*values[1:3]), *values[3:]), {}
        if maker == "op":  # unreadable: the arguments of its op
            return split_arguments(self.infos[number].function, values)
        kwargs = dict(keywords or {})
        if names:
            kwargs |= dict(zip(names, values[-len(names) :], strict=True))
            values = values[: -len(names)]
        return values, kwargs

    def new_api_result_form(self, op: int, values: list[Any]) -> int:
        """The form of the result of a function written in C, from the results of its op."""
        return self.arguments.forms.add(api_result_form(self.infos[op].function, values))

    def new_form(self, op: int, key: int, values: list[Any]) -> int:
        """The form of an operator's arguments; those of one operator with equal keys are equal."""
        function = self.infos[op].function
        form = _forms.get((id(function), key)) if key else None
        if form is None:
            if self.infos[op].slices:
                values = list(without_end(tuple(values)))
            form = form_of_schema(function, values, self.native.scalar_type_name)
            if key:
                _remember(_forms, (id(function), key), form)
        return self.arguments.forms.add(form)

    def new_result_form(self, op: int, values: list[Any]) -> int:
        """The form of the results of an operator."""
        return self.arguments.forms.add(result_form(values))

    def new_call_form(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        """The form of the arguments, or of the result, of a module call."""
        return self.arguments.forms.add(form_of(args, kwargs))

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[int, list[int]]:
        """Form and values of arguments that C++ cannot read."""
        ids: list[int] = []
        return self.arguments.read(self.arguments.form_numbers, args, kwargs, ids), ids

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

    def explain_tensor(self, tensor: Any, number: int, nbytes: int) -> tuple[int, int, int, int]:
        """Kind, producer, base and flags of a tensor that no recorded op made, with so many bytes."""
        kind, name, producer = self.explain(tensor)
        base = -1
        if kind in (EXTERNAL, INPUT):
            base = self.values.find_base(tensor)
            kind = kind if base < 0 else ACTIVATION
        self.values.note(number, name, nbytes)
        return kind, producer, base, int(bool(tensor.requires_grad))

    def compiled_backward(self) -> int:
        """The number of the opaque operation of compiled backward passes."""
        return opaque_info(self, COMPILED_BACKWARD)

    def note_region(self, op: int, info: int, stack: int, node: int) -> None:
        """The opaque op of a compiled backward pass was written, whose outputs are not known yet."""
        self.regions.append(op)
        notify_region(self, self.infos[info], op, stack, node=node)

    def module(self, module: Any) -> int:
        """The number of a module that is called."""
        number = self.modules.record_of(module, self.context).number
        if (
            self.statistics is not None
            and self.statistics.selects_modules
            and self.statistics.selects_module(number)
        ):
            self.recording.choose_module(number)
        return number

    # -- observers -------------------------------------------------------------------------------------

    def context(self) -> tuple[list[int], int]:
        context: tuple[list[int], int] = self.recording.context()
        return context

    def op_ended(
        self, info: int, number: int, stack: int, node: int, phase: int, api: int, worker: int,
        ids: list[int], values: list[Any], results: list[Any], form: int, result_form: int, raised: int,
        nonfinite: int,
    ) -> None:  # fmt: skip
        """An op has ended: notify the observers."""
        assert self.observer is not None
        traits = self.infos[info]
        args, kwargs = split_arguments(traits.function, values)
        result = results[0] if len(results) == 1 else tuple(results) if results else None
        self.observer.op(
            ObservedOp(
                traits, number, stack, phase, None if node == -1 else node,
                None if api < 0 else self.infos[api], self.context()[0], bool(worker), ids, args, kwargs,
                result, bool(raised), *self._forms(form, result_form), nonfinite=bool(nonfinite),
            )
        )  # fmt: skip

    def measure_on_device(self, value: int, tensor: Any) -> None:
        """Measure the result of an op on a device that C++ has no kernel for."""
        self._device_statistics.add(value, tensor)

    def prepare_device(self, device: int, stream: int, scalar_type: int, many: int, size: int) -> None:
        """Make the table, weights and kernel that C++ needs for a dtype on a device."""
        self._device_statistics.prepare(device, stream, scalar_type, bool(many), size)

    @property
    def _device_statistics(self) -> NativeDeviceStatistics:
        source = self.statistics_source
        statistics = None if source is None else source.device_statistics
        assert isinstance(statistics, NativeDeviceStatistics)
        return statistics

    def api_call_ended(
        self, info: int, number: int, stack: int, phase: int, worker: int, ids: list[int],
        call: tuple[str, int, Any, Any, Any], results: list[Any], metadata: list[int], form: int,
        result_form: int, raised: int,
    ) -> None:  # fmt: skip
        """An API call has ended: notify the observers."""
        assert self.observer is not None
        args, kwargs = self._call_arguments(*call)
        result = results[0] if len(results) == 1 else results or None
        self.observer.op(
            ObservedOp(
                self.infos[info], number, stack, phase, None, None, self.context()[0], bool(worker), ids,
                args, kwargs, result, bool(raised), *self._forms(form, result_form),
                result_metas=[self.values.metas[one] for one in metadata],
            )
        )  # fmt: skip

    def _forms(self, arguments: int, result: int) -> tuple[Form, Form]:
        """Two forms by their numbers; -1 is the form of one tensor."""
        forms, one = self.arguments.forms.all, self.arguments.one_tensor
        return forms[one if arguments < 0 else arguments], forms[one if result < 0 else result]

    def module_entered(
        self, module: int, number: int, phase: int, depth: int, form: int, args: Any, kwargs: Any
    ) -> None:
        """A module call has begun: notify the observers."""
        assert self.observer is not None
        self.observer.enter(ObservedCall(module, number, phase, depth, args, kwargs, form))

    def module_left(
        self, module: int, number: int, phase: int, depth: int, form: int, args: Any, kwargs: Any,
        result: Any, raised: int,
    ) -> None:  # fmt: skip
        """A module call has ended: notify the observers."""
        assert self.observer is not None
        self.observer.leave(
            ObservedCall(module, number, phase, depth, args, kwargs, form, result, bool(raised))
        )
