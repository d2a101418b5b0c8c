from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.errors import DamagedFile, UsageError
from sightline.graph.exported import archive, export, load_graph, torch_export
from tests.graph.exportable import Convolutional, Dataclass, Plain, Structures

torch.set_num_threads(1)


def test_an_archive_comes_back_with_everything(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Convolutional().eval()
    g = export(model, torch.randn(2, 3, 8, 8))
    g.save(tmp_path / "m.pt2")
    loaded = load_graph(tmp_path / "m.pt2")
    assert loaded.nodes == g.nodes
    assert loaded.edges == g.edges
    assert (loaded.name, loaded.modules, loaded.info) == (g.name, g.modules, g.info)
    assert str(loaded.dynamic) == str(g.dynamic)
    x = torch.randn(3, 3, 9, 7)
    assert torch.equal(loaded.run(x).output, model(x))
    with pytest.raises(UsageError, match=r"loaded without its model.*load_graph\(path, model=model\)"):
        loaded.verify(x)
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]  # no temporary file is left
    with torch.no_grad():
        model.fc.bias.add_(1)
    assert not torch.equal(loaded.run(x).output, model(x))
    bound = load_graph(tmp_path / "m.pt2", model=model)
    assert torch.equal(bound.run(x).output, model(x))
    assert bound.verify(x)


def _other_weights() -> dict[str, Tensor]:
    return {"weight": torch.full((2, 3), 5.0), "bias": torch.full((2,), 7.0)}


@pytest.mark.parametrize("ran_before", [False, True])
def test_what_runs_is_what_is_saved(tmp_path: Path, ran_before: bool) -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    g = export(model, x)
    if ran_before:
        g.run(x)
    model.load_state_dict(_other_weights(), assign=True)  # other tensors, of which the program knows nothing
    g.save(tmp_path / "m.pt2")
    assert torch.equal(g.run(x).output, torch.full((4, 2), 22.0))
    assert torch.equal(load_graph(tmp_path / "m.pt2").run(x).output, g.run(x).output)
    assert torch.equal(g.program.module()(x), g.run(x).output)
    assert g.verify(x)


def test_what_a_cached_export_saves_is_what_it_runs(tmp_path: Path) -> None:
    x = torch.ones(4, 3)
    export(nn.Linear(3, 2), x, cache=tmp_path / "cache")
    model = nn.Linear(3, 2)
    g = export(model, x, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the second export was read from it
    assert torch.equal(g.program.module()(x), model(x))
    model.load_state_dict(_other_weights(), assign=True)
    g.save(tmp_path / "m.pt2")
    assert torch.equal(load_graph(tmp_path / "m.pt2").run(x).output, model(x))
    other = nn.Linear(3, 2)
    assert load_graph(tmp_path / "m.pt2", model=other).program.state_dict["weight"] is other.weight


def test_buffers_that_are_replaced_are_saved(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        kept: Tensor
        unsaved: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(3))
            self.register_buffer("unsaved", torch.zeros(3), persistent=False)

        def forward(self, x: Tensor) -> Any:
            return x + self.kept + self.unsaved

    model, x = Shifted(), torch.zeros(2, 3)
    g = export(model, x)
    model.kept, model.unsaved = torch.ones(3), torch.full((3,), 10.0)
    g.save(tmp_path / "m.pt2")
    assert torch.equal(load_graph(tmp_path / "m.pt2").run(x).output, torch.full((2, 3), 11.0))
    assert torch.equal(g.run(x).output, torch.full((2, 3), 11.0))


def test_structures_and_dataclasses_come_back(tmp_path: Path) -> None:
    x = [torch.randn(2, 4) for _ in range(5)]
    g = export(Structures().eval(), (x[:2], {"inner": {"x": x[2]}, "z": x[3]}), {"scale": x[4], "power": 3})
    g.save(tmp_path / "m.pt2")
    out = (
        load_graph(tmp_path / "m.pt2")
        .run(x[:2], {"inner": {"x": x[2]}, "z": x[3]}, scale=x[4], power=3)
        .output
    )
    assert list(out) == ["y", "pieces"]
    export(Dataclass().eval(), torch.ones(2, 3)).save(tmp_path / "d.pt2")
    assert isinstance(load_graph(tmp_path / "d.pt2").run(torch.ones(4, 3)).output, Plain)


def test_an_archive_of_torch_itself(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(3, 2).eval(), (torch.randn(4, 3),))
    torch.export.save(program, tmp_path / "t.pt2")
    g = load_graph(tmp_path / "t.pt2")
    assert g.run(torch.randn(4, 3)).output.shape == (4, 2)
    assert "not written by sightline" in str(g.dynamic)
    with pytest.raises(UsageError, match=r"input must be f32\[4, 3\], but is f32\[5, 3\]"):
        g.run(torch.randn(5, 3))


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "bad.pt2").write_bytes(b"PK nonsense")
    with pytest.raises(DamagedFile, match=r"bad\.pt2 is not a graph that can be read"):
        load_graph(tmp_path / "bad.pt2")
    with pytest.raises(UsageError, match="There is no file"):
        load_graph(tmp_path / "none.pt2")
    with pytest.raises(UsageError, match="There is no folder"):
        export(nn.ReLU().eval(), torch.ones(2, 3)).save(tmp_path / "no" / "m.pt2")


# -- the cache -----------------------------------------------------------------------------------

SCALE = 2.0


class Cached(nn.Module):
    def __init__(self, width: int = 4, power: int = 2) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.power = power
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) ** self.power + self.table * SCALE


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item for each time torch.export was called."""
    made: list[Any] = []
    real = torch_export.run_export

    def counting(*args: Any) -> Any:
        made.append(args)
        return real(*args)

    monkeypatch.setattr("sightline.graph.exported.exporter.run_export", counting)
    return made


def test_the_second_time_is_read_from_the_folder(tmp_path: Path, traces: list[Any]) -> None:
    folder = tmp_path / "cache"
    one, other = Cached().eval(), Cached().eval()
    first = export(one, torch.randn(3, 4), cache=folder)
    second = export(other, torch.randn(3, 4), cache=folder)
    assert len(traces) == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    x = torch.randn(5, 4)
    assert torch.equal(first.run(x).output, one(x))
    assert torch.equal(second.run(x).output, other(x))  # with its own weights
    assert second.verify(x)
    assert second.run(x)["p_fc_weight"].outputs is other.fc.weight
    assert second.nodes == first.nodes


def test_a_stale_entry_is_never_used(
    tmp_path: Path, traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    x = torch.randn(3, 4)

    def check(model: nn.Module, *args: Any, **options: Any) -> None:
        before = len(traces)
        g = export(model, *args, cache=folder, **options)
        assert len(traces) == before + 1
        assert torch.equal(g.run(*args).output, model(*args))

    check(Cached().eval(), x)
    check(Cached(power=3).eval(), x)  # another attribute
    check(Cached().eval(), torch.randn(4, 4))  # another example
    check(Cached().double().eval(), x.double())  # other weights
    check(Cached().eval(), x, dynamic=None)  # another option
    check(Cached(), x)  # another mode
    changed = Cached().eval()
    changed.table = torch.ones(4)  # another constant
    check(changed, x)
    monkeypatch.setattr(f"{__name__}.SCALE", 5.0)  # a value that forward reads
    check(Cached().eval(), x)
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    monkeypatch.setattr(Cached, "forward", lambda self, x: self.fc(x) - 1)  # other code
    check(Cached().eval(), x)


def test_a_damaged_entry_is_made_again(tmp_path: Path, traces: list[Any]) -> None:
    model, x = Cached().eval(), torch.randn(3, 4)
    export(model, x, cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])
    assert export(model, x, cache=tmp_path / "cache").verify(x)
    assert len(traces) == 2


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners here")
def test_a_folder_others_can_write_is_not_trusted(tmp_path: Path, traces: list[Any]) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    model, x = Cached().eval(), torch.randn(3, 4)
    export(model, x, cache=folder)
    g = export(model, x, cache=folder)
    assert len(traces) == 2
    assert "can be written by others" in g.info["not_cached"]
    assert not list(folder.iterdir())


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thing = object()

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_cannot_be_described_is_not_cached(tmp_path: Path, traces: list[Any]) -> None:
    export(Holds().eval(), torch.randn(2, 3), cache=tmp_path / "cache")
    g = export(Holds().eval(), torch.randn(2, 3), cache=tmp_path / "cache")
    assert len(traces) == 2
    assert g.info["not_cached"] == "Holds.thing is a object"


@pytest.mark.parametrize(
    "build", [Cached, lambda: nn.LSTM(4, 4), lambda: nn.TransformerEncoderLayer(4, 2, 8)]
)
def test_keys_are_the_same_for_the_same_things(build: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 4)
    made = {archive.cache_key(build().eval(), (x,), {}, {"dynamic": "auto"}) for _ in range(3)}
    assert len(made) == 1


def test_keys_are_the_same_in_another_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from sightline.graph.exported.archive import cache_key\n"
        "class Model(torch.nn.Module):\n"
        "    names = frozenset({'one', 'two', 'three'})\n"
        "    def forward(self, x):\n"
        "        return x + 1 if 'a' in {'a', 'b', 'c'} else x\n"
        "print(cache_key(Model(), (torch.ones(2),), {}, {}))\n"
    )
    made = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, check=True
        )
        made.add(run.stdout)
    assert len(made) == 1
