"""The documentation site, which `make docs` builds from the Markdown files beside this one.

A link that leads nowhere is a warning, and a warning is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

from sightline import __version__

project = "sightline"
author = "the sightline authors"
copyright = "the sightline authors"  # the name that Sphinx reads
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3  # `[text](page.md#a-heading)`, as on the hosts of repositories
html_theme = "furo"
html_title = f"sightline {version}"
html_copy_source = False
html_theme_options = {"light_css_variables": {"code-font-size": "74%"}}  # a terminal of 100 columns fits

default_role = "py:obj"  # one backtick in a docstring names something of the package
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures show them

_ROOT: Final = Path(__file__).parents[1]
#: Files beside the folder of documents, and the page of the site that shows each.
_PAGES: Final = {name: name.lower() for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")}
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)")


def setup(app: Sphinx) -> None:
    """Show the repository's own documents as pages, and trees of files as plain text."""
    app.add_lexer("tree", TextLexer)
    app.connect("source-read", _read_page)


def _read_page(_: Sphinx, page: str, source: list[str]) -> None:
    """The text of a page, whose links to the repository's own documents lead to their pages."""
    folder = _ROOT / "docs"
    for name, own_page in _PAGES.items():
        if page == own_page:
            folder = _ROOT
            source[0] = (_ROOT / f"{name}.md").read_text("utf-8")

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        target = folder / path
        if target.is_dir():  # which the site has no page for
            return text
        if target.parent.resolve() == _ROOT and target.stem in _PAGES:
            return f"[{text}]({_PAGES[target.stem]}.md{anchor})"
        return f"[{text}]({path.removeprefix('docs/')}{anchor})"

    source[0] = _LINK.sub(link, source[0])
