"""Call sites in bytecode: the operand stack at an instruction that calls torch, and their order.

C++ calls this once for each instruction, for the position of its operands, the number of arguments of a call,
and the method that an operator calls.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Any, Final, NamedTuple

from sightline.recording.source_positions import (
    BINARY_METHODS,
    COMPARE_METHODS,
    MIRRORED_COMPARISONS,
    UNARY_METHODS,
    unary_name,
)

#: Kinds of sites: positions in C++'s ``SiteKind``.
UNKNOWN, CALL, BINARY, UNARY, STORE, SPREAD, SLICE, STORE_SLICE = range(8)
_GENERATORS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_END: Final = frozenset(
    {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD",
     "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}
)  # fmt: skip
#: Instructions that load a local variable, and whether they load or store two, as from Python 3.13 on: then
#: each has four bits of the argument.
_LOADS: Final = {
    "LOAD_FAST": False, "LOAD_FAST_BORROW": False, "LOAD_FAST_CHECK": False,
    "LOAD_FAST_LOAD_FAST": True, "LOAD_FAST_BORROW_LOAD_FAST_BORROW": True, "STORE_FAST_LOAD_FAST": True,
}  # fmt: skip
#: The methods that operators in place call; `source_positions` has those of the others.
_IN_PLACE_METHODS: Final = {
    "+": "add_", "-": "sub_", "*": "mul_", "/": "div_", "//": "floor_divide_", "%": "remainder_",
    "**": "pow_", "&": "__iand__", "|": "__ior__", "^": "__ixor__", "<<": "__ilshift__",
    ">>": "__irshift__",
}  # fmt: skip


def _usual(methods: Mapping[str, tuple[str, ...]], symbol: str) -> str:
    """The method that an operator calls; empty for an operator that calls none."""
    return methods.get(symbol, ("",))[0]


class Site(NamedTuple):
    """How an instruction calls torch."""

    kind: int
    depth: int = 0  #: of the operand stack below the operands of the instruction
    arguments: int = 0  #: of a call; of a subscript 1
    method: str = ""  #: the tensor method that an operator calls
    mirrored: str = ""  #: the same where only the right operand is a tensor
    names: tuple[str, ...] | None = None  #: of the keyword arguments, which come last
    keywords: bool = False  #: whether a dict of keyword arguments is there
    is_tuple: bool = False  #: whether a call certainly spreads a tuple
    args_slot: int = -1  #: the local variable that is spread, if it is the function's own ``*args``
    kwargs_slot: int = -1  #: and its own ``**kwargs``
    truth: bool = False  #: of a comparison: whether it also reads the truth of its result


@lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> dict[int, tuple[dis.Instruction, int]]:
    """Every instruction by its offset, with the offset of the next."""
    every = list(dis.get_instructions(code))
    ends = [one.offset for one in every[1:]] + [len(code.co_code)]
    return {one.offset: (one, end) for one, end in zip(every, ends, strict=True)}


@lru_cache(maxsize=4096)
def depths(code: CodeType) -> dict[int, int]:
    """How deep the operand stack is before each instruction that can be reached."""
    instructions = _instructions(code)
    # A generator is resumed with a value on its stack; from Python 3.13 on its first instruction counts it.
    start = 1 if code.co_flags & _GENERATORS and sys.version_info < (3, 13) else 0
    reached: dict[int, int] = {}
    waiting = [(0, start)]
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    handlers = [(entry.target, entry.depth + 1 + int(entry.lasti)) for entry in entries]
    while True:
        while waiting:
            offset, depth = waiting.pop()
            if offset in reached or offset not in instructions:
                continue
            reached[offset] = depth
            one, end = instructions[offset]
            argument = one.arg if one.opcode >= dis.HAVE_ARGUMENT else None
            if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
                waiting.append((one.argval, depth + dis.stack_effect(one.opcode, argument, jump=True)))
            if one.opname not in _END:
                waiting.append((end, depth + dis.stack_effect(one.opcode, argument, jump=False)))
        others = [(target, depth) for target, depth in handlers if target not in reached]
        if not others:
            return reached
        waiting += others[:1]


@lru_cache(maxsize=16384)
def site_at(code: CodeType, offset: int) -> Site:
    """How the instruction at an offset calls torch."""
    offset = _at(_instructions(code), offset)
    instruction = _instructions(code).get(offset)
    depth = depths(code).get(offset)
    if instruction is None or depth is None:
        return Site(UNKNOWN)
    one = instruction[0]
    if one.opname in ("CALL", "PRECALL", "CALL_KW"):
        return _call(code, one, depth)
    if one.opname == "CALL_FUNCTION_EX":
        return _spread(code, one, depth)
    if one.opname == "BINARY_OP":
        symbol = str(dis._nb_ops[one.arg or 0][1])  # type: ignore[attr-defined]
        if symbol == "[]":  # an instruction of its own before Python 3.14
            return Site(BINARY, depth - 2, 1, "__getitem__")
        bare = symbol.removesuffix("=")
        usual = _usual(BINARY_METHODS, bare)
        # ``0 + x`` and ``n += x`` with a number n both call ``x.add(…)``.
        return Site(BINARY, depth - 2, 0, usual if symbol == bare else _IN_PLACE_METHODS.get(bare, ""), usual)
    if one.opname == "COMPARE_OP":
        symbol = str(one.argval)
        mirrored = _usual(COMPARE_METHODS, MIRRORED_COMPARISONS.get(symbol, symbol))
        # ``if x > y:`` is one instruction from Python 3.13 on, which sets a bit of the argument.
        truth = sys.version_info >= (3, 13) and bool((one.arg or 0) & 16)
        return Site(BINARY, depth - 2, 0, _usual(COMPARE_METHODS, symbol), mirrored, truth=truth)
    if one.opname == "BINARY_SUBSCR":
        return Site(BINARY, depth - 2, 1, "__getitem__")
    if one.opname == "BINARY_SLICE":
        return Site(SLICE, depth - 3, 1, "__getitem__")
    if one.opname == "STORE_SUBSCR":
        return Site(STORE, depth - 3, 1, "__setitem__")
    if one.opname == "STORE_SLICE":
        return Site(STORE_SLICE, depth - 4, 1, "__setitem__")
    unary = unary_name(one.opname, one.arg or 0)
    if unary in ("UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_POSITIVE"):
        return Site(UNARY, depth - 1, 0, UNARY_METHODS[unary][1][0])
    if one.opname == "LOAD_ATTR":
        return Site(UNARY, depth - 1, 0, f"@{one.argval}")
    return Site(UNKNOWN)


def _call(code: CodeType, one: dis.Instruction, depth: int) -> Site:
    offsets = list(_instructions(code))
    at = offsets.index(one.offset)
    if one.opname == "CALL" and sys.version_info < (3, 12):
        at -= 1  # its PRECALL, which counts the arguments as taken though they are still there
        depth = depths(code)[offsets[at]]
    before = _instructions(code)[offsets[at - 1]][0] if at else one
    count = one.arg or 0
    if one.opname == "CALL_KW":  # from Python 3.13 on: the names are the topmost operand, a constant
        names = before.argval
        return Site(CALL, depth - count - 3, count, names=names) if type(names) is tuple else Site(UNKNOWN)
    names = code.co_consts[before.arg or 0] if before.opname == "KW_NAMES" else None
    return Site(CALL, depth - count - 2, count, names=names)


@lru_cache(maxsize=4096)
def _jump_targets(code: CodeType) -> frozenset[int]:
    jumps = (one for one, _ in _instructions(code).values() if one.opcode in (*dis.hasjrel, *dis.hasjabs))
    return frozenset(int(one.argval) for one in jumps)


def _spread(code: CodeType, one: dis.Instruction, depth: int) -> Site:
    """A call with ``*``, which certainly spreads a tuple if it was built for the call, or is ``*args``."""
    offsets = list(_instructions(code))
    at = offsets.index(one.offset) - 1
    base = depth - 4
    if sys.version_info >= (3, 14):  # a null is there instead of a dict of keyword arguments
        keywords = _instructions(code)[offsets[max(at, 0)]][0].opname != "PUSH_NULL"
        at -= not keywords
    else:
        keywords = bool((one.arg or 0) & 1)
        base += not keywords
    if keywords:  # go back to where the dict began, with the tuple on top
        target = depths(code).get(one.offset, 0) - 1
        while at > 0 and depths(code).get(offsets[at], target + 1) > target:
            at -= 1
        at -= 1
    before, after = _instructions(code)[offsets[max(at, 0)]]
    if after in _jump_targets(code):  # the operands may come from elsewhere
        return Site(SPREAD, base, keywords=keywords)
    built = before.opname in ("LIST_TO_TUPLE", "BUILD_TUPLE", "LOAD_CONST")
    built |= before.opname == "CALL_INTRINSIC_1" and "LIST_TO_TUPLE" in str(before.argrepr)
    args = code.co_argcount + code.co_kwonlyargcount if code.co_flags & inspect.CO_VARARGS else -1
    loads_two = _LOADS.get(before.opname)
    loaded = -1 if loads_two is None or before.arg is None else before.arg & (15 if loads_two else -1)
    own = args >= 0 and loaded == args and args not in _stored_slots(code)
    kwargs = args + 1 if own and keywords and code.co_flags & inspect.CO_VARKEYWORDS else -1
    return Site(
        SPREAD, base, keywords=keywords, is_tuple=built or own,
        args_slot=args if own else -1, kwargs_slot=kwargs,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _stored_slots(code: CodeType) -> frozenset[int]:
    """The local variables that a code sets or deletes, by their slots."""
    stored: set[int] = set()
    for one, _ in _instructions(code).values():
        slot = one.arg or 0
        if one.opname in ("STORE_FAST", "STORE_FAST_MAYBE_NULL", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"):
            stored.add(slot)
        elif one.opname in ("STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST"):
            stored.add(slot >> 4)
            if one.opname == "STORE_FAST_STORE_FAST":
                stored.add(slot & 15)
    return frozenset(stored)


@lru_cache(maxsize=65536)
def may_follow(code: CodeType, before: int, after: int) -> bool:
    """Whether one run of a code can be at ``before`` and later at ``after``."""
    instructions = _instructions(code)
    seen: set[int] = set()
    waiting = _successors(instructions, _at(instructions, before))
    goal = _at(instructions, after)
    while waiting:
        offset = waiting.pop()
        if offset == goal:
            return True
        if offset not in seen:
            seen.add(offset)
            waiting += _successors(instructions, offset)
    return False


def _at(instructions: dict[int, tuple[dis.Instruction, int]], offset: int) -> int:
    """The instruction an offset belongs to: the offset of a waiting frame is in the call's inline cache."""
    while offset > 0 and offset not in instructions:
        offset -= 2
    return offset


def _successors(instructions: dict[int, tuple[dis.Instruction, int]], offset: int) -> list[int]:
    if offset not in instructions:
        return []
    one, end = instructions[offset]
    offsets = [] if one.opname in _END else [end]
    if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
        offsets.append(int(one.argval))
    return offsets


class Parameters(NamedTuple):
    """The parameters of a function, in the order in which a call of it is shown."""

    slots: list[int]  #: among the local variables of its frame
    names: list[str]  #: "" for one that is shown by position, "*" and "**" for spread ones
    rebound: list[bool]  #: whether the function may give it another value before its first op


@lru_cache(maxsize=1024)
def parameters_of(function: Any) -> Parameters:
    """The parameters of a function: those without a default by position, the others by name.

    >>> def dropout(input, p=0.5, *, training=True): ...
    >>> parameters_of(dropout)
    Parameters(slots=[0, 1, 2], names=['', 'p', 'training'], rebound=[False, False, False])
    """
    code = function.__code__
    count, defaults = code.co_argcount, len(function.__defaults__ or ())
    spread = bool(code.co_flags & inspect.CO_VARARGS)
    plain = count if spread else count - defaults
    slots, names = list(range(plain)), [""] * plain
    first_keyword = count + code.co_kwonlyargcount
    if spread:
        slots.append(first_keyword)
        names.append("*")
    for slot in range(plain, first_keyword):
        slots.append(slot)
        names.append(code.co_varnames[slot])
    if code.co_flags & inspect.CO_VARKEYWORDS:
        slots.append(first_keyword + spread)
        names.append("**")
    stored = _stored_slots(code)
    return Parameters(slots, names, [slot in stored for slot in slots])


def default_of(function: Any, slot: int) -> Any:
    """The default of a parameter; Ellipsis if it has none."""
    code, defaults = function.__code__, function.__defaults__ or ()
    if slot < code.co_argcount:
        at = slot - (code.co_argcount - len(defaults))
        return defaults[at] if at >= 0 else Ellipsis
    return (function.__kwdefaults__ or {}).get(code.co_varnames[slot], Ellipsis)


def bind_arguments(names: list[str], values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call from the values of its parameters."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        if not name:
            args.append(value)
        elif name == "*":
            args += value if isinstance(value, tuple) else (value,)
        elif name == "**":
            kwargs |= value if isinstance(value, dict) else {}
        else:
            kwargs[name] = value
    return tuple(args), kwargs
