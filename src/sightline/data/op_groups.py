"""Operators as they are written, and ops grouped by their effect on the numbers of a tensor.

Names of aten ops are without their overload: ``view``, ``slice``.
"""

from __future__ import annotations

from typing import Final

#: The word for each operator; the ones that work in place have the same word and an underscore.
OPERATOR_WORDS: Final = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift", "~": "invert", "[]": "getitem",
    "[]=": "setitem", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
    "+=": "add_", "-=": "sub_", "*=": "mul_", "/=": "div_", "//=": "floordiv_", "%=": "mod_", "@=": "matmul_",
    "**=": "pow_", "&=": "and_", "|=": "or_", "^=": "xor_", "<<=": "lshift_", ">>=": "rshift_",
}  # fmt: skip
#: Operators with a left and a right side.
BINARY_OPERATORS: Final = OPERATOR_WORDS.keys() - {"~", "[]", "[]="}
#: How torch sees an expression whose left side is not a tensor: ``2 - x`` as ``x.__rsub__(2)``.
REFLECTED_OPERATORS: Final = {
    "__rsub__": "-", "__rdiv__": "/", "__rtruediv__": "/", "__rfloordiv__": "//", "__rmod__": "%",
    "__rpow__": "**", "__rmatmul__": "@", "__rlshift__": "<<", "__rrshift__": ">>",
}  # fmt: skip
#: Functions of the module ``operator`` that exported graphs call, as they are written.
PYTHON_OPERATORS: Final = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "neg": "-",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "&", "or_": "|",
}  # fmt: skip

#: Views of every element of a tensor.
WHOLE_VIEWS: Final = frozenset(
    "view _unsafe_view reshape _reshape_alias t transpose permute movedim expand squeeze unsqueeze detach "
    "alias".split()
)
#: Views of every element of a tensor or of some of them.
VIEWS: Final = WHOLE_VIEWS | frozenset("select slice split unbind".split())
#: Ops that allocate memory and do not write it.
ALLOCATIONS: Final = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _empty_affine_quantized "
    "_empty_per_channel_affine_quantized".split()
)
#: Ops whose result holds memory that was never written, at least in part.
UNINITIALIZED: Final = ALLOCATIONS | frozenset("resize resize_ resize_as_".split())
#: Normalisation by the statistics of a batch, by whatever library.
BATCH_NORMS: Final = frozenset(
    "batch_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm "
    "_batch_norm_with_update".split()
)
#: Convolutions without those that are transposed.
CONVOLUTIONS: Final = frozenset(
    "convolution _convolution mkldnn_convolution cudnn_convolution conv1d conv2d conv3d thnn_conv2d "
    "_slow_conv2d_forward".split()
)
