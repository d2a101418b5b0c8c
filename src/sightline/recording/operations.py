"""What is known of each operation: its name, its schema, how it is written, what it changes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from itertools import islice
from operator import attrgetter
from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType
from typing import Any, Final

import torch

from sightline.recording.torchapi import OpOverload, Tensor
from sightline.trace.nonfinite_rule import UNINITIALIZED

FUNCTION, METHOD, OPERATOR, PROPERTY, OP, OPAQUE = range(6)  # positions in data.FLAVOURS

#: Calls that run no op and return no tensor: a third of what a function mode sees.
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


#: What an expression arrives as whose left side is no tensor: ``2 - x`` as ``x.__rsub__(2)``.
_REFLECTED: Final = {
    "__rsub__": "-", "__rdiv__": "/", "__rtruediv__": "/", "__rfloordiv__": "//", "__rmod__": "%",
    "__rpow__": "**", "__rmatmul__": "@", "__rlshift__": "<<", "__rrshift__": ">>",
}  # fmt: skip

#: What torch gives a slice that has no end: ``x[9:]``.
_NO_END: Final = (1 << 63) - 1

#: Views that begin where their base begins.
_KEEPS_OFFSET: Final = frozenset(
    """view _unsafe_view t transpose permute expand unsqueeze squeeze detach alias unfold view_as_real
    view_as_complex _reshape_alias""".split()
)


#: Views that show every element of their base, and those of them that keep the order.
_KEEPS_ORDER: Final = frozenset("view _unsafe_view unsqueeze squeeze detach alias _reshape_alias".split())
_RELABELS: Final = _KEEPS_ORDER | frozenset("t transpose permute expand".split())
#: What these make has a NaN just where their input has one, and how much is infinite can be told as well: the
#: elements themselves, something bounded, a product with a plain number, a quotient, a sum.
COPY, BOUNDED, PRODUCT, QUOTIENT, SUM = range(1, 6)
_PRESERVES: Final = {
    "clone": COPY, "_to_copy": COPY, "_unsafe_view": COPY, "tanh": BOUNDED, "sigmoid": BOUNDED,
    "erf": BOUNDED, "mul": PRODUCT, "div": QUOTIENT, "add": SUM, "sub": SUM,
}  # fmt: skip


class OpTraits:
    """What is true of an operation in every recording."""

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
        self.preserves = 0  #: how its result tells what is not finite in its input, if it does
        self.maybe = False  #: it may also return a copy
        self.mirrored = False  #: it is given the right side of an operator before the left one
        self.moves = False  #: its result may begin elsewhere in the storage
        self.noise = False
        self.overload = False  #: it is a dispatcher op called by name, ``torch.ops.aten.mm``
        self.backward = False  #: runs a backward pass, and with it Python of the user's
        self.constant = False  #: its input was just made from Python data
        self.slices = False  #: it takes the end of a slice, which may be that of the tensor
        self.relabels = False  #: its result is a view of every element of its input
        self.keeps_order = False  #: and in the same order
        self.uninitialized = False  #: nobody has written what is in its result


_every_fact = attrgetter(*OpTraits.__slots__)


class OpInfo(OpTraits):
    """An operation in one recording: the facts, its number, and the forms of its calls."""

    __slots__ = ("forms", "number")

    def __init__(self, facts: OpTraits, number: int) -> None:
        for name, value in zip(OpTraits.__slots__, _every_fact(facts), strict=True):
            setattr(self, name, value)
        self.number = number
        self.forms: dict[Any, int] = {}


_aten_facts: Final[dict[int, OpTraits]] = {}


def aten_traits(function: Any) -> OpTraits:
    """Of a dispatcher op (or a higher-order one)."""
    found = _aten_facts.get(id(function))
    if found is None:
        found = _aten_facts[id(function)] = _read_schema(function)
    return found


def _read_schema(function: Any) -> OpTraits:
    facts = OpTraits(function)
    if not isinstance(function, OpOverload):
        facts.name = getattr(function, "__name__", None) or str(function)
        return facts
    schema = function._schema
    namespace, name = schema.name.split("::")
    facts.noise = namespace == "profiler"  # the marks torch's own optimizers leave for a profiler
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    facts.name = f"{name}{overload}" if namespace == "aten" else f"{namespace}::{name}{overload}"
    facts.mutates = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if any(result.alias_info is not None for result in schema.returns) and not facts.mutates:
        shared = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None]
        facts.aliases = shared[0] if shared else -1
        facts.maybe = not function.is_view or is_composite(function)
        facts.moves = facts.maybe or name not in _KEEPS_OFFSET
    facts.constant = name in ("lift_fresh", "lift", "lift_fresh_copy")
    facts.relabels, facts.keeps_order = name in _RELABELS, name in _KEEPS_ORDER
    facts.slices = name in ("slice", "slice_scatter", "slice_backward", "slice_copy")
    facts.uninitialized, facts.preserves = name in UNINITIALIZED, _PRESERVES.get(name, 0)
    return facts


def without_end(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a slice; of one that goes to the end without the largest integer torch puts there.

    >>> without_end((0, 9, (1 << 63) - 1)), without_end((0, 1, (1 << 63) - 1, 2))
    ((0, 9), (0, 1, None, 2))
    """
    found = tuple(None if type(item) is int and item == _NO_END else item for item in args)
    return found[:-1] if found and found[-1] is None and args[-1] is not None else found


def is_composite(function: Any) -> bool:
    """Whether an op is written in terms of other ops, as ``reshape`` is."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))
    except RuntimeError:  # an op that exists in Python alone
        return False


def api_traits(function: Any) -> OpTraits:
    """Of a function, method or property as the user wrote it."""
    facts = OpTraits(function)
    if isinstance(function, MethodWrapperType):  # Tensor.shape.__get__
        attribute = getattr(function.__self__, "__name__", "?")
        facts.name, facts.flavour = f"Tensor.{attribute}", PROPERTY
        facts.noise = function.__name__ == "__set__" or attribute not in TENSOR_PROPERTIES
        return facts
    name = getattr(function, "__name__", None) or type(function).__name__
    owner = getattr(function, "__objclass__", None)
    qualified = getattr(function, "__qualname__", name)
    if owner is not None or qualified.startswith(("Tensor.", "TensorBase.", "_TensorBase.")):
        facts.name, facts.flavour = f"Tensor.{name}", METHOD
        facts.noise = name in _NOISE_METHODS
        if name in _REFLECTED:
            facts.name, facts.flavour, facts.mirrored = _REFLECTED[name], OPERATOR, True
    elif isinstance(function, OpOverload) or hasattr(function, "overloads"):
        facts.name, facts.flavour = f"torch.ops.{function}", FUNCTION
        facts.overload = True
    else:
        facts.name, facts.flavour = _function_name(function, name), FUNCTION
        facts.noise = name in _NOISE_FUNCTIONS
    if name in _SETTERS or (name.endswith("_") and not name.endswith("__")):
        facts.mutates = (0,)
    facts.uninitialized = name in UNINITIALIZED
    facts.backward = function in (Tensor.backward, torch.autograd.grad, torch.autograd.backward)
    return facts


def opaque_traits(key: tuple[str, Any]) -> OpTraits:
    """Of something that nobody can look into; ``key`` is its name, and whatever tells it from others."""
    facts = OpTraits(key)
    facts.name, facts.flavour = key[0], OPAQUE
    return facts


def _function_name(function: Any, name: str) -> str:
    module = getattr(function, "__module__", None) or ""
    if getattr(torch.nn.functional, name, None) is function or module in (
        "torch._C._nn",
        "torch.nn.functional",
    ):
        return f"F.{name}"
    if getattr(torch, name, None) is function or module == "torch":
        return f"torch.{name}"
    for place, home in (("linalg", torch.linalg), ("special", torch.special), ("fft", torch.fft)):
        short = name.removeprefix(f"{place}_")
        if getattr(home, short, None) is function:
            return f"torch.{place}.{short}"
    return f"{module}.{name}" if module else name


_IN_C: Final = (BuiltinFunctionType, MethodDescriptorType)
_MOST: Final = 80  #: characters of a default; longer ones are tables, not settings


def schemas_of(infos: Iterable[OpInfo]) -> dict[str, tuple[str, ...]]:
    """For each operation the texts of its arguments; those of which nothing is known are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for info in infos:
        if info.name not in found and (arguments := arguments_of(info.function)):
            found[info.name] = arguments
    return found


def arguments_of(function: Any) -> tuple[str, ...]:
    """The arguments of one operation.

    >>> arguments_of(torch.ops.aten.add.Tensor), arguments_of(torch.nn.functional.glu)
    (('self', 'other', 'alpha=1'), ('input', 'dim=-1'))
    """
    if isinstance(function, OpOverload):
        return _of_overload(function)
    try:
        if isinstance(function, _IN_C) and getattr(function, "__text_signature__", None) is None:
            return _of_namesake(function.__name__)  # asking for its signature takes long to fail
        parameters = inspect.signature(function).parameters.values()
    except Exception:  # a signature may be code of the user's
        name = getattr(function, "__name__", "")
        return _of_namesake(name) if isinstance(name, str) else ()
    return tuple(_text(one) for one in parameters if one.kind is not one.VAR_KEYWORD)


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
    """Those of the dispatcher op of the same name: of ``torch.sum``, which has several, nothing."""
    packet: Any = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return ()
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    few = (one for one in schemas if not any(each.is_out or _is_named(each) for each in one.arguments))
    plain = list(islice(few, 2))
    return _of_schema(plain[0]) if len(plain) == 1 else ()


def _is_named(argument: Any) -> bool:
    """Whether it is a dimension by name, a second form of many ops that nobody means."""
    return "Dimname" in str(argument.type)


def _text(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.default is parameter.empty:
        return parameter.name
    return _with_default(parameter.name, parameter.default)


def _with_default(name: str, default: Any) -> str:
    try:
        text = repr(default)
    except Exception:  # somebody else's code, run only to be shown
        text = f"<{type(default).__name__}>"
    return f"{name}={text}" if len(text) <= _MOST else f"{name}=…"
