"""What is around the nodes of an exported program: its tensors, its results, and facts about both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from sightline.graph.exported.dynamic import Dimension, Dynamic, size_of
from sightline.graph.exported.inputs import Inputs
from sightline.graph.exported.returning import Returned

#: Results that are not the user's: new values for tensors that were there before.
_MUTATIONS: Final = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
)


@dataclass(frozen=True)
class Facts:
    """What torch's archive does not hold: plain data beside the program."""

    dynamic: Dynamic
    returned: Returned
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    names: tuple[str, ...]  #: of the inputs, leaf by leaf
    info: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The facts as what JSON knows."""
        return {
            "dynamic": self.dynamic.to_plain(),
            "returned": self.returned.to_plain(),
            "positional": list(self.positional),
            "keywords": list(self.keywords),
            "names": list(self.names),
            "info": self.info,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Facts:
        """The facts `to_plain` described."""
        return cls(
            Dynamic.from_plain(plain["dynamic"]),
            Returned.from_plain(plain["returned"]),
            tuple(plain["positional"]),
            tuple(plain["keywords"]),
            tuple(plain["names"]),
            dict(plain["info"]),
        )

    @classmethod
    def of_foreign(cls, program: torch.export.ExportedProgram) -> Facts:
        """What can be told of an archive that another tool wrote."""
        args, kwargs = program.call_spec.in_spec.children()
        names = tuple(name for name, _ in user_inputs(program))
        flat = [(name, fake) for name, fake in user_inputs(program) if isinstance(fake, torch.Tensor)]
        dimensions = tuple(
            Dimension(name, dim, size_of(size), str(size) if type(size) is not int else "")
            for name, fake in flat
            for dim, size in enumerate(fake.shape)
        )
        dtypes = {name: str(fake.dtype).removeprefix("torch.") for name, fake in flat}
        note = "This archive was not written by sightline: it does not say which line fixed a size."
        positional = []
        leaf = 0
        for index, child in enumerate(args.children()):
            positional.append(names[leaf] if child.num_leaves == 1 else f"args[{index}]")
            leaf += child.num_leaves
        return cls(
            Dynamic(dimensions, (), dtypes, (note,)),
            Returned(),
            tuple(positional),
            tuple(kwargs.context or ()),
            names,
        )


def user_inputs(program: torch.export.ExportedProgram) -> list[tuple[str, Any]]:
    """The placeholder of each leaf of the arguments and its example: a fake tensor, or a constant."""
    found = []
    specs = program.graph_signature.input_specs
    for node, spec in zip(program.graph.find_nodes(op="placeholder"), specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            constant = isinstance(spec.arg, ConstantArgument)
            found.append((node.name, spec.arg.value if constant else node.meta["val"]))
    return found


def inputs_of(program: torch.export.ExportedProgram, facts: Facts) -> Inputs:
    """What the program wants to be called with."""
    examples = [example for _, example in user_inputs(program)]
    named = list(zip(facts.names, examples, strict=True))
    tensors = {name: str(one.device) for name, one in named if isinstance(one, torch.Tensor)}
    constants = {name: one for name, one in named if name not in tensors}
    spec = program.call_spec.in_spec
    return Inputs(spec, facts.positional, facts.keywords, facts.names, constants, tensors, facts.dynamic)


def state_of(program: torch.export.ExportedProgram, model: torch.nn.Module | None) -> dict[str, Any]:
    """The tensor of each placeholder that is no input: the model's own where there is a model."""
    own: dict[str, Any] = {}
    if model is not None:
        own = {**dict(model.named_parameters(remove_duplicate=False))}
        own |= dict(model.named_buffers(remove_duplicate=False))
    found = {}
    for node, spec in zip(
        program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True
    ):
        if spec.kind is InputKind.USER_INPUT:
            continue
        target = spec.target or ""
        for source in (own, program.state_dict, program.constants):
            if target in source:
                found[node.name] = source[target]
                break
        else:
            found[node.name] = getattr(program.graph_module, target, None)
    return found


class Results:
    """From what the graph returns to what the model returns."""

    def __init__(self, program: torch.export.ExportedProgram, returned: Returned) -> None:
        self._kinds = [spec.kind for spec in program.graph_signature.output_specs]
        self._targets = [spec.target for spec in program.graph_signature.output_specs]
        self._spec = program.call_spec.out_spec
        self._returned = returned
        by_target = {
            spec.target: getattr(spec.arg, "name", "") for spec in program.graph_signature.input_specs
        }
        self._placeholders = by_target

    def finished(self, results: tuple[Any, ...], starts: dict[str, Any]) -> Any:
        """The model's output; tensors that the program changes get their new values."""
        mine = []
        for kind, target, value in zip(self._kinds, self._targets, results, strict=True):
            if kind in _MUTATIONS:
                changed = starts[self._placeholders.get(target) or str(target)]
                with torch.no_grad():
                    changed.copy_(value)
            elif kind is not OutputKind.TOKEN:
                mine.append(value)
        return self._returned.rebuilt(pytree.tree_unflatten(mine, self._spec))
