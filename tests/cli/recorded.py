"""Recordings for the tests of the command line, and how a test calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import sightline as sl
from sightline.cli import main

SRC = Path(__file__).parents[2] / "src"
#: The command, in a process of its own.
COMMAND = (sys.executable, "-c", "from sightline.cli import main; main(prog_name='sightline')")
#: The same where importing torch is an error.
WITHOUT_TORCH = (
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None; from sightline.cli import main; main(prog_name='sightline')",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x).relu()
        return x + h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def record() -> sl.Trace:
    """Two steps of training, with everything kept and measured; the second has a NaN in it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(2, 5, 8)
        with sl.trace(net, capture=True, stats=True, name="net") as t:
            for number in range(2):
                with sl.step(f"step{number}"):
                    net(x).sum().backward()
                x[0, 1, 2] = float("nan")
    return t


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def cli(*arguments: object) -> str:
    """The output of a command, which must succeed and write nothing to standard error."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def refused(*arguments: object) -> str:
    """The one sentence of a command that fails."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def misused(*arguments: object) -> str:
    """The error for a wrong option."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr.partition("Error: ")[2].rstrip("\n")


def environment(**more: str) -> dict[str, str]:
    own = ("NO_COLOR", "LESS", "PAGER", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {**kept, "PYTHONPATH": str(SRC), "PYTHONIOENCODING": "utf-8", "TERM": "xterm", **more}


def process(*arguments: object, command: tuple[str, ...] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment(), capture_output=True, text=True, check=False
    )


def on_terminal(*arguments: object, keys: bytes = b"", **variables: str) -> tuple[str, int]:
    """The output of a command on a terminal of 100 columns, and its exit status."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    options: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)], env=environment(**variables), **options
    ) as running:
        os.close(theirs)
        os.write(ours, keys)
        seen = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other side is gone
                break
            if not part:
                break
            seen += part
    os.close(ours)
    return seen.decode().replace("\r\n", "\n"), running.returncode
