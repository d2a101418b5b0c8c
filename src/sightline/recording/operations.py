"""What is known of each operation: its name, how it is written, what it changes, whether it is noise.

Resolved once per function, the first time it is seen.
"""

from __future__ import annotations

from types import MethodWrapperType
from typing import Any, Final

from sightline.recording.torchapi import OpOverload, Tensor, torch

FUNCTION, METHOD, OPERATOR, PROPERTY, OP, OPAQUE = range(6)  # positions in data.FLAVOURS

#: Calls that run no op and return no tensor: a third of what a function mode sees.
_NOISE_METHODS: Final = frozenset(
    """size dim ndimension stride numel nelement element_size storage_offset data_ptr get_device is_contiguous
    is_floating_point is_complex is_signed is_pinned is_shared is_set_to is_same_size has_names type
    untyped_storage storage _typed_storage storage_type dense_dim sparse_dim is_coalesced q_scale q_zero_point
    qscheme is_inference is_conj is_neg _is_view _is_zerotensor is_distributed is_nonzero_ __len__ __hash__
    __dir__ __repr__ __format__ __reduce_ex__ register_hook register_post_accumulate_grad_hook retain_grad
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
_TENSOR_PROPERTIES: Final = frozenset("grad data T mT H mH real imag _base _grad".split())
#: Methods that change the first argument though no underscore says so.
_SETTERS: Final = frozenset({"__setitem__", "__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"})



class OpInfo:
    """One operation, aten op or API function."""

    __slots__ = (
        "aliases", "backward", "constant", "flavour", "forms", "function", "mutates", "name", "noise", "number",
    )  # fmt: skip

    def __init__(self, function: Any, number: int) -> None:
        self.function = function  # kept alive: its id is a key
        self.number = number
        self.name = ""
        self.flavour = OP
        self.forms: dict[Any, int] = {}
        #: positions and keyword names of the arguments it changes in place
        self.mutates: tuple[int | str, ...] = ()
        #: position of the argument its result may share memory with; -1 if it never does
        self.aliases = -1
        self.noise = False
        self.backward = False  #: runs a backward pass, and with it Python of the user's
        self.constant = False  #: its input was just made from Python data


def aten_info(function: Any, number: int) -> OpInfo:
    """Of a dispatcher op (or a higher-order one)."""
    info = OpInfo(function, number)
    if not isinstance(function, OpOverload):
        info.name = getattr(function, "__name__", None) or str(function)
        return info
    schema = function._schema
    namespace, name = schema.name.split("::")
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    info.name = f"{name}{overload}" if namespace == "aten" else f"{namespace}::{name}{overload}"
    info.mutates = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if any(result.alias_info is not None for result in schema.returns) and not info.mutates:
        shared = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None]
        info.aliases = shared[0] if shared else -1
    info.constant = name in ("lift_fresh", "lift", "lift_fresh_copy")
    return info


def api_info(function: Any, number: int) -> OpInfo:
    """Of a function, method or property as the user wrote it."""
    info = OpInfo(function, number)
    if isinstance(function, MethodWrapperType):  # Tensor.shape.__get__
        attribute = getattr(function.__self__, "__name__", "?")
        info.name, info.flavour = f"Tensor.{attribute}", PROPERTY
        setter = function.__name__ == "__set__"
        info.noise = setter or attribute not in _TENSOR_PROPERTIES
        return info
    name = getattr(function, "__name__", None) or type(function).__name__
    owner = getattr(function, "__objclass__", None)
    qualified = getattr(function, "__qualname__", name)
    if owner is not None or qualified.startswith(("Tensor.", "TensorBase.", "_TensorBase.")):
        info.name, info.flavour = f"Tensor.{name}", METHOD
        info.noise = name in _NOISE_METHODS
        if name in _SETTERS or (name.endswith("_") and not name.endswith("__")):
            info.mutates = (0,)
        elif name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__"):
            info.mutates = (0,)
    elif isinstance(function, OpOverload) or hasattr(function, "overloads"):
        info.name, info.flavour = f"torch.ops.{function}", FUNCTION
    else:
        info.name, info.flavour = _function_name(function, name), FUNCTION
        info.noise = name in _NOISE_FUNCTIONS
        if name.endswith("_") and not name.endswith("__"):
            info.mutates = (0,)
    info.backward = function in (Tensor.backward, torch.autograd.grad, torch.autograd.backward)
    return info


def _function_name(function: Any, name: str) -> str:
    module = getattr(function, "__module__", None) or ""
    if getattr(torch.nn.functional, name, None) is function or module in ("torch._C._nn", "torch.nn.functional"):
        return f"F.{name}"
    if getattr(torch, name, None) is function or module == "torch":
        return f"torch.{name}"
    for place, home in (("linalg", torch.linalg), ("special", torch.special), ("fft", torch.fft)):
        short = name.removeprefix(f"{place}_")
        if getattr(home, short, None) is function:
            return f"torch.{place}.{short}"
    return f"{module}.{name}" if module else name

