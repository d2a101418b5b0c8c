"""The page of a recording inside a notebook: `inline_page` is what a cell shows that ends with a trace."""

from __future__ import annotations

import html
from typing import Final

from sightline.errors import UsageError
from sightline.page.document import document, ranks_document
from sightline.ranks.merge import Run
from sightline.trace.index import Index

#: Where a recording has more ops, a notebook shows its overview: the page would make the notebook huge.
MOST_OPS: Final = 200_000
_MOST_BYTES: Final = 4 << 20
_HEIGHT: Final = 640  #: pixels: a cell with all panes, on a laptop
_STYLE: Final = (
    f"width:100%;height:{_HEIGHT}px;border:1px solid rgba(128,128,128,0.4);border-radius:6px;"
    "background:transparent;resize:vertical"
)


def inline_page(index: Index, run: Run | None = None) -> str | None:
    """The page in a frame of its own, without a server; None where it is too large or cannot be made.

    With ``run`` it is that of all its ranks.

    The frame may run the page's script and nothing else: it has no access to the notebook around it.
    """
    if len(index.raw.ops) > MOST_OPS:
        return None
    try:
        page = document(index) if run is None else ranks_document(run)
    except UsageError:  # the viewer is not built
        return None
    if len(page) > _MOST_BYTES:
        return None
    name = html.escape(str(index.raw.info.get("name") or "a run"))
    return (
        f'<iframe title="{name}" sandbox="allow-scripts" allow="clipboard-write" loading="lazy" '
        f'style="{_STYLE}" srcdoc="{html.escape(page)}"></iframe>'
        '<div style="opacity:0.7;font-size:12px"><code>t.html("run.html")</code> writes this page to a file, '
        "<code>print(t)</code> is the overview.</div>"
    )
