"""Who may import whom: ``python checks/imports.py [src/sightline]`` prints every import that may not be.

    data ← assemble ← store
    data ← analysis ← compare, graph ← views ← ranks ← convert ← page ← api ← tracing
    analysis ← explain ← recording ← tracing
    trace_tables ← api
    tracing ← diff_api, compat, integrations ← cli

``schema``, ``errors``, ``argument_checks``, ``hints``, ``notation``, ``options``, ``patterns``,
``process_rank``, ``markers``, ``tensor_memory``, ``text_encoding``, ``threads`` and ``_version`` are below
all.
Only what runs or exports a model may import torch. Imports inside functions count: a late import is still a
dependency. Imports under ``if TYPE_CHECKING:`` do not: they name a type and never run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = "sightline"

_BASE: Final = frozenset(
    """errors argument_checks hints notation options patterns process_rank markers tensor_memory
    text_encoding threads schema _version""".split()
)
_DATA: Final = _BASE | {"data"}
_READERS: Final = _DATA | {"analysis"}
_FILES: Final = _READERS | {"store"}
_HELD: Final = _FILES | {"compare", "graph", "views", "ranks", "convert", "page"}
#: Each part of the package, and the other parts it may import. "" is the package's own ``__init__``.
MAY_IMPORT: Final[dict[str, frozenset[str]]] = {
    "_version": frozenset(),
    "errors": frozenset({"text_encoding"}),
    "notation": frozenset({"errors"}),
    "argument_checks": frozenset({"errors"}),
    "hints": frozenset({"errors", "argument_checks"}),
    "options": frozenset({"errors", "argument_checks"}),
    "patterns": frozenset({"errors", "hints"}),
    "process_rank": frozenset(),
    "text_encoding": frozenset(),
    "threads": frozenset(),
    "markers": frozenset({"errors", "argument_checks"}),
    "schema": frozenset(),
    "tensor_memory": frozenset(),
    "data": _BASE,
    "assemble": _DATA,
    "store": _DATA | {"assemble"},
    "analysis": _DATA,
    "explain": _READERS,
    "recording": _FILES | {"assemble", "explain"},
    "compare": _READERS,
    "graph": _READERS,
    "views": _READERS | {"compare"},
    "ranks": _FILES | {"views"},
    "convert": _FILES | {"views", "ranks"},
    "page": _FILES | {"compare", "graph", "views", "ranks", "convert"},
    "trace_tables": _FILES | {"recording", "ranks"},
    "api": _HELD | {"trace_tables"},
    "tracing": _HELD | {"recording", "api"},
    "diff_api": _HELD | {"api", "tracing"},
    "": _HELD | {"api", "tracing", "diff_api"},
    "__main__": frozenset({"cli"}),
    "cli": _HELD | {"recording", "api", "tracing", "diff_api", "compat", ""},
    "compat": _HELD | {"recording", "api", "tracing", ""},
    "integrations": _FILES | {"api", "tracing"},
}

#: What may import torch: what runs or exports a model.
MAY_IMPORT_TORCH: Final = ("recording", "graph.exported", "compat", "tensor_memory")
TORCH: Final = frozenset({"torch", "functorch", "torchgen"})


@dataclass(frozen=True, slots=True)
class Import:
    """One import as it is written: the module it runs in and the module it asks for."""

    file: Path
    line: int
    importer: str  #: dotted, without the package's name: ``views.code``
    target: str  #: dotted and absolute: ``sightline.data.trace_data``

    def fault(self) -> str | None:
        """Why this import may not be, or None."""
        top, _, rest = self.target.partition(".")
        if top in TORCH and not any(_within(self.importer, part) for part in MAY_IMPORT_TORCH):
            return f"{self.importer or PACKAGE} may not import torch"
        if top != PACKAGE:
            return None
        importer, imported = self.importer.partition(".")[0], rest.partition(".")[0]
        for part in (importer, imported):
            if part not in MAY_IMPORT:
                return f"{part!r} has no place in the layers yet: add it to MAY_IMPORT"
        if imported == importer or imported in MAY_IMPORT[importer]:
            return None
        return f"{importer or PACKAGE} may not import {imported or f'the public names of {PACKAGE}'}"


def _within(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def faults(root: Path) -> list[str]:
    """Every forbidden import below ``root``, the folder of the package, as ``file:line: why``."""
    found = []
    for file in sorted(root.rglob("*.py")):
        for item in imports(file, root):
            why = item.fault()
            if why:
                found.append(f"{item.file}:{item.line}: {why} ({item.target})")
    return found


def imports(file: Path, root: Path) -> Iterator[Import]:
    """Every import of one file that can run, wherever in the file it stands."""
    parts = file.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    importer = ".".join(parts[:-1] if is_package else parts)
    home = ".".join((PACKAGE, *(parts[:-1])))
    tree = ast.parse(file.read_text("utf-8"), str(file))
    for node in _running(tree):
        for target in _targets(node, home, root):
            yield Import(file, getattr(node, "lineno", 0), importer, target)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, except what stands under ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from _running(other)
            continue
        yield child
        yield from _running(child)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _targets(node: ast.AST, home: str, root: Path) -> Iterator[str]:
    """The modules that one statement or call imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, home)
        for alias in node.names:
            yield f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}", root) else base
    elif isinstance(node, ast.Call) and _is_dynamic(node.func) and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def _absolute(node: ast.ImportFrom, home: str) -> str:
    if not node.level:
        return node.module or ""
    parents = home.split(".")
    anchor = parents[: len(parents) - node.level + 1]
    return ".".join([*anchor, node.module] if node.module else anchor)


def _is_dynamic(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _is_module(dotted: str, root: Path) -> bool:
    """Whether ``from sightline import x`` means the module ``x`` or a name of the package."""
    top, *rest = dotted.split(".")
    if top != PACKAGE:
        return False
    path = root.joinpath(*rest)
    return path.with_suffix(".py").is_file() or path.is_dir()


def main(arguments: list[str]) -> int:
    """Print the forbidden imports; the exit status is 1 if there is any."""
    root = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "src" / PACKAGE
    if not root.is_dir():
        print(f"There is no folder {root}.", file=sys.stderr)
        return 2
    found = faults(root)
    for line in found:
        print(line)
    print(f"import directions: {len(found)} forbidden" if found else "import directions: fine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
