"""The names of the torch functions, methods and operators of the calls that C++ has seen."""

from __future__ import annotations

import dis
import operator
import os
import sys
from functools import cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final

import torch

from sightline.recording.native.call_sites import Site, bind_arguments, default_of, parameters_of, site_at
from sightline.recording.operations import PROPERTY, TENSOR_PROPERTIES, OpInfo, OpTraits, add_info, api_traits
from sightline.recording.torchapi import VARIABLE_FUNCTIONS, Tensor

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
#: Calls of these run several ops, one after the other.
_SEVERAL: Final = frozenset(
    """tensor as_tensor asarray new_tensor sparse_coo_tensor __getitem__ __setitem__ type tolist from_numpy
    numpy sparse_csr_tensor sparse_compressed_tensor Tensor _nested_tensor_from_tensor_list""".split()
)
#: Calls of these are the method's: function -> method.
_ITEMS: Final[dict[Any, str]] = {
    operator.getitem: "__getitem__", operator.setitem: "__setitem__",
    Tensor.__getitem__: "__getitem__", Tensor.__setitem__: "__setitem__",
}  # fmt: skip
#: Builtins that call a method of a tensor: builtin -> method.
_IMPLICIT: Final = {float: "__float__", int: "__int__", bool: "__bool__", complex: "__complex__"}
#: Ops that run without any callable: ``if x:``, ``list[x]``.
_IMPLICIT_OPS: Final = {"is_nonzero": "__bool__", "item": "__index__", "_local_scalar_dense": "__index__"}
_NO_CALLS: Final = ("ScriptFunction", "ScriptMethod", "FunctionMeta")
#: Functions that ask whether a call is overridden, and leave that to others.
_ONLY_ASK: Final = frozenset(
    {"has_torch_function", "_has_torch_function", "_peek_should_skip_torch_function"}
)


def is_torch_function(code: CodeType) -> bool:
    """Whether a code is of a torch function that counts as one API call: one that can be overridden."""
    return (
        any(map(_hands_over, code.co_names))
        and code.co_filename.startswith(_TORCH)
        and code.co_name != "__torch_function__"
    )


def _hands_over(name: str) -> bool:
    """Whether a function of torch's of this name lets others override the function that calls it."""
    return name.endswith("_torch_function") and name not in _ONLY_ASK


def calls_engine(code: CodeType) -> bool:
    """Whether a code is torch's function that calls autograd's engine."""
    return code.co_name == "_engine_run_backward" and code.co_filename.startswith(_TORCH)


def _public(function: Any) -> Any:
    """The function that others may override, which ``handle_torch_function`` is given.

    ``F.max_pool2d`` runs ``F._max_pool2d``, ``torch.unique`` runs ``torch.functional._return_output``.
    """
    instructions = iter(dis.get_instructions(function.__code__))
    names = (one.argval for one in instructions if one.opname == "LOAD_GLOBAL")
    name = next(filter(_hands_over, names), "")
    if name != "handle_torch_function":
        other = function.__globals__.get(name)
        return _public(other) if isinstance(other, FunctionType) else function
    first = next(instructions)
    public = function.__globals__.get(first.argval)
    for one in instructions:
        if one.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        public = getattr(public, one.argval, None)
    return public if callable(public) else function


@cache
def _method_traits(name: str) -> OpTraits | None:
    """The traits of a tensor method, or with ``@T`` of a property; None if tensors have none."""
    if not name.startswith("@"):
        function = getattr(Tensor, name, None)
        return None if function is None else api_traits(function)
    if name[1:] not in TENSOR_PROPERTIES:
        return None
    traits = OpTraits(name)
    traits.name, traits.flavour = f"Tensor.{name[1:]}", PROPERTY
    return traits


def _is_helper(called: Any) -> bool:
    """Whether it is C++ that may call operators and cannot be overridden: a function of an extension.

    ``Tensor._make_subclass`` detaches its tensor, the reducer of DistributedDataParallel makes its buckets.
    """
    if isinstance(called, type):
        return issubclass(called, Tensor) or type(called).__name__ in ("pybind11_type", "tensortype")
    if isinstance(called, MethodDescriptorType):
        home = called.__objclass__
        return home.__module__.startswith("torch") and not issubclass(Tensor, home)
    if not isinstance(called, BuiltinFunctionType):
        return False
    owner = called.__self__
    if owner is None:
        return called.__qualname__.startswith(("TensorBase.", "_TensorBase."))
    kinds = type(owner).__mro__
    if any(kind.__name__ == "PyCapsule" or kind.__module__ == "pybind11_builtins" for kind in kinds):
        return not _is_operator(called)
    return not isinstance(owner, Tensor) and any(kind.__module__.startswith("torch") for kind in kinds)


def _is_operator(called: Any) -> bool:
    """Whether `torch.ops` calls it: an operator, or without a name one of its overloads."""
    return isinstance(called, BuiltinFunctionType) and (called.__module__ or "").startswith("torch._ops.")


class ApiNames:
    """The API calls of one recording, by their callables."""

    def __init__(self, infos: list[OpInfo]) -> None:
        self._infos = infos
        self._numbers: dict[str, int] = {}
        self._names: dict[int, list[str]] = {}  # of the parameters of Python functions
        self._kept_alive: list[Any] = []  # C++ refers to these by address

    def of(self, function: Any) -> int:
        """The number of a function or method; -1 for one that makes no tensor and runs no op."""
        return self._of_traits(api_traits(function))

    def _of_traits(self, traits: OpTraits) -> int:
        if traits.noise:
            return -1
        number = self._numbers.get(traits.name)
        if number is None:
            number = self._numbers[traits.name] = add_info(self._infos, traits).number
        return number

    def method(self, name: str) -> int:
        """The number of a tensor method, or ``@T`` for a property; -1 if tensors have none."""
        traits = _method_traits(name) if name else None
        return -1 if traits is None else self._of_traits(traits)

    def site(self, code: CodeType, offset: int) -> tuple[Site, int, int]:
        """An instruction, and the numbers of the methods its operator may call."""
        site = site_at(code, offset)
        self._kept_alive.append(site.names)
        return site, self.method(site.method), self.method(site.mirrored)

    def callable(self, called: Any) -> tuple[int, bool, bool, bool, bool]:
        """A callable: see C++'s ``CallableTraits``."""
        name = getattr(called, "__name__", "")
        if isinstance(called, (BuiltinFunctionType, WrapperDescriptorType)) and called in _ITEMS:
            return self.method(_ITEMS[called]), True, False, False, True
        if _is_helper(called) or type(called).__name__ in _NO_CALLS:
            return -1, False, False, False, False
        owner = getattr(called, "__self__", None)
        if isinstance(called, MethodDescriptorType) and issubclass(Tensor, called.__objclass__):
            return self.of(called), name in _SEVERAL, False, False, False
        if isinstance(called, BuiltinFunctionType):
            if type(owner).__name__ in _NO_CALLS:
                return -1, False, False, False, False
            if isinstance(owner, Tensor):  # a bound method would keep the tensor alive
                return self.of(getattr(Tensor, name, called)), name in _SEVERAL, False, False, False
            module = isinstance(owner, ModuleType) and owner.__name__.startswith("torch")
            static = owner is None and getattr(VARIABLE_FUNCTIONS, name, None) == called
            if module or static:
                return self.of(called), name in _SEVERAL, False, False, False
        return -1, False, True, type(called) is partial, False

    def by_op(self, op: OpInfo, called: Any) -> int:
        """The number of a call that only its op names: ``float(x)``, ``if x:``, ``torch.ops.aten.add(x)``."""
        if _is_operator(called):
            packet = getattr(op.function, "overloadpacket", None)
            return self.of(packet if called.__name__ and packet is not None else op.function)
        base = op.name.partition(".")[0]
        implicit = _IMPLICIT.get(called) if isinstance(called, type) else None
        if implicit is None:
            implicit = _IMPLICIT_OPS.get(base)
        for name in (implicit, base):
            if name is not None and hasattr(Tensor, name):
                return self.method(name)
        for home in (torch, torch.nn.functional):
            function = getattr(home, base, None)
            if function is not None:
                return self.of(function)
        return -1

    def function(self, function: Any) -> tuple[int, bool, list[tuple[int, str | None, Any]]]:
        """A torch function written in Python: its number, whether it runs a backward pass, its parameters.

        Of each parameter the slot in its frame, and the name and default of one that may have been rebound.
        """
        self._kept_alive.append(function)
        if not isinstance(function, FunctionType):
            return -1, False, []
        number = self.of(_public(function))
        parameters = parameters_of(function)
        order = -1 if number >= 0 and self._infos[number].mirrored else 1  # as the user wrote them
        self._names[number] = parameters.names[::order]
        described: list[tuple[int, str | None, Any]] = []
        for slot, rebound in zip(parameters.slots, parameters.rebound, strict=True):
            plain = slot < function.__code__.co_argcount + function.__code__.co_kwonlyargcount
            default = default_of(function, slot) if rebound and plain else Ellipsis
            name = sys.intern(function.__code__.co_varnames[slot]) if rebound and plain else None
            self._kept_alive.append((name, default))
            described.append((slot, name, default))
        return number, self._infos[number].backward, described[::order]

    def bind_arguments(self, number: int, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of such a function, from the values of its parameters."""
        args, kwargs = bind_arguments(self._names[number], values)
        # Before torch 2.10 a reflected operator takes its operands as ``*args``, in the order of the call.
        if self._infos[number].mirrored and "*" in self._names[number] and not isinstance(args[1], Tensor):
            args = args[::-1]
        return args, kwargs
