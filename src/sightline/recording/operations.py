"""The traits of each operation: its name, the arguments it changes, the memory its result shares."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from itertools import islice
from operator import attrgetter
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Final

import torch

from sightline.argument_checks import is_written
from sightline.data.op_groups import REFLECTED_OPERATORS, UNINITIALIZED
from sightline.recording.atomic import append_numbered
from sightline.recording.torchapi import COMPOSITE, OpOverload, Tensor, has_kernel

FUNCTION, METHOD, OPERATOR, PROPERTY, OP, OPAQUE = range(6)  # positions in data.FLAVOURS

#: Calls that run no op and return no tensor: a third of the calls that a function mode sees.
_NOISE_METHODS: Final = frozenset(
    """size dim ndimension stride numel nelement element_size storage_offset data_ptr get_device is_contiguous
    is_floating_point is_complex is_signed is_pinned is_shared is_set_to is_same_size has_names
    untyped_storage storage _typed_storage storage_type dense_dim sparse_dim is_coalesced q_scale q_zero_point
    qscheme is_inference is_conj is_neg _is_view _is_zerotensor is_distributed is_nonzero_ __len__ __hash__
    __dir__ __reduce_ex__ register_hook register_post_accumulate_grad_hook retain_grad
    requires_grad_ _backward_hooks _version __torch_dispatch__ __array_priority__ __dlpack_device__
    _nested_tensor_size _nested_tensor_strides rename_ refine_names is_sparse""".split()
)
_NOISE_FUNCTIONS: Final = frozenset(
    """is_tensor is_floating_point is_complex is_grad_enabled set_grad_enabled is_inference_mode_enabled
    is_storage is_same_size is_signed is_conj is_neg is_inference is_nonzero numel get_device result_type
    can_cast promote_types get_default_dtype set_default_dtype is_autocast_enabled is_autocast_available
    get_autocast_dtype broadcast_shapes iinfo finfo typename get_device_module
    _set_grad_enabled _is_view _has_compatible_shallow_copy_type get_autocast_gpu_dtype
    is_autocast_cache_enabled get_autocast_cpu_dtype""".split()
)
#: Properties that make a tensor; ``.grad`` and ``._base`` hand out one that is there already.
TENSOR_PROPERTIES: Final = frozenset("data T mT H mH real imag".split())
#: Methods that change the first argument though no underscore says so.
_SETTERS: Final = frozenset(
    """__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __ior__
    __iand__ __ixor__ __ilshift__ __irshift__""".split()
)


#: The end that torch gives a slice without one: ``x[9:]``.
_NO_END: Final = (1 << 63) - 1

#: Views that begin where their base begins.
_KEEPS_OFFSET: Final = frozenset(
    """view _unsafe_view t transpose permute expand unsqueeze squeeze detach alias unfold view_as_real
    view_as_complex _reshape_alias""".split()
)


#: Views that show every element of their base, and those of them that keep the order.
_KEEPS_ORDER: Final = frozenset("view _unsafe_view unsqueeze squeeze detach alias _reshape_alias".split())
_RELABELS: Final = _KEEPS_ORDER | frozenset("t transpose permute expand".split())
#: Ops whose result has a NaN just where their input has one, and whose infinities are known as well: the
#: elements themselves, something bounded, a product with a plain number, a quotient, a sum.
COPY, BOUNDED, PRODUCT, QUOTIENT, SUM = range(1, 6)
_PRESERVES: Final = {
    "clone": COPY, "_to_copy": COPY, "_unsafe_view": COPY, "tanh": BOUNDED, "sigmoid": BOUNDED,
    "erf": BOUNDED, "mul": PRODUCT, "div": QUOTIENT, "add": SUM, "sub": SUM,
}  # fmt: skip


class OpTraits:
    """The properties of an operation that are the same in every recording."""

    __slots__ = (
        "aliases", "backward", "constant", "flavour", "function", "keeps_order", "maybe", "mirrored", "moves",
        "mutates", "name", "noise", "overload", "preserves", "relabels", "slices", "uninitialized",
    )  # fmt: skip

    def __init__(self, function: Any) -> None:
        self.function = function  # kept alive: its id is a key
        self.name = ""
        self.flavour = OP
        #: positions and keyword names of the arguments it changes in place
        self.mutates: tuple[int | str, ...] = ()
        #: position of the argument its result may share memory with; -1 if it never does
        self.aliases = -1
        self.preserves = 0  #: how its result shows NaNs and infinities of its input, if it does
        self.maybe = False  #: it may also return a copy
        self.mirrored = False  #: it takes the right side of an operator before the left one
        self.moves = False  #: its result may begin elsewhere in the storage
        self.noise = False
        self.overload = False  #: it is a dispatcher op called by name, ``torch.ops.aten.mm``
        self.backward = False  #: it runs a backward pass, and with it Python code of the user
        self.constant = False  #: its input was just made from Python data
        self.slices = False  #: it takes the end of a slice, which may be the end of the tensor
        self.relabels = False  #: its result is a view of every element of its input
        self.keeps_order = False  #: and in the same order
        self.uninitialized = False  #: its result holds old memory, or is still to come


_all_traits = attrgetter(*OpTraits.__slots__)


class OpInfo(OpTraits):
    """An operation in one recording: its traits, its number, and the forms of its calls."""

    __slots__ = ("forms", "number")

    def __init__(self, traits: OpTraits, number: int) -> None:
        for name, value in zip(OpTraits.__slots__, _all_traits(traits), strict=True):
            setattr(self, name, value)
        self.number = number
        self.forms: dict[Any, int] = {}


def add_info(infos: list[OpInfo], traits: OpTraits) -> OpInfo:
    """A new operation of a recording, by its place in the list of them."""
    info = OpInfo(traits, -1)
    info.number = append_numbered(infos, info)
    return info


_aten_traits: Final[dict[int, OpTraits]] = {}
#: The namespaces of torch's collectives.
_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def aten_traits(function: Any) -> OpTraits:
    """The traits of a dispatcher op (or a higher-order one)."""
    traits = _aten_traits.get(id(function))
    if traits is None:
        traits = _aten_traits[id(function)] = _read_schema(function)
    return traits


def _read_schema(function: Any) -> OpTraits:
    traits = OpTraits(function)
    if not isinstance(function, OpOverload):
        traits.name = getattr(function, "__name__", None) or str(function)
        return traits
    schema = function._schema
    namespace, name = schema.name.split("::")
    traits.noise = namespace == "profiler"  # markers of torch's optimizers for a profiler
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    traits.name = f"{name}{overload}" if namespace == "aten" else f"{namespace}::{name}{overload}"
    traits.mutates = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if namespace == "c10d" and name.endswith("_"):  # its schemas do not say that it writes to the first one
        traits.mutates = (0,)
    if any(result.alias_info is not None for result in schema.returns) and not traits.mutates:
        shared = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None]
        traits.aliases = shared[0] if shared else -1
        traits.maybe = not function.is_view or is_composite(function)
        traits.moves = traits.maybe or name not in _KEEPS_OFFSET
    traits.constant = name in ("lift_fresh", "lift", "lift_fresh_copy")
    traits.relabels, traits.keeps_order = name in _RELABELS, name in _KEEPS_ORDER
    traits.slices = name in ("slice", "slice_scatter", "slice_backward", "slice_copy")
    traits.uninitialized, traits.preserves = name in UNINITIALIZED, _PRESERVES.get(name, 0)
    # A collective returns before its data has come: its result is waited for later.
    traits.uninitialized |= namespace in _COLLECTIVES and name != "wait_tensor"
    return traits


def without_end(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a slice, without the largest integer that torch puts where there is no end.

    >>> without_end((0, 9, (1 << 63) - 1)), without_end((0, 1, (1 << 63) - 1, 2))
    ((0, 9), (0, 1, None, 2))
    """
    shown = tuple(None if type(item) is int and item == _NO_END else item for item in args)
    return shown[:-1] if shown and shown[-1] is None and args[-1] is not None else shown


def is_composite(function: Any) -> bool:
    """Whether an op is written in terms of other ops, as ``reshape`` is."""
    try:
        return bool(has_kernel(function.name(), COMPOSITE))
    except RuntimeError:  # an op that exists in Python alone
        return False


def api_traits(function: Any) -> OpTraits:
    """The traits of a function, method or property as the user wrote it."""
    traits = OpTraits(function)
    if isinstance(function, MethodWrapperType):  # Tensor.shape.__get__
        attribute = getattr(function.__self__, "__name__", "?")
        traits.name, traits.flavour = f"Tensor.{attribute}", PROPERTY
        traits.noise = function.__name__ == "__set__" or attribute not in TENSOR_PROPERTIES
        return traits
    name = getattr(function, "__name__", None) or type(function).__name__
    owner = getattr(function, "__objclass__", None)
    qualified = getattr(function, "__qualname__", name)
    if owner is not None or qualified.startswith(("Tensor.", "TensorBase.", "_TensorBase.")):
        traits.name, traits.flavour = f"Tensor.{name}", METHOD
        traits.noise = name in _NOISE_METHODS
        if name in REFLECTED_OPERATORS:
            traits.name, traits.flavour, traits.mirrored = REFLECTED_OPERATORS[name], OPERATOR, True
    elif isinstance(function, OpOverload) or hasattr(function, "overloads"):
        traits.name, traits.flavour = f"torch.ops.{function}", FUNCTION
        traits.overload = True
        traits.noise = str(function).startswith("profiler.")  # markers of torch's optimizers
    else:
        traits.name, traits.flavour = _function_name(function, name), FUNCTION
        traits.noise = name in _NOISE_FUNCTIONS
    if name in _SETTERS or (name.endswith("_") and not name.endswith("__")):
        traits.mutates = (0,)
    module = getattr(function, "__module__", None) or ""
    traits.uninitialized = name in UNINITIALIZED or module.startswith("torch.distributed.distributed_c10d")
    traits.backward = function in (Tensor.backward, torch.autograd.grad, torch.autograd.backward)
    return traits


def opaque_traits(key: tuple[str, Any]) -> OpTraits:
    """The traits of an opaque operation; ``key`` is its name, and an object that tells it from others."""
    traits = OpTraits(key)
    traits.name, traits.flavour = key[0], OPAQUE
    return traits


def _function_name(function: Any, name: str) -> str:
    module = getattr(function, "__module__", None) or ""
    if getattr(torch.nn.functional, name, None) is function or module in (
        "torch._C._nn",
        "torch.nn.functional",
    ):
        return f"F.{name}"
    if getattr(torch, name, None) is function or module == "torch":
        return f"torch.{name}"
    for namespace in ("linalg", "special", "fft"):
        short = name.removeprefix(f"{namespace}_")
        if getattr(getattr(torch, namespace), short, None) is function:
            return f"torch.{namespace}.{short}"
    return f"{module}.{name}" if module else name


_IN_C: Final = (BuiltinFunctionType, MethodDescriptorType)
_MAX_DEFAULT: Final = 80  #: characters of a default; longer ones are tables, not settings


def schemas_of(infos: Iterable[OpInfo]) -> dict[str, tuple[str, ...]]:
    """The arguments of each operation as texts; operations without known arguments are left out."""
    schemas: dict[str, tuple[str, ...]] = {}
    for info in infos:
        if info.name not in schemas and (arguments := arguments_of(info.function)):
            schemas[info.name] = arguments
    return schemas


def arguments_of(function: Any) -> tuple[str, ...]:
    """The arguments of one operation.

    >>> arguments_of(torch.ops.aten.add.Tensor), arguments_of(torch.nn.functional.glu)
    (('self', 'other', 'alpha=1'), ('input', 'dim=-1'))
    """
    if isinstance(function, OpOverload):
        return _of_overload(function)
    try:
        if isinstance(function, _IN_C) and getattr(function, "__text_signature__", None) is None:
            return _of_namesake(function.__name__)  # `inspect.signature` takes long to fail
        is_torch = type(function) is FunctionType and (function.__module__ or "").startswith("torch.")
        is_lasting = is_torch or isinstance(function, (*_IN_C, WrapperDescriptorType))
        return _of_lasting(function) if is_lasting else _of_signature(function)
    except Exception:  # a signature may be code of the user's
        name = getattr(function, "__name__", "")
        return _of_namesake(name) if isinstance(name, str) else ()


def _of_signature(function: Any) -> tuple[str, ...]:
    texts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            texts.append(f"*{parameter.name}")
        elif parameter.kind is not parameter.VAR_KEYWORD:
            has_none = parameter.default is parameter.empty
            texts.append(parameter.name if has_none else _with_default(parameter.name, parameter.default))
    return tuple(texts)


@cache  # they live as long as the process too
def _of_lasting(function: Any) -> tuple[str, ...]:
    return _of_signature(function)


@cache  # ops live as long as the process, and the next trace has the same ones
def _of_overload(function: OpOverload) -> tuple[str, ...]:
    return _of_schema(function._schema)


def _of_schema(schema: Any) -> tuple[str, ...]:
    return tuple(
        _with_default(one.name, one.default_value) if one.has_default_value() else one.name
        for one in schema.arguments
    )


@cache
def _of_namesake(name: str) -> tuple[str, ...]:
    """The arguments of the dispatcher op of the same name; empty where it has several overloads."""
    packet: Any = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return ()
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    # Many ops have a second overload that takes dimensions by name, and is hardly used.
    few = (
        one
        for one in schemas
        if not any(each.is_out or "Dimname" in str(each.type) for each in one.arguments)
    )
    plain = list(islice(few, 2))
    return _of_schema(plain[0]) if len(plain) == 1 else ()


def _with_default(name: str, default: Any) -> str:
    text = repr(default) if is_written(default) else f"<{type(default).__name__}>"
    return f"{name}={text}" if len(text) <= _MAX_DEFAULT else f"{name}=…"
