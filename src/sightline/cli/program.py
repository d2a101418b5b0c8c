"""A script or a module, run as Python itself would: as ``__main__``, with its own arguments and path."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from sightline.errors import UsageError


@dataclass(frozen=True)
class Program:
    """What is to be run, found and compiled, but not begun."""

    name: str  #: what a recording of it is called
    code: CodeType
    facts: dict[str, Any]  #: of ``__main__``: its file, its spec, its loader
    folder: str  #: where its own imports are looked for first
    arguments: tuple[str, ...]

    @classmethod
    def script(cls, path: str, arguments: tuple[str, ...]) -> Program:
        """A file, or a folder with a ``__main__.py`` in it."""
        file = Path(path)
        folder = file.is_dir()
        if folder:
            file /= "__main__.py"
        if not file.is_file():
            raise UsageError(
                f"There is no script {path!r}; give the path of a Python file, or `-m` and a module."
            )
        place = str(file.absolute())
        loader = importlib.machinery.SourceFileLoader("__main__", place)
        facts: dict[str, Any] = dict.fromkeys(("__spec__", "__package__"))
        facts |= {"__file__": place, "__loader__": loader}
        if folder:  # to Python that is a module, and not a file
            spec = importlib.util.spec_from_file_location("__main__", place, loader=loader)
            facts |= {"__spec__": spec, "__package__": "", "__cached__": spec and spec.cached}
        name = Path(path).absolute().name if folder else file.stem
        return cls(name, _compiled(file, place), facts, str(file.resolve().parent), (path, *arguments))

    @classmethod
    def module(cls, name: str, arguments: tuple[str, ...]) -> Program:
        """A module by its name, or a package by its ``__main__``; the current folder comes first."""
        if not sys.flags.safe_path:
            sys.path.insert(0, "")
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError) as error:
            raise UsageError(f"The module {name!r} cannot be found: {error}.") from error
        finally:
            if not sys.flags.safe_path:
                sys.path.remove("")
        get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
        code = get_code(spec.name) if get_code is not None and spec is not None else None
        if spec is None or code is None:
            raise UsageError(
                f"There is no module {name!r} that can be run; is it installed, or in this folder?"
            )
        facts = {
            "__file__": spec.origin, "__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader,
            "__cached__": spec.cached,
        }  # fmt: skip
        return cls(name.rpartition(".")[2], code, facts, str(Path.cwd()), (spec.origin or name, *arguments))

    def begin(self) -> dict[str, Any]:
        """Take the place of ``__main__`` for the rest of the process; the result is its namespace."""
        main = ModuleType("__main__")
        own: dict[str, Any] = {"__cached__": None, "__annotations__": {}}
        own["__builtins__"] = sys.modules["builtins"]
        vars(main).update(own | self.facts)
        sys.modules["__main__"] = main
        sys.argv[:] = self.arguments
        if not sys.flags.safe_path:
            sys.path[:1] = [self.folder]
        return vars(main)

    def tell(self, error: BaseException) -> None:
        """Say what the program died of, as Python would: from its own first frame on."""
        found = error.__traceback__
        while found is not None and found.tb_frame.f_code is not self.code:
            found = found.tb_next
        tell(error.with_traceback(found or error.__traceback__))


def tell(error: BaseException) -> None:
    """Say it by whatever says such things in this process."""
    sys.excepthook(type(error), error, error.__traceback__)


def _compiled(file: Path, place: str) -> CodeType:
    """The code of a file; what is wrong in it is said as Python says it."""
    with io.open_code(str(file)) as opened:
        text = opened.read()
    return compile(text, place, "exec", dont_inherit=True)
