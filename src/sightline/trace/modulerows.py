"""The modules of a model: the `Module` rows of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.trace import data as d
from sightline.trace.table import Row, Table, optional

if TYPE_CHECKING:
    from sightline.trace.rows import ModuleCall


class Module(Row):
    """A module of the model: its path, class and what it owns."""

    __slots__ = ()

    @property
    def _info(self) -> d.ModuleInfo:
        return self._data.raw.modules[self.id]

    @property
    def path(self) -> str:
        """Path relative to the model; ``""`` for the model itself."""
        return self._info.path

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._info.aliases

    @property
    def type(self) -> str:
        return self._info.type

    @property
    def type_module(self) -> str:
        return self._info.type_module

    @property
    def extra(self) -> str:
        return self._info.extra

    @property
    def training(self) -> bool:
        return self._info.training

    @property
    def parameters(self) -> tuple[d.ParameterInfo, ...]:
        return self._info.parameters

    @property
    def parent(self) -> Module | None:
        return optional(Module, self._data, self._info.parent)

    @property
    def root(self) -> Module:
        return Module(self._data, self._info.root)

    @property
    def depth(self) -> int:
        return len(self.path.split(".")) if self.path else 0

    @property
    def calls(self) -> Table[ModuleCall]:
        return self._data.module_calls._of(self._data.calls_of_module.get(self.id, []))

    @property
    def label(self) -> str:
        """The path, or the class name for a root."""
        return self.path or self.type

    def __repr__(self) -> str:
        return f"<Module {self.label} ({self.type})>"
