"""Escapes text of a recording for the formats of a graph."""

from __future__ import annotations

import html
import re

#: Control characters, and those that reorder or hide text. XML 1.0 has no way to write most of them.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    """The text without control characters; newlines and tabs stay.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def escaped_html(text: str) -> str:
    """The text escaped for XML and graphviz' HTML-like labels, on one line.

    >>> escaped_html("</script>\\n&")
    '&lt;/script&gt; &amp;'
    """
    plain = printable(text)
    return html.escape(" ".join(plain.split()) if "\n" in plain or "\t" in plain else plain) or " "


def escaped_mermaid(text: str) -> str:
    """The text inside a quoted Mermaid label: everything that could end it or start markup is an entity.

    >>> escaped_mermaid('say "hi" #1')
    'say #quot;hi#quot; #35;1'
    """
    flat = " ".join(printable(text).split())
    return "".join(_ENTITIES.get(character, character) for character in flat)


_ENTITIES = {
    "#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\\": "#92;",
    "{": "#123;", "}": "#125;", "|": "#124;", ";": "#59;",
}  # fmt: skip
