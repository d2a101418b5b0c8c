"""Names of nodes: short, unique, and such that Python could use them: ``relu_1``, ``fc1_weight``."""

from __future__ import annotations

import re

from sightline.patterns import bare_name
from sightline.trace.op_groups import OPERATOR_WORDS

_OTHER = re.compile(r"\W+", re.ASCII)


class Names:
    """Hands out names, each once.

    >>> names = Names()
    >>> [names.new(wish) for wish in ("relu", "relu", "fc1.weight", "+", "3 </script>")]
    ['relu', 'relu_1', 'fc1_weight', 'add', '_3_script']
    """

    def __init__(self) -> None:
        self._plain: dict[str, str] = {}  # a wish is made many times
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()

    def new(self, wish: str) -> str:
        """The wish made an identifier, with a number if it is taken."""
        plain = self._plain.get(wish)
        if plain is None:
            plain = self._plain[wish] = identifier(wish)
        count = self._counts.get(plain, 0)
        name = f"{plain}_{count}" if count else plain
        while name in self._taken:  # ``relu_1`` may have been somebody's own name
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
    plain = OPERATOR_WORDS.get(text) or _OTHER.sub("_", text).rstrip("_" if not text.endswith("_") else " ")
    return f"_{plain}" if not plain or plain[0].isdigit() else plain


def op_name(name: str, level: str) -> str:
    """An op as people say it: API calls without their namespace, aten ops with their overload.

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


def word(op: str, level: str) -> str:
    """What a node is named after.

    >>> word("add.Tensor", "aten"), word("[]", "api"), word("_softmax", "aten")
    ('add', 'getitem', '_softmax')
    """
    return OPERATOR_WORDS.get(op) or (op.partition(".")[0] if level == "aten" else op)
