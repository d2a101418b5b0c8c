"""The examples of the README and the docs run, and print what stands below them.

A block that begins with ``# name.py`` is that file, and is run by itself if nothing else mentions it or its
output is shown. The other ``python`` blocks of a document are one script, run as a user would; a ``text``
block after one is its output, with ``...`` for parts that vary. A ``console`` block is a session in the same
folder afterwards: commands after ``$ ``, each with its output.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sightline as sl

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
_MARK = "@@@ end of block"
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
#: What a session can start: this Python, and the command of this checkout.
_PROGRAMS = {
    "python": 'exec {python} "$@"',
    "sightline": 'exec {python} -c "from sightline.cli import main; main(prog_name=\'sightline\')" "$@"',
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_examples_run_and_print_what_is_shown(document: Path, tmp_path: Path) -> None:
    if document.stem == "page" and not (ROOT / "src/sightline/page/viewer.js").exists():
        pytest.skip("the viewer is not built: that needs Node 20")
    script: list[str] = []
    wanted: list[str | None] = []
    file = ""  # of the block before, where it is a file
    for kind, text in _BLOCK.findall(document.read_text("utf-8")):
        if kind == "python" and (found := _FILE.match(text)):
            # The comment line stays out, so that line numbers in the text are those of the model itself.
            file = found[1]
            (tmp_path / file).write_text(text[found.end() :], "utf-8")
            if len(re.findall(rf"\b{file[:-3]}\b", document.read_text("utf-8"))) == 1:
                _run(tmp_path, file)
        elif kind == "python":
            script += (text, f"print({_MARK!r})\n")
            wanted.append(None)
            file = ""
        elif kind == "text" and file:
            _compare(f"{document.name}: {file}", text, _run(tmp_path, file))
        elif kind == "text":
            wanted[-1] = text
    (tmp_path / "example.py").write_text("".join(script), "utf-8")
    printed = _run(tmp_path, "example.py").split(_MARK + "\n")
    for text, shown in zip(wanted, printed, strict=False):
        if text is not None:
            _compare(document.name, text, shown)
    for kind, text in _BLOCK.findall(document.read_text("utf-8")):
        if kind == "console":
            _session(document.name, text, tmp_path)


def _compare(where: str, text: str, shown: str) -> None:
    checker = doctest.OutputChecker()
    if not checker.check_output(text, shown, FLAGS):
        difference = checker.output_difference(doctest.Example("", text), shown, FLAGS)
        pytest.fail(f"{where}\n{difference}", pytrace=False)


def _session(where: str, session: str, folder: Path) -> None:
    """Run the commands of a session; one that fails says so as ``Error:``, as the text must."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text.format(python=sys.executable)}\n", "utf-8")
        (programs / name).chmod(0o755)
    environment = _environment() | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for command, wanted in _COMMAND.findall(session):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) != ("Error: " in done.stdout), f"{where}: {command}\n{done.stdout}"
        _compare(f"{where}: {command}", wanted, done.stdout)


def _run(folder: Path, file: str) -> str:
    """The output of a script in a folder."""
    command = [sys.executable, file]
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_file_that_a_document_names_is_there() -> None:
    names = {path.name for folder in ("src", "checks", "packaging") for path in (ROOT / folder).rglob("*.*")}
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    assert [name for name in re.findall(r"`[\w./]*?(\w+\.(?:py|cpp|h))`", text) if name not in names] == []


def test_the_site_builds_and_every_link_of_it_leads_somewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*build, ROOT / "docs", tmp_path / "site"],
        capture_output=True, text=True, check=False, env=_environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "site/reference.html").read_text("utf-8")
    assert all(f'id="sightline.{name}"' in page for name in set(sl.__all__) - {"__version__"})
    assert (tmp_path / "site/searchindex.js").exists()
    readme = (tmp_path / "site/readme.html").read_text("utf-8")
    assert 'href="views.html"' in readme
