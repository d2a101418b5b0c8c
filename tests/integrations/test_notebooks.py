"""Notebooks: positions name the cell, also in a bundle, and pages keep the nesting."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

import sightline as sl
from tests.recording.engines import BOTH_ENGINES

ROOT = Path(__file__).parents[2]
CELLS = [
    "import torch, sightline as sl\ntorch.set_num_threads(1)",
    "class Net(torch.nn.Module):\n    def forward(self, x):\n        y = x.relu()\n        return y.sum()\n",
    "with sl.trace(Net(), engine=ENGINE, PATH) as t:\n    Net()(torch.ones(2, 3))",
    "print(t)",
    "t.code(level='api')",
    "if not t.info.get('x'): print(t.code(level='api')); print(t.source(file='In[2]'))",
    "saved = t.save('saved.sight')",
    (
        "try:\n    with sl.trace():\n        torch.ones(2) @ torch.ones(3)\nexcept RuntimeError as error:\n"
        "    print(error.__notes__[0])"
    ),
    "with sl.trace(live='code', engine=ENGINE):\n    torch.ones(2).neg()",
]


class Text(HTMLParser):
    """The text of a page without its styles: white space counts in ``<pre>`` and nowhere else."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self._pre = "", 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._pre += tag == "pre"
        self.text += "\n" if tag in ("pre", "div", "tr") else ""

    def handle_endtag(self, tag: str) -> None:
        self._pre -= tag == "pre"

    def handle_data(self, data: str) -> None:
        self.text += data if self._pre else " ".join(data.split())


def executed(folder: Path, engine: str, more: str) -> Any:
    cells = [text.replace("ENGINE", repr(engine)).replace("PATH", more) for text in CELLS]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return book


@BOTH_ENGINES
@pytest.mark.parametrize("more", ["path='run.sight'", "last=50"])
def test_positions_name_the_cell_and_pages_keep_the_nesting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, more: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    book = executed(tmp_path, engine, more)
    printed = book.cells[5].outputs[0].text
    assert "Net()(torch.ones(2, 3))  # In[3]:2 in <module>:\n" in printed
    assert "y = x.relu()  # In[2]:3 in Net.forward:\n" in printed
    assert "ipykernel" not in printed
    for folder in ["saved.sight", *(["run.sight"] if "path" in more else [])]:
        saved = sl.load(tmp_path / folder)
        assert str(saved.code(level="api")) + "\n" + str(saved.source(file="In[2]")) + "\n" == printed
    assert "sightline: dot failed at In[8]:3 in <module>" in book.cells[7].outputs[0].text
    assert "torch.ones(2).neg()  # In[9]:2 in <module>:" in book.cells[8].outputs[0].text
    page, _ = HTMLExporter().from_notebook_node(book)
    plain = Text(page).text
    shown = "│ y = x.relu()  # In[2]:3 in Net.forward:"
    assert plain.splitlines().count(shown) == 2, "as a view, and where it was printed"
    assert re.search(r"^api ops   \d", plain, re.MULTILINE), "the overview's columns stand below each other"


def test_a_shell_without_a_kernel(tmp_path: Path) -> None:
    script = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_cell('import torch, sightline as sl', store_history=True)\n"
        "shell.run_cell('def f(x):\\n    return x.relu()', store_history=True)\n"
        "shell.run_cell('with sl.trace() as t:\\n    y = f(torch.ones(2))', store_history=True)\n"
        'shell.run_cell(\'print(t.code(op="relu", level="aten"))\')\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path),
             "SIGHTLINE_ENGINE": "python"},
    )  # fmt: skip
    assert "y = f(torch.ones(2))  # In[3]:2 in <module>:" in done.stdout
    assert "return x.relu()  # In[2]:2 in f:" in done.stdout
