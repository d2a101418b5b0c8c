"""Exported graphs on disk: torch's own archive, and a cache whose key covers all that a graph depends on."""

from __future__ import annotations

import copy
import enum
import functools
import hashlib
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

from sightline._version import __version__
from sightline.data.file_owners import installed_file
from sightline.errors import DamagedFile, UsageError
from sightline.graph.exported.program import ProgramInfo
from sightline.graph.exported.torch_export import ExportLog, torch_messages
from sightline.graph.exported.torchapi import pytree
from sightline.tensor_memory import has_memory

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH: Final = 12
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
#: Attributes of transformers' configurations that differ between processes without meaning anything.
_VOLATILE: Final = frozenset({"_original_object_hash"})
_INTERNAL: Final = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class NoCacheKey(Exception):
    """A graph may depend on an object that cannot be described; the message names it."""


def cache_key(model: torch.nn.Module, args: Any, kwargs: Any, options: dict[str, Any]) -> str:
    """A digest of everything that a graph depends on; `NoCacheKey` where something cannot be described."""
    describe = _Describer(model)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts = [
        f"{__version__} {torch.__version__} {sys.version}",
        f"{torch.get_default_dtype()} {torch.is_grad_enabled()} {torch.is_autocast_enabled('cpu')}",
        describe(options, "options"),
        str(spec),
    ]
    parts += [
        _tensor_text(leaf) if isinstance(leaf, torch.Tensor) else describe(leaf, "an input")
        for leaf in leaves
    ]
    classes: dict[type, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        classes.update(dict.fromkeys(type(module).__mro__))
        parts.append(f"{path}: {type(module).__module__}.{type(module).__qualname__}")
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                parts.append(f"{name}={describe(value, f'{path or type(module).__name__}.{name}')}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {_tensor_text(tensor)}")
    digest = hashlib.sha256()
    for part in (*parts, *_sources(classes)):
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def _tensor_text(tensor: torch.Tensor) -> str:
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else tensor.layout
    kind = type(tensor).__qualname__
    return f"{kind} {tuple(tensor.shape)} {strides} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


class _Describer:
    """Describes values in texts that are equal only for equal values."""

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._weights = {id(tensor): name for name, tensor in tensors}  # the model keeps them alive

    def __call__(self, value: Any, where: str, depth: int = 0) -> str:
        """The description of a value; ``where`` names it in the error if it has none."""
        if depth > _MAX_DEPTH:
            raise NoCacheKey(f"{where} is nested too deeply")
        inner = functools.partial(self, depth=depth + 1)
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)):
            return str(value)
        if isinstance(value, torch.Tensor):
            name = self._weights.get(id(value))
            return f"weight {name}" if name is not None else _tensor_content(value)
        if isinstance(value, torch.nn.Module):
            return f"module {type(value).__qualname__}"  # the model's own are described elsewhere
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
        return self._describe_code(value, where, inner)

    def _describe_code(self, value: Any, where: str, inner: Callable[..., str]) -> str:
        """Functions, classes, references, and objects that are fully described by their attributes."""
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
        attributes = getattr(value, "__dict__", None)
        if attributes is not None and (library or hasattr(value, "__dataclass_fields__")):
            return f"{type(value).__qualname__} {inner(attributes, where)}"
        raise NoCacheKey(f"{where} is a {type(value).__qualname__}")


def _tensor_content(tensor: torch.Tensor) -> str:
    """A tensor that is not a weight, with a digest of its numbers: they become part of the graph."""
    if tensor.layout is not torch.strided:
        raise NoCacheKey("a tensor that is not strided")
    if not has_memory(tensor):
        raise NoCacheKey("a tensor without memory")
    flat = tensor.detach().cpu().contiguous().flatten()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{_tensor_text(tensor)} {hashlib.sha256(data).hexdigest()}"


def _code(code: types.CodeType) -> str:
    """The instructions of a function and its source position."""
    constants = [
        _code(value) if isinstance(value, types.CodeType)
        else f"frozenset({sorted(map(repr, value))})" if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]  # fmt: skip
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants)
    return f"{parts} {code.co_filename} {code.co_firstlineno} {code.co_linetable!r}"


def _definitions(holder: Any) -> Iterator[str]:
    """Every function that a class or a module defines, and its plain values."""
    name = holder.__module__ if isinstance(holder, type) else holder.__name__
    # Globals of a library, such as the id of a session, do not belong to the model.
    plain = isinstance(holder, type) or not _is_installed(getattr(holder, "__file__", None) or ".py")
    for key, value in list(vars(holder).items()):
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__wrapped__", getattr(value, "__func__", value))
        if isinstance(value, types.FunctionType) and (isinstance(holder, type) or value.__module__ == name):
            given = (value.__defaults__, value.__kwdefaults__)
            if any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(given)):
                raise NoCacheKey("a function with a tensor as a default")
            defaults = _ADDRESS.sub("", repr(given))
            yield f"{name}.{key} {_code(value.__code__)} {defaults}"
        elif plain and isinstance(value, _PLAIN) and not key.startswith("__"):
            yield f"{name}.{key}={value!r}"
        elif isinstance(holder, types.ModuleType) and isinstance(value, type) and value.__module__ == name:
            if holder is not value:
                yield from _definitions(value)


def _sources(classes: dict[type, None]) -> Iterator[str]:
    """The code of the classes, and of the user's own modules they refer to."""
    waiting: list[types.ModuleType] = []
    for kind in classes:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue  # the version of torch is in the key
        yield from _definitions(kind)
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
        yield from _definitions(module)
        for value in list(vars(module).values()):
            name = (
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            )
            other = sys.modules.get(name) if isinstance(name, str) else None
            file = getattr(other, "__file__", None)
            if other is not None and file and other.__name__ not in seen and not _is_installed(str(file)):
                waiting.append(other)


def _is_installed(file: str) -> bool:
    return not file.endswith(".py") or installed_file(file)


_INFO_FILE: Final = "sightline.json"
_FORMAT: Final = 1


def write_archive(program: torch.export.ExportedProgram, info: ProgramInfo, path: Path) -> None:
    """Write an archive as a whole or not at all, without the example's inputs."""
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {str(path.parent)!r} to save the graph in.")
    bare = copy.copy(program)
    bare.example_inputs = None
    plain = json.dumps({"format": _FORMAT, **info.to_plain()})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".pt2")
    os.close(handle)
    try:
        with torch_messages(ExportLog()):
            torch.export.save(bare, temporary, extra_files={_INFO_FILE: plain})
        os.replace(temporary, path)
    except OSError:
        raise
    except Exception as error:
        raise UsageError(f"torch cannot save this graph: {_first_line(error)}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_archive(path: Path) -> tuple[torch.export.ExportedProgram, ProgramInfo]:
    """The program of an archive and its info. Only for archives you trust: loading can run code."""
    if not path.is_file():
        raise UsageError(f"There is no file {str(path)!r}.")
    extra: dict[str, Any] = {_INFO_FILE: ""}
    log = ExportLog()
    try:
        with torch_messages(log):
            program = torch.export.load(str(path), extra_files=extra)
        plain = json.loads(extra[_INFO_FILE] or "null")
        if plain is None:
            return program, ProgramInfo.from_program(program)
        if plain.pop("format") != _FORMAT:
            raise DamagedFile(f"{path} was written by another version of sightline: export the model again.")
        return program, ProgramInfo.from_plain(plain)
    except DamagedFile:
        raise
    except Exception as error:
        raise DamagedFile(
            f"{path} is not a graph that can be read: {(*log.notes, _first_line(error))[0][-300:]}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ExportCache:
    """A private folder of archives, by key."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def load(self, key: str) -> tuple[torch.export.ExportedProgram, ProgramInfo] | None:
        """The entry of a key; None where it is absent or damaged."""
        path = self._path(key)
        if not path.is_file() or not self._is_private():
            return None
        try:
            return read_archive(path)
        except (DamagedFile, OSError):
            return None

    def store(self, key: str, program: torch.export.ExportedProgram, info: ProgramInfo) -> str:
        """Add an entry; the reason where that fails, else ""."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return f"the folder {self._folder} can be written by others"
            write_archive(program, info, self._path(key))
        except (UsageError, OSError) as error:
            return str(error)
        return ""

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.pt2"

    def _is_private(self) -> bool:
        """Whether no other user can write to the folder: loading a file of theirs would run it."""
        state = self._folder.stat()
        own = not hasattr(os, "getuid") or state.st_uid == os.getuid()
        return own and not state.st_mode & 0o022
