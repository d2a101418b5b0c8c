"""A page as one HTML file: of a recording (`document`), of a distributed job or of a comparison.

In a notebook a cell that ends with a trace shows the page in a frame (`inline_page`).

The file opens without a network and makes no requests: a Content-Security-Policy forbids everything but its
script and its style sheet, each by its hash. Recorded data is base64 and is shown as text, so that nothing
in it can be markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from importlib.resources import files
from typing import Final

from sightline.compare.comparison import Comparison
from sightline.convert.atomic_files import atomic_path
from sightline.data.index import Index
from sightline.errors import UsageError
from sightline.page.comparison import comparison_payload
from sightline.page.payload import payload
from sightline.page.ranks import job_name, rank_blocks
from sightline.ranks.merge import Run

#: The error where the package has no viewer: a source checkout in which it was not built.
NO_VIEWER: Final = (
    "The viewer of the page is not built: run `make viewer` in the source checkout, which needs Node 20, "
    "or install sightline from a wheel, which has it."
)
_TITLE_LENGTH: Final = 120


def document(index: Index) -> str:
    """The page of a recording."""
    name = str(index.raw.info.get("name", ""))[:_TITLE_LENGTH]
    return _page(f"{name} · sightline" if name else "sightline", {"recording": payload(index)})


def diff_document(comparison: Comparison) -> str:
    """The page of a comparison, which holds both recordings."""
    sides = (comparison.a, comparison.b)
    names = [str(side.data.info.get("name", ""))[: _TITLE_LENGTH // 2] for side in sides]
    blocks = {f"recording-{name}": payload(side.index, None) for name, side in zip("ab", sides, strict=True)}
    return _page(
        f"{names[0]} | {names[1]} · sightline", blocks | {"comparison": comparison_payload(comparison)}
    )


def ranks_document(run: Run) -> str:
    """The page of a distributed job: all ranks, and the recording of one of each kind."""
    title = f"{job_name(run)[:_TITLE_LENGTH]} · {run.world_size} ranks · sightline"
    return _page(title, rank_blocks(run))


def _page(title: str, blocks: dict[str, bytes]) -> str:
    """A page with the viewer and its data: blocks by their ids."""
    script, style = _viewer_file("viewer.js"), _viewer_file("viewer.css")
    title = "".join(char if char.isprintable() else " " for char in title)  # no characters foreign to HTML
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        '<div id="page"><noscript>This page needs JavaScript.</noscript></div>',
        *(f'<script type="application/octet-stream" id="{id}">{_base64(data)}</script>'
          for id, data in blocks.items()),
        f"<script>{script}</script>",
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def save_page(index: Index, path: str | os.PathLike[str]) -> int:
    """Write the page of a recording to a file, at once or not at all; returns how many bytes it has."""
    return _save(document(index), path)


def save_ranks_page(run: Run, path: str | os.PathLike[str]) -> int:
    """Write the page of a distributed job to a file, at once or not at all; returns how many bytes it has."""
    return _save(ranks_document(run), path)


def save_diff_page(comparison: Comparison, path: str | os.PathLike[str]) -> int:
    """Write the page of a comparison to a file, at once or not at all; returns how many bytes it has."""
    return _save(diff_document(comparison), path)


def _save(page: str, path: str | os.PathLike[str]) -> int:
    data = page.encode("utf-8", "replace")
    with atomic_path(path) as target:
        target.write_bytes(data)
    return len(data)


def _viewer_file(name: str) -> str:
    """A file of the built viewer."""
    try:
        return (files("sightline.page") / name).read_text("utf-8")
    except FileNotFoundError:
        raise UsageError(NO_VIEWER) from None


def _hash(text: str) -> str:
    return f"sha256-{_base64(hashlib.sha256(text.encode()).digest())}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


#: Of a recording with more ops a notebook shows the overview: the page would make the notebook huge.
MOST_OPS: Final = 200_000
_MOST_BYTES: Final = 4 << 20
_HEIGHT: Final = 640  #: pixels: a cell with all panes, on a laptop
_STYLE: Final = (
    f"width:100%;height:{_HEIGHT}px;border:1px solid rgba(128,128,128,0.4);border-radius:6px;"
    "background:transparent;resize:vertical"
)


def inline_page(index: Index, run: Run | None = None) -> str | None:
    """The page in a frame of its own, without a server; None if it is too large or the viewer is missing.

    With ``run`` it is the page of all its ranks. The frame may run the page's script and nothing else: it has
    no access to the notebook around it.
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
