"""The environment of a recording: versions, devices, host and command line, with secrets masked.

A recording may be shared, so everything that looks like a secret is masked before it is saved; in doubt a
harmless word is masked too.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from sightline.data.trace_data import TraceData

MASK: Final = "•••"

#: Words that mean a secret at the end of any name, and words that do so only on their own.
_LONG: Final = (
    r"(?:passwords?|passwd|passphrases?|secrets?|token|credentials?|authorization|session[-_.]?id|"
    r"(?:api|access|private|secret|signing|encryption|license|account|shared)[-_.]?keys?)"
)
_SHORT: Final = r"(?<![A-Za-z])(?:pass|pwd|auth|bearer|cookie|key)"
_SECRET: Final = rf"(?:{_LONG}|{_SHORT})(?![A-Za-z])"  # not tokenizer, nor max-tokens
_NAME: Final = re.compile(_SECRET, re.IGNORECASE)
#: name=value, name: value, "name": "value" anywhere in a text.
_ASSIGNMENT: Final = re.compile(
    rf"""({_SECRET}[\w.-]*["']?\s*[=:]\s*)(?!//)("[^"]*"|'[^']*'|(?:bearer\s+|basic\s+)?[^\s,;&"'}}\])]+)""",
    re.IGNORECASE,
)
_BEARER: Final = re.compile(r"\b(bearer|basic)(\s+)([\w.~+/=-]{6,})", re.IGNORECASE)
#: The user part of a URL: a name and a password, or a secret alone.
_URL: Final = re.compile(
    r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30}://)([^/\s:@]{0,200}):([^@\s/]{0,2000})@", re.IGNORECASE
)
_URL_USER: Final = re.compile(
    r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30}://)([^/\s:@]{1,2000})@", re.IGNORECASE
)
#: Keys of well-known services.
_SERVICE_KEY: Final = re.compile(
    r"\b(?:sk|pk|rk)[-_][\w-]{12,}|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{12,}|\bhf_\w{12,}|"
    r"\bxox[a-z]-[\w-]{10,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]+)?|"
    r"\bnpm_\w{16,}|\bpypi-[\w-]{16,}|\bdop_v1_\w{16,}"
)
#: Long runs of letters and digits.
_RUN: Final = re.compile(r"[A-Za-z0-9+/_-]{20,}={0,2}")
_PART: Final = re.compile(r"[A-Za-z0-9+]{20,}")
#: An argument after a secret's name that is certainly an option; in doubt it is the secret.
_OPTION: Final = re.compile(r"--[a-z]{2,12}(-[a-z]{2,12}){0,3}(=|$)|-[A-Za-z]$")
_LONGEST: Final = 4000  #: characters of an argument; a longer one is cut


def environment_of(data: TraceData) -> dict[str, Any]:
    """The environment of a trace; a loaded one has that of the run it recorded.

    Any other trace is taken to be of this process.
    """
    saved = getattr(data, "environment", None)
    if saved is not None:
        return dict(saved) if isinstance(saved, dict) else {}
    return {
        "torch": data.info.get("torch"),
        "python": data.info.get("python") or platform.python_version(),
        "devices": sorted({meta.device for meta in data.metas}),
        "host": platform.node(),
        "platform": platform.platform(),
        "command": mask_arguments(sys.argv),
    }


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with its secrets masked.

    >>> mask_arguments(["train.py", "--lr=0.1", "--api-key", "abc", "--token=x", "https://me:pw@host/x"])
    ['train.py', '--lr=0.1', '--api-key', '•••', '--token=•••', 'https://me:•••@host/x']
    """
    masked: list[str] = []
    next_is_secret = False
    for argument in arguments:
        option = argument.startswith("-")
        if next_is_secret and not _OPTION.match(argument):
            masked.append(MASK)
            next_is_secret = False
            continue
        masked.append(mask_secrets(argument))
        next_is_secret = option and "=" not in argument and bool(_NAME.search(argument.lstrip("-")))
    return masked


def mask_secrets(text: str) -> str:
    """A text with everything that looks like a secret masked.

    >>> mask_secrets("WANDB_API_KEY=123 run sk-abcdefghijklmnop in s3://bucket/data")
    'WANDB_API_KEY=••• run ••• in s3://bucket/data'
    """
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    text = _URL.sub(rf"\1\2:{MASK}@", text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _ASSIGNMENT.sub(rf"\1{MASK}", text)
    text = _SERVICE_KEY.sub(MASK, text)
    return _RUN.sub(lambda run: MASK if _is_random(run[0]) else run[0], text)


def _is_random(run: str) -> bool:
    """Whether a long run of characters looks random.

    In words, paths and dates letters and digits rarely alternate, capitals begin words, and vowels are many.
    """
    chars = [char for char in run if char.isalnum()]
    if len(chars) < 16:
        return False
    classes = [0 if char.isdigit() else 1 if char.isupper() else 2 if char.islower() else 3 for char in chars]
    pairs = list(pairwise(classes))
    changes = sum(a != b for a, b in pairs)
    digits = classes.count(0)
    if digits >= 3 and changes >= len(chars) // 4:
        return True
    if min(pairs.count(pair) for pair in ((1, 1), (1, 2), (2, 1))) >= 2 and changes >= len(chars) * 0.3:
        return True
    for part in _PART.findall(run):  # fewer vowels than any language has
        letters = [char for char in part.lower() if char.isalpha()]
        if len(letters) >= 20 and sum(char in "aeiouy" for char in letters) < len(letters) * 0.29:
            return True
    return False
