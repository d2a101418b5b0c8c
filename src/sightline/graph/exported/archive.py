"""Exported graphs on disk: torch's own archive, and a cache keyed by all that the graph depends on."""

from __future__ import annotations

import copy
import enum
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from sightline._version import __version__
from sightline.errors import DamagedFile, UsageError
from sightline.graph.exported.program import ProgramInfo
from sightline.graph.exported.torch_export import Noise, heard

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_DEPTH: Final = 12
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
#: Attributes of transformers' configurations that differ between processes and say nothing.
_VOLATILE: Final = frozenset({"_original_object_hash"})
_INTERNAL: Final = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class Indescribable(Exception):
    """Something on which a graph may depend has no description; the text says what."""


def key_of(model: torch.nn.Module, args: Any, kwargs: Any, options: dict[str, Any]) -> str:
    """The key; `Indescribable` where there is none."""
    digest = hashlib.sha256()
    for part in _parts(model, args, kwargs, options):
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(model: torch.nn.Module, args: Any, kwargs: Any, options: dict[str, Any]) -> Iterator[str]:
    yield f"{__version__} {torch.__version__} {sys.version}"
    yield f"{torch.get_default_dtype()} {torch.is_grad_enabled()} {torch.is_autocast_enabled('cpu')}"
    described = _Describer(model)
    yield described(options, "options")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    yield str(spec)
    for leaf in leaves:
        yield _tensor(leaf) if isinstance(leaf, torch.Tensor) else described(leaf, "an input")
    classes: dict[type, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        classes.update(dict.fromkeys(type(module).__mro__))
        yield f"{path}: {type(module).__module__}.{type(module).__qualname__}"
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield f"{name}={described(value, f'{path or type(module).__name__}.{name}')}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} {_tensor(tensor)}"
    yield from _sources(classes)


def _tensor(tensor: torch.Tensor) -> str:
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else tensor.layout
    kind = type(tensor).__qualname__
    return f"{kind} {tuple(tensor.shape)} {strides} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


class _Describer:
    """Texts that are equal only for things that are equal."""

    def __init__(self, model: torch.nn.Module) -> None:
        weights = (*model.named_parameters(), *model.named_buffers())
        self._own = {id(tensor): name for name, tensor in weights}  # the model keeps them alive

    def __call__(self, value: Any, where: str, depth: int = 0) -> str:
        """The description of a value; ``where`` says what it is, should it have none."""
        if depth > _DEPTH:
            raise Indescribable(f"{where} is nested too deeply")
        inner = functools.partial(self, depth=depth + 1)
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)):
            return str(value)
        if isinstance(value, torch.Tensor):
            return f"weight {self._own[id(value)]}" if id(value) in self._own else _content(value)
        if isinstance(value, torch.nn.Module):
            return f"module {type(value).__qualname__}"  # one of the model's own is described where it stands
        if isinstance(value, dict):
            items = [
                f"{inner(key, where)}: {inner(item, f'{where}[{key!r}]')}"
                for key, item in value.items()
                if key not in _VOLATILE
            ]
            return f"{type(value).__qualname__}{{{', '.join(items)}}}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__qualname__}[{', '.join(inner(item, where) for item in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__qualname__}{sorted(inner(item, where) for item in value)}"
        return self._of_code(value, where, inner)

    def _of_code(self, value: Any, where: str, inner: Callable[..., str]) -> str:
        """Functions, classes, references, and the objects of which everything is in their attributes."""
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__}"
        if isinstance(value, weakref.ref):
            return f"reference to {inner(value(), where)}"
        if isinstance(value, functools.partial):
            return f"partial {inner((value.func, value.args, value.keywords), where)}"
        if isinstance(value, types.MethodType):
            return f"method {value.__qualname__} {_code(value.__func__.__code__)}"
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return f"{value.__module__}.{value.__qualname__} {_code(value.__code__)} {inner(cells, where)}"
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            return str(getattr(value, "__qualname__", value.__name__))
        library = type(value).__module__.partition(".")[0] in ("torch", "transformers")
        held = getattr(value, "__dict__", None)
        if held is not None and (library or hasattr(value, "__dataclass_fields__")):
            return f"{type(value).__qualname__} {inner(held, where)}"
        raise Indescribable(f"{where} is a {type(value).__qualname__}")


def _content(tensor: torch.Tensor) -> str:
    """A tensor that is no weight: it ends up in the graph as it is."""
    if tensor.layout is not torch.strided:
        raise Indescribable("a tensor that is not strided")
    flat = tensor.detach().cpu().contiguous().flatten()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{_tensor(tensor)} {hashlib.sha256(data).hexdigest()}"


def _code(code: types.CodeType) -> str:
    """What a function does and on which lines it stands."""
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants)
    return f"{parts} {code.co_filename} {code.co_firstlineno} {code.co_linetable!r}"


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(repr, value))})"
    return repr(value)


def _functions(holder: Any) -> Iterator[str]:
    """Every function of a class or a module that is its own, and its plain values."""
    name = holder.__module__ if isinstance(holder, type) else holder.__name__
    # What a library keeps in its globals, such as the id of a session, is not the model's.
    plain = isinstance(holder, type) or not _is_installed(getattr(holder, "__file__", None) or ".py")
    for key, value in list(vars(holder).items()):
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__wrapped__", getattr(value, "__func__", value))
        if isinstance(value, types.FunctionType) and (isinstance(holder, type) or value.__module__ == name):
            defaults = _ADDRESS.sub("", repr((value.__defaults__, value.__kwdefaults__)))
            yield f"{name}.{key} {_code(value.__code__)} {defaults}"
        elif plain and isinstance(value, _PLAIN) and not key.startswith("__"):
            yield f"{name}.{key}={value!r}"
        elif isinstance(holder, types.ModuleType) and isinstance(value, type) and value.__module__ == name:
            if holder is not value:
                yield from _functions(value)


def _sources(classes: dict[type, None]) -> Iterator[str]:
    """The code of the classes, and of the user's own modules they reach."""
    waiting: list[types.ModuleType] = []
    for kind in classes:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue  # the version of torch is in the key
        yield from _functions(kind)
        module = sys.modules.get(kind.__module__)
        if module is not None:
            waiting.append(module)
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        package = sys.modules.get(module.__name__.partition(".")[0])
        yield f"{module.__name__} {getattr(package, '__version__', '')}"
        yield from _functions(module)
        waiting += [other for other in _reached(module) if other.__name__ not in seen]


def _reached(module: types.ModuleType) -> list[types.ModuleType]:
    """The user's own modules that another one refers to."""
    found = []
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        other = sys.modules.get(name) if isinstance(name, str) else None
        if other is not None and getattr(other, "__file__", None) and not _is_installed(str(other.__file__)):
            found.append(other)
    return found


def _is_installed(file: str) -> bool:
    parts = Path(file).parts
    return (
        "site-packages" in parts or "dist-packages" in parts or not file.endswith(".py") or _in_stdlib(file)
    )


@functools.cache
def _stdlib() -> str:
    return str(Path(inspect.__file__).parent)


def _in_stdlib(file: str) -> bool:
    return file.startswith(_stdlib())


_FACTS: Final = "sightline.json"
_FORMAT: Final = 1


def write(program: torch.export.ExportedProgram, facts: ProgramInfo, path: Path) -> None:
    """Write an archive as a whole or not at all. The example's inputs stay out of it."""
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {str(path.parent)!r} to save the graph in.")
    bare = copy.copy(program)
    bare.example_inputs = None
    plain = json.dumps({"format": _FORMAT, **facts.to_plain()})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".pt2")
    os.close(handle)
    try:
        with heard(Noise()):
            torch.export.save(bare, temporary, extra_files={_FACTS: plain})
        os.replace(temporary, path)
    except OSError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"torch cannot save this graph: {first}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read(path: Path) -> tuple[torch.export.ExportedProgram, ProgramInfo]:
    """The program and the facts of an archive. Only for archives you trust: loading can run code."""
    if not path.is_file():
        raise UsageError(f"There is no file {str(path)!r}.")
    extra: dict[str, Any] = {_FACTS: ""}
    noise = Noise()
    try:
        with heard(noise):
            program = torch.export.load(str(path), extra_files=extra)
        plain = json.loads(extra[_FACTS] or "null")
        if plain is None:
            return program, ProgramInfo.of_foreign(program)
        if plain.pop("format") != _FORMAT:
            raise DamagedFile(f"{path} was written by another version of sightline: export the model again.")
        return program, ProgramInfo.from_plain(plain)
    except DamagedFile:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DamagedFile(
            f"{path} is not a graph that can be read: {(*noise.notes, first)[0][-300:]}"
        ) from error


class Cache:
    """A private folder of archives by key."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def load(self, key: str) -> tuple[torch.export.ExportedProgram, ProgramInfo] | None:
        """The entry of a key; None where there is none, or only a damaged one."""
        path = self._path(key)
        if not path.is_file() or not self._is_private():
            return None
        try:
            return read(path)
        except (DamagedFile, OSError):
            return None

    def store(self, key: str, program: torch.export.ExportedProgram, facts: ProgramInfo) -> str:
        """Keep an entry; why it could not be kept, or nothing."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return f"the folder {self._folder} can be written by others"
            write(program, facts, self._path(key))
        except (UsageError, OSError) as error:
            return str(error)
        return ""

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.pt2"

    def _is_private(self) -> bool:
        """Whether nobody else can put a file here, which would be run when loaded."""
        state = self._folder.stat()
        mine = not hasattr(os, "getuid") or state.st_uid == os.getuid()
        return mine and not state.st_mode & 0o022
