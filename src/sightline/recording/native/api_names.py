"""What the user called: names of torch functions, methods and operators, for the C++ side that found the call."""

from __future__ import annotations

import os
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, Final

import torch

from sightline.recording.native.call_sites import Site, bound, parameters_of, site_at
from sightline.recording.operations import Facts, OpInfo, PROPERTY, TENSOR_PROPERTIES, api_facts
from sightline.recording.torchapi import OpOverload, Tensor

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
#: Calls of these run several ops, one after the other.
_SEVERAL: Final = frozenset(
    """tensor as_tensor asarray new_tensor sparse_coo_tensor __getitem__ __setitem__ type tolist from_numpy
    sparse_csr_tensor sparse_compressed_tensor Tensor""".split()
)
#: What Python asks of a tensor without a call of torch's: builtin -> the method it comes to.
_IMPLICIT: Final = {float: "__float__", int: "__int__", bool: "__bool__", complex: "__complex__"}
#: And what runs when no callable is there at all: ``if x:``, ``list[x]``.
_IMPLICIT_OPS: Final = {"is_nonzero": "__bool__", "item": "__index__", "_local_scalar_dense": "__index__"}
_NO_CALLS: Final = ("ScriptFunction", "ScriptMethod", "FunctionMeta")
_OVERLOAD_CALLS: Final = {OpOverload.__call__.__code__, torch._ops.OpOverloadPacket.__call__.__code__}


def is_torch_function(code: CodeType) -> bool:
    """Whether a code is of a torch function that counts as one API call: it asks whether it is overridden."""
    return (
        "handle_torch_function" in code.co_names
        and code.co_filename.startswith(_TORCH)
        and code.co_name != "__torch_function__"
    )


class ApiNames:
    """The API calls of one recording, by what was called."""

    def __init__(self, infos: list[OpInfo]) -> None:
        self._infos = infos
        self._numbers: dict[Any, int] = {}
        self._names: dict[int, list[str]] = {}  # of the parameters of Python functions
        self._kept: list[Any] = []  # what C++ knows by address

    def _number(self, key: Any, facts: Facts) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._infos)
            self._infos.append(OpInfo(facts, found))
        return found

    def of(self, function: Any) -> int:
        """The number of a function or method."""
        facts = api_facts(function)
        return self._number(facts.name, facts)

    def method(self, name: str) -> int:
        """The number of a tensor method, or ``@T`` for a property; -1 if tensors have none."""
        if name.startswith("@"):
            if name[1:] not in TENSOR_PROPERTIES:
                return -1
            facts = Facts(name)
            facts.name, facts.flavour = f"Tensor.{name[1:]}", PROPERTY
            return self._number(facts.name, facts)
        function = getattr(Tensor, name, None) if name else None
        return -1 if function is None else self.of(function)

    def site(self, code: CodeType, offset: int) -> tuple[Site, int, int]:
        """A place in the code, and what its operator stands for."""
        found = site_at(code, offset)
        self._kept.append(found.names)
        return found, self.method(found.method), self.method(found.mirrored)

    def callable(self, called: Any) -> tuple[int, bool, bool]:
        """What was called: its number, whether it runs several ops, and whether only the op can tell."""
        name = getattr(called, "__name__", "")
        if isinstance(called, MethodDescriptorType):
            if issubclass(Tensor, called.__objclass__):
                return self.of(called), name in _SEVERAL, False
        elif isinstance(called, BuiltinFunctionType):
            owner = called.__self__
            if type(owner).__name__ in _NO_CALLS:
                return -1, False, False
            ours = isinstance(owner, ModuleType) and owner.__name__.startswith("torch")
            if ours or isinstance(owner, Tensor) or owner in (torch._C._VariableFunctionsClass, Tensor):
                return self.of(called), name in _SEVERAL, False
        elif type(called).__name__ in _NO_CALLS:
            return -1, False, False
        return -1, False, True

    def by_op(self, op: OpInfo, called: Any) -> int:
        """What was called where only the op tells: ``float(x)``, ``if x:``."""
        base = op.name.partition(".")[0]
        implicit = _IMPLICIT.get(called) if isinstance(called, type) else None
        if implicit is None and called is None:
            implicit = _IMPLICIT_OPS.get(base)
        for name in (implicit, base):
            if name is not None and hasattr(Tensor, name):
                return self.method(name)
        function = getattr(torch, base, None)
        return -1 if function is None else self.of(function)

    def function(self, function: Any) -> tuple[int, bool, list[int]]:
        """A torch function written in Python: its number, whether it runs a backward pass, its parameters."""
        self._kept.append(function)
        if not isinstance(function, FunctionType):
            return -1, False, []
        number = self.of(function)
        parameters = parameters_of(function)
        self._names[number] = parameters.names
        return number, self._infos[number].backward, parameters.slots

    def bound(self, number: int, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of such a function, out of the values of its parameters."""
        return bound(self._names[number], values)
