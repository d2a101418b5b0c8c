"""Names of nodes and ops: a node's is short, unique and a Python identifier: ``relu_1``, ``fc1_weight``."""

from __future__ import annotations

import re

from sightline.data.op_groups import OPERATOR_WORDS
from sightline.patterns import bare_name

_NON_WORD = re.compile(r"\W+", re.ASCII)


class UniqueNames:
    """Makes unique names, numbered where a name is taken.

    >>> names = UniqueNames()
    >>> [names.new(base) for base in ("relu", "relu", "fc1.weight", "+", "3 </script>")]
    ['relu', 'relu_1', 'fc1_weight', 'add', '_3_script']
    """

    def __init__(self) -> None:
        self._plain: dict[str, str] = {}  # a cache: most names are requested many times
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()

    def new(self, base: str) -> str:
        """The base as an identifier, with a number if that is taken."""
        plain = self._plain.get(base)
        if plain is None:
            plain = self._plain[base] = identifier(base)
        count = self._counts.get(plain, 0)
        name = f"{plain}_{count}" if count else plain
        while name in self._taken:  # ``relu_1`` may be the base of another name
            count += 1
            name = f"{plain}_{count}"
        self._counts[plain] = count + 1
        self._taken.add(name)
        return name


def identifier(text: str) -> str:
    """The text as a Python name.

    >>> identifier("blocks.0.attn.qkv.weight"), identifier("[]"), identifier("")
    ('blocks_0_attn_qkv_weight', 'getitem', '_')
    """
    plain = OPERATOR_WORDS.get(text) or _NON_WORD.sub("_", text).rstrip(
        "_" if not text.endswith("_") else " "
    )
    return f"_{plain}" if not plain or plain[0].isdigit() else plain


def op_name(name: str, level: str) -> str:
    """The short name of an op: API calls without their namespace, aten ops with their overload.

    >>> op_name("F.linear", "api"), op_name("+", "api"), op_name("add.Tensor", "aten")
    ('linear', '+', 'add.Tensor')
    """
    return name if level == "aten" or name in OPERATOR_WORDS else bare_name(name, level) or name


def full_name(name: str, level: str) -> str:
    """The full name of an op.

    >>> full_name("F.linear", "api"), full_name("Tensor.view", "api"), full_name("add.Tensor", "aten")
    ('torch.nn.functional.linear', 'torch.Tensor.view', 'add.Tensor')
    """
    if level == "api":
        for short, long in (("F.", "torch.nn.functional."), ("Tensor.", "torch.Tensor.")):
            if name.startswith(short):
                return long + name[len(short) :]
    return name


def base_name(op: str, level: str) -> str:
    """The name of an op that its nodes are named after.

    >>> base_name("add.Tensor", "aten"), base_name("[]", "api"), base_name("_softmax", "aten")
    ('add', 'getitem', '_softmax')
    """
    return OPERATOR_WORDS.get(op) or (op.partition(".")[0] if level == "aten" else op)
