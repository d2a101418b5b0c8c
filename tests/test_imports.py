"""Who imports whom: the package obeys its layers, the check sees a breach, and importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from checks.imports import MAY_IMPORT, faults, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sightline"
HEAVY = ("torch", "numpy", "networkx", "rich", "click", "safetensors", "transformers", "asyncio", "inspect")

# Stands in for a machine without torch: the import fails as it does there.
WITHOUT_TORCH = """
    import sys
    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("torch", "functorch"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, NoTorch())
    sys.path[:0] = [SRC, ROOT]
"""


def run(script: str) -> str:
    """What a fresh interpreter prints for this script."""
    head = f"SRC, ROOT = {str(ROOT / 'src')!r}, {str(ROOT)!r}\n"
    result = subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def script(text: str, *, without_torch: bool = False) -> str:
    head = textwrap.dedent(WITHOUT_TORCH) if without_torch else "import sys; sys.path[:0] = [SRC, ROOT]\n"
    return head + textwrap.dedent(text)


def tree(folder: Path, files: dict[str, str]) -> Path:
    """A small package with these files; every folder is a package."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text), "utf-8")
    return folder


def test_the_package_obeys_its_layers() -> None:
    assert faults(PACKAGE) == []


def test_every_part_of_the_package_has_its_place() -> None:
    parts = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    parts |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert parts <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("data/index.py", "from sightline.views.code import code", "data may not import views"),
        ("views/code.py", "from sightline.recording.plain import session", "views may not import recording"),
        ("views/code.py", "import sightline.api", "views may not import api"),
        (
            "analysis/fold.py",
            "from sightline.graph.dot import dot",
            "analysis may not import graph",
        ),
        ("recording/plain/session.py", "from sightline.api import Trace", "recording may not import api"),
        (
            "recording/plain/session.py",
            "from sightline.views.code import x",
            "recording may not import views",
        ),
        ("notation.py", "from sightline.data.forms import Form", "notation may not import data"),
        ("errors.py", "import sightline.notation", "errors may not import notation"),
        ("api.py", "from sightline import cli", "api may not import cli"),
        ("compat/lens.py", "import sightline.cli.demo", "compat may not import cli"),
        ("__init__.py", "import sightline.cli", "sightline may not import cli"),
        ("views/code.py", "import torch", "views.code may not import torch"),
        ("data/index.py", "from torch.nn import Module", "data.index may not import torch"),
        ("graph/recorded_graph.py", "import torch.fx", "graph.recorded_graph may not import torch"),
        ("api.py", "def f():\n    import torch", "api may not import torch"),
        ("views/code.py", "def f():\n    from sightline.api import Trace", "views may not import api"),
        ("views/code.py", "from ..recording import session", "views may not import recording"),
        ("views/code.py", "from .. import recording", "views may not import recording"),
        ("views/code.py", "from sightline import trace", "the public names of sightline"),
        ("views/code.py", "import sightline as sl", "the public names of sightline"),
        ("views/code.py", "import_module('sightline.recording')", "views may not import recording"),
        ("views/code.py", "try:\n    import torch\nexcept ImportError:\n    pass", "may not import torch"),
        ("if_else.py", "from sightline import errors", "has no place in the layers yet"),
        (
            "views/code.py",
            "if TYPE_CHECKING:\n    import torch\nelse:\n    import sightline.recording",
            "views may not import recording",
        ),
    ],
)
def test_a_breach_is_seen(file: str, text: str, why: str, tmp_path: Path) -> None:
    root = tree(tmp_path, {"recording/plain/session.py": "", "cli/demo.py": "", "errors.py": "", file: text})
    found = faults(root)
    assert len(found) == 1
    assert why in found[0]
    assert found[0].startswith(f"{root / file}:")
    assert main([str(root)]) == 1


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "errors.py": "",
            "data/index.py": "import numpy\nfrom sightline import errors",
            "recording/plain/session.py": "import torch\nfrom sightline.data.trace_data import x",
            "graph/exported.py": "import torch.export\nfrom . import runtime\nimport sightline.analysis",
            "graph/recorded_graph.py": "",
            "compat/lens.py": "import torch, sightline as sl",
            "views/code.py": "if TYPE_CHECKING:\n    import torch\n    from sightline.api import Trace",
            "api.py": "def f():\n    from sightline.views.code import code",
            "__init__.py": "from sightline._version import __version__",
        },
    )
    assert faults(root) == []
    assert main([str(root)]) == 0


def test_a_missing_folder_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_importing_sightline_imports_nothing_heavy() -> None:
    printed = run(script("import sightline; print(*sys.modules)"))
    assert not set(HEAVY) & set(printed.split())


def test_the_names_are_there_without_numpy_or_torch() -> None:
    printed = run(script("import sightline as sl; sl.UsageError; dir(sl); print(*sys.modules)"))
    assert not set(HEAVY) & set(printed.split())


def test_help_imports_no_torch() -> None:
    printed = run(
        script("""
        from click.testing import CliRunner
        from sightline.cli import main
        result = CliRunner().invoke(main, ["--help"])
        assert result.exit_code == 0 and "demo" in result.output, result.output
        print(*sys.modules)
        """)
    )
    assert not {"torch", "numpy", "networkx", "sightline.cli.demo"} & set(printed.split())


def test_without_torch_viewing_works() -> None:
    printed = run(
        script(
            """
            import sightline as sl
            from tests.builders import TraceBuilder
            b = TraceBuilder()
            x = b.value(2, 8)
            with b.call("", x):
                b.op("relu", x, out=(2, 8))
            t = b.build()
            assert isinstance(t, sl.Trace)
            print(t.code())
            assert "torch" not in sys.modules
            """,
            without_torch=True,
        )
    )
    assert "relu(f32[2, 8]) -> f32[2, 8]" in printed


def test_without_torch_recording_says_so_in_one_sentence() -> None:
    printed = run(
        script(
            """
            import sightline as sl
            try:
                sl.trace()
            except sl.TorchMissing as error:
                assert isinstance(error, sl.UsageError) and isinstance(error, ImportError)
                print(error)
            """,
            without_torch=True,
        )
    )
    assert "torch" in printed
    assert "\n" not in printed
    assert printed.endswith(".")


@pytest.mark.parametrize("asked", ["sl.export", "sl.load_graph", "sl.load_graph('m.pt2')"])
def test_without_torch_graphs_of_export_say_so(asked: str) -> None:
    printed = run(
        script(
            f"""
            import sightline as sl
            try:
                {asked}
            except sl.TorchMissing as error:
                print(error)
            """,
            without_torch=True,
        )
    )
    assert printed.startswith("sl.export and sl.load_graph need torch, which is not installed here")
    assert "\n" not in printed


def test_without_torch_a_captured_tensor_says_what_there_is_instead(tmp_path: Path) -> None:
    import torch

    import sightline as sl

    with sl.trace(capture=True) as t:
        sl.spy("q", torch.ones(2))
    t.save(tmp_path / "run.sight")
    printed = run(
        script(
            f"""
            import sightline as sl
            q = sl.load({str(tmp_path / "run.sight")!r}).tensors["q"][0]
            try:
                q.torch()
            except sl.TorchMissing as error:
                print(error, q.numpy().tolist())
            """,
            without_torch=True,
        )
    )
    assert printed == (
        "A torch tensor needs torch, which is not installed here; `.numpy()` has the numbers and `.raw` the "
        "bits. [1.0, 1.0]"
    )


def test_without_torch_the_demo_says_so() -> None:
    printed = run(
        script(
            """
            from click.testing import CliRunner
            from sightline.cli import main
            result = CliRunner().invoke(main, ["demo"])
            print(result.exit_code, result.output)
            """,
            without_torch=True,
        )
    )
    assert printed == "1 Error: The demo runs a model: install torch, then run it again."


def test_no_test_module_imports_another() -> None:
    """Helpers that two of them need have a module of their own."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                parts = (node.module or "").split(".") + [name.name for name in node.names]
                assert not any(part.startswith("test_") for part in parts), f"{path}:{node.lineno}"
