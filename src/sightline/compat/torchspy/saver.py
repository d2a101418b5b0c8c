"""Tensors saved to files by name: `TensorSaver`, `DebugContext` and `spy_save`.

A tensor is copied as the recorder copies captures: compactly and detached, so that a slice does not drag
its storage along. A file appears under its name only when it is whole.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn

from sightline.errors import UsageError
from sightline.options import Capture
from sightline.recording.captures import copied_size, dense_copy, save_one
from sightline.recording.torchapi import without_modes
from sightline.trace.file_names import FileNames, file_name

logger = logging.getLogger(__name__)

Names = Sequence[str] | None
Classes = type[nn.Module] | tuple[type[nn.Module], ...]
_ON_CPU: Final = Capture(device="cpu")
#: Which saver wrote a file: none is overwritten while the saver that wrote it is in use.
_writers: Final[weakref.WeakValueDictionary[Path, TensorSaver]] = weakref.WeakValueDictionary()
_current: Final[ContextVar[DebugContext | None]] = ContextVar("debug_context", default=None)
#: What saves, once for each context open anywhere: compiled code can see that there is none.
_open: Final[list[Callable[[str, Any, Any], None]]] = []


class BaseDebugger:
    """A folder, a switch, and the paths of the modules that were registered.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BaseDebugger(folder).get_module_path(nn.Linear(2, 2))
    'unknown'
    """

    def __init__(self, output_dir: str | os.PathLike[str], enabled: bool = True) -> None:
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.enabled = enabled
        self.module_paths: dict[int, str] = {}
        self._refs: dict[int, weakref.ref[nn.Module]] = {}

    def get_module_path(self, module: Any) -> str:
        """The path a module was registered under, or ``"unknown"``."""
        known = self._refs.get(id(module))
        if known is not None and known() is not module:  # an id that is used again
            return "unknown"
        return self.module_paths.get(id(module), "unknown")

    def _remember(self, module: nn.Module, path: str) -> None:
        known = self._refs.get(id(module))
        if known is None or known() is not module:
            self._refs[id(module)] = weakref.ref(module)
            self.module_paths[id(module)] = path


def chosen_modules(
    model: nn.Module, classes: Classes | None, names: Names, exclude: Names
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the filters mean, under every name they have.

    >>> model = nn.Sequential(*[nn.ReLU() for _ in range(11)])
    >>> [path for path, _ in chosen_modules(model, (nn.ReLU,), ["1"], None)]
    ['1']
    """
    wanted, unwanted = _parts(names), _parts(exclude)
    for path, module in model.named_modules(remove_duplicate=False):
        shown = path or "root"
        if not isinstance(module, classes or nn.Module):
            continue
        if wanted and not any(part.search(shown) for part in wanted):
            continue
        if not any(part.search(shown) for part in unwanted):
            yield shown, module


def _parts(names: Names) -> list[re.Pattern[str]]:
    """Parts of a path to look for; a number in one is a whole one: ``layers.1`` is not ``layers.10``."""
    given = [names] if isinstance(names, str) else list(names or ())
    return [
        re.compile(
            ("(?<![0-9])" if part[:1].isdigit() else "")
            + re.escape(part)
            + ("(?![0-9])" if part[-1:].isdigit() else "")
        )
        for part in given
    ]


class TensorSaver(BaseDebugger):
    """Writes tensors to ``{name}.call{n}.pt``, for ``torch.load(..., weights_only=True)``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saver = TensorSaver(folder)
    ...     paths = [saver.save("q", torch.ones(2, 3)), saver.save("q", torch.ones(2, 3), norm_only=True)]
    ...     [path.name for path in paths], torch.load(paths[1], weights_only=True).shape
    (['q.call0.pt', 'q.call1.pt'], torch.Size([2]))

    Tuples, lists and dicts of tensors go into one file. What cannot stand in the name of a file is replaced,
    and a number is left out where another saver in use has written that file.
    """

    def __init__(self, output_dir: str | os.PathLike[str], enabled: bool = True) -> None:
        super().__init__(output_dir, enabled)
        self.call_counts: defaultdict[str, int] = defaultdict(int)
        self._files: dict[str, str] = {}  # the name of a file -> what it was made from
        self._lock = threading.RLock()

    def register_modules(
        self,
        model: nn.Module,
        target_classes: Classes = (nn.Module,),
        target_names: Names = None,
        exclude_names: Names = None,
    ) -> None:
        """Know the paths of modules, for `spy_save`; nothing is hooked."""
        for path, module in chosen_modules(model, target_classes, target_names, exclude_names):
            self._remember(module, path)

    def save(
        self, name: str, tensor: Any, call_idx: int | None = None, norm_only: bool = False
    ) -> Path | None:
        """Write a tensor; returns the file, or None where the saver is disabled.

        Without ``call_idx`` the number is that of the calls with this name so far. ``norm_only`` writes one
        L2 norm for each row of the batch.
        """
        if not self.enabled:
            return None
        with torch.no_grad():
            kept = without_modes(partial(_kept, tensor, norm_only))
        with self._lock:
            path = self._place(name, call_idx)
            _writers[path] = self
        without_modes(partial(_write, kept, path))
        return path

    def reset_counts(self) -> None:
        """Count from 0 again; files written before are then replaced."""
        self.call_counts.clear()

    def _place(self, name: str, call_idx: int | None) -> Path:
        if call_idx is not None:
            path = self._path(f"{name}.call{call_idx}")
            if self._is_foreign(path):
                logger.warning("%s was written by another saver and is replaced", path)
            return path
        while True:
            path = self._path(f"{name}.call{self.call_counts[name]}")
            self.call_counts[name] += 1
            if not self._is_foreign(path):
                return path

    def _is_foreign(self, path: Path) -> bool:
        return _writers.get(path, self) is not self

    def _path(self, key: str) -> Path:
        folder = self.output_dir.resolve()
        names = FileNames(folder)
        try:
            name = names.take(f"{key}.pt")
        except UsageError:
            name = names.take(file_name(key))
        while self._files.setdefault(name, key) != key:  # "a/b" where "a~b" was saved before
            name = names.take(name)
        return folder / name


def _kept(held: Any, norm_only: bool) -> Any:
    """What is written: copies on the CPU, in containers that load without running code."""
    if isinstance(held, torch.Tensor):
        if norm_only:
            return _norms(held)
        return (
            held.detach().cpu().clone() if copied_size(held, _ON_CPU) is None else dense_copy(held, _ON_CPU)
        )
    if isinstance(held, Mapping):
        return {key: _kept(item, norm_only) for key, item in held.items()}
    if isinstance(held, list):
        return [_kept(item, norm_only) for item in held]
    if isinstance(held, tuple):
        return tuple(_kept(item, norm_only) for item in held)
    if held is None or isinstance(held, bool | int | float | str):
        return held
    raise TypeError(
        f"A {type(held).__name__} cannot be saved; give a tensor, or a tuple, list or dict of them."
    )


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.detach()
    rows = rows.reshape(1, 1) if rows.dim() == 0 else rows[:, None] if rows.dim() == 1 else rows.flatten(1)
    if not rows.is_complex() and rows.dtype not in (torch.float32, torch.float64):
        rows = rows.float()  # whole numbers have no norm, and that of half precision overflows
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.cpu()


def _write(kept: Any, path: Path) -> None:
    unfinished = path.parent / f".{os.getpid()}-{threading.get_ident()}.unfinished"
    try:
        if isinstance(kept, torch.Tensor):
            save_one(kept)(unfinished)
        else:
            torch.save(kept, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class DebugContext:
    """The block in which `spy_save` saves, with a saver and a prefix.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DebugContext(TensorSaver(folder), prefix="step0"):
    ...         spy_save("loss", torch.ones(()))
    ...     sorted(os.listdir(folder))
    ['step0.manual.loss.call0.pt']

    Of nested blocks the innermost one counts; their prefixes are not joined.
    """

    def __init__(self, saver: Any, prefix: str = "", module_path_override: str | None = None) -> None:
        self.saver = saver
        self.prefix = prefix
        self.module_path_override = module_path_override
        self._tokens: list[Token[DebugContext | None]] = []

    @property
    def debugger(self) -> Any:
        """The saver, by its other name."""
        return self.saver

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        _open.append(_left_alone(_save_here) if "torch._dynamo" in sys.modules else _save_here)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _open.pop()  # whichever: they all do the same
        _current.reset(self._tokens.pop())

    def _save(self, name: str, tensor: Any, module: Any = None) -> None:
        if self.module_path_override is not None:
            path = self.module_path_override
        elif module is None:
            path = "manual"
        else:
            path = self.saver.get_module_path(module)
            if path == "unknown":
                logger.warning("Module path unknown: %r of %s is not saved", name, type(module).__name__)
                return
        self.saver.save(".".join(part for part in (self.prefix, path, name) if part), tensor)


def get_debug_context() -> DebugContext | None:
    """The innermost `DebugContext` this code runs in.

    >>> get_debug_context() is None
    True
    """
    return _current.get()


def spy_save(name: str, tensor: Any, module: Any = None) -> None:
    """Save a tensor as ``{prefix}.{path}.{name}.call{n}.pt``; outside a `DebugContext` do nothing.

    >>> spy_save("q", torch.ones(2))
    """
    if _open:
        _open[-1](name, tensor, module)


def _save_here(name: str, tensor: Any, module: Any) -> None:
    context = _current.get()
    if context is not None:
        context._save(name, tensor, module)


@cache
def _left_alone(function: Callable[[str, Any, Any], None]) -> Callable[[str, Any, Any], None]:
    """A function that the compiler does not look into; importing it for nothing would take a second."""
    alone: Callable[[str, Any, Any], None] = torch.compiler.disable(function)
    return alone
