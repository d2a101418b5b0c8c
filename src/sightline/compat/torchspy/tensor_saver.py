"""Tensors saved to files by name: `TensorSaver`, `DebugContext` and `spy_save`.

A tensor is written at once, detached and without the rest of its storage.
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
from sightline.recording.captures import copied_size, dense_copy
from sightline.recording.torchapi import (
    DISPATCH_MODES,
    FUNCTION_MODES,
    without_modes,
)
from sightline.store.shards.file_names import FileNames, file_name
from sightline.tensor_memory import has_memory, is_freed

#: Named as in torchspy, so that the settings of a program for ``torchspy`` hold here.
_saver_log: Final = logging.getLogger("torchspy.saver")
_context_log: Final = logging.getLogger("torchspy.context")

Names = Sequence[str] | None
Classes = type[nn.Module] | tuple[type[nn.Module], ...]
_ON_CPU: Final = Capture(device="cpu")
_OBSERVER: Final = "sightline.recording.native._observer"  #: the native engine, once it is loaded
#: A key that is the name of a file on every system.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
#: The saver that wrote each file: a file is not overwritten by another saver while its own is in use.
_writers: Final[weakref.WeakValueDictionary[str, TensorSaver]] = weakref.WeakValueDictionary()
_current: Final[ContextVar[DebugContext | None]] = ContextVar("debug_context", default=None)
#: The save function, once for each open context: an empty list lets compiled code skip the call.
_open_contexts: Final[list[Callable[[str, Any, Any], None]]] = []


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
        reference = self._refs.get(id(module))
        if reference is not None and reference() is not module:  # the id of a module that is gone
            return "unknown"
        return self.module_paths.get(id(module), "unknown")

    def _remember(self, module: nn.Module, path: str) -> None:
        reference = self._refs.get(id(module))
        if reference is None or reference() is not module:
            self._refs[id(module)] = weakref.ref(module)
            self.module_paths[id(module)] = path


def matching_modules(
    model: nn.Module, classes: Classes | None, names: Names, exclude: Names
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that match the filters, under every name they have.

    >>> model = nn.Sequential(*[nn.ReLU() for _ in range(11)])
    >>> [path for path, _ in matching_modules(model, (nn.ReLU,), ["1"], None)]
    ['1']
    """
    included, excluded = _path_patterns(names), _path_patterns(exclude)
    for path, module in model.named_modules(remove_duplicate=False):
        shown = path or "root"
        if not isinstance(module, classes or nn.Module):
            continue
        if included and not any(pattern.search(shown) for pattern in included):
            continue
        if not any(pattern.search(shown) for pattern in excluded):
            yield shown, module


def _path_patterns(names: Names) -> list[re.Pattern[str]]:
    """Patterns for parts of a path, in which numbers match as a whole: ``layers.1`` is not ``layers.10``."""
    return [
        re.compile(
            ("(?<![0-9])" if part[:1].isdigit() else "")
            + re.escape(part)
            + ("(?![0-9])" if part[-1:].isdigit() else "")
        )
        for part in ([names] if isinstance(names, str) else names or ())
    ]


class TensorSaver(BaseDebugger):
    """Writes tensors to ``{name}.call{n}.pt``, for ``torch.load(..., weights_only=True)``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saver = TensorSaver(folder)
    ...     paths = [saver.save("q", torch.ones(2, 3)), saver.save("q", torch.ones(2, 3), norm_only=True)]
    ...     [path.name for path in paths], torch.load(paths[1], weights_only=True).shape
    (['q.call0.pt', 'q.call1.pt'], torch.Size([2]))

    Tuples, lists and dicts of tensors go into one file. Characters that a file name cannot have are replaced,
    and a number is skipped if another saver in use has written that file.
    """

    def __init__(self, output_dir: str | os.PathLike[str], enabled: bool = True) -> None:
        super().__init__(output_dir, enabled)
        self.call_counts: defaultdict[str, int] = defaultdict(int)
        self._files: dict[str, str] = {}  # the name of a file -> its key
        self._folder: tuple[Path | None, str] = (None, "")  # ``output_dir`` and its full path
        self._lock = threading.RLock()

    def register_modules(
        self,
        model: nn.Module,
        target_classes: Classes = (nn.Module,),
        target_names: Names = None,
        exclude_names: Names = None,
    ) -> None:
        """Note the paths of modules for `spy_save`, without hooks."""
        for path, module in matching_modules(model, target_classes, target_names, exclude_names):
            self._remember(module, path)
            _saver_log.info("Registered module path: %s", path)

    def save(
        self, name: str, tensor: Any, call_idx: int | None = None, norm_only: bool = False
    ) -> Path | None:
        """Write a tensor; returns the file, or None if the saver is disabled.

        Without ``call_idx`` the number is that of the calls with this name so far. ``norm_only`` writes one
        L2 norm for each row of the batch.
        """
        path = self._save_unseen(name, tensor, call_idx, norm_only)
        return Path(path) if path else None

    def _save_unseen(
        self, name: str, tensor: Any, call_idx: int | None = None, norm_only: bool = False
    ) -> str:
        """Write a tensor so that no mode and no recording sees it; returns the file, or "" if disabled."""
        if not self.enabled:
            return ""
        if _is_plain(tensor):
            path = self._save(name, tensor, call_idx, norm_only)
        else:
            path = without_modes(partial(self._save, name, tensor, call_idx, norm_only))
        _saver_log.debug("Saved tensor: %s", path)
        return path

    def _save(self, name: str, tensor: Any, call_idx: int | None, norm_only: bool) -> str:
        copies = _copy(tensor, norm_only)
        with self._lock:
            path = self._free_path(name, call_idx)
            _writers[path] = self
        # A temporary name and a rename would also keep a killed process from leaving half a file. They take a
        # fifth of the time of writing 16 kB, which a call inside a forward should not pay.
        try:
            torch.save(copies, path)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise
        return path

    def reset_counts(self) -> None:
        """Count from 0 again; files written before are then replaced."""
        self.call_counts.clear()

    def _free_path(self, name: str, call_idx: int | None) -> str:
        if call_idx is not None:
            path = self._path(f"{name}.call{call_idx}")
            if self._is_foreign(path):
                _saver_log.warning("%s was written by another saver and is replaced", path)
            return path
        while True:
            path = self._path(f"{name}.call{self.call_counts[name]}")
            self.call_counts[name] += 1
            if not self._is_foreign(path):
                return path

    def _is_foreign(self, path: str) -> bool:
        return _writers.get(path, self) is not self

    def _path(self, key: str) -> str:
        given, folder = self._folder
        if given is not self.output_dir:
            folder = str(self.output_dir.resolve())
            self._folder = self.output_dir, folder
        name = f"{key}.pt"
        if not _PLAIN_NAME.fullmatch(key) or self._files.setdefault(name, key) != key:
            # The key cannot be a name, or another key has the name: "a~b" after "a/b".
            names = FileNames(Path(folder))
            try:
                name = names.take(name)
            except UsageError:
                name = names.take(file_name(key))
            while self._files.setdefault(name, key) != key:
                name = names.take(name)
        return os.path.join(folder, name)


def _copy(value: Any, norm_only: bool) -> Any:
    """Tensors on the CPU without the rest of their storages, in containers that load without running code."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            gone = is_freed(value)
        if gone:
            raise UsageError(
                "This tensor cannot be saved: its memory was freed, as FSDP does after a forward pass. Save "
                "it earlier."
            )
        if norm_only:
            return _norms(value)
        if _is_whole(value):
            return value.detach()
        return (
            value.detach().cpu().clone()
            if copied_size(value, _ON_CPU) is None
            else dense_copy(value, _ON_CPU)
        )
    if isinstance(value, Mapping):
        return {key: _copy(item, norm_only) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, norm_only) for item in value]
    if isinstance(value, tuple):
        return tuple(_copy(item, norm_only) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"A {type(value).__name__} cannot be saved; give a tensor, or a tuple, list or dict of them."
    )


def _is_plain(value: Any) -> bool:
    """Whether nothing would see the ops that save a value: neither a mode, a subclass nor a recording."""
    seen = DISPATCH_MODES.depth() or FUNCTION_MODES.depth() or _OBSERVER in sys.modules
    return not seen and type(value) in (torch.Tensor, nn.Parameter)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be written as it is: it is all of its memory, on the CPU."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.is_cpu
        and has_memory(tensor)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.detach()
    rows = rows.reshape(1, 1) if rows.dim() == 0 else rows[:, None] if rows.dim() == 1 else rows.flatten(1)
    if not rows.is_complex() and rows.dtype not in (torch.float32, torch.float64):
        rows = rows.float()  # integers have no norm, and that of half precision overflows
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.cpu()


class DebugContext:
    """The block in which `spy_save` saves, with a saver and a prefix.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DebugContext(TensorSaver(folder), prefix="step0"):
    ...         spy_save("loss", torch.ones(()))
    ...     sorted(os.listdir(folder))
    ['step0.manual.loss.call0.pt']

    Of nested blocks the innermost one counts, with its own prefix alone.
    """

    def __init__(self, saver: Any, prefix: str = "", module_path_override: str | None = None) -> None:
        self.saver = saver
        self.prefix = prefix
        self.module_path_override = module_path_override
        self._tokens: list[Token[DebugContext | None]] = []

    @property
    def debugger(self) -> Any:
        """An alias of ``saver``."""
        return self.saver

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        compiled = "torch._dynamo" in sys.modules  # importing it only for this would take a second
        _open_contexts.append(_uncompiled(_save_current) if compiled else _save_current)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _open_contexts.pop()  # any of them: they all do the same
        _current.reset(self._tokens.pop())

    def _save(self, name: str, tensor: Any, module: Any = None) -> None:
        if self.module_path_override is not None:
            path = self.module_path_override
        elif module is None:
            path = "manual"
        else:
            path = self.saver.get_module_path(module)
            if path == "unknown":
                _context_log.warning(
                    "Module path unknown for tensor '%s' of a %s that is not registered. Skipping save.",
                    name, type(module).__name__,
                )  # fmt: skip
                return
        full = ".".join(part for part in (self.prefix, path, name) if part)
        # A saver of the user's own is called as the original calls it.
        save = self.saver._save_unseen if type(self.saver) is TensorSaver else self.saver.save
        save(full, tensor)


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
    if _open_contexts:
        _open_contexts[-1](name, tensor, module)


def _save_current(name: str, tensor: Any, module: Any) -> None:
    context = _current.get()
    if context is not None:
        context._save(name, tensor, module)


@cache
def _uncompiled(function: Callable[[str, Any, Any], None]) -> Callable[[str, Any, Any], None]:
    """The function, excluded from compilation."""
    excluded: Callable[[str, Any, Any], None] = torch.compiler.disable(function)
    return excluded
